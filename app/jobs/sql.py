"""Every statement on jobs, named by what it does. Each transition is one guarded statement; its rows are the verdict.

Guards are `id` and `attempt_token` (a CHECK ties the token to `processing`): with a lease condition beside the id
the planner, while statistics say that few rows are processing, walks the partial lease index instead of the key.
No volatile function in here: ids, tokens and jitter are made by the application, the time is `fencepost_now()`.
"""

from typing import Any

from app.jobs.model import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_RECLAIMS,
    FREE_RELEASES,
    LATE_RESULT_SECONDS,
)

# --- fragments -------------------------------------------------------------------------------------------------------

JOB = """
    j.id, j.queue, j.kind, j.payload::text AS payload, j.status, j.priority, j.attempts, j.max_attempts,
    j.recovery_policy, j.reclaim_count, j.max_reclaims, j.lease_seconds, j.max_run_seconds, j.backoff_base_seconds,
    j.backoff_cap_seconds, j.available_at, j.fence, j.reserved_by, j.reserved_at, j.heartbeat_at, j.lease_expires_at,
    j.cancel_requested_at IS NOT NULL AS cancel_requested, j.progress::text AS progress, j.result::text AS result,
    j.last_error, j.unique_key, coalesce(j.idempotency_key, j.id::text) AS idempotency_key, j.traceparent, j.schedule,
    j.slot_at, j.created_at, j.updated_at, j.finished_at"""

_SECONDS = "* interval '1 second'"

# Every way out of `processing` clears what only an attempt in progress has.
_LET_GO = """reserved_by = NULL, reserved_at = NULL, heartbeat_at = NULL, lease_expires_at = NULL,
    lease_granted_seconds = NULL, attempt_token = NULL, cancel_requested_at = NULL, updated_at = fencepost_now()"""

# What the history keeps of an attempt must be read before it is cleared, under the row's lock.
_ATTEMPT = """j.id, j.attempt_token, j.fence, j.attempts, j.reserved_by, j.reserved_at, j.heartbeat_at,
    j.lease_granted_seconds, j.progress"""

_HISTORY = """INSERT INTO job_attempts (job_id, fence, number, worker_id, claimed_at, last_heartbeat_at, lease_seconds,
        ended_at, progress, status_after, available_after, outcome, error_type, error_message, token_sha256,
        ending_sha256)
    SELECT h.id, h.fence, h.attempts, h.reserved_by, h.reserved_at, h.heartbeat_at, h.lease_granted_seconds,
        fencepost_now(), h.progress, m.status, CASE WHEN m.status = 'queued' THEN m.available_at END"""

_PREVIOUS_ATTEMPT = """CASE WHEN j.fence > 1 THEN (
        SELECT json_build_object('outcome', a.outcome, 'error_type', a.error_type, 'error_message', a.error_message,
            'progress', a.progress, 'age_seconds', extract(epoch FROM fencepost_now() - a.ended_at)::float8)::text
        FROM job_attempts a WHERE a.job_id = j.id ORDER BY a.fence DESC LIMIT 1) END AS previous_attempt"""

_TOKEN_SHA = "sha256(uuid_send(h.attempt_token))"


# --- intake ----------------------------------------------------------------------------------------------------------

NOW = "SELECT fencepost_now() AS now"

ENQUEUE = f"""
WITH input AS MATERIALIZED (
    SELECT * FROM unnest(
        %(ids)s::uuid[], %(queues)s::text[], %(kinds)s::text[], %(payloads)s::text[], %(priorities)s::smallint[],
        %(available_ats)s::timestamptz[], %(delays)s::float8[], %(max_attempts)s::int[], %(max_reclaims)s::int[],
        %(recovery_policies)s::text[], %(leases)s::float8[], %(max_runs)s::float8[], %(bases)s::float8[],
        %(caps)s::float8[], %(unique_keys)s::text[], %(idempotency_keys)s::text[], %(digests)s::bytea[],
        %(traceparents)s::text[], %(schedules)s::text[], %(slots)s::timestamptz[]
    ) WITH ORDINALITY AS i(
        id, queue, kind, payload, priority, available_at, delay, max_attempts, max_reclaims, recovery_policy, lease,
        max_run, base, cap, unique_key, idempotency_key, digest, traceparent, schedule, slot_at, n)
), new_queues AS (
    INSERT INTO queues (name)
    SELECT DISTINCT i.queue FROM input i WHERE NOT EXISTS (SELECT FROM queues q WHERE q.name = i.queue) ORDER BY 1
    ON CONFLICT DO NOTHING
)
INSERT INTO jobs AS j (
    id, queue, kind, payload, priority, available_at, max_attempts, max_reclaims, recovery_policy, lease_seconds,
    max_run_seconds, backoff_base_seconds, backoff_cap_seconds, unique_key, idempotency_key, content_sha256,
    traceparent, schedule, slot_at)
SELECT i.id, i.queue, coalesce(i.kind, i.queue), i.payload::json, i.priority,
    greatest(fencepost_now(), coalesce(i.available_at, fencepost_now() + coalesce(i.delay, 0) {_SECONDS})),
    coalesce(i.max_attempts, q.max_attempts, {DEFAULT_MAX_ATTEMPTS}),
    coalesce(i.max_reclaims, q.max_reclaims, {DEFAULT_MAX_RECLAIMS}),
    coalesce(i.recovery_policy, q.recovery_policy, 'auto'), i.lease, i.max_run, i.base, i.cap, i.unique_key,
    i.idempotency_key, i.digest, i.traceparent, i.schedule, i.slot_at
FROM input i LEFT JOIN queues q ON q.name = i.queue
ORDER BY i.n
ON CONFLICT DO NOTHING
RETURNING j.id, j.queue, j.max_attempts, j.recovery_policy, j.max_reclaims, j.available_at, j.created_at,
    j.updated_at, j.available_at <= fencepost_now() AS due,
    extract(epoch FROM j.available_at - fencepost_now())::float8 AS wait
"""

HOLDERS = f"""
SELECT i.n, h.* FROM unnest(%(queues)s::text[], %(unique_keys)s::text[], %(idempotency_keys)s::text[])
    WITH ORDINALITY AS i(queue, unique_key, idempotency_key, n)
CROSS JOIN LATERAL (
    (SELECT 'idempotency' AS held_by, j.content_sha256, {JOB} FROM jobs j
     WHERE j.queue = i.queue AND j.idempotency_key = i.idempotency_key)
    UNION ALL
    (SELECT 'unique', j.content_sha256, {JOB} FROM jobs j
     WHERE j.queue = i.queue AND j.unique_key = i.unique_key AND j.unique_key IS NOT NULL
        AND j.status IN ('queued', 'processing', 'manual_review'))
) h
"""

HOLDER_OF_KEY = """
SELECT k.id, k.queue, k.unique_key FROM jobs j JOIN jobs k ON k.queue = j.queue AND k.unique_key = j.unique_key
WHERE j.id = %(id)s AND k.id <> j.id AND k.unique_key IS NOT NULL
    AND k.status IN ('queued', 'processing', 'manual_review')
"""

GET = f"""
SELECT {JOB}, l.result::text AS late_result, l.received_at AS late_received_at, l.worker_id AS late_worker_id,
    l.fence AS late_fence
FROM jobs j LEFT JOIN late_results l
    ON l.job_id = j.id AND l.fence = j.fence AND j.status IN ('queued', 'failed', 'manual_review')
    AND l.received_at > fencepost_now() - {LATE_RESULT_SECONDS} {_SECONDS}
WHERE j.id = %(id)s
"""

ATTEMPTS = """
SELECT * FROM (
    SELECT a.number, a.fence, a.worker_id, a.claimed_at, a.last_heartbeat_at, a.ended_at, a.outcome, a.error_type,
        a.error_message, a.progress::text AS progress
    FROM job_attempts a WHERE a.job_id = %(id)s
    UNION ALL
    SELECT j.attempts, j.fence, j.done_by, j.done_claimed_at, j.done_heartbeat_at, j.finished_at, 'done', NULL, NULL,
        j.progress::text
    FROM jobs j WHERE j.id = %(id)s AND j.done_token_sha256 IS NOT NULL
) h
WHERE h.fence > %(after)s ORDER BY h.fence LIMIT %(limit)s
"""

EXISTS = "SELECT id FROM jobs WHERE id = %(id)s"


PAGE_BYTES = 4 * 1024 * 1024
"""A page ends early past so many bytes of payloads and results as stored: 500 of 256 KiB would be 128 MiB at once."""


def search(filters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The list of jobs, downward by (created_at, id): the only statement that is built. Values stay parameters.

    `found` is how many rows matched up to the limit; more than there are rows when the page ended early.
    """
    conditions = ["true"]
    columns = {"queue": "queue", "kind": "kind", "worker_id": "reserved_by", "unique_key": "unique_key"}
    conditions += [f"j.{column} = %({name})s" for name, column in columns.items() if filters.get(name) is not None]
    if filters.get("status"):
        conditions.append("j.status = ANY(%(status)s::text[])")
    if filters.get("created_after") is not None:
        conditions.append("j.created_at > %(created_after)s::timestamptz")
    if filters.get("created_before") is not None:
        conditions.append("j.created_at < %(created_before)s::timestamptz")
    if filters.get("before_at") is not None:
        conditions.append("(j.created_at, j.id) < (%(before_at)s::timestamptz, %(before_id)s::uuid)")
    return (
        f"""
WITH page AS (
    SELECT j.id, j.created_at, pg_column_size(j.payload) + coalesce(pg_column_size(j.result), 0) AS bytes
    FROM jobs j WHERE {" AND ".join(conditions)} ORDER BY j.created_at DESC, j.id DESC LIMIT %(limit)s
), measured AS (
    SELECT id, count(*) OVER () AS found, sum(bytes) OVER (ORDER BY created_at DESC, id DESC) - bytes AS before
    FROM page
)
SELECT {JOB}, m.found FROM measured m JOIN jobs j ON j.id = m.id
WHERE m.before < {PAGE_BYTES} ORDER BY j.created_at DESC, j.id DESC
""",
        filters,
    )


# --- claim -----------------------------------------------------------------------------------------------------------

# HAZARD. `WHERE id IN (SELECT … LIMIT 1 FOR UPDATE SKIP LOCKED)` claimed 10 rows instead of 1 under another plan: the
# subquery may run again for every row. Here the rows are picked once, in a materialised CTE, into one array; the
# UPDATE takes exactly that array, and RETURNING alone says what was claimed. One lateral look per (queue, priority)
# keeps each on its index: 100 000 jobs of a higher priority that are not due yet are never walked. The outer LIMIT
# pulls lazily, so only what is returned is locked. Row k of the array gets token, worker and lease number k.
# A queue with `max_processing` is left out here and reported as `limited`: it goes by LIMITED and a statement each.
# HAZARD. The guard of the UPDATE reads `(SELECT 'queued')`, not the bare constant: with that the partial index of
# queued jobs can serve it, and while statistics are stale the planner walks all of it beside `id` (300 000 queued jobs,
# never analysed: 1 900 pages and 20 ms for one job; now 96 and 1 ms). `tests/reliability/test_plans.py` keeps it so.
CLAIM = f"""
WITH pair AS MATERIALIZED (
    SELECT p.queue, p.priority, p.n, q.max_processing IS NOT NULL AND NOT %(locked)s AS limited
    FROM unnest(%(queues)s::text[], %(priorities)s::smallint[]) WITH ORDINALITY AS p(queue, priority, n)
    LEFT JOIN queues q ON q.name = p.queue
    WHERE q.paused IS NOT TRUE
    ORDER BY p.n
), picked AS MATERIALIZED (
    SELECT due.id, due.available_at, pair.n
    FROM pair CROSS JOIN LATERAL (
        SELECT j.id, j.available_at FROM jobs j
        WHERE j.status = 'queued' AND j.queue = pair.queue AND j.priority = pair.priority
            AND j.available_at <= (SELECT fencepost_now())
        ORDER BY j.available_at, j.id
        LIMIT %(wanted)s
        FOR UPDATE SKIP LOCKED
    ) due
    WHERE NOT (SELECT coalesce(bool_or(limited), false) FROM pair)
    LIMIT %(wanted)s
), dealt AS MATERIALIZED (
    SELECT array_agg(id ORDER BY n, available_at, id) AS ids FROM picked
), claimed AS (
    UPDATE jobs j SET
        status = 'processing',
        attempts = j.attempts + 1,
        fence = greatest(j.fence + 1, (SELECT epoch::bigint << 40 FROM fence_epoch)),
        attempt_token = (%(tokens)s::uuid[])[array_position((SELECT ids FROM dealt), j.id)],
        reserved_by = (%(workers)s::text[])[array_position((SELECT ids FROM dealt), j.id)],
        reserved_at = fencepost_now(),
        heartbeat_at = NULL,
        progress = NULL,
        lease_granted_seconds = coalesce(
            (%(leases)s::float8[])[array_position((SELECT ids FROM dealt), j.id)], j.lease_seconds,
            (SELECT q.lease_seconds FROM queues q WHERE q.name = j.queue), {DEFAULT_LEASE_SECONDS}),
        lease_expires_at = fencepost_now() + least(j.max_run_seconds, coalesce(
            (%(leases)s::float8[])[array_position((SELECT ids FROM dealt), j.id)], j.lease_seconds,
            (SELECT q.lease_seconds FROM queues q WHERE q.name = j.queue), {DEFAULT_LEASE_SECONDS})) {_SECONDS},
        updated_at = fencepost_now()
    WHERE j.id = ANY((SELECT ids FROM dealt)::uuid[]) AND j.status = (SELECT 'queued')
    RETURNING {JOB}, j.attempt_token, array_position((SELECT ids FROM dealt), j.id) AS place,
        j.reserved_at + j.max_run_seconds {_SECONDS} AS run_deadline_at,
        {_PREVIOUS_ATTEMPT}
)
SELECT (SELECT coalesce(bool_or(limited), false) FROM pair) AS limited, fencepost_now() AS server_time, c.*
FROM (SELECT) once LEFT JOIN claimed c ON true ORDER BY c.place
"""

# The queue's row is the lock; the count must be a statement of its own, for one statement would count on the
# snapshot from before the wait.
LOCK_LIMITED = """
SELECT name, max_processing FROM queues WHERE name = ANY(%(queues)s::text[]) AND max_processing IS NOT NULL
ORDER BY name FOR UPDATE
"""

COUNT_PROCESSING = """
SELECT queue, count(*)::int AS processing FROM jobs
WHERE status = 'processing' AND queue = ANY(%(queues)s::text[]) GROUP BY queue
"""

CLAIM_REQUEST = """
SELECT content_sha256, job_ids, fences FROM claim_requests
WHERE key_id = %(key_id)s AND worker_id = %(worker_id)s AND request_id = %(request_id)s
"""

KEEP_CLAIM_REQUEST = """
INSERT INTO claim_requests (key_id, worker_id, request_id, content_sha256, job_ids, fences, created_at)
VALUES (%(key_id)s, %(worker_id)s, %(request_id)s, %(digest)s, %(ids)s::uuid[], %(fences)s::bigint[], fencepost_now())
"""

REPLAY_CLAIM = f"""
SELECT {JOB}, j.attempt_token, j.reserved_at + j.max_run_seconds {_SECONDS} AS run_deadline_at,
    {_PREVIOUS_ATTEMPT}
FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[]) WITH ORDINALITY AS i(id, fence, n)
JOIN jobs j ON j.id = i.id AND j.fence = i.fence
WHERE j.attempt_token IS NOT NULL AND j.lease_expires_at > fencepost_now()
ORDER BY i.n
"""

# --- the worker's calls on its attempt -------------------------------------------------------------------------------

HEARTBEAT = f"""
UPDATE jobs j SET
    heartbeat_at = fencepost_now(),
    lease_expires_at = greatest(j.lease_expires_at, least(
        fencepost_now() + greatest(i.lease, CASE WHEN i.as_granted THEN j.lease_granted_seconds END) {_SECONDS},
        j.reserved_at + j.max_run_seconds {_SECONDS})),
    progress = coalesce(i.progress::json, j.progress),
    updated_at = fencepost_now()
FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(workers)s::text[], %(leases)s::float8[],
    %(as_granted)s::boolean[], %(progress)s::text[]) AS i(id, token, worker, lease, as_granted, progress)
WHERE j.id = i.id AND j.attempt_token = i.token AND j.reserved_by = i.worker
RETURNING j.id, j.attempt_token, j.reserved_by, j.fence, j.lease_expires_at,
    j.cancel_requested_at IS NOT NULL AS cancel_requested, fencepost_now() AS server_time,
    j.reserved_at + j.max_run_seconds {_SECONDS} AS run_deadline_at,
    coalesce((SELECT q.paused FROM queues q WHERE q.name = j.queue), false) AS queue_paused
"""

COMPLETE = f"""
UPDATE jobs j SET
    status = 'done',
    result = i.result::json,
    done_by = j.reserved_by,
    done_claimed_at = j.reserved_at,
    done_heartbeat_at = j.heartbeat_at,
    done_token_sha256 = i.token_sha256,
    done_sha256 = i.digest,
    release_count = 0,
    last_error = NULL,
    finished_at = fencepost_now(),
    {_LET_GO}
FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(token_digests)s::bytea[], %(digests)s::bytea[], %(results)s::text[])
    AS i(id, token, token_sha256, digest, result)
WHERE j.id = i.id AND j.attempt_token = i.token
RETURNING j.id, i.token, j.queue, j.status, j.fence, NULL::timestamptz AS available_at,
    fencepost_now() AS server_time,
    coalesce((SELECT q.max_processing IS NOT NULL FROM queues q WHERE q.name = j.queue), false) AS limited
"""

# The exponent is bounded before the power is taken: 2^40 times any base is beyond every cap.
_BACK_OFF = f"""least(
        coalesce(h.backoff_cap_seconds, q.backoff_cap_seconds, 3600.0),
        coalesce(h.backoff_base_seconds, q.backoff_base_seconds, 5.0) * power(2.0::float8, least(h.attempts - 1, 40))
    ) * h.jitter {_SECONDS}"""

FAIL = f"""
WITH held AS MATERIALIZED (
    SELECT {_ATTEMPT}, j.queue, j.max_attempts, j.backoff_base_seconds, j.backoff_cap_seconds, j.cancel_requested_at,
        i.error_type, i.error_message, i.retryable, i.delay, i.jitter, i.digest
    FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(digests)s::bytea[], %(error_types)s::text[],
        %(error_messages)s::text[], %(retryables)s::boolean[], %(delays)s::float8[], %(jitters)s::float8[])
        AS i(id, token, digest, error_type, error_message, retryable, delay, jitter)
    JOIN jobs j ON j.id = i.id AND j.attempt_token = i.token
    FOR UPDATE OF j
), fate AS (
    SELECT h.*, CASE
            WHEN h.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN h.retryable AND h.attempts < h.max_attempts THEN 'queued'
            ELSE 'failed' END AS status,
        fencepost_now() + CASE WHEN h.delay IS NOT NULL THEN h.delay {_SECONDS} ELSE {_BACK_OFF} END AS retry_at,
        coalesce(q.max_processing IS NOT NULL, false) AS limited
    FROM held h LEFT JOIN queues q ON q.name = h.queue
), moved AS (
    UPDATE jobs j SET
        status = f.status,
        available_at = CASE WHEN f.status = 'queued' THEN f.retry_at ELSE j.available_at END,
        finished_at = CASE WHEN f.status <> 'queued' THEN fencepost_now() END,
        last_error = coalesce(f.error_message, f.error_type, 'failed without a message'),
        release_count = 0,
        {_LET_GO}
    FROM fate f WHERE j.id = f.id AND j.attempt_token = f.attempt_token
    RETURNING j.id, f.attempt_token AS token, j.queue, j.status, j.fence, j.available_at, f.limited
), history AS (
    {_HISTORY}, 'failed', h.error_type, h.error_message, {_TOKEN_SHA}, h.digest
    FROM held h JOIN moved m ON m.id = h.id
)
SELECT id, token, queue, status, fence, CASE WHEN status = 'queued' THEN available_at END AS available_at,
    fencepost_now() AS server_time, status = 'queued' AND available_at <= fencepost_now() AS due,
    extract(epoch FROM available_at - fencepost_now())::float8 AS wait, limited
FROM moved
"""

RELEASE = f"""
WITH held AS MATERIALIZED (
    SELECT {_ATTEMPT}, j.queue, j.release_count, j.max_attempts, j.cancel_requested_at, i.reason, i.delay, i.digest
    FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(digests)s::bytea[], %(error_messages)s::text[],
        %(delays)s::float8[]) AS i(id, token, digest, reason, delay)
    JOIN jobs j ON j.id = i.id AND j.attempt_token = i.token
    FOR UPDATE OF j
), fate AS (
    SELECT h.*, h.release_count >= {FREE_RELEASES} AS counts, CASE
            WHEN h.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN h.release_count >= {FREE_RELEASES} AND h.attempts >= h.max_attempts THEN 'failed'
            ELSE 'queued' END AS status
    FROM held h
), moved AS (
    UPDATE jobs j SET
        status = f.status,
        attempts = CASE WHEN f.counts THEN j.attempts ELSE greatest(j.attempts - 1, 0) END,
        release_count = j.release_count + 1,
        available_at = CASE WHEN f.status = 'queued'
            THEN fencepost_now() + coalesce(f.delay, 0) {_SECONDS} ELSE j.available_at END,
        finished_at = CASE WHEN f.status <> 'queued' THEN fencepost_now() END,
        last_error = CASE WHEN f.status = 'failed' THEN 'released too often' ELSE coalesce(f.reason, j.last_error) END,
        {_LET_GO}
    FROM fate f WHERE j.id = f.id AND j.attempt_token = f.attempt_token
    RETURNING j.id, f.attempt_token AS token, j.queue, j.status, j.fence, j.available_at
), history AS (
    {_HISTORY}, 'released', NULL, h.reason, {_TOKEN_SHA}, h.digest
    FROM held h JOIN moved m ON m.id = h.id
)
SELECT id, token, queue, status, fence, CASE WHEN status = 'queued' THEN available_at END AS available_at,
    fencepost_now() AS server_time, status = 'queued' AND available_at <= fencepost_now() AS due,
    extract(epoch FROM available_at - fencepost_now())::float8 AS wait,
    coalesce((SELECT q.max_processing IS NOT NULL FROM queues q WHERE q.name = queue), false) AS limited
FROM moved
"""

# The service's own give-back: the poller vanished before it could be answered. Neither count moves.
GIVE_BACK = f"""
WITH held AS MATERIALIZED (
    SELECT {_ATTEMPT}, j.cancel_requested_at
    FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS i(id, token)
    JOIN jobs j ON j.id = i.id AND j.attempt_token = i.token
    FOR UPDATE OF j
), moved AS (
    UPDATE jobs j SET
        status = CASE WHEN h.cancel_requested_at IS NOT NULL THEN 'cancelled' ELSE 'queued' END,
        attempts = greatest(j.attempts - 1, 0),
        finished_at = CASE WHEN h.cancel_requested_at IS NOT NULL THEN fencepost_now() END,
        {_LET_GO}
    FROM held h WHERE j.id = h.id AND j.attempt_token = h.attempt_token
    RETURNING j.id, j.queue, j.status, j.fence, j.available_at
), history AS (
    {_HISTORY}, 'released', NULL, 'the claimer went away before it was answered', {_TOKEN_SHA}, NULL
    FROM held h JOIN moved m ON m.id = h.id
)
SELECT id, queue, status FROM moved
"""

# Why an ending or a heartbeat hit nothing: what the job is now, and how the attempt of that token ended.
FATE_OF_TOKEN = """
SELECT i.n, j.id, j.status, j.fence, j.attempt_token = i.token AS current, j.reserved_by,
    j.done_token_sha256 = i.token_sha256 AS completed, j.done_sha256, j.finished_at,
    a.fence AS attempt_fence, a.outcome, a.ended_at, a.ending_sha256, a.status_after, a.available_after
FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(token_digests)s::bytea[]) WITH ORDINALITY AS
    i(id, token, token_sha256, n)
LEFT JOIN jobs j ON j.id = i.id
LEFT JOIN job_attempts a ON a.job_id = i.id AND a.token_sha256 = i.token_sha256
ORDER BY i.n
"""

# A refused completion of the job's latest attempt, ended by reclaim: its result may still be what a person wants.
# Keyed by the fence: the next claim raises the job's fence, and what is kept here is then nobody's.
KEEP_LATE_RESULT = """
INSERT INTO late_results AS l (job_id, fence, worker_id, result, received_at)
SELECT j.id, a.fence, a.worker_id, %(result)s::json, fencepost_now()
FROM jobs j JOIN job_attempts a ON a.job_id = j.id AND a.fence = j.fence
WHERE j.id = %(id)s AND a.token_sha256 = %(token_sha256)s AND a.outcome = 'reclaimed'
    AND j.status IN ('queued', 'failed', 'manual_review')
ON CONFLICT (job_id) DO UPDATE SET fence = excluded.fence, worker_id = excluded.worker_id, result = excluded.result,
    received_at = excluded.received_at
WHERE l.fence < excluded.fence
"""

# --- reclaim ---------------------------------------------------------------------------------------------------------


def _expired(more: str) -> str:
    # Rows set aside and queues on hold are left out here, so that they never fill a batch. A cancel request passes a
    # hold.
    return f"""
SELECT j.id, j.queue, j.attempt_token, j.cancel_requested_at IS NOT NULL AS cancel_requested,
    q.reclaim_burst IS NOT NULL AS braked
FROM jobs j LEFT JOIN queues q ON q.name = j.queue
WHERE j.status = 'processing' AND j.lease_expires_at < fencepost_now(){more}
    AND NOT EXISTS (SELECT FROM reclaim_set_aside s WHERE s.job_id = j.id)
    AND (j.cancel_requested_at IS NOT NULL OR q.hold_until IS NULL OR q.hold_until <= fencepost_now())
ORDER BY j.lease_expires_at, j.id
LIMIT %(limit)s
FOR UPDATE OF j SKIP LOCKED
"""


EXPIRED = _expired("")
# The same past what could not be moved in this pass.
EXPIRED_PAST = _expired(" AND j.id <> ALL(%(past)s::uuid[])")

SET_ASIDE_DUE = """
SELECT j.id, j.queue, j.attempt_token, j.cancel_requested_at IS NOT NULL AS cancel_requested,
    q.reclaim_burst IS NOT NULL AS braked
FROM reclaim_set_aside s JOIN jobs j ON j.id = s.job_id LEFT JOIN queues q ON q.name = j.queue
WHERE s.next_try_at <= fencepost_now() AND j.status = 'processing' AND j.lease_expires_at < fencepost_now()
    AND (j.cancel_requested_at IS NOT NULL OR q.hold_until IS NULL OR q.hold_until <= fencepost_now())
ORDER BY s.next_try_at LIMIT %(limit)s FOR UPDATE OF j SKIP LOCKED
"""

RECLAIM = f"""
WITH held AS MATERIALIZED (
    SELECT {_ATTEMPT}, j.max_attempts, j.recovery_policy, j.reclaim_count, j.max_reclaims, j.cancel_requested_at,
        q.reclaim_delay_seconds,
        CASE WHEN %(even_unexpired)s THEN 'taken back after a restore of the database'
            WHEN j.lease_expires_at >= j.reserved_at + j.max_run_seconds {_SECONDS} THEN 'max run time exceeded'
            ELSE 'lease expired before completion' END AS error
    FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS i(id, token)
    JOIN jobs j ON j.id = i.id AND j.attempt_token = i.token
    LEFT JOIN queues q ON q.name = j.queue
    WHERE j.lease_expires_at < fencepost_now() OR %(even_unexpired)s
    FOR UPDATE OF j
), fate AS (
    SELECT h.*, CASE
            WHEN h.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN h.recovery_policy = 'manual' THEN 'manual_review'
            WHEN h.attempts >= h.max_attempts THEN 'failed'
            WHEN h.reclaim_count >= h.max_reclaims THEN 'manual_review'
            ELSE 'queued' END AS status
    FROM held h
), moved AS (
    UPDATE jobs j SET
        status = f.status,
        reclaim_count = j.reclaim_count + 1,
        release_count = 0,
        available_at = CASE WHEN f.status = 'queued'
            THEN fencepost_now() + coalesce(f.reclaim_delay_seconds, 0) {_SECONDS} ELSE j.available_at END,
        finished_at = CASE WHEN f.status IN ('failed', 'cancelled') THEN fencepost_now() END,
        last_error = f.error,
        {_LET_GO}
    FROM fate f WHERE j.id = f.id AND j.attempt_token = f.attempt_token
    RETURNING j.id, j.queue, j.status, j.fence, j.available_at
), history AS (
    {_HISTORY}, 'reclaimed', NULL, h.error, {_TOKEN_SHA}, NULL
    FROM held h JOIN moved m ON m.id = h.id
)
SELECT id, queue, status, status = 'queued' AND available_at <= fencepost_now() AS due FROM moved
"""

# Waits for whoever holds a row: none may be left over after a restore.
PROCESSING_IDS = """
SELECT id, queue, attempt_token FROM jobs WHERE status = 'processing' ORDER BY lease_expires_at, id LIMIT %(limit)s
FOR UPDATE
"""

SET_ASIDE = f"""
INSERT INTO reclaim_set_aside AS s (job_id, tries, error, set_aside_at, next_try_at)
VALUES (%(id)s, 1, %(error)s, fencepost_now(), fencepost_now() + interval '1 second')
ON CONFLICT (job_id) DO UPDATE SET tries = s.tries + 1, error = excluded.error,
    next_try_at = fencepost_now() + least(30, power(2.0::float8, least(s.tries, 10))) {_SECONDS}
"""

NO_LONGER_ASIDE = "DELETE FROM reclaim_set_aside WHERE job_id = %(id)s"

# One that ended by another way (a completion, a forced cancel) needs no more attention.
FORGET_SET_ASIDE = """
DELETE FROM reclaim_set_aside s WHERE NOT EXISTS (
    SELECT FROM jobs j WHERE j.id = s.job_id AND j.status = 'processing' AND j.lease_expires_at < fencepost_now())
"""

# The storm brake: window and count live in the queue's row and are raised under its lock.
LOCK_BRAKED = """
SELECT name, reclaim_burst, reclaim_hold_seconds,
    CASE WHEN burst_started_at IS NULL OR burst_started_at <= fencepost_now() - interval '1 minute'
        THEN 0 ELSE burst_count END AS used,
    burst_started_at IS NULL OR burst_started_at <= fencepost_now() - interval '1 minute' AS new_window,
    coalesce(hold_until > fencepost_now(), false) AS held
FROM queues WHERE name = ANY(%(queues)s::text[]) AND reclaim_burst IS NOT NULL ORDER BY name FOR UPDATE
"""

COUNT_BURST = """
UPDATE queues SET burst_started_at = CASE WHEN %(new_window)s THEN fencepost_now() ELSE burst_started_at END,
    burst_count = %(used)s WHERE name = %(name)s
"""

HOLD = f"""
UPDATE queues SET hold_since = fencepost_now(), hold_until = fencepost_now() + reclaim_hold_seconds {_SECONDS}
WHERE name = %(name)s
"""

# --- the passes of the loop, a state of the database -----------------------------------------------------------------

# One grace an outage: set only where none is set, by a statement that looks at what all instances last did.
GIVE_GRACE = f"""
UPDATE loops SET grace_until = fencepost_now() + %(grace)s {_SECONDS}
WHERE name = %(name)s AND grace_until IS NULL AND %(grace)s > 0
    AND last_pass_at < fencepost_now() - %(outage_after)s {_SECONDS}
    AND EXISTS (SELECT FROM jobs WHERE status = 'processing')
"""

# A statement of its own: the one above may have waited for another instance that gave the grace, and would still read
# the row as it was before.
GRACE = "SELECT grace_until, grace_until > fencepost_now() AS in_grace FROM loops WHERE name = %(name)s"

END_PASS = """
UPDATE loops SET last_pass_at = greatest(last_pass_at, fencepost_now()),
    grace_until = CASE WHEN %(reclaimed)s AND grace_until <= fencepost_now() THEN NULL ELSE grace_until END
WHERE name = %(name)s
RETURNING last_pass_at
"""

PASSES = """
SELECT name, last_pass_at, extract(epoch FROM fencepost_now() - last_pass_at)::float8 AS age,
    CASE WHEN grace_until > fencepost_now() THEN grace_until END AS grace_until
FROM loops ORDER BY name
"""

# --- the operator ----------------------------------------------------------------------------------------------------

# HAZARD. When a claim commits while `held` waits for its lock, `h.was` is of the new version of the row, but an UPDATE
# checks the constraints on the version of its snapshot first (still queued), and only then goes to the new one. So the
# SET of `asked` must make a good row of either.
CANCEL = f"""
WITH held AS MATERIALIZED (
    SELECT {_ATTEMPT}, j.status AS was FROM jobs j
    WHERE j.id = %(id)s AND (%(expected_fence)s::bigint IS NULL OR j.fence = %(expected_fence)s)
        AND j.status IN ('queued', 'manual_review', 'processing')
        AND (%(force)s OR j.cancel_requested_at IS NULL)
    FOR UPDATE
), asked AS (
    UPDATE jobs j SET
        cancel_requested_at = CASE WHEN j.status = 'processing' THEN fencepost_now() END,
        updated_at = fencepost_now()
    FROM held h WHERE j.id = h.id AND h.was = 'processing' AND NOT %(force)s
    RETURNING {JOB}, h.was
), moved AS (
    UPDATE jobs j SET
        status = 'cancelled',
        finished_at = fencepost_now(),
        last_error = CASE WHEN h.was = 'processing' THEN 'cancelled by force' ELSE j.last_error END,
        {_LET_GO}
    FROM held h WHERE j.id = h.id AND (h.was <> 'processing' OR %(force)s)
    RETURNING {JOB}, h.was
), history AS (
    {_HISTORY}, 'cancelled', NULL, %(reason)s::text, {_TOKEN_SHA}, NULL
    FROM held h JOIN moved m ON m.id = h.id WHERE h.was = 'processing'
)
SELECT * FROM asked UNION ALL SELECT * FROM moved
"""

REQUEUE = f"""
WITH held AS MATERIALIZED (
    SELECT {_ATTEMPT}, j.status AS was, j.result, j.done_by, j.done_claimed_at, j.done_heartbeat_at,
        j.done_token_sha256, j.done_sha256, j.finished_at
    FROM jobs j
    WHERE j.id = %(id)s AND (%(expected_fence)s::bigint IS NULL OR j.fence = %(expected_fence)s)
        AND (j.status IN ('failed', 'cancelled', 'manual_review')
            OR (j.status = 'done' AND %(from_done)s)
            OR (j.status = 'processing' AND %(force)s)
            OR (j.status = 'queued' AND j.available_at > fencepost_now()))
    FOR UPDATE
), moved AS (
    UPDATE jobs j SET
        status = 'queued',
        available_at = fencepost_now(),
        max_attempts = greatest(j.max_attempts, j.attempts + %(extra_attempts)s::int),
        max_reclaims = greatest(j.max_reclaims, j.reclaim_count + %(extra_attempts)s::int),
        release_count = 0,
        result = NULL, done_by = NULL, done_claimed_at = NULL, done_heartbeat_at = NULL, done_token_sha256 = NULL,
        done_sha256 = NULL, finished_at = NULL,
        {_LET_GO}
    FROM held h WHERE j.id = h.id
    RETURNING {JOB}, h.was
), history AS (
    {_HISTORY}, 'requeued', NULL, %(reason)s::text, {_TOKEN_SHA}, NULL
    FROM held h JOIN moved m ON m.id = h.id WHERE h.was = 'processing'
), queue_again AS (
    -- Its queue may have been deleted meanwhile; a queue comes into being with its first live job.
    INSERT INTO queues (name) SELECT m.queue FROM moved m ON CONFLICT DO NOTHING
), kept_result AS (
    INSERT INTO job_attempts AS a (job_id, fence, number, worker_id, claimed_at, last_heartbeat_at, ended_at, progress,
        status_after, outcome, token_sha256, ending_sha256, result)
    SELECT h.id, h.fence, h.attempts, coalesce(h.done_by, 'operator'), coalesce(h.done_claimed_at, h.finished_at),
        h.done_heartbeat_at, h.finished_at, h.progress, 'done', 'done', coalesce(h.done_token_sha256, ''::bytea),
        h.done_sha256, h.result
    FROM held h JOIN moved m ON m.id = h.id
    WHERE h.done_token_sha256 IS NOT NULL OR h.result IS NOT NULL
    ON CONFLICT (job_id, fence) DO UPDATE SET result = excluded.result
)
SELECT * FROM moved
"""

# A late result can be taken while it is of the job's latest attempt: the fence in late_results says so.
RESOLVE = f"""
WITH late AS (
    SELECT l.* FROM late_results l
    WHERE l.job_id = %(id)s AND l.received_at > fencepost_now() - {LATE_RESULT_SECONDS} {_SECONDS}
), held AS MATERIALIZED (
    SELECT j.id, j.status AS was FROM jobs j
    WHERE j.id = %(id)s AND (%(expected_fence)s::bigint IS NULL OR j.fence = %(expected_fence)s)
        AND ((NOT %(accept_late)s AND j.status = 'manual_review')
            OR (%(accept_late)s AND j.status IN ('manual_review', 'queued', 'failed')
                AND EXISTS (SELECT FROM late WHERE late.fence = j.fence)))
    FOR UPDATE
)
UPDATE jobs j SET
    status = %(outcome)s,
    result = CASE WHEN %(accept_late)s THEN (SELECT result FROM late) ELSE %(result)s::json END,
    last_error = CASE WHEN %(outcome)s = 'failed' THEN coalesce(%(note)s::text, 'resolved as failed') END,
    finished_at = fencepost_now(),
    {_LET_GO}
FROM held h WHERE j.id = h.id
RETURNING {JOB}, h.was
"""

DROP_LATE_RESULT = "DELETE FROM late_results WHERE job_id = %(id)s"

# --- waiting, pruning, measuring -------------------------------------------------------------------------------------

TAKES_WRITES = """
SELECT NOT pg_is_in_recovery() AND NOT current_setting('transaction_read_only')::boolean AS writable
"""

# One statement an instance over all awaited queues: what is due, and the next instant at which something will be.
NEXT_DUE = """
SELECT w.queue, extract(epoch FROM min(d.available_at) - fencepost_now())::float8 AS wait
FROM unnest(%(queues)s::text[]) AS w(queue)
LEFT JOIN queues q ON q.name = w.queue
CROSS JOIN generate_series(0, 9) AS p(priority)
CROSS JOIN LATERAL (
    SELECT j.available_at FROM jobs j
    WHERE j.status = 'queued' AND j.queue = w.queue AND j.priority = p.priority
    ORDER BY j.available_at, j.id LIMIT 1
) d
WHERE q.paused IS NOT TRUE
GROUP BY w.queue
"""

# The queues are found in the jobs themselves, for a queue may be deleted while its finished jobs stay.
PRUNE = f"""
WITH RECURSIVE name AS (
    (SELECT queue FROM jobs WHERE finished_at IS NOT NULL ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM jobs j WHERE j.finished_at IS NOT NULL AND j.queue > n.queue ORDER BY j.queue LIMIT 1)
    FROM name n WHERE n.queue IS NOT NULL
)
DELETE FROM jobs WHERE id = ANY(ARRAY(
    SELECT old.id FROM name n LEFT JOIN queues q ON q.name = n.queue
    CROSS JOIN (VALUES ('done'), ('failed'), ('cancelled')) AS s(status)
    CROSS JOIN LATERAL (
        SELECT j.id FROM jobs j
        WHERE j.queue = n.queue AND j.status = s.status AND j.finished_at IS NOT NULL
            AND j.finished_at < fencepost_now() - CASE WHEN s.status = 'done'
                THEN coalesce(q.retention_seconds, %(done)s)
                ELSE coalesce(q.failed_retention_seconds, %(failed)s) END {_SECONDS}
            AND (j.idempotency_key IS NULL OR j.created_at < fencepost_now() - interval '24 hours')
        ORDER BY j.finished_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    ) old
    LIMIT %(limit)s
))
"""

PRUNE_CLAIM_REQUESTS = "DELETE FROM claim_requests WHERE created_at < fencepost_now() - interval '24 hours'"

PRUNE_LATE_RESULTS = f"DELETE FROM late_results WHERE received_at < fencepost_now() - {LATE_RESULT_SECONDS} {_SECONDS}"

# --- the epoch of the fences -----------------------------------------------------------------------------------------

EPOCH_SEEN = """
SELECT e.epoch, e.system_identifier, e.timeline, s.system_identifier::text AS seen_identifier,
    CASE WHEN NOT pg_is_in_recovery()
        THEN ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END AS seen_timeline
FROM fence_epoch e CROSS JOIN pg_control_system() s
"""

EPOCH_MOVED = """
UPDATE fence_epoch SET epoch = epoch + CASE WHEN system_identifier IS NULL THEN 0 ELSE 1 END,
    system_identifier = %(seen_identifier)s, timeline = %(seen_timeline)s
WHERE (system_identifier, timeline) IS DISTINCT FROM (%(seen_identifier)s, %(seen_timeline)s)
RETURNING epoch
"""

EPOCH_BUMP = "UPDATE fence_epoch SET epoch = epoch + 1 RETURNING epoch"
