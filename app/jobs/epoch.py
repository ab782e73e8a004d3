"""The epoch of the fences: the high part of every fence number.

After a restore or a promotion the last claims may be missing, and a counter alone would give a number out twice.
So the epoch grows when a connection sees another system identifier or timeline than the stored one, before that
connection serves, and by hand with `epoch bump --restored`.
"""

import logging
from typing import Any

import psycopg

from app.db import Connection, Database
from app.jobs import sql
from app.jobs.reclaim import take_back_all

log = logging.getLogger("fencepost.epoch")

TEST_CLOCK = "SELECT coalesce(current_setting('fencepost.now', true), '') AS pretended"


class PretendedClock(RuntimeError):
    """`fencepost.now` is set for the database or the role: all leases would stand still."""


async def look(connection: Connection) -> None:
    """Run on each new connection; raises psycopg errors where the database is not to be had."""
    try:
        cursor = await connection.execute(sql.EPOCH_SEEN)
        seen: dict[str, Any] | None = await cursor.fetchone()
    except psycopg.errors.UndefinedTable:
        return  # Not migrated yet: there is no fence to protect.
    except psycopg.errors.InsufficientPrivilege:
        log.warning("this role may not read the system identifier: bump the epoch by hand after a restore")
        return
    if seen is None or seen["seen_timeline"] is None:
        return
    if (seen["system_identifier"], seen["timeline"]) == (seen["seen_identifier"], seen["seen_timeline"]):
        return
    cursor = await connection.execute(sql.EPOCH_MOVED, seen)
    moved: dict[str, Any] | None = await cursor.fetchone()
    if moved is not None and moved["epoch"] > seen["epoch"]:
        log.warning("another cluster or timeline than before: the fence epoch is now %d", moved["epoch"])


async def refuse_pretended_clock(connection: Connection) -> None:
    """Raises PretendedClock where the database's clock is pretended and the settings do not allow it."""
    cursor = await connection.execute(TEST_CLOCK)
    row: dict[str, Any] | None = await cursor.fetchone()
    if row is not None and row["pretended"]:
        raise PretendedClock(
            f"fencepost.now is set to {row['pretended']!r} for this database or role, which stops every lease. "
            "Remove it (ALTER DATABASE … RESET fencepost.now), or set FENCEPOST_TEST_CLOCK=true in a test."
        )


async def bump(db: Database, *, restored: bool) -> tuple[int, int]:
    """Raise the epoch; with `restored` also take back every processing job. (new epoch, jobs taken back)."""
    async with db.begin() as tx:
        row = await tx.row(sql.EPOCH_BUMP)
    return (row["epoch"] if row else 0), (await take_back_all(db) if restored else 0)
