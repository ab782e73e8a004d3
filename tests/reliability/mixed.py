"""Everything at once on the same jobs: two instances, single and batch calls in shuffled order, meddlers, operators.

Nothing is killed here. So there must be no answer of 5xx and no deadlock, on top of what the checker judges; and a
queue with `max_processing` never has more. Leases are short and the loops quick, so that reclaim takes part.
"""

import asyncio
import contextlib
import json
import random
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from app.migrations import upgrade
from tests import harness
from tests.reliability.blackbox import ready
from tests.reliability.checker import check
from tests.reliability.history import Event, Held, Violation, digest, figures, instant
from tests.reliability.nemesis import Instance
from tests.reliability.wire import NoAnswer
from tests.reliability.workload import Producer, Recorder, Size, Worker, nothing_left, read_out

NARROW, ROOM = "sync", 4
"""The queue with `max_processing`, and how much."""
KEYED = "keyed"
"""The queue of the jobs with business keys; the checker does not know them."""
ENVIRONMENT = {"FENCEPOST_RECLAIM_INTERVAL_SECONDS": "0.05", "FENCEPOST_OUTAGE_GRACE_SECONDS": "0"}
QUIET_SECONDS = 90.0


@dataclass
class Mixed:
    violations: list[Violation]
    figures: dict[str, Any]


def run(
    seed: int, *, jobs: int, seconds: float, workers: int = 10, meddlers: int = 4, say: Callable[[str], None] = print
) -> Mixed:
    """`seconds`: over which the jobs are enqueued."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-mixed-"))
    # Sooner than the time-out of a lock, which would hide a deadlock.
    server = harness.PostgresServer(folder / "postgres", {"deadlock_timeout": "100ms"})
    instances: list[Instance] = []
    try:
        server.start()
        url = harness.create_database(server.url)
        upgrade(url)
        instances += [Instance(folder / f"instance-{number}", url, ENVIRONMENT) for number in range(2)]
        for instance in instances:
            instance.start()
        size = Size(jobs, workers, seconds, lease_seconds=1, fault_share=0.02)
        found = asyncio.run(_run(seed, size, meddlers, url, instances, say))
        for clash in _clashes(server.log.read_text()):
            say(f"deadlock: {clash}")
        for instance in instances:
            if not instance.alive():
                found.violations.append(Violation("F1", "instance", "ended by itself"))
            if instance.service is not None and "Traceback" in instance.service.log():
                found.violations.append(Violation("F2", "instance", "has a traceback in its log"))
                say(instance.service.log()[-6000:])
        return found
    finally:
        for instance in instances:
            instance.kill()
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


async def _run(
    seed: int, size: Size, meddlers: int, url: str, instances: list[Instance], say: Callable[[str], None]
) -> Mixed:
    for instance in instances:
        await ready(instance)
    recorder, calm, over = Recorder(instances, seed), asyncio.Event(), asyncio.Event()
    wire = recorder.wires()[0]
    await wire.ask("PUT", f"/v1/queues/{NARROW}", {"max_processing": ROOM})
    began = time.monotonic()
    looking = asyncio.create_task(_look(url))
    workers = [Worker(recorder, number, size, over) for number in range(size.workers)]
    working = [asyncio.create_task(worker.run()) for worker in workers]
    meddling = [
        asyncio.create_task(each.run())
        for each in (
            *(Meddler(recorder, number, workers, size, calm) for number in range(meddlers)),
            *(Operator(recorder, number, calm) for number in range(2)),
            *(Keyed(recorder, number, calm) for number in range(3)),
        )
    ]
    producers = [Producer(recorder, number, size, range(number, size.jobs, 4)) for number in range(4)]
    await asyncio.gather(*(producer.run() for producer in producers))
    say(f"all enqueued after {time.monotonic() - began:.1f} s")
    calm.set()
    await asyncio.gather(*meddling)
    with contextlib.suppress(AssertionError):
        await harness.wait_until(lambda: nothing_left(url), QUIET_SECONDS, every=0.1)
    worked = time.monotonic() - began
    over.set()
    await asyncio.gather(*working)
    looking.cancel()
    [most] = await asyncio.gather(looking, return_exceptions=True)
    if isinstance(most, BaseException):
        raise most
    read, told = await read_out(url, wire, say)
    wire.close()
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        cursor = await connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        row = await cursor.fetchone()
        deadlocks = row[0] if row else -1
    read.jobs = {job: final for job, final in read.jobs.items() if final.queue != KEYED}
    (read.counts or {}).pop(KEYED, None)
    violations = [*check(recorder.events, read), *told]
    sick = [event for event in recorder.events if (event.status or 0) >= 500]
    violations += [Violation("M1", event.op, f"was answered {event.status} {event.code}") for event in sick]
    violations += [Violation("M2", "database", f"{deadlocks} deadlocks")] * bool(deadlocks)
    violations += [Violation("M3", NARROW, f"had {most} processing, of {ROOM}")] * (most > ROOM)
    violations += [Violation("I23", "answer", f"without a code: {where}") for where in recorder.shapeless]
    return Mixed(
        violations,
        {
            "seed": seed,
            "seconds": round(worked, 1),
            "deadlocks": deadlocks,
            "answers_5xx": len(sick),
            "most_in_narrow_queue": most,
            "by_operation": _by_operation(recorder.events),
            **figures(recorder.events, read, recorder.faulty),
            "violations": len(violations),
        },
    )


NAMES = {
    "enqueue": "WITH input AS",
    "claim": "WITH pair AS",
    "heartbeat": "SET heartbeat_at",
    "complete": "SET status = 'done'",
    "fail": "i.error_message",
    "release": "i.reason",
    "cancel": "'cancelled by force'",
    "requeue": "queue_again",
    "reclaim": "reclaim_delay",
}


def _clashes(log: str) -> list[str]:
    """Who met whom in each deadlock, as PostgreSQL logged it."""
    clashes = []
    for found in re.finditer(r"ERROR:  deadlock detected\n(.*?)HINT", log, re.DOTALL):
        statements = [" ".join(part.split()) for part in re.split(r"\n\tProcess \d+: ", found[1])[1:]]
        names = [next((name for name, mark in NAMES.items() if mark in each), each[:60]) for each in statements]
        clashes.append(" and ".join(names))
    return clashes


def _by_operation(events: Sequence[Event]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for event in events:
        answers = found.setdefault(event.op, {})
        answers[event.code or event.answer] = answers.get(event.code or event.answer, 0) + 1
    return found


async def _look(url: str) -> int:
    """The most jobs of the narrow queue that were processing at any look, until it is cancelled."""
    most = 0
    with contextlib.suppress(asyncio.CancelledError):
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            while True:
                cursor = await connection.execute(
                    "SELECT count(*) FROM jobs WHERE queue = %s AND status = 'processing'", [NARROW]
                )
                row = await cursor.fetchone()
                most = max(most, row[0] if row else 0)
                await asyncio.sleep(0.005)
    return most


class Meddler:
    """Speaks of the jobs that the workers hold, with the tokens of the workers: heartbeats and endings, single and in
    batches over shuffled sets, some twice in one batch, some with tokens that are long stale or of nobody."""

    def __init__(
        self, recorder: Recorder, number: int, workers: Sequence[Worker], size: Size, calm: asyncio.Event
    ) -> None:
        self._recorder = recorder
        self._random = random.Random(f"{recorder.seed} meddler {number}")
        self._workers = workers
        self._lease = size.lease_seconds
        self._calm = calm
        self._seen: list[Held] = []
        self._wires = recorder.wires()

    async def run(self) -> None:
        draw = self._random
        try:
            while not self._calm.is_set():
                held = [each for worker in self._workers for each in worker._mine.values()]
                draw.shuffle(held)
                self._seen = [*self._seen, *held[:3]][-60:]
                chosen = held[: draw.choice([1, 1, 2, 5, 20])] + draw.sample(self._seen, min(len(self._seen), 2))
                chosen += chosen[: draw.choice([0, 0, 1])]
                draw.shuffle(chosen)
                if chosen:
                    verbs, weights = ["heartbeat", "complete", "fail", "release"], [80, 8, 6, 6]
                    verb = draw.choices(verbs, weights)[0]
                    await self._say(verb, chosen[: 1 if draw.random() < 0.4 else None])
                await asyncio.sleep(draw.uniform(0, 0.02))
        finally:
            for wire in self._wires:
                wire.close()

    async def _say(self, verb: str, chosen: list[Held]) -> None:
        draw, bodies, events = self._random, [], []
        for each in chosen:
            event = Event(verb, "unknown", time.monotonic(), worker=each.worker, job=each.job, token=each.token)
            body: dict[str, Any] = {"attempt_token": each.token}
            if verb == "heartbeat":
                body |= {"worker_id": each.worker, "lease_seconds": self._lease}
                event.lease = int(self._lease * 1_000_000)
            elif verb == "complete":
                # As its worker would, or otherwise.
                body["result"] = {"by": each.worker, "fence": each.fence if draw.random() < 0.5 else -1}
            elif verb == "fail":
                body |= {"error_message": each.token, "retry_after_seconds": draw.choice([0, 0.1])}
            else:
                body["reason"] = "taken away"
            content = body.get("result") if verb == "complete" else {k: v for k, v in body.items() if k[0] != "a"}
            event.content = digest(json.dumps(content, separators=(",", ":")))
            bodies.append(body)
            events.append(event)
        wire = draw.choice(self._wires)
        if len(chosen) == 1:
            answer = await self._recorder.say(wire, f"/v1/jobs/{chosen[0].job}/{verb}", bodies[0], events, seconds=10)
            results = [answer]
        else:
            items = [{"id": each.job, **body} for each, body in zip(chosen, bodies, strict=True)]
            answer = await self._recorder.say(wire, f"/v1/jobs/{verb}", {"items": items}, events, seconds=10)
            results = list(answer["results"]) if answer else [None] * len(chosen)
        for event, result in zip(events, results, strict=True):
            if result is None:
                continue
            if not result.get("ok", True):
                problem = result["problem"]
                event.status, event.code = problem["status"], problem["code"]
                event.answer = "rejected" if problem["status"] < 500 else "unknown"
                event.ended_at = instant(problem.get("ended_at"))
                continue
            event.at, event.fence = instant(result["server_time"]), result["fence"]
            if verb == "heartbeat":
                event.expires_at = instant(result["lease_expires_at"])
            else:
                event.after, event.available_at = result["status"], instant(result["available_at"])


class Operator:
    """Looks at lists and cancels, with and without force, and brings back what is failed, cancelled or in review."""

    def __init__(self, recorder: Recorder, number: int, calm: asyncio.Event) -> None:
        self._recorder = recorder
        self._random = random.Random(f"{recorder.seed} operator {number}")
        self._calm = calm
        self._wires = recorder.wires()

    async def run(self) -> None:
        draw = self._random
        try:
            while not self._calm.is_set():
                status = draw.choice(["processing", "queued", "failed", "cancelled", "manual_review"])
                event = Event("list", "unknown", time.monotonic())
                try:
                    _, page = await draw.choice(self._wires).ask(
                        "GET", f"/v1/jobs?status={status}&limit=50", seconds=10
                    )
                except NoAnswer:
                    self._recorder.events.append(event)
                    continue
                jobs = [job["id"] for job in page["jobs"] if job["queue"] != KEYED]
                for job in draw.sample(jobs, min(len(jobs), 3)):
                    verb = "requeue" if status in ("failed", "cancelled", "manual_review") else "cancel"
                    if verb == "cancel" and draw.random() < 0.6:
                        continue
                    body: dict[str, Any] = {"reason": "because"}
                    if status == "processing" and draw.random() < 0.4:
                        verb, body["force"] = draw.choice(["cancel", "requeue"]), True
                    event = Event(verb, "unknown", time.monotonic(), job=job)
                    path = f"/v1/jobs/{job}/{verb}"
                    await self._recorder.say(draw.choice(self._wires), path, body, [event], seconds=10)
                await asyncio.sleep(draw.uniform(0.01, 0.05))
        finally:
            for wire in self._wires:
                wire.close()


class Keyed:
    """Enqueues with few business keys, single and in batches in any order, and ends what it claims of them."""

    def __init__(self, recorder: Recorder, number: int, calm: asyncio.Event) -> None:
        self._recorder = recorder
        self._number = number
        self._random = random.Random(f"{recorder.seed} keyed {number}")
        self._calm = calm
        self._wires = recorder.wires()

    async def run(self) -> None:
        draw = self._random
        while not self._calm.is_set():
            jobs = [self._job() for _ in range(draw.choice([1, 1, 4, 12]))]
            if len(jobs) == 1:
                del jobs[0]["idempotency_key"]
                await self._say("keyed", "/v1/jobs", jobs[0])
            else:
                await self._say("keyed", "/v1/jobs/batch", {"jobs": jobs})
            if draw.random() < 0.5:
                await self._work()
        while await self._work():
            pass
        for wire in self._wires:
            wire.close()

    def _job(self) -> dict[str, Any]:
        draw = self._random
        return {
            "queue": KEYED,
            "payload": self._number,
            "unique_key": f"key-{draw.randrange(30)}",
            "on_conflict": draw.choice(["return", "reject"]),
            "idempotency_key": uuid.UUID(int=draw.getrandbits(128)).hex,
        }

    async def _work(self) -> int:
        claim = {"worker_id": f"keyed-{self._number}", "queues": [KEYED], "max_jobs": 6, "lease_seconds": 60}
        answer = await self._say("keyed-claim", "/v1/jobs/claim", claim)
        jobs = answer["jobs"] if answer else []
        items = [{"id": job["id"], "attempt_token": job["attempt_token"]} for job in jobs]
        self._random.shuffle(items)
        if items:
            await self._say("keyed-end", "/v1/jobs/complete", {"items": items})
        return len(items)

    async def _say(self, op: str, path: str, body: Any) -> Any:
        event = Event(op, "unknown", time.monotonic())
        return await self._recorder.say(self._random.choice(self._wires), path, body, [event], seconds=10)
