-- Heartbeats of 100 attempts in one statement. Each client has 1000 of its own; the token of job n is n in hexadecimal.
\set base :client_id * 1000 + random(0, 9) * 100
UPDATE jobs j
SET heartbeat_at = now(),
    lease_expires_at = now() + interval '30 seconds',
    updated_at = now()
FROM (SELECT n AS id, lpad(to_hex(n), 32, '0')::uuid AS token
      FROM generate_series(:base::bigint + 1, :base::bigint + 100) AS g (n)) AS i
WHERE j.id = i.id
    AND j.status = 'processing'
    AND j.reserved_by = 'worker'
    AND j.attempt_token = i.token;
