"""What an operator does to a schedule: put, pause, resume, fire, delete; how it is read and previewed.

Each holds the schedule's row lock, as the tick does, so that an edit and a firing come one after the other and the
end of a run, which touches the ledger alone, undoes no edit.
"""

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg

from app.audit.record import record
from app.db import Tx
from app.errors import (
    IdempotencyMismatch,
    InvalidInput,
    Overlap,
    PreconditionFailed,
    Refusal,
    ScheduleBroken,
    ScheduleNotFound,
    Unavailable,
)
from app.jobs import intake
from app.jobs.model import new_id, new_token
from app.jobs.sql import NOW
from app.schedules import cadence as grid
from app.schedules import sql
from app.schedules.firing import new_job, read_cadence
from app.schedules.tasks import NAMES as TASKS

NAMED = 20
"""So many schedules of each kind of trouble are named in the details of readiness."""


async def get(tx: Tx, name: str, *, tolerance: float) -> dict[str, Any]:
    """`tolerance` in seconds: past its time by more, a schedule counts as overdue. Raises ScheduleNotFound."""
    row = await tx.row(sql.GET, {"name": name, "tolerance": tolerance})
    if row is None:
        raise ScheduleNotFound(name)
    return row


async def page(tx: Tx, *, after: str, limit: int, tolerance: float) -> list[dict[str, Any]]:
    return await tx.rows(sql.LIST, {"after": after, "limit": limit, "tolerance": tolerance})


async def slots(tx: Tx, name: str, *, before: tuple[datetime, UUID] | None, limit: int) -> list[dict[str, Any]]:
    """The ledger, the newest first; also of a schedule that was deleted. Raises ScheduleNotFound."""
    at, slot_id = before or (None, None)
    rows = await tx.rows(sql.SLOTS, {"name": name, "before_at": at, "before_id": slot_id, "limit": limit})
    if not rows and await tx.row(sql.ANY_SLOT, {"name": name}) is None:
        await get(tx, name, tolerance=0.0)
    return rows


async def _locked(tx: Tx, name: str, if_match: frozenset[str] | None = None) -> dict[str, Any]:
    row = await tx.row(sql.LOCK, {"name": name, "tolerance": 0.0})
    if row is None:
        raise ScheduleNotFound(name)
    _check_edition(row, if_match)
    return row


def _check_edition(row: dict[str, Any] | None, if_match: frozenset[str] | None) -> None:
    """`if_match` holds the editions that the caller has seen, or `*` for any."""
    if if_match is None or (row is not None and ("*" in if_match or str(row["edition"]) in if_match)):
        return
    raise PreconditionFailed(
        "The schedule does not exist (any more)." if row is None else "The schedule was changed since it was read.",
        etag=f'"{row["edition"]}"' if row is not None else None,
    )


def first_times(definition: Mapping[str, Any], now: datetime) -> tuple[datetime | None, datetime]:
    """(anchor, first time) of a new cadence. Raises InvalidInput for a cadence that cannot be."""
    try:
        if definition["cron"] is not None:
            return None, grid.next_after(grid.cron(definition["cron"], definition["timezone"]), now)
    except grid.BadCadence as error:
        raise InvalidInput.at(f"body.{error.member}", str(error)) from None
    first = now + timedelta(seconds=min(definition["startup_grace_seconds"], definition["every_seconds"]))
    return first, first


async def put(
    tx: Tx,
    name: str,
    definition: Mapping[str, Any],
    *,
    enabled: bool | None,
    if_match: frozenset[str] | None,
    actor: str,
    tolerance: float,
    only_new: bool = False,
) -> tuple[dict[str, Any], bool]:
    """Set all of a schedule; (the schedule, whether it is new). One that is the same already changes nothing.

    `definition` has every name of `sql.DEFINITION`. `enabled` None keeps what is there (true for a new one).
    """
    if definition["task"] is not None and definition["task"] not in TASKS:
        raise InvalidInput.at("body.task", f"must be one of {', '.join(TASKS)}")
    for _ in range(3):
        row = await tx.row(sql.LOCK, {"name": name, "tolerance": tolerance})
        _check_edition(row, if_match)
        if row is not None and only_new:
            raise PreconditionFailed("The schedule exists already.", etag=f'"{row["edition"]}"')
        if row is not None:
            await _change(tx, row, definition, enabled=enabled, actor=actor)
            return await get(tx, name, tolerance=tolerance), False
        now = await tx.row(NOW)
        if now is None:
            raise Unavailable("The database did not tell its time.")
        anchor, first = first_times(definition, now["now"])
        made = await tx.row(
            sql.INSERT,
            {
                **definition,
                "name": name,
                "edition": new_token(),
                "anchor_at": anchor,
                "next_run_at": first,
                "enabled": enabled is not False,
                "actor": actor,
            },
        )
        if made is not None:
            await record(
                tx, actor=actor, action="schedule.put", target=name, reason=None, before=None, after=_shown(definition)
            )
            return await get(tx, name, tolerance=tolerance), True
    raise Unavailable("The schedule came and went while it was put; try again.")


async def _change(
    tx: Tx, row: dict[str, Any], definition: Mapping[str, Any], *, enabled: bool | None, actor: str
) -> None:
    name = row["name"]
    changed = {key: value for key, value in definition.items() if not _same(key, row[key], value)}
    unreadable = _unreadable(row)
    if unreadable and not changed:
        # A row that was damaged: the same PUT mends it.
        changed = {key: definition[key] for key in sql.CADENCE}
    if changed:
        await tx.run(sql.REDEFINE, {**definition, "name": name, "edition": new_token()})
        if unreadable or changed.keys() & set(sql.CADENCE):
            anchor, first = first_times(definition, row["now"])
            await tx.run(sql.RESET, {"name": name, "anchor_at": anchor, "next_run_at": first})
            before, row = row, await _locked(tx, name)
        else:
            before = row
        await record(
            tx,
            actor=actor,
            action="schedule.put",
            target=name,
            reason=None,
            before=_shown({key: before[key] for key in changed}),
            after=_shown(changed),
        )
    if enabled is False:
        await _pause(tx, row, actor=actor, reason=None)
    elif enabled is True:
        await _resume(tx, row, actor=actor, reason=None)


def _unreadable(row: dict[str, Any]) -> bool:
    try:
        read_cadence(row)
    except ValueError:
        return True
    return False


def _same(name: str, stored: Any, given: Any) -> bool:
    """Payloads are compared as JSON: white space and the order of keys are no edit, 1 and 1.0 are two."""
    if stored == given or name != "payload" or stored is None or given is None:
        return bool(stored == given)
    return _canonical(stored) == _canonical(given)


def _canonical(text: str) -> str:
    def number(digits: str) -> dict[str, str]:
        return {"": digits}

    return json.dumps(json.loads(text, parse_int=number, parse_float=number), sort_keys=True)


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """For the audit: a payload is only named."""
    return {key: "changed" if key == "payload" else value for key, value in values.items() if value is not None}


async def pause(
    tx: Tx, name: str, *, actor: str, reason: str | None, tolerance: float, if_match: frozenset[str] | None = None
) -> dict[str, Any]:
    """Stop firing. One that is paused already stays as it is."""
    await _pause(tx, await _locked(tx, name, if_match), actor=actor, reason=reason)
    return await get(tx, name, tolerance=tolerance)


async def resume(
    tx: Tx, name: str, *, actor: str, reason: str | None, tolerance: float, if_match: frozenset[str] | None = None
) -> dict[str, Any]:
    """Go on with the next slot of the grid; the paused ones make one row of the ledger and are not caught up."""
    await _resume(tx, await _locked(tx, name, if_match), actor=actor, reason=reason)
    return await get(tx, name, tolerance=tolerance)


async def _pause(tx: Tx, row: dict[str, Any], *, actor: str, reason: str | None) -> None:
    if await tx.run(sql.PAUSE, {"name": row["name"], "actor": actor, "reason": reason, "edition": new_token()}):
        await record(
            tx,
            actor=actor,
            action="schedule.pause",
            target=row["name"],
            reason=reason,
            before={"enabled": True},
            after={"enabled": False},
        )


async def _resume(tx: Tx, row: dict[str, Any], *, actor: str, reason: str | None) -> None:
    if row["enabled"]:
        return
    due, following = _paused_slots(row)
    await tx.run(sql.RESUME, {"name": row["name"], "next_run_at": following, "edition": new_token()})
    if due is not None:
        await tx.run(
            sql.RECORD_PAUSED,
            {
                "id": new_id(),
                "name": row["name"],
                "slot": due.slot,
                "first": due.first,
                "count": due.collapsed + 1,
                "reason": f"paused by {row['paused_by'] or 'somebody'}",
            },
        )
        tx.tell("skip", why="paused", count=due.collapsed + 1)
    await record(
        tx,
        actor=actor,
        action="schedule.resume",
        target=row["name"],
        reason=reason,
        before={"enabled": False, "paused_by": row["paused_by"], "paused_reason": row["paused_reason"]},
        after={"enabled": True},
    )


def _paused_slots(row: dict[str, Any]) -> tuple[grid.Overdue | None, datetime | None]:
    """What was not fired while paused, and the next time; nothing for a row that the tick will mark as broken, nor for
    one whose slot was due before the pause: that one is still owed, and its run stands for those of the pause."""
    first = row["grace_for"] or row["next_run_at"]
    if first is None or first > row["now"] or (row["paused_since"] is not None and first <= row["paused_since"]):
        return None, None
    try:
        cadence = read_cadence(row)
        return grid.overdue(cadence, first, row["now"]), grid.next_after(cadence, row["now"])
    except ValueError:
        return None, None


async def delete(tx: Tx, name: str, *, if_match: frozenset[str] | None, actor: str) -> None:
    """Its jobs and its ledger stay, and a run in progress still ends its slot."""
    row = await _locked(tx, name, if_match)
    await tx.run(sql.DELETE, {"name": name})
    await tx.run(sql.FORGET_KEYS, {"name": name})
    before = _shown({key: row[key] for key in sql.DEFINITION})
    await record(tx, actor=actor, action="schedule.delete", target=name, reason=None, before=before, after=None)


async def fire(
    tx: Tx,
    name: str,
    *,
    actor: str,
    reason: str | None,
    force: bool,
    key: str | None,
    digest: bytes | None,
    if_match: frozenset[str] | None = None,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, bool]:
    """Run now, also while paused; the grid stays. (row of the ledger, job or None for a task, whether it is new).

    Raises Overlap naming the unfinished job, unless forced, IdempotencyMismatch, PreconditionFailed, and
    ScheduleBroken where what is stored of its target makes no job. `key` makes it repeatable for as
    long as the row of the ledger is kept (at least 24 hours); `digest` is of what was asked.
    """
    row = await _locked(tx, name, if_match)
    if key is not None:
        known = await tx.row(sql.FIRED_WITH_KEY, {"name": name, "key": key})
        if known is not None:
            return await _repeated(tx, known, key, digest)
    if row["overlap"] == "skip" and not force:
        unfinished = await tx.row(sql.UNFINISHED, {"names": [name]})
        if unfinished is not None:
            job_id = str(unfinished["job_id"]) if unfinished["job_id"] is not None else None
            raise Overlap(
                f"{'Job ' + job_id if job_id else 'A run'} of schedule {name!r} is unfinished.",
                schedule=name,
                job_id=job_id,
            )
    job = None
    if row["task"] is None:
        more: dict[str, Any] = {"reject_conflict": True}
        if key is not None:
            # With a key of a client the job is kept at least 24 hours, as long as a repeat must find it.
            # It is this schedule's, not that of one deleted under the same name.
            born = int(row["created_at"].timestamp() * 1_000_000)
            more |= {"idempotency_key": f"schedule/{name}/{born}/{key}", "content_sha256": digest}
        try:
            [answer] = await intake.enqueue(tx, [new_job(row, None, None, **more)])
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            says = (str(error).strip().splitlines() or ["it is refused"])[0]
            raise ScheduleBroken(f"Schedule {name!r} makes no job: {says}", schedule=name) from error
        if isinstance(answer, Refusal):
            raise answer
        job = answer
        if job["deduplicated"]:
            # Its row of the ledger is gone, the job is still here.
            return None, job, False
    slot = await tx.row(
        sql.RECORD_BY_HAND,
        {
            "id": new_id(),
            "name": name,
            "reason": f"fired by {actor}" + (f": {reason}" if reason else ""),
            "job_id": job["id"] if job is not None else None,
            "task": row["task"],
            "key": key,
            "digest": digest,
        },
    )
    if slot is None:
        raise Unavailable("The row of the ledger could not be written.")
    await tx.run(sql.FIRED_BY_HAND, {"name": name})
    after = {"job_id": str(job["id"]) if job is not None else None, "force": force}
    await record(tx, actor=actor, action="schedule.fire", target=name, reason=reason, before=None, after=after)
    tx.tell("fire", target="job" if job is not None else "task")
    return slot, job, True


async def _repeated(
    tx: Tx, known: dict[str, Any], key: str, digest: bytes | None
) -> tuple[dict[str, Any], dict[str, Any] | None, bool]:
    if bytes(known["request_sha256"] or b"") != (digest or b""):
        raise IdempotencyMismatch(
            "This idempotency key was used before with other content.",
            holder_id=str(known["job_id"]) if known["job_id"] is not None else None,
            idempotency_key=key,
        )
    job = None
    if known["job_id"] is not None:
        job = await intake.get(tx, known["job_id"])
    return known, job, False


def preview(row: dict[str, Any], count: int) -> dict[str, Any]:
    """The next `count` times, in UTC and on the clock of the schedule's zone, oddities of that clock noted.

    Raises ScheduleBroken.
    """
    try:
        cadence = read_cadence(row)
        zone = grid.zone(row["timezone"] or "UTC")
        at = row["now"]
        times: list[dict[str, Any]] = []
        if row["next_run_at"] is not None and row["next_run_at"] > at:
            at = row["next_run_at"]
            graced = "after the grace of a restart" if row["grace_for"] is not None else grid.note(cadence, at)
            times.append({"utc": at, "local": at.astimezone(zone), "note": graced})
        while len(times) < count:
            try:
                at = grid.next_after(cadence, at)
            except grid.BadCadence:
                if times:
                    break  # the years end
                raise
            times.append({"utc": at, "local": at.astimezone(zone), "note": grid.note(cadence, at)})
    except (ValueError, OverflowError) as error:
        raise ScheduleBroken(
            f"The cadence of schedule {row['name']!r} cannot be read: {error}", schedule=row["name"]
        ) from None
    return {"timezone": row["timezone"] or "UTC", "times": times[:count]}


async def trouble(tx: Tx, *, tolerance: float) -> dict[str, Any]:
    """For the details of readiness: which schedules are overdue, blocked or broken; counts up to 1 000."""
    found: dict[str, Any] = {kind: [] for kind in ("overdue", "blocked", "broken")}
    counts = dict.fromkeys(found, 0)
    for row in await tx.rows(sql.TROUBLE, {"tolerance": tolerance}):
        counts[row["kind"]] += 1
        if counts[row["kind"]] <= NAMED:
            facts = {"since": row["since"], "job_id": row["job_id"], "error": row["error"]}
            known = {key: value for key, value in facts.items() if value is not None}
            found[row["kind"]].append({"schedule": row["name"], **known})
    return {**found, "counts": counts}
