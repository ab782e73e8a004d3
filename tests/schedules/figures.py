"""The figures that a reader asks for: `python -m tests.schedules.figures [restarts|lateness|idle]`.

- restarts: a schedule of every 20 s while the service is restarted every 6 s for 90 s, half of the ends by kill -9
- lateness: 1 000 schedules of 1 s on one instance for 30 s, from slot to firing
- idle: a tick with 10 000 schedules of which none is due

The longer loops of restarts, which judge, are in `processes.py`.
"""

import asyncio
import contextlib
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psycopg

from app.db import Database
from app.migrations import upgrade
from tests import harness
from tests.schedules.clock import change, put, ticker

INSERT_MANY = """
INSERT INTO schedules (name, edition, every_seconds, anchor_at, next_run_at, queue, kind, payload, priority,
    startup_grace_seconds, overlap, enabled)
SELECT 's' || n, gen_random_uuid(), {every}, t, t, 'q', 'q', '{{}}', 4, 60, '{overlap}', true
FROM generate_series(1, {count}) n, LATERAL (SELECT now() + interval '2 s' + n * interval '1 s' / {count} AS t) x
"""


@contextlib.contextmanager
def place(**settings: str) -> Iterator[tuple[str, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-figures-"))
    server = harness.PostgresServer(folder / "postgres", settings).start()
    try:
        url = server.create_database()
        upgrade(url)
        yield url, folder
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


def query(url: str, statement: str) -> list[tuple]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def restarts() -> None:
    with place() as (url, folder):
        service = harness.Service(folder / "0", ["--port", "0"], {"FENCEPOST_DATABASE_URL": url}).wait_ready()
        body = {"every_seconds": 20, "queue": "q", "overlap": "allow", "startup_grace_seconds": 20}
        assert httpx2.put(f"{service.url}/v1/schedules/s", json=body).status_code == 201
        end, number = time.monotonic() + 90, 0
        while time.monotonic() < end:
            time.sleep(6)
            number += 1
            if number % 2:
                service.kill()
            else:
                service.stop()
            service = harness.Service(folder / str(number), ["--port", "0"], {"FENCEPOST_DATABASE_URL": url})
            service.wait_ready()
        [(planned, fired, distinct, gap)] = query(
            url,
            "SELECT floor(extract(epoch FROM now() - min(slot_at)) / 20)::int + 1, count(*), count(DISTINCT slot_at), "
            "max(gap) FROM (SELECT slot_at, extract(epoch FROM created_at - lag(created_at) OVER (ORDER BY created_at))"
            " AS gap FROM jobs WHERE schedule = 's') j",
        )
        service.kill()
        print(
            f"restarts: {number} restarts ({(number + 1) // 2} by kill -9); {planned} slots came, {fired} firings of "
            f"{distinct} slots, largest gap {gap:.1f} s"
        )


def lateness() -> None:
    with place() as (url, folder):
        query(url, INSERT_MANY.format(every=1, overlap="allow", count=1000))
        service = harness.Service(folder / "0", ["--port", "0"], {"FENCEPOST_DATABASE_URL": url}).wait_ready()
        time.sleep(35)
        rows = query(
            url,
            "SELECT lateness_seconds FROM schedule_slots WHERE outcome = 'fired' AND task IS NULL AND fired_at > "
            "(SELECT min(fired_at) + interval '4 s' FROM schedule_slots) ORDER BY 1",
        )
        [(collapsed,)] = query(
            url,
            "SELECT coalesce(sum(count), 0) FROM schedule_slots WHERE outcome <> 'fired' AND fired_at > "
            "(SELECT min(fired_at) + interval '4 s' FROM schedule_slots)",
        )
        service.kill()
        late = [row[0] for row in rows]
        print(
            f"lateness: {len(late)} firings, median {statistics.median(late) * 1000:.0f} ms, "
            f"p99 {late[int(len(late) * 0.99)] * 1000:.0f} ms, most {late[-1] * 1000:.0f} ms; {collapsed} collapsed"
        )


async def _idle(url: str) -> None:
    db = Database(url, pool_size=2)
    await db.open()
    await put(db, "one", every_seconds=3600)
    await change(db, INSERT_MANY.format(every=86400, overlap="skip", count=10_000))
    await change(db, "UPDATE schedules SET next_run_at = now() + interval '1 hour'")
    await change(db, "ANALYZE schedules")
    one = ticker(db)
    for _ in range(20):
        await one.tick()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(200):
        await one.tick()
    took, cpu = (time.perf_counter() - began) / 200, (time.process_time() - used) / 200
    print(f"idle: a tick with 10 000 schedules, none due: {took * 1000:.2f} ms, of it {cpu * 1000:.2f} ms CPU of ours")
    await db.close()


def idle() -> None:
    with place() as (url, _):
        asyncio.run(_idle(url))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for name in sys.argv[1:] or ["restarts", "lateness", "idle"]:
        {"restarts": restarts, "lateness": lateness, "idle": idle}[name]()
