"""Big tables by one INSERT, and what PostgreSQL really did for a statement of `app.jobs.sql`."""

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg

from app.jobs import sql
from app.jobs.lease import PRIORITIES
from app.jobs.model import token_digest

FINISHED = """
INSERT INTO jobs (id, queue, kind, payload, status, priority, attempts, fence, max_attempts, max_reclaims,
    available_at, result, done_by, done_claimed_at, done_token_sha256, done_sha256, created_at, updated_at, finished_at)
SELECT gen_random_uuid(), 'q', 'k', '{"n": 1}', 'done', 4, 1, 1, 5, 3, at, 'null', 'w', at, sha256(n::text::bytea),
    ''::bytea, at, at, at
FROM (SELECT n, fencepost_now() - n * interval '0.1 second' AS at FROM generate_series(1, %(rows)s) n) g
"""

QUEUED = """
INSERT INTO jobs (id, queue, kind, payload, status, priority, max_attempts, max_reclaims, available_at, created_at)
SELECT gen_random_uuid(), 'q', 'k', '{"n": 1}', 'queued', %(priority)s, 5, 3,
    fencepost_now() + (%(due_in)s + n * 0.001) * interval '1 second',
    fencepost_now() - (3600 + n * 0.01) * interval '1 second'
FROM generate_series(1, %(rows)s) n
"""

# The token is derived from the number, so that a test can name it.
PROCESSING = """
INSERT INTO jobs (id, queue, kind, payload, status, priority, attempts, fence, max_attempts, max_reclaims,
    available_at, attempt_token, reserved_by, reserved_at, lease_granted_seconds, lease_expires_at)
SELECT md5('id' || n)::uuid, 'q', 'k', '{"n": 1}', 'processing', 4, 1, 1, 5, 3, fencepost_now(),
    md5('token' || n)::uuid, 'w', fencepost_now(), 3600, fencepost_now() + (3600 + n) * interval '1 second'
FROM generate_series(1, %(rows)s) n
"""


def load(
    connection: psycopg.Connection, *, finished: int = 0, not_due: int = 0, due: int = 0, processing: int = 0
) -> None:
    """Rows of queue `q`: finished ones, of priority 9 not due for an hour, of priority 4 due, and processing ones."""
    connection.execute("INSERT INTO queues (name) VALUES ('q') ON CONFLICT DO NOTHING")
    connection.execute(FINISHED, {"rows": finished})
    connection.execute(QUEUED, {"rows": not_due, "priority": 9, "due_in": 3600})
    connection.execute(QUEUED, {"rows": due, "priority": 4, "due_in": -3600})
    connection.execute(PROCESSING, {"rows": processing})


def held(connection: psycopg.Connection, count: int) -> list[tuple[uuid.UUID, uuid.UUID]]:
    """(id, token) of so many processing rows."""
    return connection.execute(
        "SELECT id, attempt_token FROM jobs WHERE status = 'processing' ORDER BY id LIMIT %s", [count]
    ).fetchall()


def claim_params(wanted: int, queues: Sequence[str] = ("q",)) -> dict[str, Any]:
    return {
        "queues": [queue for queue in queues for _ in PRIORITIES],
        "priorities": [priority for _ in queues for priority in PRIORITIES],
        "wanted": wanted,
        "tokens": [uuid.uuid4() for _ in range(wanted)],
        "workers": ["w"] * wanted,
        "leases": [30.0] * wanted,
        "locked": False,
    }


def verb_params(attempts: Sequence[tuple[uuid.UUID, uuid.UUID]]) -> dict[str, Any]:
    """What HEARTBEAT, COMPLETE, FAIL, RELEASE, GIVE_BACK and RECLAIM ask for, all together."""
    count = len(attempts)
    return {
        "ids": [job_id for job_id, _ in attempts],
        "tokens": [token for _, token in attempts],
        "token_digests": [token_digest(token) for _, token in attempts],
        "digests": [b"d"] * count,
        "workers": ["w"] * count,
        "leases": [3600.0] * count,
        "as_granted": [False] * count,
        "progress": [None] * count,
        "results": ["1"] * count,
        "error_types": ["E"] * count,
        "error_messages": ["text"] * count,
        "retryables": [True] * count,
        "delays": [None] * count,
        "jitters": [0.5] * count,
        "even_unexpired": True,
    }


NAMES = re.compile(r"%\((\w+)\)s")


def explain(connection: psycopg.Connection, statement: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """EXPLAIN (ANALYZE, BUFFERS) of the prepared statement: under `plan_cache_mode` it is what a service would run."""
    names = list(dict.fromkeys(NAMES.findall(statement)))
    numbered = NAMES.sub(lambda found: f"${names.index(found[1]) + 1}", statement).replace("%%", "%")
    connection.execute(f"PREPARE explained AS {numbered}".encode())
    try:
        cursor = psycopg.ClientCursor(connection)
        places = ", ".join(f"%({name})s" for name in names)
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained ({places})".encode(), params)
        return cursor.fetchone()[0][0]
    finally:
        connection.execute("DEALLOCATE explained")


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def buffers(explained: Mapping[str, Any]) -> int:
    """8 kB pages touched by all of it: found in memory or read."""
    top = explained["Plan"]
    return top.get("Shared Hit Blocks", 0) + top.get("Shared Read Blocks", 0)


def scans_of_jobs(explained: Mapping[str, Any]) -> list[str]:
    """How the table was reached: the index's name, or `Seq Scan`. Parts that never ran are left out."""
    found = []
    for node in nodes(explained["Plan"]):
        kind, of_jobs = node["Node Type"], node.get("Relation Name") == "jobs"
        if node["Actual Loops"] and (kind == "Bitmap Index Scan" or (of_jobs and "Index" in kind)):
            found.append(node["Index Name"])
        elif node["Actual Loops"] and of_jobs and kind not in ("Bitmap Heap Scan", "ModifyTable"):
            found.append(kind)
    return found


def told(explained: Mapping[str, Any]) -> str:
    """A plan in few lines, for a failure's message."""

    def lines(plan: Mapping[str, Any], depth: int) -> Iterator[str]:
        where = plan.get("Index Name") or plan.get("Relation Name") or plan.get("CTE Name") or ""
        touched = plan.get("Shared Hit Blocks", 0) + plan.get("Shared Read Blocks", 0)
        rows = f"rows {plan['Plan Rows']}/{plan['Actual Rows']} x{plan['Actual Loops']}"
        yield f"{'  ' * depth}{plan['Node Type']} {where} {rows} buffers {touched}"
        for child in plan.get("Plans", ()):
            yield from lines(child, depth + 1)

    return "\n".join(lines(explained["Plan"], 0))


def claim_ids(connection: psycopg.Connection, wanted: int) -> list[uuid.UUID]:
    """The ids that a run of CLAIM returned."""
    cursor = connection.execute(sql.CLAIM, claim_params(wanted))
    names = [column.name for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return [row["id"] for row in rows if row["id"] is not None]
