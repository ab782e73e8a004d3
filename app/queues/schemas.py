"""The shapes of queues on the wire."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from app.web.shapes import DAY, Answered, Int32, Key, Reason, Seconds, Strict, Whole


class BackoffSetting(Strict):
    base_seconds: Annotated[float, Seconds(0, DAY)] | None = None
    cap_seconds: Annotated[float, Seconds(1, 7 * DAY)] | None = None


class PutQueue(Strict):
    """All settings of a queue; an absent one means its default. Pause and hold are never touched."""

    max_processing: Annotated[int, Whole(1, 1_000_000)] | None = None
    lease_seconds: Annotated[float, Seconds(1, 43_200)] | None = None
    max_attempts: Annotated[int, Whole(1, 100)] | None = None
    max_reclaims: Annotated[int, Whole(0, 100)] | None = None
    backoff: BackoffSetting | None = None
    recovery_policy: Literal["auto", "manual"] | None = None
    reclaim_delay_seconds: Annotated[float, Seconds(0, 366 * DAY)] | None = None
    reclaim_burst: Annotated[int, Whole(1, 1_000_000)] | None = Field(
        None, description="Automatic reclaims a minute; past it the queue's reclaim is held."
    )
    reclaim_hold_seconds: Annotated[float, Seconds(1, 366 * DAY)] = 600.0
    owner: Key | None = None
    runbook_url: Annotated[str, Field(max_length=2000, pattern=r"^https?://[^\s\x00-\x1f]+$")] | None = None
    retention_seconds: Annotated[float, Seconds(0, 3660 * DAY)] | None = Field(None, description="For done jobs.")
    failed_retention_seconds: Annotated[float, Seconds(0, 3660 * DAY)] | None = Field(
        None, description="For failed and cancelled jobs."
    )


class Why(Strict):
    reason: Reason | None = None


class QueueList(Strict):
    cursor: str | None = Field(None, max_length=400)
    limit: Annotated[int, Whole(1, 500)] = 100


class Hold(Answered):
    since: datetime
    until: datetime


class BackoffRead(Answered):
    base_seconds: float | None
    cap_seconds: float | None


class QueueCounts(Answered):
    """Jobs by status, each capped at 10 000."""

    queued: Int32
    processing: Int32
    done: Int32
    failed: Int32
    cancelled: Int32
    manual_review: Int32


class Queue(Answered):
    name: str
    paused: bool
    paused_by: str | None
    paused_reason: str | None
    paused_since: datetime | None
    counts: QueueCounts
    oldest_waiting_seconds: float | None
    hold: Hold | None
    max_processing: Int32 | None
    lease_seconds: float | None
    max_attempts: Int32 | None
    max_reclaims: Int32 | None
    backoff: BackoffRead
    recovery_policy: Literal["auto", "manual"] | None
    reclaim_delay_seconds: float | None
    reclaim_burst: Int32 | None
    reclaim_hold_seconds: float
    owner: str | None
    runbook_url: str | None
    retention_seconds: float | None
    failed_retention_seconds: float | None
    created_at: datetime
    updated_at: datetime


class Queues(Answered):
    queues: list[Queue]
    next_cursor: str | None
