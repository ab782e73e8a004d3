"""Every statement on queues as things of their own (the claim and the reclaim read them in `jobs/sql.py`)."""

COUNT_CAP = 10_000
"""Counts by status stop here: a page of queues must not scan ten million rows."""

SETTINGS = (
    "max_processing",
    "lease_seconds",
    "max_attempts",
    "max_reclaims",
    "backoff_base_seconds",
    "backoff_cap_seconds",
    "recovery_policy",
    "reclaim_delay_seconds",
    "reclaim_burst",
    "reclaim_hold_seconds",
    "owner",
    "runbook_url",
    "retention_seconds",
    "failed_retention_seconds",
)

_COLUMNS = ", ".join(f"q.{name}" for name in SETTINGS)

QUEUE = f"""q.name, q.paused, q.paused_by, q.paused_reason, q.paused_since, {_COLUMNS},
    CASE WHEN q.hold_until > fencepost_now() THEN q.hold_since END AS hold_since,
    CASE WHEN q.hold_until > fencepost_now() THEN q.hold_until END AS hold_until, q.created_at, q.updated_at"""

LIST = f"""
SELECT {QUEUE} FROM queues q WHERE q.name > %(after)s ORDER BY q.name LIMIT %(limit)s
"""

GET = f"SELECT {QUEUE} FROM queues q WHERE q.name = %(name)s"

# For the operations that tell the audit what was before.
LOCK = f"{GET} FOR UPDATE"

COUNTS = """
SELECT q.name, s.status, c.count
FROM unnest(%(names)s::text[]) AS q(name)
CROSS JOIN (VALUES ('queued'), ('processing'), ('done'), ('failed'), ('cancelled'), ('manual_review')) AS s(status)
CROSS JOIN LATERAL (
    SELECT count(*)::int AS count FROM (
        SELECT FROM jobs j WHERE s.status = 'queued' AND j.status = 'queued' AND j.queue = q.name
        UNION ALL
        SELECT FROM jobs j WHERE s.status = 'processing' AND j.status = 'processing' AND j.queue = q.name
        UNION ALL
        SELECT FROM jobs j WHERE s.status = 'manual_review' AND j.status = 'manual_review' AND j.queue = q.name
        UNION ALL
        SELECT FROM jobs j WHERE s.status IN ('done', 'failed', 'cancelled') AND j.queue = q.name
            AND j.status = s.status AND j.finished_at IS NOT NULL
        LIMIT %(cap)s
    ) capped
) c
"""

OLDEST_WAITING = """
SELECT q.name, greatest(0, extract(epoch FROM fencepost_now() - min(d.available_at)))::float8 AS seconds
FROM unnest(%(names)s::text[]) AS q(name)
CROSS JOIN generate_series(0, 9) AS p(priority)
CROSS JOIN LATERAL (
    SELECT j.available_at FROM jobs j
    WHERE j.status = 'queued' AND j.queue = q.name AND j.priority = p.priority AND j.available_at <= fencepost_now()
    ORDER BY j.available_at LIMIT 1
) d
GROUP BY q.name
"""

# An absent setting means its default; pause and hold are an operator's and are never touched by a PUT.
PUT = f"""
INSERT INTO queues AS q (name, {", ".join(SETTINGS)})
VALUES (%(name)s, {", ".join(f"%({name})s" for name in SETTINGS)})
ON CONFLICT (name) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in SETTINGS)},
    updated_at = fencepost_now()
RETURNING {QUEUE}, (xmax = 0) AS created
"""

PAUSE = f"""
UPDATE queues q SET paused = true, paused_by = %(actor)s, paused_reason = %(reason)s, paused_since = fencepost_now(),
    updated_at = fencepost_now()
WHERE q.name = %(name)s AND NOT q.paused RETURNING {QUEUE}
"""

RESUME = f"""
UPDATE queues q SET paused = false, paused_by = NULL, paused_reason = NULL, paused_since = NULL,
    updated_at = fencepost_now()
WHERE q.name = %(name)s AND q.paused RETURNING {QUEUE}
"""

RELEASE_HOLD = f"""
UPDATE queues q SET hold_since = NULL, hold_until = NULL, burst_started_at = NULL, burst_count = 0,
    updated_at = fencepost_now()
WHERE q.name = %(name)s AND q.hold_until > fencepost_now() RETURNING {QUEUE}
"""

# Waits for enqueues under way and stops new ones for the moment of the deletion: none may land in a queue that is
# being deleted. The lock time-out bounds the wait.
LOCK_JOBS = "LOCK TABLE jobs IN SHARE MODE"

LIVE_JOB = """
SELECT id, status FROM jobs WHERE queue = %(name)s AND status = 'queued'
UNION ALL SELECT id, status FROM jobs WHERE queue = %(name)s AND status = 'processing'
UNION ALL SELECT id, status FROM jobs WHERE queue = %(name)s AND status = 'manual_review'
LIMIT 1
"""

DELETE = "DELETE FROM queues WHERE name = %(name)s"
