-- The article's claim of one job, then its complete: two statements, two commits. A transaction of pgbench is one job.
WITH target AS (
    SELECT id
    FROM jobs
    WHERE status = 'queued'
        AND available_at <= now()
    ORDER BY available_at, id
    FOR UPDATE SKIP LOCKED
    LIMIT 1
)
UPDATE jobs j
SET status = 'processing',
    reserved_by = 'worker-' || :client_id,
    reserved_at = now(),
    lease_expires_at = now() + interval '30 seconds',
    attempt_token = gen_random_uuid(),
    attempts = attempts + 1,
    updated_at = now()
FROM target
WHERE j.id = target.id
RETURNING j.id, j.attempt_token, j.lease_expires_at \gset
UPDATE jobs
SET status = 'done',
    reserved_by = NULL,
    reserved_at = NULL,
    heartbeat_at = NULL,
    lease_expires_at = NULL,
    attempt_token = NULL,
    finished_at = now(),
    updated_at = now()
WHERE id = :id
    AND status = 'processing'
    AND attempt_token = :attempt_token;
