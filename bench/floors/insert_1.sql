-- A plain insert; :payload is 200 bytes of JSON, sent each time.
INSERT INTO jobs (queue, payload) VALUES ('bench', :payload::json);
