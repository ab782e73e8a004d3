"""A transaction held open while jobs flow at 200 a second: what dead rows that cannot be removed do to claims."""

import time

import psycopg

from bench.compare import Row
from bench.context import Bench
from bench.stats import Goal, Spread, quantile

GROUP = "bloat"
RATE = 200


def run(bench: Bench) -> list[Row]:
    quick, hold = bench.size.quick, 3.0 if bench.size.quick else bench.size.hold_seconds
    lead, look = (2.0, 1.0) if quick else (60.0, 30.0)
    with bench.product() as ours:
        bench.load.tell("paced", url=ours.server.url, rate=RATE, seconds=lead + hold)
        began = time.monotonic()
        bench.say(f"  {RATE} jobs/s for {lead:g} s, then {hold:g} s with a transaction held open")
        time.sleep(lead)
        with psycopg.connect(ours.database_url) as holder:
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT pg_current_xact_id(), (SELECT count(*) FROM queues)")
            told = bench.load.hear(hold + 120)
            holder.rollback()
        took = time.monotonic() - began
    before = [ms for at, ms in told["claims"] if lead - look <= at < lead]
    held = [ms for at, ms in told["claims"] if at >= lead + hold - look]
    ours_p95, floor_p95 = quantile(held, 0.95), quantile(before, 0.95)
    problems = [f"{count} x {label}" for label, count in told["errors"].items()]
    if took > lead + hold + 5:
        problems.append(f"{RATE} jobs/s were not kept up: {took:.0f} s instead of {lead + hold:.0f}")
    return [
        Row(
            GROUP,
            f"claim p95 at {RATE} jobs/s with a transaction held open for {hold:g} s",
            "ms",
            Spread.of([ours_p95]),
            "before it",
            Spread.of([floor_p95]),
            Spread.of([ours_p95 / floor_p95]),
            Goal(2, 1.2, lower_is_better=True),
            problems,
            {"p50_ms": quantile(held, 0.5), "p99_ms": quantile(held, 0.99), "p50_before_ms": quantile(before, 0.5)},
            judge=not quick,
        )
    ]
