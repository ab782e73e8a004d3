"""Every statement on schedules and their ledger.

The time is `fencepost_now()`, ids are made by the application. Instants of a schedule's row are clamped on their way
out: psycopg cannot read `infinity` or the year 20000, and one such row would spoil the whole read.
"""

_SECONDS = "* interval '1 second'"


def _readable(column: str) -> str:
    return (
        f"CASE WHEN isfinite({column}) THEN least(greatest({column}, timestamptz '1970-01-01 00:00+00'), "
        f"timestamptz '9999-12-30 00:00+00') END"
    )


def _clamped(column: str) -> str:
    return f"least(greatest({column}, timestamptz '1970-01-01 00:00+00'), timestamptz '9999-12-30 00:00+00')"


CADENCE = ("every_seconds", "cron", "timezone")

JOB_FIELDS = (
    "queue",
    "kind",
    "payload",
    "priority",
    "max_attempts",
    "max_reclaims",
    "recovery_policy",
    "lease_seconds",
    "max_run_seconds",
    "backoff_base_seconds",
    "backoff_cap_seconds",
    "unique_key",
)

DEFINITION = (*CADENCE, "task", *JOB_FIELDS, "startup_grace_seconds", "overlap")
"""What a PUT sets, but for `enabled`."""

_DEFINED = ", ".join("s.payload::text AS payload" if name == "payload" else f"s.{name}" for name in DEFINITION)

# Unfinished runs hold back the next: of jobs in manual review only those that went there because of their policy.
_UNFINISHED_JOB = """j.schedule IS NOT NULL
    AND (j.status IN ('queued', 'processing') OR j.status = 'manual_review' AND j.recovery_policy = 'manual')"""

# What was noted in `blocked_by` still blocks: an unfinished run, or whoever holds the unique key of its jobs.
_BLOCKS = f"""s.enabled AND (s.overlap = 'skip' AND {_UNFINISHED_JOB}
    OR s.unique_key = j.unique_key AND s.queue = j.queue AND j.status IN ('queued', 'processing', 'manual_review'))"""

_UNFINISHED_TASK = """r.task IS NOT NULL AND r.ended_at IS NULL
    AND (r.lease_expires_at IS NULL OR r.lease_expires_at > fencepost_now())"""

_DAMAGED = "(s.next_run_at IS NULL OR s.next_run_at = '-infinity' OR s.next_run_at > '9999-12-30 00:00+00')"

# Also of a damaged row, whose time would never come.
_GRACE = "least(greatest(s.startup_grace_seconds, 0), 86400)"

SCHEDULE = f"""
    s.name, s.edition, {_DEFINED}, {_readable("s.anchor_at")} AS anchor_at, {_readable("s.next_run_at")} AS next_run_at,
    {_readable("s.grace_for")} AS grace_for, s.enabled, s.paused_by, s.paused_reason,
    {_readable("s.paused_since")} AS paused_since, {_readable("s.last_fired_at")} AS last_fired_at,
    s.worst_lateness_seconds, s.error, s.skip_row, {_clamped("s.created_at")} AS created_at,
    {_clamped("s.updated_at")} AS updated_at,
    s.enabled AND ({_DAMAGED} OR s.next_run_at < fencepost_now() - %(tolerance)s {_SECONDS}) AS overdue,
    (SELECT j.id FROM jobs j WHERE j.id = s.blocked_by AND {_BLOCKS}) AS blocked_by, fencepost_now() AS now"""

# --- reading ---------------------------------------------------------------------------------------------------------

GET = f"SELECT {SCHEDULE} FROM schedules s WHERE s.name = %(name)s"

LOCK = f"{GET} FOR UPDATE OF s"

LIST = f"SELECT {SCHEDULE} FROM schedules s WHERE s.name > %(after)s ORDER BY s.name LIMIT %(limit)s"

_SLOT = f"""l.id, {_clamped("l.slot_at")} AS slot_at, {_clamped("l.first_slot_at")} AS first_slot_at, l.manual,
    {_clamped("l.fired_at")} AS fired_at, l.lateness_seconds, l.outcome, l.count, l.reason, l.job_id, l.task,
    {_readable("l.ended_at")} AS ended_at"""

SLOTS = f"""
SELECT {_SLOT} FROM schedule_slots l
WHERE l.schedule = %(name)s
    AND (%(before_at)s::timestamptz IS NULL OR (l.fired_at, l.id) < (%(before_at)s::timestamptz, %(before_id)s::uuid))
ORDER BY l.fired_at DESC, l.id DESC LIMIT %(limit)s
"""

ANY_SLOT = "SELECT id FROM schedule_slots WHERE schedule = %(name)s LIMIT 1"

# Of each kind of trouble at most 20 are named, all up to 1 000 are counted.
TROUBLE = f"""
SELECT t.kind, t.name, t.since, t.job_id, t.error FROM (
    (SELECT 'overdue' AS kind, s.name, {_readable("s.next_run_at")} AS since, NULL::uuid AS job_id, NULL AS error
     FROM schedules s WHERE s.enabled AND s.next_run_at < fencepost_now() - %(tolerance)s {_SECONDS}
     ORDER BY s.next_run_at LIMIT 1000)
    UNION ALL
    (SELECT 'overdue', s.name, NULL, NULL, NULL FROM schedules s
     WHERE s.enabled AND {_DAMAGED} AND s.next_run_at IS DISTINCT FROM '-infinity' LIMIT 1000)
    UNION ALL
    (SELECT 'blocked', s.name, {_readable("s.last_fired_at")}, j.id, NULL
     FROM schedules s JOIN jobs j ON j.id = s.blocked_by WHERE {_BLOCKS} LIMIT 1000)
    UNION ALL
    (SELECT 'broken', s.name, NULL, NULL, left(s.error, 500) FROM schedules s WHERE s.error IS NOT NULL LIMIT 1000)
) t
"""

GAUGES = f"""
SELECT s.name, extract(epoch FROM s.last_fired_at)::float8 AS last_fired,
    CASE WHEN NOT s.enabled THEN 0
        WHEN {_DAMAGED} THEN extract(epoch FROM fencepost_now() - coalesce(s.last_fired_at, s.created_at))::float8
        ELSE greatest(0, extract(epoch FROM fencepost_now() - s.next_run_at))::float8 END AS late,
    s.worst_lateness_seconds AS worst
FROM schedules s ORDER BY s.name LIMIT %(limit)s
"""

# --- what an operator does -------------------------------------------------------------------------------------------

_NAMES = ", ".join(DEFINITION)
_VALUES = ", ".join("%(payload)s::json" if name == "payload" else f"%({name})s" for name in DEFINITION)

INSERT = f"""
INSERT INTO schedules (name, edition, {_NAMES}, anchor_at, next_run_at, enabled, paused_by, paused_since)
VALUES (%(name)s, %(edition)s, {_VALUES}, %(anchor_at)s, %(next_run_at)s, %(enabled)s,
    CASE WHEN NOT %(enabled)s THEN %(actor)s END, CASE WHEN NOT %(enabled)s THEN fencepost_now() END)
ON CONFLICT (name) DO NOTHING
RETURNING name
"""

REDEFINE = f"""
UPDATE schedules SET ({_NAMES}) = ROW ({_VALUES}), edition = %(edition)s, updated_at = fencepost_now()
WHERE name = %(name)s
"""

# A new cadence is a new grid: what was due on the old one is not owed any more.
RESET = """
UPDATE schedules SET anchor_at = %(anchor_at)s, next_run_at = %(next_run_at)s, grace_for = NULL, error = NULL,
    worst_lateness_seconds = NULL
WHERE name = %(name)s
"""

PAUSE = """
UPDATE schedules SET enabled = false, paused_by = %(actor)s, paused_reason = %(reason)s,
    paused_since = fencepost_now(), edition = %(edition)s, updated_at = fencepost_now()
WHERE name = %(name)s AND enabled
"""

RESUME = """
UPDATE schedules SET enabled = true, paused_by = NULL, paused_reason = NULL, paused_since = NULL,
    next_run_at = coalesce(%(next_run_at)s, next_run_at),
    grace_for = CASE WHEN %(next_run_at)s::timestamptz IS NULL THEN grace_for END, edition = %(edition)s,
    updated_at = fencepost_now()
WHERE name = %(name)s AND NOT enabled
"""

DELETE = "DELETE FROM schedules WHERE name = %(name)s"

# Keys of firings by hand are the old schedule's; one made anew under the name has none yet.
FORGET_KEYS = "UPDATE schedule_slots SET request_key = NULL WHERE schedule = %(name)s AND request_key IS NOT NULL"

FIRED_BY_HAND = "UPDATE schedules SET last_fired_at = fencepost_now(), skip_row = NULL WHERE name = %(name)s"

FIRED_WITH_KEY = f"""
SELECT {_SLOT}, l.request_sha256 FROM schedule_slots l WHERE l.schedule = %(name)s AND l.request_key = %(key)s
"""

RECORD_BY_HAND = f"""
INSERT INTO schedule_slots AS l (id, schedule, slot_at, first_slot_at, manual, outcome, fired_at, lateness_seconds,
    reason, job_id, task, request_key, request_sha256)
VALUES (%(id)s, %(name)s, fencepost_now(), fencepost_now(), true, 'fired', fencepost_now(), 0, %(reason)s, %(job_id)s,
    %(task)s, %(key)s, %(digest)s)
RETURNING {_SLOT}
"""

RECORD_PAUSED = """
INSERT INTO schedule_slots (id, schedule, slot_at, first_slot_at, outcome, count, fired_at, lateness_seconds, reason)
VALUES (%(id)s, %(name)s, %(slot)s, %(first)s, 'skipped_paused', %(count)s, fencepost_now(),
    extract(epoch FROM fencepost_now() - %(slot)s::timestamptz)::float8, %(reason)s)
ON CONFLICT (schedule, slot_at) WHERE NOT manual DO NOTHING
"""

# --- the tick --------------------------------------------------------------------------------------------------------

# Start-up is a state of the database: nobody passed for a while. Each overdue slot gets one grace, stored before
# anybody waits for it. The statement reads and decides in one, so that an instance that was frozen in between, or
# one that starts beside a live one, adopts nothing. Locked rows are passed over: whoever holds one must not keep the
# others waiting.
_ADOPTABLE = """s.enabled AND s.next_run_at <= fencepost_now() AND s.next_run_at > '-infinity' AND s.grace_for IS NULL
    AND (%(names)s::text[] IS NULL OR s.name = ANY(%(names)s::text[]))
    AND EXISTS (SELECT FROM loops l WHERE l.name = %(loop)s
        AND l.last_pass_at < fencepost_now() - %(outage_after)s * interval '1 second')"""

ADOPT = f"""
UPDATE schedules s SET grace_for = s.next_run_at,
    next_run_at = fencepost_now() + {_GRACE} {_SECONDS}
WHERE {_ADOPTABLE}
    AND s.name = ANY(ARRAY(SELECT s.name FROM schedules s WHERE {_ADOPTABLE} FOR UPDATE SKIP LOCKED))
RETURNING s.name
"""

ADOPTABLE = f"SELECT s.name, s.edition FROM schedules s WHERE {_ADOPTABLE}"

# Fail toward running: a time that can never come, or cannot be read, is soon.
_REPAIRABLE = f"""s.enabled AND {_DAMAGED}
    AND (%(names)s::text[] IS NULL OR s.name = ANY(%(names)s::text[]))"""

REPAIR = f"""
WITH damaged AS MATERIALIZED (
    SELECT s.name, s.edition FROM schedules s WHERE {_REPAIRABLE} FOR UPDATE SKIP LOCKED
), repaired AS (
    UPDATE schedules s SET next_run_at = fencepost_now() + {_GRACE} {_SECONDS}, grace_for = NULL,
        error = 'next_run_at was ' || coalesce(s.next_run_at::text, 'null') || '; set to now + grace'
    WHERE s.name = ANY(ARRAY(SELECT d.name FROM damaged d))
    RETURNING s.name
)
SELECT d.name, d.edition, r.name IS NOT NULL AS changed FROM damaged d LEFT JOIN repaired r ON r.name = d.name
"""

REPAIRABLE = f"SELECT s.name, s.edition FROM schedules s WHERE {_REPAIRABLE}"

INTERRUPT = """
UPDATE schedule_slots r SET outcome = 'interrupted', ended_at = fencepost_now(),
    reason = 'its process vanished: the lease of the run is over'
WHERE r.id = ANY(ARRAY(
    SELECT l.id FROM schedule_slots l
    WHERE l.task IS NOT NULL AND l.ended_at IS NULL AND l.lease_expires_at < fencepost_now()
    FOR UPDATE SKIP LOCKED))
RETURNING r.schedule AS name
"""

# What the ledger has already of the slots that seem due: of a row that could not be advanced, or was moved back.
_AS_READ = f"""{SCHEDULE}, s.next_run_at::text AS as_read,
    (SELECT {_readable("max(l.slot_at)")} FROM schedule_slots l WHERE l.schedule = s.name AND NOT l.manual
        AND l.slot_at BETWEEN coalesce(s.grace_for, s.next_run_at) AND fencepost_now()) AS done_until"""

_DUE = f"""
SELECT {_AS_READ} FROM schedules s
WHERE s.enabled AND s.next_run_at <= fencepost_now() AND s.edition <> ALL(%(without)s::uuid[])
ORDER BY s.next_run_at LIMIT %(limit)s"""

DUE = f"{_DUE} FOR UPDATE OF s SKIP LOCKED"

# For when the rows cannot even be locked: then nothing is advanced, and the unique slot alone keeps from doubling.
DUE_UNLOCKED = _DUE

# By itself, also one whose time could not be repaired.
ALONE_UNLOCKED = f"""
SELECT {_AS_READ} FROM schedules s
WHERE s.name = %(name)s AND s.enabled AND (s.next_run_at <= fencepost_now() OR {_DAMAGED})"""

ALONE = f"{ALONE_UNLOCKED} FOR UPDATE OF s SKIP LOCKED"

# After the locks and as a statement of its own: a run that was begun beside this transaction must be seen.
UNFINISHED = f"""
SELECT n.name, u.job_id, u.since FROM unnest(%(names)s::text[]) AS n(name)
CROSS JOIN LATERAL (
    (SELECT j.id AS job_id, {_clamped("coalesce(j.slot_at, j.created_at)")} AS since FROM jobs j
     WHERE j.schedule = n.name AND {_UNFINISHED_JOB} ORDER BY j.created_at LIMIT 1)
    UNION ALL
    (SELECT NULL, {_clamped("r.slot_at")} FROM schedule_slots r
     WHERE r.schedule = n.name AND {_UNFINISHED_TASK} LIMIT 1)
) u
"""

# Jobs of others that hold the unique key of a schedule's jobs.
KEY_HELD = f"""
SELECT i.name, j.id AS job_id, {_clamped("j.created_at")} AS since
FROM unnest(%(names)s::text[], %(queues)s::text[], %(keys)s::text[]) AS i(name, queue, key)
JOIN jobs j ON j.queue = i.queue AND j.unique_key = i.key AND j.unique_key IS NOT NULL
    AND j.status IN ('queued', 'processing', 'manual_review')
"""

EXTEND_SKIP = """
UPDATE schedule_slots l SET slot_at = i.slot, fired_at = fencepost_now(), count = l.count + i.more,
    lateness_seconds = extract(epoch FROM fencepost_now() - i.slot)::float8
FROM unnest(%(ids)s::uuid[], %(slots)s::timestamptz[], %(mores)s::bigint[]) AS i(id, slot, more)
WHERE l.id = i.id AND l.outcome = 'skipped_overlap'
    AND NOT EXISTS (SELECT FROM schedule_slots o WHERE o.schedule = l.schedule AND o.slot_at = i.slot AND NOT o.manual)
RETURNING l.id
"""

# The guard is the time as it was read. The row is locked, so it can only miss where something rewrote the row itself.
ADVANCE = """
UPDATE schedules s SET next_run_at = i.next, grace_for = NULL, error = NULL, skip_row = i.skip_row,
    blocked_by = i.blocked_by,
    last_fired_at = CASE WHEN i.fires THEN fencepost_now() ELSE s.last_fired_at END,
    worst_lateness_seconds = CASE WHEN i.fires
        THEN greatest(s.worst_lateness_seconds, extract(epoch FROM fencepost_now() - i.first)::float8)
        ELSE s.worst_lateness_seconds END
FROM unnest(%(names)s::text[], %(as_read)s::text[], %(nexts)s::timestamptz[], %(firsts)s::timestamptz[],
    %(fires)s::boolean[], %(skip_rows)s::uuid[], %(blocked_by)s::uuid[])
    AS i(name, as_read, next, first, fires, skip_row, blocked_by)
WHERE s.name = i.name AND s.enabled AND s.next_run_at IS NOT DISTINCT FROM i.as_read::timestamptz
RETURNING s.name
"""

# Unique (schedule, slot) decides: what is not returned was recorded before and is not run again. The job is asked
# too, for it may outlive its row of the ledger.
RECORD = f"""
WITH input AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(slots)s::timestamptz[], %(outcomes)s::text[],
        %(firsts)s::timestamptz[], %(counts)s::bigint[], %(reasons)s::text[], %(job_ids)s::uuid[], %(tasks)s::text[],
        %(run_tokens)s::uuid[], %(collapsed_ids)s::uuid[], %(collapsed_firsts)s::timestamptz[],
        %(collapsed_lasts)s::timestamptz[], %(collapsed)s::bigint[])
        AS i(id, schedule, slot_at, outcome, first_slot_at, count, reason, job_id, task, run_token, collapsed_id,
            collapsed_first, collapsed_last, collapsed)
), recorded AS (
    INSERT INTO schedule_slots AS l (id, schedule, slot_at, first_slot_at, outcome, count, fired_at, lateness_seconds,
        reason, job_id, task, run_token, lease_expires_at)
    SELECT i.id, i.schedule, i.slot_at, i.first_slot_at, i.outcome, i.count, fencepost_now(),
        extract(epoch FROM fencepost_now() - i.slot_at)::float8, i.reason, i.job_id, i.task, i.run_token,
        CASE WHEN i.task IS NOT NULL THEN fencepost_now() + %(lease)s {_SECONDS} END
    FROM input i
    WHERE NOT EXISTS (SELECT FROM jobs j WHERE j.schedule = i.schedule AND j.slot_at = i.slot_at)
    ORDER BY i.schedule
    ON CONFLICT (schedule, slot_at) WHERE NOT manual DO NOTHING
    RETURNING l.id, l.lateness_seconds
), earlier AS (
    INSERT INTO schedule_slots (id, schedule, slot_at, first_slot_at, outcome, count, fired_at, lateness_seconds,
        reason)
    SELECT i.collapsed_id, i.schedule, i.collapsed_last, i.collapsed_first, 'collapsed', i.collapsed, fencepost_now(),
        extract(epoch FROM fencepost_now() - i.collapsed_last)::float8, 'missed; the next row ran for them'
    FROM input i JOIN recorded r ON r.id = i.id
    WHERE i.collapsed > 0
    ORDER BY i.schedule
    ON CONFLICT (schedule, slot_at) WHERE NOT manual DO NOTHING
)
SELECT id, lateness_seconds FROM recorded
"""

HELD_KEY = """
UPDATE schedule_slots SET outcome = 'skipped_overlap', job_id = %(job_id)s, reason = 'a live job holds the unique key'
WHERE id = %(id)s
"""

MARK = """
UPDATE schedules SET error = %(error)s
WHERE name = %(name)s AND edition = %(edition)s AND error IS DISTINCT FROM %(error)s
"""

SOON = """
SELECT extract(epoch FROM min(next_run_at) - fencepost_now())::float8 AS seconds, fencepost_now() AS now
FROM schedules
WHERE enabled AND next_run_at > fencepost_now() AND next_run_at < fencepost_now() + interval '1 day'
"""

PATIENCE = "SELECT set_config('lock_timeout', %(wait)s, true), set_config('statement_timeout', %(most)s, true)"

# --- maintenance runs ------------------------------------------------------------------------------------------------

# Runs that somebody fired by hand; any instance takes them.
TAKE_RUNS = f"""
UPDATE schedule_slots l SET run_token = %(token)s, lease_expires_at = fencepost_now() + %(lease)s {_SECONDS}
WHERE l.id = ANY(ARRAY(
    SELECT r.id FROM schedule_slots r
    WHERE r.task IS NOT NULL AND r.ended_at IS NULL AND r.lease_expires_at IS NULL
    ORDER BY r.fired_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
RETURNING l.id, l.run_token, l.task
"""

RENEW_RUN = f"""
UPDATE schedule_slots SET lease_expires_at = fencepost_now() + %(lease)s {_SECONDS}
WHERE id = %(id)s AND run_token = %(token)s AND ended_at IS NULL
"""

END_RUN = """
UPDATE schedule_slots SET outcome = %(outcome)s, reason = coalesce(%(reason)s, reason), ended_at = fencepost_now()
WHERE id = %(id)s AND run_token = %(token)s AND ended_at IS NULL
"""

# --- retention of the ledger -----------------------------------------------------------------------------------------

LEDGER_NAMES = """
WITH RECURSIVE n(name) AS (
    (SELECT schedule FROM schedule_slots ORDER BY schedule LIMIT 1)
    UNION ALL
    SELECT (SELECT l.schedule FROM schedule_slots l WHERE l.schedule > n.name ORDER BY l.schedule LIMIT 1)
    FROM n WHERE n.name IS NOT NULL
)
SELECT name FROM n WHERE name IS NOT NULL
"""

PRUNE_LEDGER = f"""
WITH kept AS MATERIALIZED (
    SELECT (SELECT l.fired_at FROM schedule_slots l WHERE l.schedule = %(name)s
            ORDER BY l.fired_at DESC, l.id DESC OFFSET %(least)s LIMIT 1) AS least,
        (SELECT l.fired_at FROM schedule_slots l WHERE l.schedule = %(name)s
            ORDER BY l.fired_at DESC, l.id DESC OFFSET %(most)s LIMIT 1) AS most
)
DELETE FROM schedule_slots WHERE id = ANY(ARRAY(
    SELECT l.id FROM schedule_slots l, kept k
    WHERE l.schedule = %(name)s AND NOT (l.task IS NOT NULL AND l.ended_at IS NULL) AND k.least IS NOT NULL
        AND l.fired_at <= least(k.least, greatest(k.most, fencepost_now() - %(age)s {_SECONDS}))
        AND (l.request_key IS NULL OR l.fired_at < fencepost_now() - interval '24 hours')
    ORDER BY l.fired_at LIMIT %(limit)s))
"""
