-- The article's claim with LIMIT 100, then one complete of all of them by their tokens: two commits for 100 jobs.
-- With fewer than 100 left it divides by zero, so that a run on an empty table cannot pass as a fast one.
WITH target AS (
    SELECT id
    FROM jobs
    WHERE status = 'queued'
        AND available_at <= now()
    ORDER BY available_at, id
    FOR UPDATE SKIP LOCKED
    LIMIT 100
), claimed AS (
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
    RETURNING j.id, j.attempt_token
)
SELECT array_agg(id) AS ids, array_agg(attempt_token) AS tokens, 1 / (count(*) / 100) AS all_there
FROM claimed \gset
UPDATE jobs j
SET status = 'done',
    reserved_by = NULL,
    reserved_at = NULL,
    heartbeat_at = NULL,
    lease_expires_at = NULL,
    attempt_token = NULL,
    finished_at = now(),
    updated_at = now()
FROM unnest(:ids::bigint[], :tokens::uuid[]) AS i (id, token)
WHERE j.id = i.id
    AND j.status = 'processing'
    AND j.attempt_token = i.token;
