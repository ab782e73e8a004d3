"""The shapes of jobs on the wire. Requests are strict and closed; answers stay open for later members."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field

from app.web.shapes import (
    DAY,
    Answered,
    ErrorMessage,
    ErrorType,
    Id,
    Instant,
    Int32,
    Int64,
    JsonText,
    Key,
    Name,
    Payload,
    Progress,
    Reason,
    Result,
    Seconds,
    Strict,
    Whole,
)

Delay = Annotated[float, Seconds(0, 366 * DAY)]
Lease = Annotated[float, Seconds(1, 43_200)]
Fence = Annotated[int, Whole(0, 2**53 - 1)]

StatusWord = Literal["queued", "processing", "done", "failed", "cancelled", "manual_review"]
Policy = Literal["auto", "manual"]


# --- requests --------------------------------------------------------------------------------------------------------


class Backoff(Strict):
    """Waiting after a fail: min(cap, base × 2^(attempt-1)) with full jitter."""

    base_seconds: Annotated[float, Seconds(0, DAY)] | None = None
    cap_seconds: Annotated[float, Seconds(1, 7 * DAY)] | None = None


class Enqueue(Strict):
    """A job to be run."""

    queue: Name
    payload: Payload
    kind: Name | None = Field(None, description="What to run; the queue's name when absent.")
    priority: Annotated[int, Whole(0, 9)] = Field(4, description="Higher first; first in, first out within one.")
    available_at: Instant | None = Field(None, description="Not before this; at most 366 days ahead.")
    delay_seconds: Delay | None = Field(None, description="Not before so many seconds from now.")
    max_attempts: Annotated[int, Whole(1, 100)] | None = None
    max_reclaims: Annotated[int, Whole(0, 100)] | None = None
    recovery_policy: Policy | None = Field(
        None, description="`auto`: a lapsed lease puts the job back in the queue; `manual`: a person decides."
    )
    lease_seconds: Lease | None = None
    max_run_seconds: Annotated[float, Seconds(1, 2_592_000)] | None = None
    backoff: Backoff | None = None
    unique_key: Key | None = Field(None, description="At most one live job per queue and key.")
    on_conflict: Literal["return", "reject"] = Field(
        "return", description="When the unique key is held: answer the live job, or refuse with 409."
    )


class EnqueueItem(Enqueue):
    """One job of a batch; its idempotency key stands here, not in the header."""

    idempotency_key: Key | None = None


class EnqueueBatch(Strict):
    jobs: list[EnqueueItem] = Field(max_length=1000)


class Claim(Strict):
    """A worker's wish for jobs."""

    worker_id: Key
    queues: list[Name] = Field(min_length=1, max_length=50, description="Tried in this order.")
    max_jobs: Annotated[int, Whole(1, 100)] = 1
    lease_seconds: Lease | None = None
    wait_seconds: Annotated[float, Seconds(0, 30)] = Field(0.0, description="Wait so long for a job to come.")
    request_id: Id | None = Field(None, description="Makes the claim repeatable for 24 hours.")


class Heartbeat(Strict):
    attempt_token: Id
    worker_id: Key
    lease_seconds: Lease | None = Field(None, description="From now; the length granted at the claim when absent.")
    progress: Progress | None = Field(None, description="Kept; absent keeps the last.")


class Complete(Strict):
    attempt_token: Id
    result: Result | None = None


class Fail(Strict):
    attempt_token: Id
    error_type: ErrorType | None = None
    error_message: ErrorMessage | None = None
    retryable: bool = True
    retry_after_seconds: Delay | None = Field(None, description="In place of the back-off.")


class Release(Strict):
    attempt_token: Id
    reason: Reason | None = None
    delay_seconds: Delay | None = None


class HeartbeatItem(Heartbeat):
    id: Id


class CompleteItem(Complete):
    id: Id


class FailItem(Fail):
    id: Id


class ReleaseItem(Release):
    id: Id


class HeartbeatBatch(Strict):
    items: list[HeartbeatItem] = Field(max_length=1000)


class CompleteBatch(Strict):
    items: list[CompleteItem] = Field(max_length=1000)


class FailBatch(Strict):
    items: list[FailItem] = Field(max_length=1000)


class ReleaseBatch(Strict):
    items: list[ReleaseItem] = Field(max_length=1000)


class Cancel(Strict):
    reason: Reason | None = None
    force: bool = Field(False, description="End a processing job at once; its token dies.")
    expected_fence: Fence | None = Field(None, description="Refuse with 409 when the fence is another by now.")


class Requeue(Strict):
    reason: Reason | None = None
    extra_attempts: Annotated[int, Whole(1, 100)] = 1
    force: bool = Field(False, description="Also from processing; the token dies at once.")
    from_done: bool = Field(False, description="Also from done; the result goes into the history.")
    expected_fence: Fence | None = None


class Resolve(Strict):
    """A person's verdict."""

    outcome: Literal["done", "failed"]
    result: Result | None = None
    note: Reason | None = None
    accept_late_result: bool = Field(False, description="Take the refused result of the latest attempt.")
    expected_fence: Fence | None = None


class JobList(Strict):
    queue: Name | None = None
    kind: Name | None = None
    status: list[StatusWord] | None = None
    worker_id: Key | None = None
    unique_key: Key | None = None
    created_after: Instant | None = None
    created_before: Instant | None = None
    cursor: str | None = Field(None, max_length=400)
    limit: Annotated[int, Whole(1, 500)] = 100


class AttemptList(Strict):
    cursor: str | None = Field(None, max_length=400)
    limit: Annotated[int, Whole(1, 500)] = 100


# --- answers ---------------------------------------------------------------------------------------------------------


class LateResult(Answered):
    """A completion that came after its attempt was reclaimed; `resolve` can accept it."""

    fence: Int64
    worker_id: str
    received_at: datetime
    result: JsonText | None = None


class BackoffRead(Answered):
    base_seconds: float | None
    cap_seconds: float | None


class Job(Answered):
    id: UUID
    queue: str
    kind: str
    payload: JsonText
    status: StatusWord
    priority: Int32
    attempts: Int32
    max_attempts: Int32
    recovery_policy: Policy
    reclaim_count: Int32
    max_reclaims: Int32
    lease_seconds: float | None
    max_run_seconds: float | None
    backoff: BackoffRead
    available_at: datetime
    fence: Int64
    reserved_by: str | None
    reserved_at: datetime | None
    heartbeat_at: datetime | None
    lease_expires_at: datetime | None
    cancel_requested: bool
    progress: JsonText | None
    result: JsonText | None
    last_error: str | None
    unique_key: str | None
    idempotency_key: str
    traceparent: str | None
    schedule: str | None
    slot_at: datetime | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class JobRead(Job):
    late_result: LateResult | None = None


class Enqueued(Job):
    deduplicated: bool


class PreviousAttempt(Answered):
    outcome: str
    error_type: str | None
    error_message: str | None
    progress: JsonText | None
    age_seconds: float


class ClaimedJob(Job):
    attempt_token: UUID
    run_deadline_at: datetime | None
    previous_attempt: PreviousAttempt | None


class Claimed(Answered):
    jobs: list[ClaimedJob]
    server_time: datetime
    replayed: bool


class HeartbeatAnswer(Answered):
    id: UUID
    status: StatusWord
    lease_expires_at: datetime
    run_deadline_at: datetime | None
    cancel_requested: bool
    queue_paused: bool
    server_time: datetime
    fence: Int64


class Ended(Answered):
    id: UUID
    status: StatusWord
    fence: Int64
    available_at: datetime | None
    server_time: datetime


class _Result(Answered):
    """An item of a batch: with `ok` what the single call answers, else `problem`."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    index: Int32
    id: UUID | None
    ok: bool
    status: str | None = Field(description="The job's status.")
    problem: dict[str, Any] | None = None


class EnqueueResult(_Result):
    deduplicated: bool | None = None


class HeartbeatResult(_Result):
    lease_expires_at: datetime | None = None
    run_deadline_at: datetime | None = None
    cancel_requested: bool | None = None
    queue_paused: bool | None = None
    server_time: datetime | None = None
    fence: Int64 | None = None


class EndResult(_Result):
    fence: Int64 | None = None
    available_at: datetime | None = None
    server_time: datetime | None = None


class EnqueueResults(Answered):
    results: list[EnqueueResult]


class HeartbeatResults(Answered):
    results: list[HeartbeatResult]


class CompleteResults(Answered):
    results: list[EndResult]


class FailResults(Answered):
    results: list[EndResult]


class ReleaseResults(Answered):
    results: list[EndResult]


class Jobs(Answered):
    jobs: list[Job]
    next_cursor: str | None


class Attempt(Answered):
    number: Int32
    fence: Int64
    worker_id: str
    claimed_at: datetime
    last_heartbeat_at: datetime | None
    ended_at: datetime
    outcome: Literal["failed", "reclaimed", "released", "cancelled", "requeued", "done"]
    error_type: str | None
    error_message: str | None
    progress: JsonText | None


class Attempts(Answered):
    attempts: list[Attempt]
    next_cursor: str | None
