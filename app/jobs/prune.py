"""Delete finished jobs whose retention is over, and what was remembered for repeats; never a `manual_review`."""

from app.db import Database
from app.errors import Unavailable
from app.jobs import sql
from app.jobs.model import Pass

LOOP = "prune"
BATCH = 1000


async def prune_pass(db: Database, *, retention: float, failed_retention: float) -> Pass:
    """One pass in short transactions of at most 1 000 rows; `moved` is the number of jobs deleted. Retentions in
    seconds; a queue's own come first, and a job with a client's idempotency key stays at least 24 hours."""
    total = 0
    while True:
        async with db.begin() as tx:
            deleted = await tx.run(sql.PRUNE, {"done": retention, "failed": failed_retention, "limit": BATCH})
            tx.tell("prune", count=deleted)
        total += deleted
        if deleted < BATCH:
            break
    async with db.begin() as tx:
        await tx.run(sql.PRUNE_CLAIM_REQUESTS)
        await tx.run(sql.PRUNE_LATE_RESULTS)
        row = await tx.row(sql.END_PASS, {"name": LOOP, "reclaimed": False})
    if row is None:
        raise Unavailable("The row of the prune loop is missing.")
    return Pass(total, row["last_pass_at"])
