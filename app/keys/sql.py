"""Every statement on API keys."""

LIVE = """
SELECT id, name, secret_sha256, scopes, queues,
       CASE WHEN isfinite(expires_at)
            THEN extract(epoch FROM expires_at - fencepost_now())::double precision END AS expires_in
  FROM api_keys
 WHERE revoked_at IS NULL
   AND (expires_at IS NULL OR expires_at > fencepost_now())
"""

EVER = "SELECT EXISTS (SELECT FROM api_keys) AS ever"

INSTALL = """
INSERT INTO api_keys (id, name, secret_sha256, scopes, queues)
VALUES (%(id)s, %(name)s, %(secret_sha256)s, %(scopes)s, %(queues)s)
ON CONFLICT (id) DO UPDATE
   SET secret_sha256 = excluded.secret_sha256, scopes = excluded.scopes, queues = excluded.queues,
       expires_at = NULL, revoked_at = NULL
 WHERE (api_keys.secret_sha256, api_keys.scopes, api_keys.queues) IS DISTINCT FROM
       (excluded.secret_sha256, excluded.scopes, excluded.queues)
    OR api_keys.revoked_at IS NOT NULL
"""
