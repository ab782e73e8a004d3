"""Claim and complete of one job each, 64 connections: requests against the bare FastAPI route, jobs against pgbench."""

from bench.compare import Figure, Row
from bench.context import Bench, kept_promise
from bench.stats import Goal

GROUP = "claim-complete"


def run(bench: Bench) -> list[Row]:
    table = bench.table()
    with bench.product() as ours, bench.floor("fastapi_route") as fastapi:
        found = bench.interleave(
            {
                "ours": bench.http(ours.server, "claim-complete", "claim-complete", items=True, guess=2500),
                "FastAPI route": bench.route(fastapi),
                bench.scripts.name: bench.script(table, "claim_complete_1.sql", clients=16, prepare=table.queued),
            }
        )
        done = ours.count("status = 'done'")
    # A job is two requests.
    requests = [Figure(figure.value * 2, figure.problems, figure.details) for figure in found["ours"]]
    what = "claim + complete, one job each, 64 connections"
    rows = [
        bench.row(GROUP, what, "req/s", {**found, "ours": requests}, "FastAPI route", Goal(1.2, 1.7)),
        bench.row(GROUP, what + " (floor: 16)", "jobs/s", found, bench.scripts.name, Goal(1.0, 1.4)),
    ]
    kept_promise(rows[1], bench.acknowledged["claim-complete"], done, "completes")
    return rows
