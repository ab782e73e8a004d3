-- 100 rows in one statement; :payloads is an array of 100 payloads of 200 bytes, sent each time.
INSERT INTO jobs (queue, payload)
SELECT 'bench', i.payload::json FROM unnest(:payloads::text[]) AS i (payload);
