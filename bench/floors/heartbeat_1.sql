-- The article's heartbeat. Each client has 100 attempts of its own; the token of job n is n in hexadecimal.
\set n :client_id * 100 + random(1, 100)
UPDATE jobs
SET heartbeat_at = now(),
    lease_expires_at = now() + interval '30 seconds',
    updated_at = now()
WHERE id = :n
    AND status = 'processing'
    AND reserved_by = 'worker'
    AND attempt_token = lpad(to_hex(:n::bigint), 32, '0')::uuid;
