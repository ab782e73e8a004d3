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
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from app import telemetry
from app.db import Database, Tx
from app.errors import Unavailable
from app.jobs.model import Pass, new_token
from app.jobs.sql import END_PASS
from app.schedules import cadence as grid
from app.schedules import sql
from app.schedules.firing import AdvanceRefused, Fired, fire, read_cadence
from app.schedules.tasks import Runs

log = logging.getLogger("fencepost.schedules")

LOOP = "schedule"
BATCH = 200
ALONE = 200
"""So many rows that gave trouble are tried in one pass, each by itself."""

FROM_CODE_GRACE = 60.0
TOGETHER = {"wait": "500ms", "most": "1s"}
ALONE_AT_MOST = {"wait": "100ms", "most": "300ms"}
HASTY = {"wait": "10ms", "most": "300ms"}
"""What a firing waits for a lock, and how long a statement of it may take: with others, alone, and alone while others
of its batch wait. One row that is blocked or slow then delays the others by about a second."""

MOST_PATIENCE = 5_000
"""Milliseconds that a statement of a row alone may take after some tries: a database that is slow for all must not keep
its schedules from running."""

BLOCKED_SECONDS = 0.5
"""So long a pass may spend on rows that gave trouble and are slow; the rest of them have their turn in the next."""

BATCH_SECONDS = 2.0
"""The same for a batch whose rows are tried alone."""

LOCK_NOT_AVAILABLE, QUERY_CANCELED = "55P03", "57014"
MAX_BACK_OFF = 30.0
SAID_AGAIN = 60.0
"""Seconds after which a trouble that lasts is logged again."""


def tolerance(interval: float) -> float:
    """Seconds after its time at which a schedule that has not fired counts as overdue."""
    return max(3 * interval, 5.0)


@dataclass(frozen=True, slots=True)
class _Step:
    """What is done before firing, for all schedules in one statement; `each` names the ones it would move."""

    what: str
    statement: str
    params: dict[str, Any]
    each: str | None = None


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
        self._said: dict[str, tuple[str, float]] = {}
        self._unreadable_since: float | None = None
        self._passed: float | None = None

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
            ended = await self._end_pass()
            async with self._db.begin() as tx:
                soon = await tx.row(sql.SOON)
        except Exception:
            self._run_from_code()
            raise
        self._unreadable_since = None
        if soon is None:
            raise Unavailable("The database did not tell its time.")
        return Pass(moved, ended or soon["now"], soon["seconds"])

    async def _end_pass(self) -> datetime | None:
        """Tell all instances that somebody passed: as one statement, so that an instance that is frozen in it holds
        up nobody. None where the row is held: what was fired is fired, and the next pass tells."""
        self._passed = time.monotonic()
        try:
            row = await self._db.statement(END_PASS, {"name": LOOP, "reclaimed": False})
        except (psycopg.Error, Unavailable) as error:
            if _sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            self._say("pass", f"the pass of the schedules cannot be told: {_text(error)}")
            return None
        if row is None:
            raise Unavailable("The row of the schedule loop is missing.")
        at: datetime = row["last_pass_at"]
        return at

    # --- before firing ------------------------------------------------------------------------------------------------

    async def _before(self) -> None:
        """Repair, adopt, interrupt, take; each by itself where they fail together, since none of them may keep the
        schedules from running, and one row may not keep the others from their grace."""
        steps = self._steps()
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.PATIENCE, TOGETHER)
                done = [(step.what, await tx.rows(step.statement, step.params)) for step in steps]
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            done = [(step.what, await self._by_itself(step)) for step in steps]
        for what, rows in done:
            if what == "take":
                for run in rows:
                    self.runs.begin(run["id"], run["run_token"], run["task"])
                continue
            for row in rows:
                if not row.get("changed", True):
                    # The statement ran and left the row as it was, which is as good as an error.
                    self._say(f"{what} {row['name']}", f"schedule {row['name']}: {what} changed nothing")
                    self._aside.setdefault(row["edition"], _Aside(row["name"]))
            rows = [row for row in rows if row.get("changed", True)]
            if rows:
                names = ", ".join(str(row["name"]) for row in rows[:20])
                log.warning("%s: %d, such as %s", what, len(rows), names)
                if what == "interrupt":
                    telemetry.publish("task", count=len(rows), outcome="interrupted")
                else:
                    telemetry.publish(what, count=len(rows))

    def _steps(self) -> tuple[_Step, ...]:
        adopting = {"loop": LOOP, "outage_after": self._tolerance, "names": None}
        taking = {"token": new_token(), "lease": self.runs.lease, "limit": BATCH}
        steps = (
            _Step("repair", sql.REPAIR, {"names": None}, sql.REPAIRABLE),
            _Step("adopt", sql.ADOPT, adopting, sql.ADOPTABLE),
            _Step("interrupt", sql.INTERRUPT, {}),
            _Step("take", sql.TAKE_RUNS, taking),
        )
        # Who passed a moment ago knows that there was no outage, whatever could be told of it.
        live = self._passed is not None and time.monotonic() - self._passed <= self._tolerance
        return tuple(step for step in steps if not (live and step.what == "adopt"))

    async def _by_itself(self, step: _Step) -> list[dict[str, Any]]:
        try:
            return await self._step(step, None)
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            self._say(step.what, f"{step.what} of schedules failed, firing goes on: {_text(error)}")
        if step.each is None:
            return []
        try:
            async with self._db.begin() as tx:
                rows = await tx.rows(step.each, step.params)
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            return []
        return await self._halves(step, [(row["name"], row["edition"]) for row in rows])

    async def _halves(self, step: _Step, rows: list[tuple[str, UUID]]) -> list[dict[str, Any]]:
        """The step for these schedules, in ever smaller parts, until the ones that cannot be moved are alone."""
        if not rows:
            return []
        try:
            return await self._step(step, [name for name, _ in rows])
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            if len(rows) == 1:
                [(name, edition)] = rows
                self._say(f"{step.what} {name}", f"schedule {name}: {step.what} was refused: {_text(error)}")
                self._aside.setdefault(edition, _Aside(name))
                return []
        half = len(rows) // 2
        return [*await self._halves(step, rows[:half]), *await self._halves(step, rows[half:])]

    async def _step(self, step: _Step, names: list[str] | None) -> list[dict[str, Any]]:
        params = step.params if names is None else {**step.params, "names": names}
        async with self._db.begin() as tx:
            await tx.row(sql.PATIENCE, ALONE_AT_MOST)
            return await tx.rows(step.statement, params)

    def _say(self, key: str, text: str) -> None:
        """Log an error that may last for many passes, at once and then once a minute."""
        now, last = time.monotonic(), self._said.get(key)
        if last is not None and last[0] == text and now - last[1] < SAID_AGAIN:
            return
        if len(self._said) > 10_000:
            self._said.clear()
        self._said[key] = text, now
        log.error("%s", text)

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
        params = {"tolerance": self._tolerance, "without": list(self._aside), "limit": BATCH}
        rows: list[dict[str, Any]] = []
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.PATIENCE, TOGETHER)
                rows = await tx.rows(sql.DUE, params)
                fired = await self._fire(tx, rows, advance=True) if rows else Fired()
        except (psycopg.Error, Unavailable, AdvanceRefused) as error:
            # A connection lost: not a row's fault. The other instances or the next pass go on.
            if _lost(error):
                raise
            if not rows:
                async with self._db.begin() as tx:
                    rows = await tx.rows(sql.DUE_UNLOCKED, params)
                if not rows:
                    # All that is due has been set aside, and has its turn there.
                    self._say("batch", f"schedules cannot be locked: {_text(error)}")
                    return Fired()
            self._say("batch", f"a batch of schedules failed, each is tried alone: {_text(error)}")
            fired = Fired(rows=len(rows))
            began = time.monotonic()
            for row in rows:
                if time.monotonic() - began > BATCH_SECONDS:
                    self._aside.setdefault(row["edition"], _Aside(row["name"]))
                    continue
                fired.slots += (await self._alone(row["edition"], row["name"], row, patience=HASTY)).slots
            return fired
        await self._committed(fired)
        return fired

    async def _try_aside(self) -> int:
        began = time.monotonic()
        moved, blocked = 0, 0.0
        waiting = sorted(self._aside.items(), key=lambda item: item[1].next_try)
        for edition, aside in [item for item in waiting if item[1].next_try <= began][:ALONE]:
            before = time.monotonic()
            fired = await self._alone(edition, aside.name, None, patience=self._patience(aside))
            moved += len(fired.slots)
            spent = time.monotonic() - before
            if fired.blocked or spent > 0.05:
                blocked += spent
                if blocked >= BLOCKED_SECONDS:
                    break
        return moved

    async def _alone(self, edition: UUID, name: str, row: dict[str, Any] | None, *, patience: dict[str, str]) -> Fired:
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.PATIENCE, patience)
                rows = await tx.rows(sql.ALONE, {"tolerance": self._tolerance, "name": name})
                fired = await self._fire(tx, rows, advance=True)
        except (psycopg.Error, Unavailable, AdvanceRefused) as error:
            if _lost(error):
                raise
            if _sqlstate(error) == LOCK_NOT_AVAILABLE:
                self._set_aside(edition, name, every_pass=True)
                return Fired(blocked=True)
            return await self._unadvanced(edition, name, row, error, patience)
        if not fired.broken:
            self._aside.pop(edition, None)
        await self._committed(fired)
        return fired

    async def _unadvanced(
        self, edition: UUID, name: str, row: dict[str, Any] | None, cause: Exception, patience: dict[str, str]
    ) -> Fired:
        """The row cannot be advanced: its slot and job go without. The unique slot keeps that from doubling, and the
        next period's slot fires though the time stays behind."""
        rows: list[dict[str, Any]] = []
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.PATIENCE, patience)
                rows = await tx.rows(sql.ALONE_UNLOCKED, {"tolerance": self._tolerance, "name": name})
                fired = await self._fire(tx, rows, advance=False)
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            await self._mark(edition, name, f"cannot be fired: {_text(error)}")
            self._set_aside(edition, name)
            row = rows[0] if rows else row
            if row is not None and row["task"] is not None:
                self.runs.begin_unrecorded(row["task"], self._period(row))
            return Fired()
        if rows and not fired.broken:
            await self._mark(edition, name, f"next_run_at cannot be advanced: {_text(cause)}")
            self._set_aside(edition, name, every_pass=True)
        await self._committed(fired)
        return fired

    async def _fire(self, tx: Tx, rows: Sequence[dict[str, Any]], *, advance: bool) -> Fired:
        return await fire(tx, rows, advance=advance, lease=self.runs.lease)

    @staticmethod
    def _period(row: dict[str, Any]) -> float:
        try:
            return grid.period_seconds(read_cadence(row), row["now"])
        except ValueError:
            return 3600.0

    @staticmethod
    def _patience(aside: _Aside) -> dict[str, str]:
        return {**ALONE_AT_MOST, "most": f"{min(MOST_PATIENCE, 300 * 2 ** min(aside.tries, 5))}ms"}

    def _set_aside(self, edition: UUID, name: str, *, every_pass: bool = False) -> None:
        aside = self._aside.setdefault(edition, _Aside(name))
        aside.tries += 1
        wait = 0.2 if every_pass else min(MAX_BACK_OFF, float(2 ** min(aside.tries - 1, 10)))
        aside.next_try = time.monotonic() + wait

    async def _mark(self, edition: UUID, name: str, text: str) -> None:
        self._say(f"schedule {name}", f"schedule {name}: {text}")
        telemetry.publish("broken")
        try:
            async with self._db.begin() as tx:
                await tx.row(sql.PATIENCE, ALONE_AT_MOST)
                await tx.run(sql.MARK, {"name": name, "edition": edition, "error": text[:1000]})
        except (psycopg.Error, Unavailable) as error:
            if _lost(error):
                raise
            self._say(f"mark {name}", f"schedule {name} cannot even be marked: {_text(error)}")

    async def _committed(self, fired: Fired) -> None:
        for seconds in fired.lateness:
            telemetry.observe_lateness(seconds)
        for planned in fired.slots:
            if planned.run_token is not None:
                self.runs.begin(planned.slot_id, planned.run_token, planned.row["task"])
        for row, text in fired.broken:
            await self._mark(row["edition"], row["name"], text)
            self._set_aside(row["edition"], row["name"])


def _sqlstate(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, Unavailable) else error
    return (cause.sqlstate or "") if isinstance(cause, psycopg.Error) else ""


def _lost(error: BaseException) -> bool:
    """The connection or the server, not the statement; a statement that was cut off for its time is the statement's."""
    if isinstance(error, AdvanceRefused) or (isinstance(error, Unavailable) and error.__cause__ is None):
        return False
    cause = error.__cause__ if isinstance(error, Unavailable) else error
    state = _sqlstate(error)
    if not state:
        # Without one it was not the server that complained; a value that cannot be read is a DataError.
        return not isinstance(cause, psycopg.Error) or isinstance(
            cause, (psycopg.OperationalError, psycopg.InterfaceError)
        )
    return state[:2] == "08" or (state[:2] == "57" and state != QUERY_CANCELED)


def _text(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0][:500]
