"""The batch routes over 4 connections against pgbench's batches with 4 clients."""

import orjson

from bench.compare import Row
from bench.context import Bench, kept_promise
from bench.stats import Goal
from bench.workloads import PAYLOAD

GROUP = "batch"


def run(bench: Bench) -> list[Row]:
    table, floor = bench.table(), bench.scripts.name
    rows = []
    with bench.product() as ours:
        # The order matters: the queue of the first must not be filled by the second.
        found = bench.interleave(
            {
                "ours": bench.http(
                    ours.server,
                    "claim-complete-100",
                    "claim-complete",
                    items=True,
                    guess=8000,
                    batch=100,
                    connections=4,
                ),
                floor: bench.script(
                    table, "claim_complete_100.sql", clients=4, jobs=100, prepare=table.queued, guess=25_000
                ),
            }
        )
        what = "claim 100 + complete 100, 4 connections"
        rows.append(bench.row(GROUP, what, "jobs/s", found, floor, Goal(0.75, 0.95)))
        kept_promise(rows[0], bench.acknowledged["claim-complete-100"], ours.count("status = 'done'"), "completes")

        before = ours.count()
        payload = orjson.dumps(orjson.dumps(PAYLOAD).decode()).decode()
        found = bench.interleave(
            {
                "ours": bench.http(ours.server, "enqueue-500", "enqueue-batch", items=True, batch=500),
                floor: bench.script(
                    table,
                    "insert_100.sql",
                    clients=4,
                    jobs=100,
                    prepare=lambda _: table.empty(),
                    variables={"payloads": "{" + ",".join([payload] * 100) + "}"},
                ),
            }
        )
        what = "enqueue of 500 (floor: inserts of 100), 4 connections"
        rows.append(bench.row(GROUP, what, "jobs/s", found, floor, Goal(0.35, 0.6)))
        kept_promise(rows[1], bench.acknowledged["enqueue-500"], ours.count() - before, "jobs")

        found = bench.interleave(
            {
                "ours": bench.http(ours.server, "heartbeat-100", "heartbeat-batch", items=True),
                floor: bench.script(
                    table, "heartbeat_100.sql", clients=4, jobs=100, prepare=lambda _: table.processing(4000)
                ),
            }
        )
        what = "heartbeat of 100, 4 connections"
        rows.append(bench.row(GROUP, what, "beats/s", found, floor, Goal(0.4, 0.7)))
    return rows
