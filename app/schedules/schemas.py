"""The shapes of schedules on the wire."""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from app.jobs.schemas import Backoff, BackoffRead, Lease, Policy
from app.web.shapes import (
    DAY,
    Answered,
    Int32,
    Int64,
    JsonText,
    Key,
    Name,
    Payload,
    Reason,
    Seconds,
    Strict,
    Whole,
)


class PutSchedule(Strict):
    """A whole schedule: one cadence (`every_seconds`, or `cron` with `timezone`), one target (`queue` and the job's
    fields, or `task`). An absent member means its default, but an absent `enabled` keeps what is there."""

    every_seconds: Annotated[int, Whole(1, 31_622_400)] | None = None
    cron: str | None = Field(
        None, max_length=200, description="Five fields, or @hourly, @daily, @weekly, @monthly, @yearly."
    )
    timezone: str | None = Field(None, max_length=100, description="Of the cron; UTC when absent.")
    task: str | None = Field(None, max_length=100, description="A maintenance task of the service: `prune`.")
    queue: Name | None = None
    kind: Name | None = None
    payload: Payload | None = Field(None, description="The payload of each job; null when absent.")
    priority: Annotated[int, Whole(0, 9)] | None = None
    max_attempts: Annotated[int, Whole(1, 100)] | None = None
    max_reclaims: Annotated[int, Whole(0, 100)] | None = None
    recovery_policy: Policy | None = None
    lease_seconds: Lease | None = None
    max_run_seconds: Annotated[float, Seconds(1, 2_592_000)] | None = None
    backoff: Backoff | None = None
    unique_key: Key | None = None
    startup_grace_seconds: Annotated[float, Seconds(0, DAY)] = Field(
        60.0, description="How long an overdue slot waits after an outage of the service, once; and a new interval."
    )
    overlap: Literal["skip", "allow"] = Field(
        "skip", description="`skip`: no new run while one is unfinished; the slot is noted in the ledger."
    )
    enabled: bool | None = Field(None, description="Absent: stays as it is; true for a new one.")


class Why(Strict):
    reason: Reason | None = None


class Fire(Strict):
    reason: Reason | None = None
    force: bool = Field(False, description="Also while a run is unfinished.")


class ScheduleList(Strict):
    cursor: str | None = Field(None, max_length=400)
    limit: Annotated[int, Whole(1, 500)] = 100


class SlotList(Strict):
    cursor: str | None = Field(None, max_length=400)
    limit: Annotated[int, Whole(1, 500)] = 100


class PreviewQuery(Strict):
    count: Annotated[int, Whole(1, 500)] = 5


class Schedule(Answered):
    name: str
    every_seconds: Int32 | None
    cron: str | None
    timezone: str | None
    task: str | None
    queue: str | None
    kind: str | None
    payload: JsonText | None
    priority: Int32 | None
    max_attempts: Int32 | None
    max_reclaims: Int32 | None
    recovery_policy: Policy | None
    lease_seconds: float | None
    max_run_seconds: float | None
    backoff: BackoffRead
    unique_key: str | None
    startup_grace_seconds: float
    overlap: Literal["skip", "allow"]
    enabled: bool
    paused_by: str | None
    paused_reason: str | None
    paused_since: datetime | None
    next_run_at: datetime | None
    anchor_at: datetime | None
    last_fired_at: datetime | None
    overdue: bool
    worst_lateness_seconds: float | None
    blocked_by: UUID | None
    error: str | None
    created_at: datetime
    updated_at: datetime


class Schedules(Answered):
    schedules: list[Schedule]
    next_cursor: str | None


class Slot(Answered):
    id: UUID
    slot_at: datetime
    first_slot_at: datetime
    manual: bool
    fired_at: datetime
    lateness_seconds: float
    outcome: Literal["fired", "collapsed", "skipped_overlap", "skipped_paused", "failed", "interrupted"]
    count: Int64
    reason: str | None
    job_id: UUID | None
    task: str | None
    ended_at: datetime | None


class Slots(Answered):
    slots: list[Slot]
    next_cursor: str | None


class PreviewTime(Answered):
    utc: datetime
    local: datetime
    note: str | None


class Preview(Answered):
    timezone: str
    times: list[PreviewTime]
