"""Producers, workers and the final read-out of a black-box run: only HTTP on real sockets, every call recorded."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from tests.reliability.history import Attempt, Event, Final, Held, ReadOut, Violation, answer_of, digest, instant
from tests.reliability.nemesis import Instance
from tests.reliability.wire import NoAnswer, Wire

QUEUES = ("mail", "image", "report", "sync")


@dataclass(frozen=True)
class Size:
    jobs: int
    workers: int
    produce_seconds: float
    """Enqueues are spread over so long, so that faults meet work under way."""
    lease_seconds: float
    fault_share: float
    """Of claimed jobs whose worker dies, and again of those whose worker stalls past its lease."""


class Recorder:
    def __init__(self, instances: Sequence[Instance], seed: int) -> None:
        self.instances = instances
        self.seed = seed
        self.events: list[Event] = []
        self.faulty: set[str] = set()
        """Tokens of attempts that their workers left or slept through on purpose."""
        self.shapeless: list[str] = []

    def wires(self) -> list[Wire]:
        return [Wire(instance.port) for instance in self.instances]

    async def say(self, wire: Wire, path: str, body: Any, events: list[Event], **how: Any) -> Any:
        """One call; its outcome is written on `events`. Returns the answer where there was one."""
        try:
            status, answer = await wire.ask("POST", path, body, **how)
        except NoAnswer:
            status, answer = None, None
        received = time.monotonic()
        for event in events:
            event.received = received
            event.status = status
            event.answer = answer_of(status)
            if isinstance(answer, dict) and event.answer != "ok":
                event.code = answer.get("code")
                event.ended_at = instant(answer.get("ended_at"))
        if status is not None and status >= 400 and not (isinstance(answer, dict) and answer.get("code")):
            self.shapeless.append(f"{path} {status}")
        self.events.extend(events)
        return answer if status is not None and status < 400 else None


def _item(event: Event, result: dict[str, Any]) -> dict[str, Any] | None:
    """The outcome of one item of a batch that was answered."""
    if result["ok"]:
        return result
    problem = result["problem"]
    event.status, event.answer = problem["status"], answer_of(problem["status"])
    event.code, event.ended_at = problem["code"], instant(problem.get("ended_at"))
    return None


class Producer:
    def __init__(self, recorder: Recorder, number: int, size: Size, share: range) -> None:
        self._recorder = recorder
        self._random = random.Random(f"{recorder.seed} producer {number}")
        self._size = size
        self._share = list(share)
        self._wires = recorder.wires()

    async def run(self) -> None:
        began, done = time.monotonic(), 0
        while done < len(self._share):
            ahead = done / len(self._share) * self._size.produce_seconds - (time.monotonic() - began)
            if ahead > 0:
                await asyncio.sleep(ahead)
            many = self._random.choice([1, 1, 5, 20, 50])
            numbers = self._share[done : done + many]
            done += len(numbers)
            jobs = [self._job(number) for number in numbers]
            await self._until_answered(jobs)
            if self._random.random() < 0.1:
                # The same again, as a producer does that did not believe its answer; sometimes with other content.
                again = dict(self._random.choice(jobs))
                if self._random.random() < 0.3:
                    again["payload"] = {"n": -1}
                await self._once([again])
        for wire in self._wires:
            wire.close()

    def _job(self, number: int) -> dict[str, Any]:
        draw = self._random
        job: dict[str, Any] = {
            "queue": draw.choice(QUEUES),
            "payload": {"n": number, "text": "x" * draw.randrange(200)},
            "idempotency_key": f"job-{number}",
            "max_attempts": draw.choice([3, 20, 100]),
            "max_reclaims": 100,
            "priority": draw.choice([0, 4, 4, 4, 9]),
        }
        if draw.random() < 0.05:
            job["delay_seconds"] = draw.choice([0.2, 1.5])
        return job

    async def _until_answered(self, jobs: list[dict[str, Any]]) -> None:
        for _ in range(200):
            if all(answered != "unknown" for answered in await self._once(jobs)):
                return
            await asyncio.sleep(self._random.uniform(0.05, 0.3))

    async def _once(self, jobs: list[dict[str, Any]]) -> list[str]:
        events = [
            Event(
                "enqueue",
                "unknown",
                time.monotonic(),
                key=job["idempotency_key"],
                queue=job["queue"],
                content=digest(json.dumps(job["payload"], separators=(",", ":"))),
            )
            for job in jobs
        ]
        wire = self._random.choice(self._wires)
        if len(jobs) == 1:
            body = {name: value for name, value in jobs[0].items() if name != "idempotency_key"}
            header = f"idempotency-key: {jobs[0]['idempotency_key']}\r\n"
            answer = await self._recorder.say(wire, "/v1/jobs", body, events, headers=header)
            results = [answer] if answer else []
        else:
            answer = await self._recorder.say(wire, "/v1/jobs/batch", {"jobs": jobs}, events)
            results = (
                [_item(event, result) for event, result in zip(events, answer["results"], strict=True)]
                if answer
                else []
            )
        for event, result in zip(events, results, strict=False):
            if result is not None:
                event.job, event.fresh = result["id"], not result["deduplicated"]
        return [event.answer for event in events]


class Worker:
    """Claims, beats, ends. Now and then it dies with all it holds, or sleeps past its lease and comes back."""

    def __init__(self, recorder: Recorder, number: int, size: Size, over: asyncio.Event) -> None:
        self._recorder = recorder
        self._number = number
        self._life = 0
        self._random = random.Random(f"{recorder.seed} worker {number}")
        self._size = size
        self._over = over
        self._wires = recorder.wires()
        self._beat_wires = recorder.wires()
        self._mine: dict[str, Held] = {}
        self._asleep = False

    @property
    def _name(self) -> str:
        return f"worker-{self._number}.{self._life}"

    async def run(self) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            while not self._over.is_set():
                held = await self._claim()
                if held:
                    await self._work(held)
                else:
                    await asyncio.sleep(self._random.uniform(0.02, 0.2))
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            for wire in (*self._wires, *self._beat_wires):
                wire.close()

    async def _claim(self) -> list[Held]:
        draw = self._random
        asked = draw.choice([1, 1, 2, 5, 10])
        queues = draw.sample(QUEUES, draw.choice([1, 2, 4]))
        body: dict[str, Any] = {"worker_id": self._name, "queues": queues, "max_jobs": asked}
        body["lease_seconds"] = self._size.lease_seconds
        if draw.random() < 0.3:
            body["wait_seconds"] = draw.choice([0.3, 1])
        if draw.random() < 0.5:
            body["request_id"] = str(uuid.UUID(int=draw.getrandbits(128), version=4))
        for _ in range(6):
            event = Event("claim", "unknown", time.monotonic(), worker=self._name, queues=tuple(queues), asked=asked)
            event.request = body.get("request_id")
            wire = draw.choice(self._wires)
            answer = await self._recorder.say(
                wire, "/v1/jobs/claim", body, [event], seconds=3 + body.get("wait_seconds", 0)
            )
            if answer is not None:
                event.at, event.replayed = instant(answer["server_time"]), answer["replayed"]
                event.jobs = [self._held(job) for job in answer["jobs"]]
                self._mine.update({held.token: held for held in event.jobs})
                return event.jobs
            if event.request is None:
                break
            await asyncio.sleep(draw.uniform(0.02, 0.3))
        return []

    def _held(self, job: dict[str, Any]) -> Held:
        return Held(
            job["id"],
            job["queue"],
            job["fence"],
            job["attempt_token"],
            job["reserved_by"],
            instant(job["reserved_at"]) or 0,
            instant(job["lease_expires_at"]) or 0,
            instant(job["available_at"]) or 0,
            job["attempts"],
        )

    async def _beat(self) -> None:
        draw = random.Random(f"{self._recorder.seed} beats {self._number}")
        while True:
            await asyncio.sleep(self._size.lease_seconds / 3)
            held = [each for each in self._mine.values() if each.worker == self._name]
            if held and not self._asleep and not await self._beat_once(draw.choice(self._beat_wires), held):
                await self._beat_once(draw.choice(self._beat_wires), held)

    async def _beat_once(self, wire: Wire, held: list[Held]) -> bool:
        lease = self._size.lease_seconds
        events = [
            Event("heartbeat", "unknown", time.monotonic(), worker=each.worker, job=each.job, token=each.token)
            for each in held
        ]
        for event in events:
            event.lease = int(lease * 1_000_000)
        bodies = [
            {"attempt_token": each.token, "worker_id": each.worker, "lease_seconds": lease, "progress": {"seen": 1}}
            for each in held
        ]
        if len(held) == 1:
            answer = await self._recorder.say(wire, f"/v1/jobs/{held[0].job}/heartbeat", bodies[0], events, seconds=1)
            results = [answer]
        else:
            items = [{"id": each.job, **body} for each, body in zip(held, bodies, strict=True)]
            answer = await self._recorder.say(wire, "/v1/jobs/heartbeat", {"items": items}, events, seconds=1)
            results = (
                [_item(event, result) for event, result in zip(events, answer["results"], strict=True)]
                if answer
                else [None] * len(held)
            )
        for event, result in zip(events, results, strict=True):
            if result is not None:
                event.at, event.expires_at = instant(result["server_time"]), instant(result["lease_expires_at"])
                event.fence = result["fence"]
            elif event.status == 409:
                self._mine.pop(event.token or "", None)
        return all(event.answer != "unknown" for event in events)

    async def _work(self, held: list[Held]) -> None:
        draw, share = self._random, self._size.fault_share
        fate = draw.random()
        if fate < share:
            # Dies in the middle: some are done, the others are nobody's.
            for each in held[: len(held) // 2]:
                await self._end([each])
            self._recorder.faulty.update(each.token for each in held[len(held) // 2 :])
            self._mine.clear()
            self._life += 1
            return
        if fate < 2 * share:
            self._asleep = True
            self._recorder.faulty.update(each.token for each in held)
            await asyncio.sleep(self._size.lease_seconds * draw.uniform(0.8, 2.5))
            self._asleep = False
            if draw.random() < 0.5:
                await self._beat_once(draw.choice(self._wires), held)
            for each in held:
                await self._end([each])
        elif len(held) > 1 and draw.random() < 0.5:
            await asyncio.sleep(draw.uniform(0, 0.02))
            await self._end(held)
        else:
            for each in held:
                slow = draw.random() < 0.01
                await asyncio.sleep(
                    self._size.lease_seconds * draw.uniform(0.5, 1.8) if slow else draw.uniform(0, 0.02)
                )
                await self._end([each])
        for each in held:
            self._mine.pop(each.token, None)

    async def _end(self, held: list[Held]) -> None:
        """End attempts, the same call again until it is answered; now and then once more although it was."""
        draw = self._random
        verb = draw.choices(["complete", "fail", "release"], [90, 6, 4])[0]
        bodies = [self._ending(verb, each) for each in held]
        for _ in range(25):
            events = [
                Event(verb, "unknown", time.monotonic(), worker=each.worker, job=each.job, token=each.token)
                for each in held
            ]
            for event, body in zip(events, bodies, strict=True):
                content = body.get("result") if verb == "complete" else body
                event.content = digest(json.dumps(content, separators=(",", ":")))
            wire = draw.choice(self._wires)
            bodied = [{"attempt_token": each.token, **body} for each, body in zip(held, bodies, strict=True)]
            if len(held) == 1:
                answer = await self._recorder.say(wire, f"/v1/jobs/{held[0].job}/{verb}", bodied[0], events)
                results = [answer]
            else:
                items = [{"id": each.job, **body} for each, body in zip(held, bodied, strict=True)]
                answer = await self._recorder.say(wire, f"/v1/jobs/{verb}", {"items": items}, events)
                results = (
                    [_item(event, result) for event, result in zip(events, answer["results"], strict=True)]
                    if answer
                    else [None] * len(held)
                )
            for event, result in zip(events, results, strict=True):
                if result is not None:
                    event.at, event.after, event.fence = (
                        instant(result["server_time"]),
                        result["status"],
                        result["fence"],
                    )
                    event.available_at = instant(result["available_at"])
            if all(event.answer != "unknown" for event in events) and draw.random() > 0.03:
                return
            await asyncio.sleep(draw.uniform(0.02, 0.3))

    def _ending(self, verb: str, held: Held) -> dict[str, Any]:
        if verb == "complete":
            return {"result": {"by": held.worker, "fence": held.fence}}
        if verb == "fail":
            return {"error_type": "Flaky", "error_message": held.token, "retry_after_seconds": 0.2}
        return {"reason": "gives back"}


JOBS = """
SELECT id::text, queue, idempotency_key, payload::text, status, fence, attempts, max_attempts, reclaim_count,
    result::text, available_at <= fencepost_now() AS due, done_by, done_claimed_at, finished_at
FROM jobs
"""
ATTEMPTS = """
SELECT job_id::text, fence, number, worker_id, outcome, claimed_at, ended_at FROM job_attempts ORDER BY job_id, fence
"""
LIVE = "SELECT count(*) FROM jobs WHERE status IN ('queued', 'processing')"


async def nothing_left(database_url: str) -> bool:
    try:
        async with await psycopg.AsyncConnection.connect(
            database_url, autocommit=True, connect_timeout=2
        ) as connection:
            row = await (await connection.execute(LIVE)).fetchone()
            return row is not None and row[0] == 0
    except psycopg.Error:
        return False


async def read_out(database_url: str, wire: Wire, say: Callable[[str], None]) -> tuple[ReadOut, list[Violation]]:
    """What is there, from the tables; and what of it the service tells otherwise."""
    async with await psycopg.AsyncConnection.connect(database_url, row_factory=dict_row) as connection:
        jobs = await (await connection.execute(JOBS)).fetchall()
        attempts = await (await connection.execute(ATTEMPTS)).fetchall()
    finals: dict[str, Final] = {}
    for row in jobs:
        finals[row["id"]] = Final(
            row["id"],
            row["queue"],
            row["idempotency_key"],
            digest(row["payload"]),
            row["status"],
            row["fence"],
            row["attempts"],
            row["max_attempts"],
            row["reclaim_count"],
            digest(row["result"]),
            row["due"],
            [],
        )
    for row in attempts:
        finals[row["job_id"]].attempts.append(
            Attempt(
                row["fence"],
                row["number"],
                row["worker_id"],
                row["outcome"],
                instant(row["claimed_at"]) or 0,
                instant(row["ended_at"]) or 0,
            )
        )
    for row in jobs:
        if row["status"] == "done":
            claimed, ended = instant(row["done_claimed_at"]) or 0, instant(row["finished_at"]) or 0
            done = Attempt(row["fence"], row["attempts"], row["done_by"], "done", claimed, ended)
            finals[row["id"]].attempts.append(done)
    say(f"read out {len(finals)} jobs")
    read = ReadOut(finals)
    return read, [violation async for violation in _told_otherwise(read, wire)]


async def _told_otherwise(read: ReadOut, wire: Wire) -> Any:
    _, queues = await wire.ask("GET", "/v1/queues", seconds=10)
    read.counts = {queue["name"]: queue["counts"] for queue in queues["queues"]}
    told: dict[str, tuple[str, int]] = {}
    cursor = ""
    while True:
        _, page = await wire.ask("GET", f"/v1/jobs?limit=500{cursor}", seconds=10)
        told.update({job["id"]: (job["status"], job["fence"]) for job in page["jobs"]})
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    own = {job.job: (job.status, job.fence) for job in read.jobs.values()}
    if told != own:
        yield Violation("I22", "list", f"{len(set(told.items()) ^ set(own.items()))} jobs are listed otherwise")
    for job in [job for job in read.jobs.values() if len(job.attempts) > 1][:100]:
        _, page = await wire.ask("GET", f"/v1/jobs/{job.job}/attempts?limit=500", seconds=10)
        given = [(each["fence"], each["number"], each["outcome"]) for each in page["attempts"]]
        if given != [(each.fence, each.number, each.outcome) for each in job.attempts]:
            yield Violation("I22", job.job, "has other attempts by HTTP than in the table")
