"""What an operator does to a queue: put, pause, resume, release a hold, delete; and how a queue is read."""

from collections.abc import Sequence
from typing import Any

from app.audit.record import record
from app.db import Tx
from app.errors import QueueNotEmpty, QueueNotFound
from app.queues import sql

STATUSES = ("queued", "processing", "done", "failed", "cancelled", "manual_review")


async def get(tx: Tx, name: str) -> dict[str, Any]:
    """One queue with counts. Raises QueueNotFound."""
    row = await tx.row(sql.GET, {"name": name})
    if row is None:
        raise QueueNotFound(name)
    return (await _with_counts(tx, [row]))[0]


async def page(tx: Tx, *, after: str, limit: int) -> list[dict[str, Any]]:
    return await _with_counts(tx, await tx.rows(sql.LIST, {"after": after, "limit": limit}))


async def _with_counts(tx: Tx, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [row["name"] for row in rows]
    counts: dict[str, dict[str, int]] = {name: dict.fromkeys(STATUSES, 0) for name in names}
    for row in await tx.rows(sql.COUNTS, {"names": names, "cap": sql.COUNT_CAP}):
        counts[row["name"]][row["status"]] = row["count"]
    oldest = {row["name"]: row["seconds"] for row in await tx.rows(sql.OLDEST_WAITING, {"names": names})}
    return [
        {
            **{name: value for name, value in row.items() if name not in ("hold_since", "hold_until")},
            "counts": counts[row["name"]],
            "oldest_waiting_seconds": oldest.get(row["name"]),
            "hold": {"since": row["hold_since"], "until": row["hold_until"]} if row["hold_until"] else None,
        }
        for row in rows
    ]


async def put(tx: Tx, name: str, settings: dict[str, Any], *, actor: str) -> tuple[dict[str, Any], bool]:
    """Set all settings of a queue; (the queue, whether it is new)."""
    before = await tx.row(sql.LOCK, {"name": name})
    row = await tx.row(sql.PUT, {"name": name, **settings})
    created = row is not None and bool(row["created"])
    changed = {key: value for key, value in settings.items() if before is None or before[key] != value}
    if changed or created:
        old = {key: before[key] for key in changed} if before is not None else None
        await record(tx, actor=actor, action="queue.put", target=name, reason=None, before=old, after=changed)
    # A limit raised or taken away makes jobs claimable.
    tx.tell("claimable", queue=name, count=1, more=True)
    return await get(tx, name), created


async def pause(tx: Tx, name: str, *, actor: str, reason: str | None) -> dict[str, Any]:
    """Stop claims from this queue; running jobs may end. A queue that is paused already stays as it is."""
    return await _switch(tx, sql.PAUSE, "pause", name, actor, reason)


async def resume(tx: Tx, name: str, *, actor: str, reason: str | None) -> dict[str, Any]:
    return await _switch(tx, sql.RESUME, "resume", name, actor, reason)


async def release_hold(tx: Tx, name: str, *, actor: str, reason: str | None) -> dict[str, Any]:
    """Let the reclaim of a queue go on after a storm; its burst starts anew."""
    return await _switch(tx, sql.RELEASE_HOLD, "release-hold", name, actor, reason)


async def _switch(tx: Tx, statement: str, action: str, name: str, actor: str, reason: str | None) -> dict[str, Any]:
    before = await tx.row(sql.LOCK, {"name": name})
    row = await tx.row(statement, {"name": name, "actor": actor, "reason": reason})
    if before is not None and row is not None:
        facts = ("paused", "paused_by", "paused_reason", "hold_until")
        old, new = ({fact: state[fact] for fact in facts} for state in (before, row))
        await record(tx, actor=actor, action=f"queue.{action}", target=name, reason=reason, before=old, after=new)
        if action == "resume":
            tx.tell("claimable", queue=name, count=1, more=True)
    return await get(tx, name)


async def delete(tx: Tx, name: str, *, actor: str) -> None:
    """Delete a queue without live jobs; its finished jobs stay. Raises QueueNotFound, QueueNotEmpty."""
    await tx.run(sql.LOCK_JOBS)
    before = await tx.row(sql.LOCK, {"name": name})
    if before is None:
        raise QueueNotFound(name)
    live = await tx.row(sql.LIVE_JOB, {"name": name})
    if live is not None:
        raise QueueNotEmpty(
            f"Queue {name!r} has live jobs, such as {live['id']} ({live['status']}).",
            queue=name,
            job_id=str(live["id"]),
        )
    await tx.run(sql.DELETE, {"name": name})
    settings = {name: before[name] for name in sql.SETTINGS}
    await record(tx, actor=actor, action="queue.delete", target=name, reason=None, before=settings, after=None)
