"""Single heartbeats over 64 connections against the bare FastAPI route."""

from bench.compare import Row
from bench.context import Bench
from bench.stats import Goal

GROUP = "heartbeat"


def run(bench: Bench) -> list[Row]:
    table = bench.table()
    with bench.product() as ours, bench.floor("fastapi_route") as fastapi, bench.floor("starlette_route") as starlette:
        found = bench.interleave(
            {
                "ours": bench.http(ours.server, "heartbeat", "heartbeat"),
                "FastAPI route": bench.route(fastapi),
                "Starlette route": bench.route(starlette),
                bench.scripts.name: bench.script(
                    table, "heartbeat_1.sql", clients=16, prepare=lambda _: table.processing(1600)
                ),
            }
        )
    what = "single heartbeat, 64 connections"
    return [
        bench.row(GROUP, what, "req/s", found, "FastAPI route", Goal(1.3, 1.8)),
        bench.row(GROUP, what, "req/s", found, "Starlette route"),
        bench.row(GROUP, what + " (floor: 16)", "req/s", found, bench.scripts.name),
    ]
