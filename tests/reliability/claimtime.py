"""What a claim costs beside a million finished jobs, and beside jobs of a higher priority that are not due yet.

Three databases on one server; the real claim operation, by turns on the empty one and on a full one, so that what
else the machine does meets both. The figure is the ratio of medians within a pair of turns.
"""

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from app.db import Database
from app.jobs import lease, sql
from app.jobs.model import ClaimCall
from app.migrations import upgrade
from tests import harness
from tests.reliability import plans
from tests.reliability.blackbox import SAFE

CLAIMS = 60
"""In one turn, one job each."""


def run(
    finished: int = 1_000_000, not_due: int = 100_000, pairs: int = 11, say: Callable[[str], None] = print
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-soak-"))
    server = harness.PostgresServer(folder / "postgres", SAFE)
    try:
        server.start()
        # Rows to claim: a turn's, twice for the turn in each pair, and the first one that warms up.
        due = CLAIMS * (2 * pairs + 4)
        sizes = {
            "empty": {},
            f"{finished} finished": {"finished": finished},
            f"{not_due} of a higher priority, not due": {"not_due": not_due},
        }
        urls = {}
        for name, rows in sizes.items():
            began = time.monotonic()
            urls[name] = harness.create_database(server.url)
            upgrade(urls[name])
            with psycopg.connect(urls[name], autocommit=True) as connection:
                plans.load(connection, **rows, due=due)
                connection.execute("VACUUM (ANALYZE) jobs")
            say(f"loaded: {name} ({time.monotonic() - began:.1f} s)")
        found = {name: asyncio.run(_compare(urls["empty"], urls[name], pairs)) for name in list(sizes)[1:]}
        for name, url in urls.items():
            with psycopg.connect(url) as connection:
                explained = plans.explain(connection, sql.CLAIM, plans.claim_params(1))
                found.setdefault(name, {})["buffers"] = plans.buffers(explained)
                found[name]["scans"] = plans.scans_of_jobs(explained)
                if name == list(sizes)[1]:
                    say(plans.told(explained))
                connection.rollback()
        for name, figures in found.items():
            say(f"{name}: {figures}")
        return found
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


async def _compare(empty_url: str, full_url: str, pairs: int) -> dict[str, Any]:
    empty, full = Database(empty_url, pool_size=1), Database(full_url, pool_size=1)
    await empty.open()
    await full.open()
    try:
        await _turn(empty)
        await _turn(full)
        ratios, plain, beside = [], [], []
        for number in range(pairs):
            turns = [(empty, plain), (full, beside)]
            for database, times in turns if number % 2 else reversed(turns):
                times.append(await _turn(database))
            ratios.append(beside[-1] / plain[-1])
        return {
            "pairs": pairs,
            "claims_a_turn": CLAIMS,
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "ms_empty": round(statistics.median(plain) * 1000, 3),
            "ms_full": round(statistics.median(beside) * 1000, 3),
        }
    finally:
        await empty.close()
        await full.close()


async def _turn(database: Database) -> float:
    """The median time of a claim in seconds, its commit included."""
    times = []
    for _ in range(CLAIMS):
        began = time.perf_counter()
        async with database.begin(generic_plan=True) as tx:
            [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 1)])
        times.append(time.perf_counter() - began)
        assert len(grant.jobs) == 1
    return statistics.median(times)
