"""Fire what is due: advance, record the slot and enqueue its job in one transaction; no leader.

Any number of instances may tick. What the database decides: who fires (the row's lock), that a slot is fired once
(unique schedule and slot), whether the service was away (`last_pass_at` of all instances), and what time it is. What
a process remembers between passes is only which rows gave trouble, so that these wait by themselves and hold up no
other.

It fails toward running: a row that cannot be advanced is fired all the same, slot by slot, and a row that cannot be
read is marked; the others go on.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from app import telemetry
from app.db import Database, Tx
from app.errors import Unavailable
from app.jobs import intake
from app.jobs.model import NewJob, Pass, new_id, new_token
from app.jobs.sql import END_PASS
from app.schedules import cadence as grid
from app.schedules import sql
from app.schedules.tasks import Runs

log = logging.getLogger("fencepost.schedules")

LOOP = "schedule"
BATCH = 200
ALONE = 50
"""So many rows that gave trouble are tried in one pass, each by itself."""

FROM_CODE_GRACE = 60.0
BATCH_LOCK_WAIT, ALONE_LOCK_WAIT = "500ms", "100ms"
"""What a firing waits for a lock. Together, for the few that may be blocked, below the second that the others may be
delayed."""

MAX_BACK_OFF = 30.0


def tolerance(interval: float) -> float:
    """Seconds after its time at which a schedule that has not fired counts as overdue."""
    return max(3 * interval, 5.0)


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
    skip_row: UUID | None = None
    blocked_by: UUID | None = None
    blocking_job: UUID | None = None

    @property
    def fires(self) -> bool:
        return not self.skipped


@dataclass(slots=True)
class Fired:
    """What a transaction did, to be acted upon after its commit."""

    rows: int = 0
    slots: list[Planned] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    broken: list[tuple[dict[str, Any], str]] = field(default_factory=list)


@dataclass(slots=True)
class _Aside:
    name: str
    tries: int = 0
    next_try: float = 0.0


class Ticker:
    """`interval` in seconds: how often somebody must pass, from which an outage is told."""

    def __init__(self, db: Database, runs: Runs, interval: float) -> None:
        self._db = db
        self.runs = runs
        self._tolerance = tolerance(interval)
        self._aside: dict[UUID, _Aside] = {}
        self._unreadable_since: float | None = None

    async def tick(self) -> Pass:
        """One pass. Raises Unavailable (or what psycopg raised) where the database is at fault, not a row."""
        try:
            await self._before()
            moved = 0
            while True:
                fired = await self._batch()
                moved += len(fired.slots)
                if fired.rows < BATCH:
                    break
            moved += await self._try_aside()
            async with self._db.begin() as tx:
                row = await tx.row(END_PASS, {"name": LOOP, "reclaimed": False})
                soon = await tx.row(sql.SOON)
            if row is None:
                raise Unavailable("The row of the schedule loop is missing.")
        except Exception:
            self._run_from_code()
            raise
        self._unreadable_since = None
        return Pass(moved, row["last_pass_at"], soon["seconds"] if soon else None)

    # --- before firing ------------------------------------------------------------------------------------------------

    async def _before(self) -> None:
        """Adopt, repair, interrupt; each by itself, since none of them may keep the schedules from running."""
        try:
            async with self._db.begin() as tx:
                taken = [each for step in self._steps() for each in await self._step(tx, *step)]
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            taken = []
            for step in self._steps():
                try:
                    async with self._db.begin() as tx:
                        taken += await self._step(tx, *step)
                except (psycopg.Error, Unavailable) as failure:
                    if _lost(failure):
                        raise
                    log.error("%s of schedules failed, firing goes on: %s", step[0], _text(failure))
        for run in taken:
            self.runs.begin(run["id"], run["run_token"], run["task"])

    def _steps(self) -> tuple[tuple[str, str, dict[str, Any]], ...]:
        return (
            ("repair", sql.REPAIR, {}),
            ("adopt", sql.ADOPT, {"loop": LOOP, "outage_after": self._tolerance}),
            ("interrupt", sql.INTERRUPT, {}),
            ("take", sql.TAKE_RUNS, {"token": new_token(), "lease": self.runs.lease, "limit": BATCH}),
        )

    async def _step(self, tx: Tx, what: str, statement: str, params: dict[str, Any]) -> list[dict[str, Any]]:
        rows = await tx.rows(statement, params)
        if not rows or what == "take":
            return rows
        names = ", ".join(str(row["name"]) for row in rows[:20])
        log.warning("%s: %d, such as %s", what, len(rows), names)
        if what == "interrupt":
            tx.tell("task", count=len(rows), outcome="interrupted")
        else:
            tx.tell(what, count=len(rows))
        return []

    def _run_from_code(self) -> None:
        """The stored schedules cannot be read: the service's own tasks are known without them."""
        now = time.monotonic()
        if self._unreadable_since is None:
            self._unreadable_since = now
        if now - self._unreadable_since >= FROM_CODE_GRACE:
            for name, task in self.runs.tasks.items():
                self.runs.begin_unrecorded(name, task.every)

    # --- firing -------------------------------------------------------------------------------------------------------

    async def _batch(self) -> Fired:
        rows: list[dict[str, Any]] = []
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.SHORT_WAIT, {"wait": BATCH_LOCK_WAIT})
                rows = await tx.rows(sql.DUE, {**self._params, "without": list(self._aside), "limit": BATCH})
                fired = await self._fire(tx, rows, advance=True) if rows else Fired()
        except (psycopg.Error, Unavailable, AdvanceRefused) as error:
            # A connection lost: not a row's fault. The other instances or the next pass go on.
            if _lost(error):
                raise
            if not rows:
                async with self._db.begin() as tx:
                    rows = await tx.rows(sql.DUE_UNLOCKED, {**self._params, "limit": BATCH})
                if not rows:
                    raise
            log.warning("a batch of %d schedules failed, each is tried alone: %s", len(rows), _text(error))
            fired = Fired()
            for row in rows:
                fired.slots += (await self._alone(row["edition"], row["name"], row)).slots
            return fired
        await self._committed(fired)
        return fired

    @property
    def _params(self) -> dict[str, Any]:
        return {"tolerance": self._tolerance}

    async def _try_aside(self) -> int:
        now, moved = time.monotonic(), 0
        waiting = sorted(self._aside.items(), key=lambda item: item[1].next_try)
        for edition, aside in [item for item in waiting if item[1].next_try <= now][:ALONE]:
            moved += len((await self._alone(edition, aside.name, None)).slots)
        return moved

    async def _alone(self, edition: UUID, name: str, row: dict[str, Any] | None) -> Fired:
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.SHORT_WAIT, {"wait": ALONE_LOCK_WAIT})
                rows = await tx.rows(sql.DUE_ALONE, {**self._params, "name": name})
                fired = await self._fire(tx, rows, advance=True)
        except (psycopg.Error, Unavailable, AdvanceRefused) as error:
            if _lost(error):
                raise
            return await self._unadvanced(edition, name, row, error)
        if not fired.broken:
            self._aside.pop(edition, None)
        await self._committed(fired)
        return fired

    async def _unadvanced(self, edition: UUID, name: str, row: dict[str, Any] | None, cause: Exception) -> Fired:
        """The row cannot be advanced: its slot and job go without. The unique slot keeps that from doubling, and the
        next period's slot fires though the time stays behind."""
        if _sqlstate(cause) == "55P03":
            # Somebody holds a lock that the firing needs; at the next pass again.
            self._set_aside(edition, name, every_pass=True)
            return Fired()
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.SHORT_WAIT, {"wait": ALONE_LOCK_WAIT})
                rows = [
                    each
                    for each in await tx.rows(sql.DUE_UNLOCKED, {**self._params, "limit": 10_000})
                    if each["name"] == name
                ]
                fired = await self._fire(tx, rows, advance=False)
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            await self._mark(edition, name, f"cannot be fired: {_text(error)}")
            self._set_aside(edition, name)
            if row is not None and row["task"] is not None:
                self.runs.begin_unrecorded(row["task"], self._period(row))
            return Fired()
        await self._mark(edition, name, f"next_run_at cannot be advanced: {_text(cause)}")
        self._set_aside(edition, name, every_pass=True)
        await self._committed(fired)
        return fired

    @staticmethod
    def _period(row: dict[str, Any]) -> float:
        try:
            return grid.period_seconds(read_cadence(row), row["now"])
        except ValueError:
            return 3600.0

    def _set_aside(self, edition: UUID, name: str, *, every_pass: bool = False) -> None:
        aside = self._aside.setdefault(edition, _Aside(name))
        aside.tries += 1
        wait = 0.2 if every_pass else min(MAX_BACK_OFF, float(2 ** min(aside.tries - 1, 10)))
        aside.next_try = time.monotonic() + wait

    async def _mark(self, edition: UUID, name: str, text: str) -> None:
        log.error("schedule %s: %s", name, text)
        telemetry.publish("broken")
        try:
            async with self._db.begin() as tx:
                await tx.run(sql.MARK, {"name": name, "edition": edition, "error": text[:1000]})
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            log.error("schedule %s cannot even be marked: %s", name, _text(error))

    async def _committed(self, fired: Fired) -> None:
        for seconds in fired.lateness:
            telemetry.observe_lateness(seconds)
        for planned in fired.slots:
            if planned.run_token is not None:
                self.runs.begin(planned.slot_id, planned.run_token, planned.row["task"])
        for row, text in fired.broken:
            await self._mark(row["edition"], row["name"], text)
            self._set_aside(row["edition"], row["name"])

    async def _fire(self, tx: Tx, rows: Sequence[dict[str, Any]], *, advance: bool) -> Fired:
        fired = Fired(rows=len(rows))
        plans: list[Planned] = []
        for row in rows:
            try:
                plans.append(_plan(row))
            except (ValueError, OverflowError) as error:
                fired.broken.append((row, f"the cadence cannot be read: {error}"))
        if not plans:
            return fired
        await self._hold_back(tx, plans)
        if advance:
            await _advance(tx, plans)
        recorded = await self._record(tx, plans)
        fired.slots = [plan for plan in plans if plan.slot_id in recorded and plan.fires]
        fired.lateness = [recorded[plan.slot_id] for plan in fired.slots]
        await self._enqueue(tx, [plan for plan in fired.slots if plan.job_id is not None])
        for plan in fired.slots:
            tx.tell("fire", target="task" if plan.run_token is not None else "job")
            if plan.due.collapsed:
                tx.tell("collapse", count=plan.due.collapsed)
        return fired

    async def _hold_back(self, tx: Tx, plans: Sequence[Planned]) -> None:
        """Overlap `skip`: at most one unfinished run. Skips in a row are one row of the ledger."""
        names = [plan.row["name"] for plan in plans if plan.row["overlap"] == "skip"]
        if not names:
            return
        found = {row["name"]: row for row in await tx.rows(sql.UNFINISHED, {"names": names})}
        skipped = [plan for plan in plans if plan.row["name"] in found]
        if not skipped:
            return
        for plan in skipped:
            run = found[plan.row["name"]]
            plan.skipped, plan.blocking_job = True, run["job_id"]
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

    async def _record(self, tx: Tx, plans: Sequence[Planned]) -> dict[UUID, float]:
        """The rows of the ledger that are new, with their lateness in seconds."""
        new = [plan for plan in plans if plan.fires or plan.skip_row is None or plan.skip_row == plan.slot_id]
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
                "lease": self.runs.lease,
            },
        )
        return {row["id"]: row["lateness_seconds"] for row in rows}

    async def _enqueue(self, tx: Tx, plans: Sequence[Planned]) -> None:
        if not plans:
            return
        answers = await intake.enqueue(tx, [new_job(plan.row, plan.job_id, plan.due.slot) for plan in plans])
        for plan, answer in zip(plans, answers, strict=True):
            if isinstance(answer, dict) and answer["deduplicated"]:
                await tx.run(sql.HELD_KEY, {"id": plan.slot_id, "job_id": answer["id"]})


def _why_skipped(plan: Planned) -> str:
    if plan.blocking_job is not None:
        return f"job {plan.blocking_job} is unfinished"
    return "a run is unfinished"


async def _advance(tx: Tx, plans: Sequence[Planned]) -> None:
    for plan in plans:
        if plan.skipped and plan.skip_row is None:
            plan.skip_row = plan.slot_id
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
    first_due = row["grace_for"] or row["next_run_at"] or row["now"]
    due = grid.overdue(cadence, min(first_due, row["now"]), row["now"])
    return Planned(row, due, grid.next_after(cadence, row["now"]))


def new_job(row: dict[str, Any], job_id: UUID | None, slot: datetime | None, **more: Any) -> NewJob:
    """The job of one slot; without one, of a firing by hand."""
    fields = {name: row[name] for name in sql.JOB_FIELDS}
    if fields["priority"] is None:
        del fields["priority"]
    return NewJob(**fields, schedule=row["name"], slot_at=slot, id=job_id, **more)


def _sqlstate(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, Unavailable) else error
    return (cause.sqlstate or "") if isinstance(cause, psycopg.Error) else ""


def _lost(error: BaseException) -> bool:
    """The connection or the server, not the statement."""
    if isinstance(error, AdvanceRefused) or (isinstance(error, Unavailable) and error.__cause__ is None):
        return False
    return _sqlstate(error)[:2] in ("", "08", "57")


def _text(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0][:500]
