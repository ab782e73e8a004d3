"""The words of the state machine and its table of moves; pure, knows no SQL and no HTTP.

MOVES is the specification's table as data. `tests/jobs/test_moves.py` plays every event against every status on
PostgreSQL and compares what happened with this table, so it is a contract, not a comment.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

import uuid_utils


class Status(StrEnum):
    QUEUED = "queued"
    PROCESSING = "processing"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    MANUAL_REVIEW = "manual_review"


QUEUED, PROCESSING, DONE = Status.QUEUED, Status.PROCESSING, Status.DONE
FAILED, CANCELLED, MANUAL_REVIEW = Status.FAILED, Status.CANCELLED, Status.MANUAL_REVIEW

MOVES: Mapping[str, Mapping[Status, frozenset[Status]]] = {
    # event: {from: every status it may lead to}. An absent from-status refuses the event and changes nothing.
    "claim": {QUEUED: frozenset({PROCESSING})},
    "heartbeat": {PROCESSING: frozenset({PROCESSING})},
    "complete": {PROCESSING: frozenset({DONE})},
    "fail": {PROCESSING: frozenset({QUEUED, FAILED, CANCELLED})},
    "release": {PROCESSING: frozenset({QUEUED, FAILED, CANCELLED})},
    "reclaim": {PROCESSING: frozenset({QUEUED, FAILED, MANUAL_REVIEW, CANCELLED})},
    "cancel": {
        QUEUED: frozenset({CANCELLED}),
        MANUAL_REVIEW: frozenset({CANCELLED}),
        PROCESSING: frozenset({PROCESSING}),
        CANCELLED: frozenset({CANCELLED}),
    },
    "cancel_force": {
        QUEUED: frozenset({CANCELLED}),
        MANUAL_REVIEW: frozenset({CANCELLED}),
        PROCESSING: frozenset({CANCELLED}),
        CANCELLED: frozenset({CANCELLED}),
    },
    "requeue": {
        FAILED: frozenset({QUEUED}),
        CANCELLED: frozenset({QUEUED}),
        MANUAL_REVIEW: frozenset({QUEUED}),
        QUEUED: frozenset({QUEUED}),
    },
    "requeue_from_done": {
        DONE: frozenset({QUEUED}),
        FAILED: frozenset({QUEUED}),
        CANCELLED: frozenset({QUEUED}),
        MANUAL_REVIEW: frozenset({QUEUED}),
        QUEUED: frozenset({QUEUED}),
    },
    "requeue_force": {
        PROCESSING: frozenset({QUEUED}),
        FAILED: frozenset({QUEUED}),
        CANCELLED: frozenset({QUEUED}),
        MANUAL_REVIEW: frozenset({QUEUED}),
        QUEUED: frozenset({QUEUED}),
    },
    "resolve_done": {MANUAL_REVIEW: frozenset({DONE})},
    "resolve_failed": {MANUAL_REVIEW: frozenset({FAILED})},
    "resolve_late": {
        # Only with a late result of the job's latest attempt at hand.
        MANUAL_REVIEW: frozenset({DONE}),
        QUEUED: frozenset({DONE}),
        FAILED: frozenset({DONE}),
    },
}

DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_MAX_ATTEMPTS = 5
DEFAULT_MAX_RECLAIMS = 3
FREE_RELEASES = 10
"""So many releases in a row give their attempt back; from the next one they count."""

REPLAY_SECONDS = 24 * 3600.0
"""How long a claim can be repeated, and how long at least an idempotency key is remembered."""

LATE_RESULT_SECONDS = 7 * 86400.0


def new_id() -> UUID:
    """A UUIDv7: rows made together lie together in the index. Rising within this process, not across hosts."""
    return UUID(bytes=uuid_utils.uuid7().bytes)


def new_token() -> UUID:
    """An attempt token: 122 random bits, never derived from anything."""
    return UUID(bytes=uuid_utils.uuid4().bytes)


def token_digest(token: UUID) -> bytes:
    return hashlib.sha256(token.bytes).digest()


class Pass(NamedTuple):
    """What one pass of a background loop did: how much it moved, and when, by the database's clock."""

    moved: int
    at: datetime
    soon: float | None = None
    """Seconds until there is more to do, where that is known."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """One job to enqueue. Durations in seconds; None leaves the queue's or the service's default."""

    queue: str
    payload: str
    kind: str | None = None
    priority: int = 4
    available_at: datetime | None = None
    delay_seconds: float | None = None
    max_attempts: int | None = None
    max_reclaims: int | None = None
    recovery_policy: str | None = None
    lease_seconds: float | None = None
    max_run_seconds: float | None = None
    backoff_base_seconds: float | None = None
    backoff_cap_seconds: float | None = None
    unique_key: str | None = None
    reject_conflict: bool = False
    idempotency_key: str | None = None
    content_sha256: bytes | None = None
    traceparent: str | None = None
    schedule: str | None = None
    slot_at: datetime | None = None
    id: UUID | None = None
    """Made anew where it is None; given by who writes it elsewhere first."""


@dataclass(frozen=True, slots=True)
class ClaimCall:
    """One worker's wish for up to `max_jobs` jobs."""

    worker_id: str
    max_jobs: int
    lease_seconds: float | None = None
    key_id: str = "keyless"
    request_id: UUID | None = None
    content_sha256: bytes = b""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat."""

    job_id: UUID
    token: UUID
    worker_id: str
    lease_seconds: float | None = None
    progress: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """What a worker says of the end of its attempt: verb `complete`, `fail` or `release`, and its content.

    `content_sha256` is the digest of verb and content; a repeat is the same call only when it is equal.
    """

    verb: str
    job_id: UUID
    token: UUID
    content_sha256: bytes
    result: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    retryable: bool = True
    delay_seconds: float | None = None
    jitter: float = field(default=0.0)
    """One number in [0, 1), drawn at the door; the statement computes the back-off from the row's own `attempts`."""
