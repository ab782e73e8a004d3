"""A made-up service with virtual time, right or with one named bug: what the checker is tested on.

It shares no line with the real one. Answers get lost, workers die, stall, come back with stale tokens and repeat
their calls, as in a real run.
"""

import random
import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.reliability.history import (
    OK,
    OUTCOME_OF,
    REJECTED,
    UNKNOWN,
    Attempt,
    Event,
    Final,
    Held,
    ReadOut,
    digest,
)

SECOND = 1_000_000
LEASE = 2 * SECOND

BUGS = {
    "stale_complete": "I3", "stale_heartbeat": "I3", "beat_after_end": "I3", "stale_fail": "I3",
    "refuses_good_token": "I3",
    "fail_not_kept": "I3", "released_by_nobody_as_failed": "I3", "lies_about_end": "I3",
    "early_reclaim": "I9", "short_heartbeat": "I9", "shorter_lease": "I9",
    "undo_done": "I4", "completion_lost": "I4", "other_result": "I4", "done_by_nobody": "I4",
    "double_claim": "I1", "fence_reused": "I1", "claims_a_held_job": "I1",
    "token_reused": "I2", "fence_goes_back": "I2",
    "lost_enqueue": "I5", "phantom_job": "I6", "other_payload": "I6",
    "two_jobs_of_a_key": "I7", "takes_other_content": "I7",
    "repeat_takes_new_jobs": "I8", "repeat_refused": "I8", "repeat_answered_otherwise": "I8",
    "history_row_lost": "I11", "attempts_beyond_max": "I11", "reclaims_miscounted": "I11", "wrong_number": "I11",
    "stuck": "I12", "miscounts": "I13", "internal_error": "I23",
    "too_many": "I19", "not_due": "I19", "wrong_queue": "I19", "same_job_twice": "I19",
}  # fmt: skip


@dataclass
class SimJob:
    id: str
    queue: str
    key: str
    content: str
    available_at: int
    max_attempts: int
    status: str = "queued"
    fence: int = 0
    attempts: int = 0
    reclaims: int = 0
    releases: int = 0
    token: str | None = None
    worker: str = ""
    claimed_at: int = 0
    expires_at: int = 0
    result: str = ""
    history: list[Attempt] = field(default_factory=list)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)


class Simulation:
    def __init__(self, seed: int, bug: str | None = None, steps: int = 400) -> None:
        self.random = random.Random(seed)
        self.bug = bug
        self.now = SECOND
        self.jobs: dict[str, SimJob] = {}
        self.keys: dict[tuple[str, str], SimJob] = {}
        self.requests: dict[tuple[str, str], list[Held]] = {}
        self.events: list[Event] = []
        self.hands: list[Held] = []
        self.said: list[tuple[Held, str, str]] = []
        for _ in range(steps):
            self._step()
        self._settle()

    def _buggy(self, name: str, chance: float = 0.3) -> bool:
        return self.bug == name and self.random.random() < chance

    # --- the service -------------------------------------------------------------------------------------------------

    def enqueue(self, queue: str, key: str, content: str) -> dict[str, Any]:
        known = self.keys.get((queue, key))
        if known is not None and not self._buggy("two_jobs_of_a_key"):
            if known.content != content and not self._buggy("takes_other_content"):
                return {"answer": REJECTED, "status": 422, "code": "idempotency-mismatch"}
            return {"answer": OK, "status": 200, "job": known.id, "fresh": False}
        delay = self.random.choice([0, 0, 0, SECOND])
        most = self.random.choice([2, 3, 9])
        job = SimJob(str(uuid.UUID(int=self.random.getrandbits(128))), queue, key, content, self.now + delay, most)
        if not self._buggy("lost_enqueue", 0.05):
            self.jobs[job.id] = job
            self.keys[queue, key] = job
        if self._buggy("other_payload", 0.1):
            job.content = "other"
        return {"answer": OK, "status": 201, "job": job.id, "fresh": True}

    def claim(self, worker: str, queues: tuple[str, ...], asked: int, request: str | None) -> dict[str, Any]:
        if request is not None and (worker, request) in self.requests and not self._buggy("repeat_takes_new_jobs", 0.6):
            mine = [held for held in self.requests[worker, request] if self.jobs[held.job].token == held.token]
            mine = [held for held in mine if self.jobs[held.job].expires_at > self.now]
            return {"answer": OK, "status": 200, "at": self.now, "jobs": mine, "replayed": True}
        queue_ok = lambda job: job.queue in queues or self._buggy("wrong_queue", 0.2)  # noqa: E731
        due = [
            job
            for job in self.jobs.values()
            if queue_ok(job)
            and (
                (job.status == "queued" and (job.available_at <= self.now or self._buggy("not_due")))
                or (job.status == "processing" and self._buggy("claims_a_held_job", 0.1))
                or (job.status == "done" and self._buggy("undo_done", 0.05))
            )
        ]
        taken = []
        for job in due[: asked + self._buggy("too_many")]:
            if not self._buggy("fence_reused") or not job.fence:
                job.fence += 1
            job.attempts += 1
            job.status, job.worker, job.claimed_at, job.expires_at = "processing", worker, self.now, self.now + LEASE
            if not (self._buggy("token_reused") and job.held):
                job.token = str(uuid.UUID(int=self.random.getrandbits(128)))
            else:
                job.token = job.held[-1].token
            taken.append(self._held(job))
            if self._buggy("same_job_twice"):
                taken.append(taken[-1])
            if self._buggy("double_claim", 0.2):
                # A second claim that ran at the same time got it too; its answer comes next in the history.
                twin = Held(**{name: getattr(taken[-1], name) for name in Held.__slots__})
                twin.token, twin.worker = str(uuid.UUID(int=self.random.getrandbits(128))), "twin"
                told = {"answer": OK, "status": 200, "at": self.now, "jobs": [twin]}
                self.events.append(Event("claim", sent=0.0, worker="twin", queues=queues, asked=1, **told))
            if self._buggy("fence_goes_back", 0.3) and len(job.held) > 1:
                job.held[-1].claimed_at = taken[-1].claimed_at = job.held[0].claimed_at - 1
        if request is not None and taken:
            self.requests[worker, request] = taken
        return {"answer": OK, "status": 200, "at": self.now, "jobs": taken}

    def _held(self, job: SimJob) -> Held:
        assert job.token is not None
        held = Held(
            job.id,
            job.queue,
            job.fence,
            job.token,
            job.worker,
            job.claimed_at,
            job.expires_at,
            job.available_at,
            job.attempts,
        )
        job.held.append(held)
        return held

    def heartbeat(self, held: Held, lease: int) -> dict[str, Any]:
        job = self.jobs.get(held.job)
        if job is None:
            return self._refused(job, held)
        stale_ok = (job.token and self._buggy("stale_heartbeat")) or (
            held.token in job.ended and self._buggy("beat_after_end")
        )
        if job.token != held.token and not stale_ok:
            return self._refused(job, held)
        job.expires_at = max(job.expires_at, self.now + lease)
        told = job.expires_at
        if self._buggy("short_heartbeat"):
            told = job.expires_at = self.now + lease // 2
        if self._buggy("shorter_lease"):
            told = job.expires_at = self.now - 1
            lease = 0
        return {"answer": OK, "status": 200, "at": self.now, "expires_at": told, "fence": job.fence}

    def end(self, verb: str, held: Held, content: str) -> dict[str, Any]:
        job = self.jobs.get(held.job)
        if job is None:
            return {"answer": REJECTED, "status": 404}
        before = job.ended.get(held.token)
        if before is not None:
            if (before["verb"], before["content"]) != (verb, content) or self._buggy("repeat_refused", 0.5):
                return {"answer": REJECTED, "status": 409, "code": "attempt-ended"}
            told = before["told"]
            return {**told, "at": self.now} if self._buggy("repeat_answered_otherwise", 0.5) else told
        live = job.status == "processing"
        stale_ok = live and (
            (verb == "complete" and self._buggy("stale_complete", 0.6))
            or (verb == "fail" and self._buggy("stale_fail", 0.6))
        )
        if job.token != held.token and not stale_ok:
            return self._refused(job, held)
        if self._buggy("refuses_good_token", 0.1):
            return {"answer": REJECTED, "status": 409, "code": "lease-lost"}
        if verb == "complete":
            status = "done"
            job.result = digest("wrong") if self._buggy("other_result", 0.1) else content
        elif verb == "fail":
            status = "failed" if job.attempts >= job.max_attempts else "queued"
        else:
            status = "queued"
        told = {"answer": OK, "status": 200, "at": self.now, "after": status, "fence": held.fence}
        if status == "queued":
            told["available_at"] = self.now + (SECOND // 2 if verb == "fail" else 0)
        job.ended[held.token] = {"verb": verb, "content": content, "told": told}
        if (verb == "complete" and self._buggy("completion_lost", 0.05)) or (
            verb == "fail" and self._buggy("fail_not_kept", 0.2)
        ):
            return told
        self._let_go(job, status, OUTCOME_OF[verb], told.get("available_at"))
        return told

    def _refused(self, job: SimJob | None, held: Held) -> dict[str, Any]:
        told: dict[str, Any] = {"answer": REJECTED, "status": 409, "code": "lease-lost"}
        if job is not None:
            for attempt in job.history:
                if attempt.fence == held.fence:
                    if attempt.outcome != "reclaimed":
                        told["code"] = "attempt-ended"
                    else:
                        told["ended_at"] = attempt.ended_at - self._buggy("lies_about_end")
        return told

    def _let_go(self, job: SimJob, status: str, outcome: str, available_at: int | None = None) -> None:
        if self._buggy("released_by_nobody_as_failed", 0.2) and outcome == "reclaimed":
            outcome = "failed"
        number = job.attempts + self._buggy("wrong_number", 0.1)
        row = Attempt(job.fence, number, job.worker, outcome, job.claimed_at, self.now)
        if not self._buggy("history_row_lost", 0.1):
            job.history.append(row)
        if outcome == "released":
            job.releases += 1
            job.attempts -= job.releases <= 10
        else:
            job.releases = 0
        job.status, job.token = status, None
        if available_at is not None:
            job.available_at = available_at

    def reclaim(self) -> None:
        for job in self.jobs.values():
            early = self._buggy("early_reclaim", 0.1)
            if job.status != "processing" or not (job.expires_at < self.now or early) or self.bug == "stuck":
                continue
            job.reclaims += not self._buggy("reclaims_miscounted")
            over = job.attempts >= job.max_attempts and not self._buggy("attempts_beyond_max", 0.9)
            self._let_go(job, "failed" if over else "queued", "reclaimed", self.now)

    # --- its callers -------------------------------------------------------------------------------------------------

    def _call(self, act: Any, event: Event) -> Event:
        """Ask; the answer may get lost, before or after the service did what it was asked."""
        fate = self.random.random()
        told: dict[str, Any] = {"answer": UNKNOWN} if fate < 0.04 else act()
        if self._buggy("internal_error", 0.01):
            told = {"answer": UNKNOWN, "status": 500}
        elif 0.04 <= fate < 0.08:
            told = {"answer": UNKNOWN, "status": self.random.choice([None, 503])}
        for name, value in told.items():
            setattr(event, name, value)
        event.sent = event.received = float(self.now)
        self.events.append(event)
        return event

    def _step(self) -> None:
        draw = self.random
        self.now += draw.randrange(1, SECOND // 4)
        what = draw.random()
        if what < 0.25:
            queue, key = draw.choice("ab"), f"k{draw.randrange(60)}"
            content = digest(key if draw.random() < 0.95 else "else")
            event = Event("enqueue", UNKNOWN, 0.0, key=key, queue=queue, content=content)
            self._call(lambda: self.enqueue(queue, key, content), event)
        elif what < 0.5:
            self._claims()
        elif what < 0.65 and self.hands:
            self._beats(draw.choice(self.hands))
        elif what < 0.85 and self.hands:
            # The same one may be taken again later: a repeat, or a stale token.
            held = draw.choice(self.hands[-20:])
            verb = draw.choices(["complete", "fail", "release"], [6, 3, 1])[0]
            self._ends(held, verb, digest(f"{verb}{draw.randrange(2) if draw.random() < 0.1 else 0}"))
        elif what < 0.9 and self.said:
            self._ends(*draw.choice(self.said[-8:]))
        else:
            self.reclaim()
            if self._buggy("done_by_nobody", 0.3):
                for job in self.jobs.values():
                    if job.status == "queued" and job.fence:
                        job.status, job.result = "done", digest("ghost")
                        break

    def _claims(self) -> None:
        draw = self.random
        worker, asked = f"w{draw.randrange(6)}", draw.choice([1, 1, 3])
        queues = draw.choice([("a",), ("b",), ("a", "b")])
        request = f"r{draw.randrange(1 << 30)}" if draw.random() < 0.5 else None
        for _ in range(1 if request is None else draw.choice([1, 1, 2])):
            event = Event("claim", UNKNOWN, 0.0, worker=worker, queues=queues, asked=asked, request=request)
            event = self._call(lambda: self.claim(worker, queues, asked, request), event)
            self.hands.extend(held for held in event.jobs if held not in self.hands)

    def _beats(self, held: Held) -> None:
        lease = self.random.choice([SECOND, LEASE, 3 * SECOND])
        event = Event("heartbeat", UNKNOWN, 0.0, job=held.job, token=held.token, worker=held.worker, lease=lease)
        self._call(lambda: self.heartbeat(held, lease), event)

    def _ends(self, held: Held, verb: str, content: str) -> None:
        self.said.append((held, verb, content))
        event = Event(verb, UNKNOWN, 0.0, job=held.job, token=held.token, worker=held.worker, content=content)
        self._call(lambda: self.end(verb, held, content), event)

    def _settle(self) -> None:
        """Healthy workers until nothing is left, as in the quiet period of a real run."""
        for _ in range(40):
            self.now += SECOND
            self.reclaim()
            self._claims_all()

    def _claims_all(self) -> None:
        queues = ("a", "b")
        event = Event("claim", UNKNOWN, 0.0, worker="last", queues=queues, asked=100)
        for name, value in self.claim("last", queues, 100, None).items():
            setattr(event, name, value)
        self.events.append(event)
        for held in list(event.jobs):
            told = self.end("complete", held, digest("last"))
            done = Event("complete", UNKNOWN, 0.0, job=held.job, token=held.token, content=digest("last"))
            for name, value in told.items():
                setattr(done, name, value)
            self.events.append(done)

    def read_out(self) -> ReadOut:
        if self.bug == "phantom_job":
            self.jobs["ghost"] = SimJob("ghost", "a", "nobody", "x", 0, 3, "cancelled")
        finals = {
            job.id: Final(
                job.id,
                job.queue,
                job.key,
                job.content,
                job.status,
                job.fence,
                job.attempts,
                job.max_attempts,
                job.reclaims,
                job.result if job.status == "done" else "",
                job.available_at <= self.now,
                list(job.history),
            )
            for job in self.jobs.values()
        }
        counts: dict[str, dict[str, int]] = {}
        for job in finals.values():
            queue = counts.setdefault(job.queue, {})
            queue[job.status] = queue.get(job.status, 0) + 1
        if self.bug == "miscounts" and counts:
            next(iter(counts.values()))["done"] = -1
        return ReadOut(finals, counts)
