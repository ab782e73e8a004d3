"""Take back jobs whose lease ran out: a fail for a silent worker, fenced on the token that was read.

Any number of instances may run a pass at once. A pass never punishes workers for an outage of ours (one grace an
outage, kept in the database), never lets one row that cannot be moved stop the others (it is set aside, reported
and tried alone), and holds a queue whose automatic reclaims come in a storm (`reclaim_burst`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from app.db import Database, Tx
from app.errors import Unavailable
from app.jobs import sql
from app.jobs.model import Pass

log = logging.getLogger("fencepost.reclaim")

LOOP = "reclaim"
BATCH = 50
LOCK_CLASS = "55P03"
TIME_OUT = "57014"
MOST_WAITS = 3
"""After so many rows that waited in vain it is no row's fault: waiting for each would make a pass of minutes."""
MOST_STUCK = 500
"""So many rows that cannot be moved are gone past in one pass."""

Stuck = list[tuple[dict[str, Any], Exception]]


@dataclass(frozen=True, slots=True)
class Pacing:
    """Seconds: how often a pass runs, and the grace after an outage (0: none)."""

    interval: float
    grace: float

    @property
    def outage_after(self) -> float:
        return max(3 * self.interval, 5.0)


async def reclaim_pass(db: Database, pacing: Pacing) -> Pass:
    """One pass. Raises Unavailable where the database is at fault, not a row."""
    moved = await _retry_set_aside(db, pacing)
    stuck: Stuck = []
    while True:
        batch, moved_now, in_grace = await _batch(db, pacing, stuck)
        moved += moved_now
        last = in_grace or batch < BATCH or len(stuck) >= MOST_STUCK
        if last:
            await _judge(db, stuck, moved)
        elif stuck and not moved:
            continue
        row = await db.statement(sql.END_PASS, {"name": LOOP, "reclaimed": not in_grace})
        if row is None:
            raise Unavailable("The row of the reclaim loop is missing.")
        if last:
            return Pass(moved, row["last_pass_at"])


async def _batch(db: Database, pacing: Pacing, stuck: Stuck) -> tuple[int, int, bool]:
    """(rows seen, rows moved, in grace); what cannot be moved is added to `stuck`. The outage is judged in the batch's
    own transaction, so that an instance that was frozen between two batches does not go on with what it knew before."""
    seen: list[dict[str, Any]] = []
    try:
        async with db.begin() as tx:
            if await _in_grace(tx, pacing):
                return 0, 0, True
            if stuck:
                past = [row["id"] for row, _ in stuck]
                seen = await tx.rows(sql.EXPIRED_PAST, {"limit": BATCH, "past": past})
            else:
                seen = await tx.rows(sql.EXPIRED, {"limit": BATCH})
            allowed = await _brake(tx, seen)
            return len(seen), await _move(tx, allowed), False
    except (psycopg.Error, Unavailable) as error:
        # A connection lost, or nothing read yet: not a row's fault. The other instances or the next pass go on.
        if not seen or _server_left(error):
            raise
        return len(seen), await _one_by_one(db, seen, stuck), False


async def _in_grace(tx: Tx, pacing: Pacing) -> bool:
    given = await tx.run(sql.GIVE_GRACE, {"name": LOOP, "grace": pacing.grace, "outage_after": pacing.outage_after})
    state = await tx.row(sql.GRACE, {"name": LOOP})
    if given and state is not None:
        log.warning("no pass of any instance for a while: reclaim waits until %s", state["grace_until"])
        tx.tell("grace")
    return state is not None and bool(state["in_grace"])


async def _move(tx: Tx, rows: Sequence[dict[str, Any]], *, even_unexpired: bool = False) -> int:
    if not rows:
        return 0
    ordered = sorted(rows, key=lambda row: row["id"])
    moved = await tx.rows(
        sql.RECLAIM,
        {
            "ids": [row["id"] for row in ordered],
            "tokens": [row["attempt_token"] for row in ordered],
            "even_unexpired": even_unexpired,
        },
    )
    for row in moved:
        tx.tell("reclaim", queue=row["queue"], to=row["status"])
        # Also where the job itself is not claimable now: it left a place in a queue with a limit.
        tx.tell("claimable", queue=row["queue"], count=1)
    return len(moved)


async def _brake(tx: Tx, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what the queues' bursts do not allow; window and count are raised under the queue's row lock."""
    braked = {row["queue"] for row in rows if row["braked"] and not row["cancel_requested"]}
    if not braked:
        return list(rows)
    allowed = [row for row in rows if row["queue"] not in braked or row["cancel_requested"]]
    for queue in await tx.rows(sql.LOCK_BRAKED, {"queues": sorted(braked)}):
        mine = [row for row in rows if row["queue"] == queue["name"] and not row["cancel_requested"]]
        if queue["held"]:
            continue
        room = max(queue["reclaim_burst"] - queue["used"], 0)
        allowed.extend(mine[:room])
        await tx.run(
            sql.COUNT_BURST,
            {"name": queue["name"], "new_window": queue["new_window"], "used": queue["used"] + len(mine[:room])},
        )
        if len(mine) > room:
            await tx.run(sql.HOLD, {"name": queue["name"]})
            log.warning("reclaim of queue %s is on hold: more than %d a minute", queue["name"], queue["reclaim_burst"])
            tx.tell("hold", queue=queue["name"])
    return allowed


async def _one_by_one(db: Database, rows: Sequence[dict[str, Any]], stuck: Stuck) -> int:
    """The batch failed: try each row alone."""
    moved = waits = 0
    # Where a queue's own row is locked, each of its jobs would wait as long again.
    locked: dict[str, Exception] = {}
    for row in rows:
        if row["braked"] and row["queue"] in locked:
            stuck.append((row, locked[row["queue"]]))
            continue
        try:
            async with db.begin() as tx:
                moved += await _move(tx, await _brake(tx, [row]))
        except (psycopg.Error, Unavailable) as error:
            if _server_left(error):
                raise
            stuck.append((row, error))
            if _sqlstate(error) == LOCK_CLASS:
                locked[row["queue"]] = error
            if _sqlstate(error) == TIME_OUT or (_sqlstate(error) == LOCK_CLASS and not row["braked"]):
                waits += 1
                if waits >= MOST_WAITS and not moved:
                    raise
    return moved


async def _judge(db: Database, stuck: Stuck, moved: int) -> None:
    """Set aside what could not be moved, unless it is only locked for now.

    Where not a single row could be moved in the pass and the error may be of the whole database (a revoked right, a
    renamed column, a held table lock), nothing is set aside: the pass fails, says so, and is tried again. A row can
    raise such an error as well, so this is known only after looking past it.
    """
    if stuck and not moved and _sqlstate(stuck[0][1])[:2] in ("25", "40", "42", "53", "55", "58", "XX"):
        raise stuck[0][1]
    for row, cause in stuck:
        if _sqlstate(cause) != LOCK_CLASS:
            await _set_aside(db, row, cause)


async def _set_aside(db: Database, row: dict[str, Any], error: Exception) -> None:
    cause = error.__cause__ or error
    text = str(cause).splitlines()[0][:500] if str(cause) else type(cause).__name__
    log.error("job %s of queue %s cannot be reclaimed and is set aside: %s", row["id"], row["queue"], text)
    async with db.begin() as tx:
        await tx.run(sql.SET_ASIDE, {"id": row["id"], "error": text})
        tx.tell("set_aside", loop=LOOP)


async def _retry_set_aside(db: Database, pacing: Pacing) -> int:
    moved = 0
    async with db.begin() as tx:
        if await _in_grace(tx, pacing):
            return 0
        due = await tx.rows(sql.SET_ASIDE_DUE, {"limit": BATCH})
        await tx.run(sql.FORGET_SET_ASIDE)
    for row in due:
        try:
            async with db.begin() as tx:
                if await _move(tx, await _brake(tx, [row])):
                    moved += 1
                    await tx.run(sql.NO_LONGER_ASIDE, {"id": row["id"]})
        except (psycopg.Error, Unavailable) as error:
            if _server_left(error):
                raise
            await _set_aside(db, row, error)
    return moved


async def take_back_all(db: Database) -> int:
    """Reclaim every processing job, expired or not: after a restore, when no token of before may count.

    Raises Unavailable where a row stays locked by somebody: some may then be left, and it must be run again.
    """
    total = 0
    while True:
        async with db.begin() as tx:
            rows = await tx.rows(sql.PROCESSING_IDS, {"limit": 500})
            total += await _move(tx, rows, even_unexpired=True)
        if not rows:
            return total


def _server_left(error: BaseException) -> bool:
    """The connection or the server went away. A statement's time-out is not that: it may be one row's trigger."""
    state = _sqlstate(error)
    return state[:2] in ("", "08") or (state[:2] == "57" and state != TIME_OUT)


def _sqlstate(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, Unavailable) else error
    return (cause.sqlstate or "") if isinstance(cause, psycopg.Error) else ""
