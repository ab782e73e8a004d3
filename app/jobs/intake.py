"""The producer's and the operator's side: enqueue, get, search, cancel, requeue, resolve."""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from uuid import UUID

from psycopg import errors as pg

from app.arrays import array
from app.audit.record import record
from app.db import Database, Tx
from app.errors import (
    FenceMoved,
    IdempotencyMismatch,
    InvalidInput,
    JobNotFound,
    MoveRefused,
    Refusal,
    Unavailable,
    UniqueKeyHeld,
)
from app.jobs import sql
from app.jobs.model import NewJob, Status, new_id

MAX_AHEAD_SECONDS = 366 * 86400.0


async def enqueue(tx: Tx, jobs: Sequence[NewJob], *, place: str = "body.jobs[{}]") -> list[dict[str, Any] | Refusal]:
    """Enqueue all; each answer is the row with `deduplicated`, or the refusal of that item.

    Never a success without a job: where a key is held, the holder is read in a second statement, and where it is
    gone meanwhile the insert is tried again (three times, then Unavailable).
    """
    ids = [job.id or new_id() for job in jobs]
    await _check_instants(tx, jobs, place)
    answers: dict[int, dict[str, Any] | Refusal] = {}
    # In key order, so that two batches with the same keys wait for each other in one direction only. Ids are made in
    # the order of the items, which keeps first in first out within a batch.
    # The unique key first: it is what others share; of idempotency keys a good producer gives each job its own.
    keys = [(job.queue, job.unique_key or "", job.idempotency_key or "") for job in jobs]
    left = sorted(range(len(jobs)), key=keys.__getitem__)
    for _ in range(3):
        rows = {row["id"]: row for row in await tx.rows(sql.ENQUEUE, _columns([(ids[i], jobs[i]) for i in left]))}
        for index in left:
            if ids[index] in rows:
                answers[index] = _fresh(jobs[index], rows[ids[index]])
        left = [index for index in left if index not in answers]
        _tell(tx, list(rows.values()))
        if not left:
            return [answers[index] for index in range(len(jobs))]
        held: dict[int, dict[str, Any]] = {}
        for row in await tx.rows(
            sql.HOLDERS,
            {
                "queues": [jobs[i].queue for i in left],
                "unique_keys": [jobs[i].unique_key for i in left],
                "idempotency_keys": [jobs[i].idempotency_key for i in left],
            },
        ):
            # The idempotency key comes first in the statement and decides over the unique key.
            held.setdefault(left[row["n"] - 1], row)
        for index, row in held.items():
            answers[index] = _held(jobs[index], row)
            if isinstance(answers[index], dict):
                tx.tell("deduplicate", queue=row["queue"])
        left = [index for index in left if index not in answers]
        if not left:
            return [answers[index] for index in range(len(jobs))]
        if tx.whole and len(jobs) > 1:
            # What is in holds later keys: to go back for an earlier one would be crosswise. All of it anew.
            raise Unavailable(_CAME_AND_WENT) from pg.SerializationFailure()
    if tx.whole:
        raise Unavailable(_CAME_AND_WENT)
    # What is in is committed; only these had no luck.
    answers |= {index: Unavailable(_CAME_AND_WENT) for index in left}
    return [answers[index] for index in range(len(jobs))]


_CAME_AND_WENT = "The holder of a key came and went while this was enqueued; try again."


_NEW: dict[str, Any] = {
    "status": "queued",
    "attempts": 0,
    "reclaim_count": 0,
    "fence": 0,
    "reserved_by": None,
    "reserved_at": None,
    "heartbeat_at": None,
    "lease_expires_at": None,
    "cancel_requested": False,
    "progress": None,
    "result": None,
    "last_error": None,
    "finished_at": None,
    "deduplicated": False,
}


def _fresh(job: NewJob, row: dict[str, Any]) -> dict[str, Any]:
    """A job as it was just inserted: what was given, what is so of every new job, and what the database chose.

    `tests/jobs/test_intake.py` compares it with the row as read."""
    return {
        **_NEW,
        "queue": job.queue,
        "kind": job.kind or job.queue,
        "payload": job.payload,
        "priority": job.priority,
        "lease_seconds": job.lease_seconds,
        "max_run_seconds": job.max_run_seconds,
        "backoff_base_seconds": job.backoff_base_seconds,
        "backoff_cap_seconds": job.backoff_cap_seconds,
        "unique_key": job.unique_key,
        "idempotency_key": job.idempotency_key or str(row["id"]),
        "traceparent": job.traceparent,
        "schedule": job.schedule,
        "slot_at": job.slot_at,
        **row,
    }


def _held(job: NewJob, row: dict[str, Any]) -> dict[str, Any] | Refusal:
    if row["held_by"] == "idempotency":
        if bytes(row["content_sha256"] or b"") != (job.content_sha256 or b""):
            return IdempotencyMismatch(
                "This idempotency key was used before with other content.",
                holder_id=str(row["id"]),
                idempotency_key=job.idempotency_key,
            )
    elif job.reject_conflict:
        return UniqueKeyHeld(
            f"A live job of queue {job.queue!r} holds this unique key.",
            holder_id=str(row["id"]),
            unique_key=job.unique_key,
            job_status=row["status"],
        )
    return {**row, "deduplicated": True}


def _columns(jobs: Sequence[tuple[UUID, NewJob]]) -> dict[str, str]:
    return {
        "ids": array(job_id for job_id, _ in jobs),
        "queues": array(job.queue for _, job in jobs),
        "kinds": array(job.kind for _, job in jobs),
        "payloads": array(job.payload for _, job in jobs),
        "priorities": array(job.priority for _, job in jobs),
        "available_ats": array(job.available_at for _, job in jobs),
        "delays": array(job.delay_seconds for _, job in jobs),
        "max_attempts": array(job.max_attempts for _, job in jobs),
        "max_reclaims": array(job.max_reclaims for _, job in jobs),
        "recovery_policies": array(job.recovery_policy for _, job in jobs),
        "leases": array(job.lease_seconds for _, job in jobs),
        "max_runs": array(job.max_run_seconds for _, job in jobs),
        "bases": array(job.backoff_base_seconds for _, job in jobs),
        "caps": array(job.backoff_cap_seconds for _, job in jobs),
        "unique_keys": array(job.unique_key for _, job in jobs),
        "idempotency_keys": array(job.idempotency_key for _, job in jobs),
        "digests": array(job.content_sha256 for _, job in jobs),
        "traceparents": array(job.traceparent for _, job in jobs),
        "schedules": array(job.schedule for _, job in jobs),
        "slots": array(job.slot_at for _, job in jobs),
    }


async def _check_instants(tx: Tx, jobs: Sequence[NewJob], place: str) -> None:
    """`available_at` is at most 366 days ahead by the database's clock; only asked where one is given."""
    if all(job.available_at is None for job in jobs):
        return
    row = await tx.row(sql.NOW)
    if row is None:
        raise Unavailable("The database did not tell its time.")
    too_far = [
        index
        for index, job in enumerate(jobs)
        if job.available_at is not None and (job.available_at - row["now"]).total_seconds() > MAX_AHEAD_SECONDS
    ]
    if too_far:
        says = "must be at most 366 days ahead"
        raise InvalidInput([{"place": f"{place.format(index)}.available_at", "message": says} for index in too_far])


def _tell(tx: Tx, rows: Sequence[dict[str, Any]]) -> None:
    counts = Counter(row["queue"] for row in rows)
    due = Counter(row["queue"] for row in rows if row["due"])
    later: dict[str, float] = {}
    for row in rows:
        if not row["due"]:
            later[row["queue"]] = min(row["wait"], later.get(row["queue"], row["wait"]))
    for queue, count in due.items():
        tx.tell("claimable", queue=queue, count=count)
    for queue, wait in later.items():
        tx.tell("due_later", queue=queue, wait=wait)
    for queue, count in counts.items():
        tx.tell("enqueue", queue=queue, count=count)


async def get(tx: Tx, job_id: UUID) -> dict[str, Any]:
    row = await tx.row(sql.GET, {"id": job_id})
    if row is None:
        raise JobNotFound(job_id)
    return row


async def search(tx: Tx, filters: dict[str, Any]) -> list[dict[str, Any]]:
    return await tx.rows(*sql.search(filters))


async def attempts(tx: Tx, job_id: UUID, *, after: int, limit: int) -> list[dict[str, Any]]:
    if await tx.row(sql.EXISTS, {"id": job_id}) is None:
        raise JobNotFound(job_id)
    return await tx.rows(sql.ATTEMPTS, {"id": job_id, "after": after, "limit": limit})


async def cancel(
    tx: Tx, job_id: UUID, *, actor: str, reason: str | None, force: bool, expected_fence: int | None
) -> dict[str, Any]:
    """Cancel, or ask a processing job's worker to stop (`cancel_requested`); a cancelled job stays as it is."""
    row = await tx.row(sql.CANCEL, {"id": job_id, "reason": reason, "force": force, "expected_fence": expected_fence})
    if row is None:
        return await _explain_refusal(tx, job_id, "cancel", expected_fence, unchanged={Status.CANCELLED})
    await _audit(tx, actor, "cancel", row, reason, force=force)
    tx.tell("cancel", queue=row["queue"])
    if row["status"] == Status.CANCELLED and row["was"] == Status.PROCESSING:
        tx.tell("claimable", queue=row["queue"], count=1)
    return await get(tx, job_id)


async def requeue(
    db: Database,
    job_id: UUID,
    *,
    actor: str,
    reason: str | None,
    extra_attempts: int,
    force: bool,
    from_done: bool,
    expected_fence: int | None,
) -> dict[str, Any]:
    """Bring a job back, due at once. Raises UniqueKeyHeld naming the newer job that holds its key."""
    params = {
        "id": job_id,
        "reason": reason,
        "extra_attempts": extra_attempts,
        "force": force,
        "from_done": from_done,
        "expected_fence": expected_fence,
    }
    for _ in range(3):
        try:
            async with db.begin() as tx:
                row = await tx.row(sql.REQUEUE, params)
                if row is None:
                    return await _explain_refusal(tx, job_id, "requeue", expected_fence, unchanged={Status.QUEUED})
                await _audit(tx, actor, "requeue", row, reason, force=force, from_done=from_done)
                tx.tell("requeue", queue=row["queue"])
                tx.tell("claimable", queue=row["queue"], count=1)
                return await get(tx, job_id)
        except pg.UniqueViolation:
            async with db.begin() as tx:
                holder = await tx.row(sql.HOLDER_OF_KEY, {"id": job_id})
            if holder is not None:
                raise UniqueKeyHeld(
                    f"Job {holder['id']} holds the unique key of this job; cancel it or let it end first.",
                    holder_id=str(holder["id"]),
                    job_id=str(job_id),
                    unique_key=holder["unique_key"],
                ) from None
    raise Unavailable("The holder of the unique key came and went; try again.")


async def resolve(
    tx: Tx,
    job_id: UUID,
    *,
    actor: str,
    outcome: str,
    result: str | None,
    note: str | None,
    accept_late_result: bool,
    expected_fence: int | None,
) -> dict[str, Any]:
    """A person's verdict on a job in manual review; with `accept_late_result` also on one queued again or failed."""
    row = await tx.row(
        sql.RESOLVE,
        {
            "id": job_id,
            "outcome": outcome,
            "result": result,
            "note": note,
            "accept_late": accept_late_result,
            "expected_fence": expected_fence,
        },
    )
    if row is None:
        return await _explain_refusal(
            tx, job_id, "resolve", expected_fence, unchanged=frozenset(), wants_late=accept_late_result
        )
    await tx.run(sql.DROP_LATE_RESULT, {"id": job_id})
    await _audit(tx, actor, "resolve", row, note, outcome=outcome, accept_late_result=accept_late_result)
    tx.tell("resolve", queue=row["queue"], to=row["status"])
    return await get(tx, job_id)


async def _audit(tx: Tx, actor: str, action: str, row: dict[str, Any], reason: str | None, **how: Any) -> None:
    await record(
        tx,
        actor=actor,
        action=f"job.{action}",
        target=str(row["id"]),
        reason=reason,
        before={"status": row["was"]},
        after={"status": row["status"], "cancel_requested": row["cancel_requested"], "fence": row["fence"], **how},
    )


_WAYS = {
    ("requeue", Status.DONE): " To run it once more send from_done.",
    ("requeue", Status.PROCESSING): " To take it from its worker send force.",
}
"""What an operator may have meant: the flag that allows the move."""


async def _explain_refusal(
    tx: Tx,
    job_id: UUID,
    event: str,
    expected_fence: int | None,
    *,
    unchanged: AbstractSet[Status],
    wants_late: bool = False,
) -> dict[str, Any]:
    """A repeat that changed nothing answers the job; anything else says what the job is now."""
    row = await tx.row(sql.GET, {"id": job_id})
    if row is None:
        raise JobNotFound(job_id)
    if expected_fence is not None and row["fence"] != expected_fence:
        raise FenceMoved(
            f"The fence of job {job_id} is {row['fence']}, not {expected_fence}: it was claimed since you looked.",
            job_id=str(job_id),
            fence=row["fence"],
            expected_fence=expected_fence,
            job_status=row["status"],
        )
    if row["status"] in unchanged or (event == "cancel" and row["cancel_requested"]):
        return row
    if wants_late and row["late_fence"] is None:
        raise MoveRefused(f"Job {job_id} has no late result to accept.", job_id=str(job_id), job_status=row["status"])
    raise MoveRefused(
        f"{event} is not possible: job {job_id} is {row['status']}.{_WAYS.get((event, row['status']), '')}",
        job_id=str(job_id),
        event=event,
        job_status=row["status"],
        fence=row["fence"],
    )
