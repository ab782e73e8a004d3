"""Idle pick-up: from the sending of an enqueue to the answer of a claim that waits, here and on another instance."""

from typing import Any

from bench.compare import Row
from bench.context import Bench, Product
from bench.stats import Goal, Spread

GROUP = "pickup"


def run(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    with bench.product() as first, bench.product(first.database_url) as second:
        for what, producer, goals in (
            ("same instance", first, ((5, 3), (25, 10))),
            ("enqueued on another instance", second, ((15, 8), (60, 25))),
        ):
            rows += _rows(bench, what, first, producer, goals)
    return rows


def _rows(
    bench: Bench, what: str, waiter: Product, producer: Product, goals: tuple[tuple[float, float], ...]
) -> list[Row]:
    quick = bench.size.quick
    ask: dict[str, Any] = {
        "url": waiter.server.url,
        "enqueue_url": producer.server.url,
        "pause": 0.02 if quick else 0.08,
    }
    bench.load.ask("pickup", count=5, **ask)
    told = bench.load.ask("pickup", count=20 if quick else 500, **ask)
    problems = [f"{count} x {label}" for label, count in told["errors"].items()]
    details = {name: told[name] for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms", "count")}
    rows = []
    for name, (least, moonshot) in zip(("p50_ms", "p99_ms"), goals, strict=True):
        goal = Goal(least, moonshot, lower_is_better=True, unit="ms")
        rows.append(
            Row(
                GROUP,
                f"enqueue to waiting claim, {what}, {name[:3]}",
                "ms",
                Spread.of([told[name]]),
                goal=goal,
                problems=problems,
                details=details,
                judge=not quick,
            )
        )
    return rows
