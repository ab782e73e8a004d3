"""What a claim touches on a grown table against a small one: pages and time of the product's own statement.

The one group that does not go over HTTP: no route tells how many pages a statement touched. The statement is
`app.jobs.sql.CLAIM`, its parameters are those that the tests of its plans use.
"""

import importlib
from typing import Any

import psycopg

from app.jobs import sql
from bench.compare import Figure, Row, Side
from bench.context import Bench
from bench.stats import Goal

plans: Any = importlib.import_module("tests.reliability.plans")

GROUP = "growth"
QUEUES = 100
NOT_DUE = 100_000
DUE = 2_000
CHUNK = 250_000

_FINISHED = """
INSERT INTO jobs (id, queue, kind, payload, status, priority, attempts, fence, max_attempts, max_reclaims,
    available_at, result, done_by, done_claimed_at, done_token_sha256, done_sha256, created_at, updated_at, finished_at)
SELECT gen_random_uuid(), 'q' || mod(n, %(queues)s::int), 'k', '{"n": 1}', 'done', 4, 1, 1, 5, 3, at, 'null', 'w', at,
    sha256(n::text::bytea), ''::bytea, at, at, at
FROM (SELECT n, fencepost_now() - n * interval '0.05 second' AS at
      FROM generate_series(%(first)s::int, %(last)s::int) n) g
"""

_QUEUED = """
INSERT INTO jobs (id, queue, kind, payload, status, priority, max_attempts, max_reclaims, available_at)
SELECT gen_random_uuid(), 'q' || mod(n, %(queues)s::int), 'k', '{"n": 1}', 'queued', %(priority)s, 5, 3,
    fencepost_now() + (%(due_in)s + n * 0.001) * interval '1 second'
FROM generate_series(1, %(rows)s) n
"""


def run(bench: Bench) -> list[Row]:
    from app.migrations import upgrade

    rows, not_due = bench.size.rows, 5_000 if bench.size.quick else NOT_DUE
    small, big = bench.cluster.create(), bench.cluster.create()
    for url in (small, big):
        upgrade(url)
    _fill(bench, small, finished=0, not_due=0, queues=1)
    _fill(bench, big, finished=rows, not_due=not_due, queues=QUEUES)
    with psycopg.connect(small, autocommit=True) as at_small, psycopg.connect(big, autocommit=True) as at_big:
        sides = {"ours": _side(at_big), "small table": _side(at_small)}
        found = bench.interleave(sides)
    times = {
        name: [Figure(figure.details["milliseconds"], figure.problems) for figure in figures]
        for name, figures in found.items()
    }
    what = f"a claim at {rows:,} finished + {not_due:,} not due + {QUEUES} queues".replace(",", " ")
    goal = Goal(1.3, 1.15, lower_is_better=True)
    return [
        bench.row(GROUP, f"{what}: pages touched", "pages", found, "small table", goal),
        bench.row(GROUP, f"{what}: time", "ms", times, "small table"),
    ]


def _fill(bench: Bench, url: str, *, finished: int, not_due: int, queues: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO queues (name) SELECT 'q' || n FROM generate_series(0, %s) n ON CONFLICT DO NOTHING",
            [queues - 1],
        )
        for first in range(1, finished + 1, CHUNK):
            last = min(finished, first + CHUNK - 1)
            connection.execute(_FINISHED, {"queues": queues, "first": first, "last": last})
            bench.say(f"  {last} finished rows")
        # The jobs that are not due are of a higher priority and all in the queue that is claimed from.
        connection.execute(_QUEUED, {"queues": 1, "priority": 9, "due_in": 86_400, "rows": not_due})
        connection.execute(_QUEUED, {"queues": 1, "priority": 4, "due_in": -3600, "rows": DUE})
        if queues > 1:
            connection.execute(_QUEUED, {"queues": queues, "priority": 4, "due_in": -1800, "rows": DUE})
        connection.execute("VACUUM ANALYZE jobs")
        connection.execute("CHECKPOINT")


def _side(connection: psycopg.Connection) -> Side:
    connection.execute("SET plan_cache_mode = force_generic_plan")
    for _ in range(3):
        plans.explain(connection, sql.CLAIM, plans.claim_params(1, ["q0"]))

    def claim() -> Figure:
        told = [plans.explain(connection, sql.CLAIM, plans.claim_params(1, ["q0"])) for _ in range(9)]
        pages = sorted(plans.buffers(each) for each in told)
        times = sorted(float(each["Execution Time"]) for each in told)
        return Figure(pages[4], details={"milliseconds": times[4], "most_pages": pages[-1]})

    return claim
