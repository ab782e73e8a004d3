"""A pretended time for the transactions of a Database, and schedules in the state that a test means."""

from datetime import UTC, datetime, timedelta
from typing import Any

from app.db import Database
from app.schedules import ops, sql
from app.schedules.tasks import Runs, Task
from app.schedules.tick import Ticker

START = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
NO_OUTAGE = 1e7
"""So long an interval between passes, in seconds, that no pretended time looks like an outage."""


class Clock:
    """`fencepost.now` of every transaction that these databases begin."""

    def __init__(self, *databases: Database, at: datetime = START) -> None:
        self.databases = list(databases)
        self.set(at)

    def set(self, at: datetime) -> None:
        self.now = at
        for database in self.databases:
            database._begin = f"BEGIN; SET LOCAL fencepost.now = '{at.isoformat()}'"

    def pass_(self, seconds: float) -> datetime:
        self.set(self.now + timedelta(seconds=seconds))
        return self.now


DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(sql.DEFINITION),
    "queue": "q",
    "kind": "q",
    "payload": "null",
    "priority": 4,
    "startup_grace_seconds": 60.0,
    "overlap": "allow",
}


def definition(**given: Any) -> dict[str, Any]:
    made = {**DEFAULTS, **given}
    if made["task"] is not None:
        made |= {"queue": None, "kind": None, "payload": None, "priority": None}
    if made["cron"] is not None:
        made["timezone"] = made["timezone"] or "UTC"
    return made


async def put(db: Database, name: str = "s", *, enabled: bool | None = None, **given: Any) -> dict[str, Any]:
    async with db.begin() as tx:
        row, _ = await ops.put(
            tx, name, definition(**given), enabled=enabled, if_match=None, actor="test", tolerance=5.0
        )
    return row


async def read(db: Database, name: str = "s") -> dict[str, Any]:
    async with db.begin() as tx:
        return await ops.get(tx, name, tolerance=5.0)


async def change(db: Database, statement: str, **params: Any) -> None:
    async with db.begin() as tx:
        await tx.run(statement, params)


async def rows(db: Database, statement: str, **params: Any) -> list[dict[str, Any]]:
    async with db.begin() as tx:
        return await tx.rows(statement, params)


async def ledger(db: Database, name: str = "s") -> list[tuple[str, datetime, int]]:
    """(outcome, slot, count), the oldest first."""
    found = await rows(
        db,
        "SELECT outcome, slot_at, count FROM schedule_slots WHERE schedule = %(name)s ORDER BY slot_at, id",
        name=name,
    )
    return [(row["outcome"], row["slot_at"], row["count"]) for row in found]


async def jobs(db: Database, name: str = "s") -> list[datetime | None]:
    found = await rows(db, "SELECT slot_at FROM jobs WHERE schedule = %(name)s ORDER BY slot_at", name=name)
    return [row["slot_at"] for row in found]


def ticker(db: Database, tasks: dict[str, Task] | None = None, *, interval: float = NO_OUTAGE) -> Ticker:
    return Ticker(db, Runs(db, tasks or {}, 60.0), interval)


def started(db: Database) -> Ticker:
    """A process that has just started, with the interval that the service has: it may give graces."""
    return ticker(db, interval=1.0)


async def only_mine(db: Database) -> None:
    """Without the schedule that the migration makes."""
    await change(db, "DELETE FROM schedules")
