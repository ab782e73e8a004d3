"""Single enqueues of 200 bytes over 64 connections against the bare FastAPI route."""

import orjson

from bench.compare import Row
from bench.context import Bench, kept_promise
from bench.stats import Goal
from bench.workloads import PAYLOAD

GROUP = "enqueue"


def run(bench: Bench) -> list[Row]:
    table = bench.table()
    with bench.product() as ours, bench.floor("fastapi_route") as fastapi, bench.floor("starlette_route") as starlette:
        found = bench.interleave(
            {
                "ours": bench.http(ours.server, "enqueue", "enqueue"),
                "FastAPI route": bench.route(fastapi),
                "Starlette route": bench.route(starlette),
                bench.scripts.name: bench.script(
                    table,
                    "insert_1.sql",
                    clients=16,
                    prepare=lambda _: table.empty(),
                    variables={"payload": orjson.dumps(PAYLOAD).decode()},
                ),
            }
        )
        count = ours.count()
    what = "single enqueue of 200 bytes, 64 connections"
    rows = [
        bench.row(GROUP, what, "req/s", found, "FastAPI route", Goal(1.1, 1.6)),
        bench.row(GROUP, what, "req/s", found, "Starlette route"),
        bench.row(GROUP, what + " (floor: 16)", "req/s", found, bench.scripts.name),
    ]
    kept_promise(rows[0], bench.acknowledged["enqueue"], count, "jobs")
    return rows
