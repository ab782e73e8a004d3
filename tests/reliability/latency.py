"""How late a lapsed lease is taken back, by the database's own instants: the end of the attempt minus its lease's."""

import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg

from app.migrations import upgrade
from app.settings import Settings
from tests import harness
from tests.reliability.blackbox import SAFE, ready
from tests.reliability.history import instant
from tests.reliability.nemesis import Instance
from tests.reliability.wire import Wire

QUEUE = "lapse"

ENDED = """
SELECT job_id::text, ended_at FROM job_attempts WHERE outcome = 'reclaimed' AND job_id = ANY(%s::uuid[])
"""


def run(
    seed: int, expiries: int = 600, outage_seconds: float = 12.0, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """With the settings of a fresh installation: first while an instance is up, then over an outage of the service."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-soak-"))
    server = harness.PostgresServer(folder / "postgres", SAFE)
    instance = None
    try:
        server.start()
        url = harness.create_database(server.url)
        upgrade(url)
        instance = Instance(folder / "instance", url, {}).start()
        return asyncio.run(_run(random.Random(f"{seed} latency"), url, instance, expiries, outage_seconds, say))
    finally:
        if instance is not None:
            instance.kill()
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


async def _run(
    draw: random.Random, url: str, instance: Instance, expiries: int, outage: float, say: Callable[[str], None]
) -> dict[str, Any]:
    settings = Settings.model_construct()
    interval, grace = settings.reclaim_interval_seconds, settings.outage_grace_seconds
    await ready(instance)
    leases = await _abandon(instance, draw, expiries, 2, 14)
    ended = await _ended(url, leases, 60)
    up = [(ended[job] - leases[job]) / 1e6 for job in leases]
    found = {"up": {**_quantiles(up), "goal_seconds": interval + 1}}
    say(f"lapses while an instance is up: {found['up']}")

    # Their leases end while nobody is there to see it, and some after the return.
    leases = await _abandon(instance, draw, expiries, 3, outage + 5)
    instance.kill()
    await asyncio.sleep(outage)
    # The instance is back when it passes for the first time, which is soon after its start: counted from the start.
    back = _now(url)
    instance.start()
    ended = await _ended(url, leases, grace + 60)
    late = [(ended[job] - max(leases[job], back)) / 1e6 for job in leases]
    known = [(ended[job] - back) / 1e6 for job in leases]
    found["after_outage"] = {
        **_quantiles(late),
        "goal_seconds": grace + interval + 1,
        "outage_seconds": outage,
        "first_after_return_seconds": round(min(known), 2),
    }
    say(f"lapses over an outage of {outage:.0f} s: {found['after_outage']}")
    return found


async def _abandon(instance: Instance, draw: random.Random, count: int, least: float, most: float) -> dict[str, int]:
    """So many jobs claimed by workers that are never heard of again: job → end of its lease, as the claim told it."""
    leases: dict[str, int] = {}
    wire = Wire(instance.port)
    for start in range(0, count, 100):
        job = {"queue": QUEUE, "payload": start, "max_attempts": 1}
        await wire.ask("POST", "/v1/jobs/batch", {"jobs": [job] * min(100, count - start)}, seconds=20)
    wires = [wire, *(Wire(instance.port) for _ in range(7))]

    async def claims(wire: Wire, number: int) -> None:
        while len(leases) < count:
            body = {"worker_id": f"gone-{number}", "queues": [QUEUE], "lease_seconds": draw.uniform(least, most)}
            _, answer = await wire.ask("POST", "/v1/jobs/claim", body, seconds=20)
            if not answer["jobs"]:
                break
            for job in answer["jobs"]:
                leases[job["id"]] = instant(job["lease_expires_at"]) or 0
        wire.close()

    await asyncio.gather(*(claims(wire, number) for number, wire in enumerate(wires)))
    assert len(leases) == count
    return leases


async def _ended(url: str, leases: dict[str, int], seconds: float) -> dict[str, int]:
    deadline = time.monotonic() + seconds
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:

        async def all_ended() -> list[tuple[str, datetime]] | None:
            rows = await (await connection.execute(ENDED, [list(leases)])).fetchall()
            return rows if len(rows) == len(leases) else None

        rows = await harness.wait_until(all_ended, deadline - time.monotonic(), every=0.2)
    return {job: instant(at) or 0 for job, at in rows}


def _now(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT fencepost_now()").fetchone()
    assert row is not None
    return instant(row[0]) or 0


def _quantiles(seconds: Sequence[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "expiries": len(seconds),
        "p50_seconds": round(statistics.median(seconds), 3),
        "p99_seconds": round(cuts[98], 3),
        "max_seconds": round(max(seconds), 3),
        "min_seconds": round(min(seconds), 3),
    }
