"""What fires of one or many schedules, in one transaction: the ledger's rows, the jobs, and the advanced times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from app.db import Tx
from app.jobs import intake
from app.jobs.model import NewJob, new_id, new_token
from app.schedules import cadence as grid
from app.schedules import sql


class AdvanceRefused(Exception):
    """The database took the statement and changed nothing."""


@dataclass(slots=True)
class Planned:
    row: dict[str, Any]
    due: grid.Overdue
    next: datetime
    slot_id: UUID = field(default_factory=new_id)
    job_id: UUID | None = None
    run_token: UUID | None = None
    skipped: bool = False
    done: bool = False
    """The ledger has all that is due; only the time is behind."""
    skip_row: UUID | None = None
    blocked_by: UUID | None = None
    blocking_job: UUID | None = None
    key_held: bool = False

    @property
    def fires(self) -> bool:
        return not (self.skipped or self.done)


@dataclass(slots=True)
class Fired:
    """What a transaction did, to be acted upon after its commit."""

    rows: int = 0
    slots: list[Planned] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    broken: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    blocked: bool = False


async def fire(tx: Tx, rows: Sequence[dict[str, Any]], *, advance: bool, lease: float) -> Fired:
    """Fire what is due of these schedules, all in the transaction `tx`. `lease` of a maintenance run, in seconds.

    Raises AdvanceRefused, unless `advance` is false: then the time stays, and the unique slot keeps from doubling.
    """
    fired = Fired(rows=len(rows))
    plans: list[Planned] = []
    for row in rows:
        try:
            plans.append(_plan(row))
        except (ValueError, OverflowError) as error:
            fired.broken.append((row, f"the cadence cannot be read: {error}"))
    if not plans:
        return fired
    await _hold_back(tx, plans)
    if advance:
        await _advance(tx, plans)
    recorded = await _record(tx, plans, lease)
    fired.slots = [plan for plan in plans if plan.slot_id in recorded and plan.fires]
    fired.lateness = [recorded[plan.slot_id] for plan in fired.slots]
    held = await _enqueue(tx, [plan for plan in fired.slots if plan.job_id is not None])
    fired.slots = [plan for plan in fired.slots if plan.slot_id not in held]
    for plan in fired.slots:
        tx.tell("fire", target="task" if plan.run_token is not None else "job")
        if plan.due.collapsed:
            tx.tell("collapse", count=plan.due.collapsed)
    return fired


async def _hold_back(tx: Tx, plans: Sequence[Planned]) -> None:
    """Overlap `skip`: at most one unfinished run; and nothing while a job of others holds the unique key. Skips in a
    row are one row of the ledger."""
    found: dict[str, dict[str, Any]] = {}
    plans = [plan for plan in plans if not plan.done]
    keyed = [plan.row for plan in plans if plan.row["unique_key"] is not None]
    if keyed:
        columns = {each + "s": [row[name] for row in keyed] for each, name in _KEYED.items()}
        found = {row["name"]: {**row, "key_held": True} for row in await tx.rows(sql.KEY_HELD, columns)}
    names = [plan.row["name"] for plan in plans if plan.row["overlap"] == "skip"]
    if names:
        found |= {row["name"]: {**row, "key_held": False} for row in await tx.rows(sql.UNFINISHED, {"names": names})}
    skipped = [plan for plan in plans if plan.row["name"] in found]
    if not skipped:
        return
    for plan in skipped:
        run = found[plan.row["name"]]
        plan.skipped, plan.blocking_job, plan.key_held = True, run["job_id"], run["key_held"]
        # From the run's slot to this one: a whole period, or it was begun by hand in between.
        if (plan.due.slot - run["since"]) >= plan.next - plan.due.slot:
            plan.blocked_by = run["job_id"]
    in_a_row = [plan for plan in skipped if plan.row["skip_row"] is not None]
    if in_a_row:
        extended = await tx.rows(
            sql.EXTEND_SKIP,
            {
                "ids": [plan.row["skip_row"] for plan in in_a_row],
                "slots": [plan.due.slot for plan in in_a_row],
                "mores": [plan.due.collapsed + 1 for plan in in_a_row],
            },
        )
        still = {row["id"] for row in extended}
        for plan in in_a_row:
            plan.skip_row = plan.row["skip_row"] if plan.row["skip_row"] in still else None
    for plan in skipped:
        tx.tell("skip", why="overlap", count=plan.due.collapsed + 1)


_KEYED = {"name": "name", "queue": "queue", "key": "unique_key"}


async def _record(tx: Tx, plans: Sequence[Planned], lease: float) -> dict[UUID, float]:
    """The rows of the ledger that are new, with their lateness in seconds."""
    new = [
        plan
        for plan in plans
        if plan.fires or (plan.skipped and (plan.skip_row is None or plan.skip_row == plan.slot_id))
    ]
    for plan in new:
        if plan.fires and plan.row["task"] is None:
            plan.job_id = new_id()
        elif plan.fires:
            plan.run_token = new_token()
    rows = await tx.rows(
        sql.RECORD,
        {
            "ids": [plan.slot_id for plan in new],
            "names": [plan.row["name"] for plan in new],
            "slots": [plan.due.slot for plan in new],
            "outcomes": ["fired" if plan.fires else "skipped_overlap" for plan in new],
            "firsts": [plan.due.slot if plan.fires else plan.due.first for plan in new],
            "counts": [1 if plan.fires else plan.due.collapsed + 1 for plan in new],
            "reasons": [None if plan.fires else _why_skipped(plan) for plan in new],
            "job_ids": [plan.job_id or plan.blocking_job for plan in new],
            "tasks": [plan.row["task"] if plan.fires else None for plan in new],
            "run_tokens": [plan.run_token for plan in new],
            "collapsed_ids": [new_id() for _ in new],
            "collapsed_firsts": [plan.due.first for plan in new],
            "collapsed_lasts": [plan.due.last for plan in new],
            "collapsed": [plan.due.collapsed if plan.fires else 0 for plan in new],
            "lease": lease,
        },
    )
    return {row["id"]: row["lateness_seconds"] for row in rows}


async def _enqueue(tx: Tx, plans: Sequence[Planned]) -> set[UUID]:
    """The slots whose unique key somebody took meanwhile."""
    held: set[UUID] = set()
    if not plans:
        return held
    answers = await intake.enqueue(tx, [new_job(plan.row, plan.job_id, plan.due.slot) for plan in plans])
    for plan, answer in zip(plans, answers, strict=True):
        if isinstance(answer, dict) and answer["deduplicated"]:
            await tx.run(sql.HELD_KEY, {"id": plan.slot_id, "job_id": answer["id"]})
            held.add(plan.slot_id)
    return held


def _why_skipped(plan: Planned) -> str:
    if plan.key_held:
        return f"job {plan.blocking_job} holds the unique key"
    if plan.blocking_job is not None:
        return f"job {plan.blocking_job} is unfinished"
    return "a run is unfinished"


async def _advance(tx: Tx, plans: Sequence[Planned]) -> None:
    for plan in plans:
        if plan.skipped and plan.skip_row is None:
            plan.skip_row = plan.slot_id
        elif plan.done:
            plan.skip_row, plan.blocked_by = plan.row["skip_row"], plan.row["blocked_by"]
    advanced = await tx.rows(
        sql.ADVANCE,
        {
            "names": [plan.row["name"] for plan in plans],
            "as_read": [plan.row["as_read"] for plan in plans],
            "nexts": [plan.next for plan in plans],
            "firsts": [plan.due.first for plan in plans],
            "fires": [plan.fires for plan in plans],
            "skip_rows": [plan.skip_row for plan in plans],
            "blocked_by": [plan.blocked_by for plan in plans],
        },
    )
    if len(advanced) != len(plans):
        raise AdvanceRefused("next_run_at stayed as it was")


def read_cadence(row: dict[str, Any]) -> grid.Cadence:
    """The cadence as stored. Raises BadCadence (a ValueError) for a row that was damaged."""
    if row["cron"] is not None:
        return grid.cron(row["cron"], row["timezone"] or "UTC")
    if row["every_seconds"] is None or row["every_seconds"] < 1:
        raise grid.BadCadence("every_seconds", f"every_seconds is {row['every_seconds']}")
    if row["anchor_at"] is None:
        raise grid.BadCadence("every_seconds", "anchor_at is no instant")
    return grid.interval(row["every_seconds"], row["anchor_at"])


def _plan(row: dict[str, Any]) -> Planned:
    cadence = read_cadence(row)
    first_due = row["grace_for"] or row["next_run_at"]
    if first_due is None:
        # A time that cannot be read nor repaired: the slot must be one of the grid, for only then it is fired once.
        slot = grid.latest(cadence, row["now"])
        due = grid.Overdue(slot, slot, slot, 0)
    else:
        if row["done_until"] is not None:
            following = grid.next_after(cadence, row["done_until"])
            if following > row["now"]:
                due = grid.Overdue(row["done_until"], row["done_until"], row["done_until"], 0)
                return Planned(row, due, grid.next_after(cadence, row["now"]), done=True)
            first_due = following
        due = grid.overdue(cadence, min(first_due, row["now"]), row["now"])
    return Planned(row, due, grid.next_after(cadence, row["now"]))


def new_job(row: dict[str, Any], job_id: UUID | None, slot: datetime | None, **more: Any) -> NewJob:
    """The job of one slot; without one, of a firing by hand."""
    fields = {name: row[name] for name in sql.JOB_FIELDS}
    if fields["priority"] is None:
        del fields["priority"]
    return NewJob(**fields, schedule=row["name"], slot_at=slot, id=job_id, **more)
