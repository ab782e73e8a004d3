"""What was said over HTTP, one record a call, and what is there at the end.

`answer` is one of three: `ok` (2xx), `rejected` (4xx: certainly nothing was done) and `unknown` (no answer, a lost
connection, any 5xx: it may have happened, also later than the caller gave up). Instants of the database are whole
microseconds since 1970; the harness's own are seconds of its monotonic clock.
"""

import hashlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

OK, REJECTED, UNKNOWN = "ok", "rejected", "unknown"
ENDINGS = ("complete", "fail", "release")
OUTCOME_OF = {"complete": "done", "fail": "failed", "release": "released"}


def instant(text: str | datetime | None) -> int | None:
    if text is None:
        return None
    at = text if isinstance(text, datetime) else datetime.fromisoformat(text)
    return round(at.timestamp() * 1_000_000)


def digest(text: str | None) -> str:
    return hashlib.sha256((text or "").encode()).hexdigest()[:16]


def answer_of(status: int | None) -> str:
    if status is None or status >= 500:
        return UNKNOWN
    return OK if status < 400 else REJECTED


@dataclass(slots=True)
class Held:
    """A job as a claim handed it out."""

    job: str
    queue: str
    fence: int
    token: str
    worker: str
    claimed_at: int
    expires_at: int
    available_at: int
    number: int


@dataclass(slots=True)
class Event:
    """One call (one item of a batch). Which fields are filled depends on `op`."""

    op: str
    answer: str
    sent: float
    received: float = 0.0
    status: int | None = None
    code: str | None = None
    worker: str = ""
    job: str | None = None
    token: str | None = None
    at: int | None = None
    """`server_time` of the answer."""
    fence: int | None = None
    after: str | None = None
    """The job's status as the answer to an ending told it."""
    expires_at: int | None = None
    available_at: int | None = None
    ended_at: int | None = None
    """What a `lease-lost` told of the attempt's end."""
    content: str = ""
    """Digest of what a repeat would have to send again."""
    key: str | None = None
    queue: str | None = None
    fresh: bool | None = None
    """Of an enqueue: 201, or 200 for a job that was there."""
    lease: int | None = None
    """Microseconds that a heartbeat asked for."""
    asked: int = 0
    queues: tuple[str, ...] = ()
    request: str | None = None
    replayed: bool = False
    jobs: list[Held] = field(default_factory=list)


@dataclass(slots=True)
class Attempt:
    fence: int
    number: int
    worker: str
    outcome: str
    claimed_at: int
    ended_at: int


@dataclass(slots=True)
class Final:
    """A job in the final read-out; `attempts` are all that ended, in the order of their fences."""

    job: str
    queue: str
    key: str | None
    content: str
    status: str
    fence: int
    count: int
    max_attempts: int
    reclaims: int
    result: str
    due: bool
    attempts: list[Attempt]


@dataclass(slots=True)
class ReadOut:
    jobs: dict[str, Final]
    counts: dict[str, dict[str, int]] | None = None
    """By queue and status, as the service itself counts."""


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule} {self.about}: {self.text}"


def figures(events: list[Event], read: ReadOut, faulty: set[str]) -> dict[str, Any]:
    """What a run amounts to. `faulty` holds the tokens of attempts whose worker died or stalled on purpose."""
    keys = {event.key for event in events if event.op == "enqueue" and event.answer == OK}
    found = {job.key for job in read.jobs.values()}
    completions: dict[str, set[str]] = {}
    for event in events:
        if event.op == "complete" and event.answer == OK and event.job and event.token:
            completions.setdefault(event.job, set()).add(event.token)
    owner = {(held.job, held.fence): held.token for event in events for held in event.jobs}
    reclaimed = [
        (owner.get((job.job, attempt.fence)), attempt)
        for job in read.jobs.values()
        for attempt in job.attempts
        if attempt.outcome == "reclaimed"
    ]
    unanswered = {event.token for event in events if event.token and event.answer == UNKNOWN}
    answers: dict[str, int] = {}
    for event in events:
        answers[str(event.status)] = answers.get(str(event.status), 0) + 1
    statuses: dict[str, int] = {}
    for job in read.jobs.values():
        statuses[job.status] = statuses.get(job.status, 0) + 1
    return {
        "calls": len(events),
        "answers": dict(sorted(answers.items())),
        "no_answer": sum(event.status is None for event in events),
        "jobs_acknowledged": len(keys),
        "jobs_lost": len(keys - found),
        "jobs_by_status": statuses,
        "completed_twice": sum(len(tokens) > 1 for tokens in completions.values()),
        "attempts": sum(len(job.attempts) for job in read.jobs.values()),
        "refused_stale": sum(event.code in ("lease-lost", "attempt-ended") for event in events),
        "extra_executions": len(reclaimed),
        "extra_after_worker_fault": sum(token in faulty for token, _ in reclaimed if token),
        "extra_after_lost_claim_answer": sum(token is None for token, _ in reclaimed),
        "extra_after_unanswered_calls": sum(token in unanswered - faulty for token, _ in reclaimed),
        "extra_unexplained": sum(token is not None and token not in unanswered | faulty for token, _ in reclaimed),
        "internal_errors": sum((event.status or 0) >= 500 and event.status != 503 for event in events),
    }
