"""Rows in the state that a test means, not by the way that leads there.

`a_job(tx, status="processing", lease_over=True)` inserts a job with what belongs to its status, and answers a `Made`
with the token that its claimer would hold.
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from app.jobs.model import new_id, token_digest

COLUMNS = """
INSERT INTO jobs (id, queue, kind, payload, status, priority, attempts, max_attempts, max_reclaims, recovery_policy,
    reclaim_count, release_count, available_at, fence, attempt_token, reserved_by, reserved_at, lease_expires_at,
    lease_granted_seconds, max_run_seconds, cancel_requested_at, unique_key, idempotency_key, result, last_error,
    done_by, done_claimed_at, done_token_sha256, done_sha256, finished_at, created_at)
VALUES (%(id)s, %(queue)s, %(kind)s, %(payload)s::json, %(status)s, %(priority)s, %(attempts)s, %(max_attempts)s,
    %(max_reclaims)s, %(recovery_policy)s, %(reclaim_count)s, %(release_count)s,
    fencepost_now() + %(due_in)s * interval '1 second', %(fence)s, %(token)s::uuid, %(worker)s,
    CASE WHEN %(processing)s THEN fencepost_now() - interval '10 seconds' END,
    CASE WHEN %(processing)s THEN fencepost_now() + %(lease_left)s * interval '1 second' END,
    CASE WHEN %(processing)s THEN %(lease)s::float8 END, %(max_run_seconds)s,
    CASE WHEN %(cancel_requested)s THEN fencepost_now() END, %(unique_key)s, %(idempotency_key)s, %(result)s::json,
    %(last_error)s, CASE WHEN %(done)s THEN %(done_worker)s END,
    CASE WHEN %(done)s THEN fencepost_now() - interval '10 seconds' END,
    CASE WHEN %(done)s THEN %(done_token)s::bytea END, CASE WHEN %(done)s THEN %(done_digest)s::bytea END,
    CASE WHEN %(final)s THEN fencepost_now() - %(finished_ago)s * interval '1 second' END,
    fencepost_now() - %(created_ago)s * interval '1 second')
"""


@dataclass(frozen=True)
class Made:
    id: UUID
    token: UUID
    queue: str
    worker: str


async def a_job(tx, status: str = "queued", *, lease_over: bool = False, **given: Any) -> Made:
    """A job in `status`. Attempts and fence are 1 where the status implies a claim; all can be given."""
    token, claimed = uuid.uuid4(), status in ("processing", "done", "failed", "manual_review")
    row = {
        "id": new_id(),
        "queue": "q",
        "kind": "k",
        "payload": json.dumps({"n": 1}),
        "status": status,
        "priority": 4,
        "attempts": int(claimed),
        "fence": int(claimed),
        "max_attempts": 5,
        "max_reclaims": 3,
        "recovery_policy": "auto",
        "reclaim_count": 0,
        "release_count": 0,
        "due_in": -1,
        "worker": "w" if status == "processing" else None,
        "token": token if status == "processing" else None,
        "lease": 30.0,
        "lease_left": -1 if lease_over else 30,
        "max_run_seconds": None,
        "cancel_requested": False,
        "unique_key": None,
        "idempotency_key": None,
        "result": None,
        "last_error": None,
        "done_worker": "w",
        "done_token": token_digest(token),
        "done_digest": b"x",
        "finished_ago": 0,
        "created_ago": 60,
        **given,
    }
    row |= {
        "processing": row["status"] == "processing",
        "done": row["status"] == "done",
        "final": row["status"] in ("done", "failed", "cancelled"),
    }
    assert await tx.run(COLUMNS, row) == 1
    return Made(row["id"], token, row["queue"], row["worker"] or "w")


async def read(tx, made: Made) -> dict[str, Any]:
    row = await tx.row("SELECT * FROM jobs WHERE id = %(id)s", {"id": made.id})
    assert row is not None
    return row
