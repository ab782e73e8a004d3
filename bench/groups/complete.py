"""Single completes over 64 connections against the bare FastAPI route; the jobs are claimed outside of the window."""

from bench.compare import Row
from bench.context import Bench, kept_promise
from bench.stats import Goal

GROUP = "complete"


def run(bench: Bench) -> list[Row]:
    with bench.product() as ours, bench.floor("fastapi_route") as fastapi, bench.floor("starlette_route") as starlette:
        found = bench.interleave(
            {
                "ours": bench.http(ours.server, "complete", "complete"),
                "FastAPI route": bench.route(fastapi),
                "Starlette route": bench.route(starlette),
            }
        )
        done = ours.count("status = 'done'")
    what = "single complete, 64 connections"
    rows = [
        bench.row(GROUP, what, "req/s", found, "FastAPI route", Goal(1.3, 1.8)),
        bench.row(GROUP, what, "req/s", found, "Starlette route"),
    ]
    kept_promise(rows[0], bench.acknowledged["complete"], done, "completes")
    return rows
