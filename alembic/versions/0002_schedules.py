"""Schedules and their ledger; jobs of one slot are unique; the loop `schedule`; the service's own schedule `fencepost-prune`.

The two indexes on jobs are partial (no job had a schedule before), so each costs one scan of the table, in which
enqueues wait: about a second for each million of jobs.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE schedules (
    name TEXT NOT NULL,
    edition UUID NOT NULL,
    every_seconds INTEGER,
    cron TEXT,
    timezone TEXT,
    anchor_at TIMESTAMP WITH TIME ZONE,
    task TEXT,
    queue TEXT,
    kind TEXT,
    payload JSON,
    priority SMALLINT,
    max_attempts INTEGER,
    max_reclaims INTEGER,
    recovery_policy TEXT,
    lease_seconds DOUBLE PRECISION,
    max_run_seconds DOUBLE PRECISION,
    backoff_base_seconds DOUBLE PRECISION,
    backoff_cap_seconds DOUBLE PRECISION,
    unique_key TEXT,
    startup_grace_seconds DOUBLE PRECISION NOT NULL,
    overlap TEXT NOT NULL,
    enabled BOOLEAN NOT NULL,
    paused_by TEXT,
    paused_reason TEXT,
    paused_since TIMESTAMP WITH TIME ZONE,
    next_run_at TIMESTAMP WITH TIME ZONE,
    grace_for TIMESTAMP WITH TIME ZONE,
    last_fired_at TIMESTAMP WITH TIME ZONE,
    worst_lateness_seconds DOUBLE PRECISION,
    blocked_by UUID,
    skip_row UUID,
    error TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    CONSTRAINT pk_schedules PRIMARY KEY (name),
    CONSTRAINT ck_schedules_overlap CHECK (overlap IN ('skip', 'allow')),
    CONSTRAINT ck_schedules_one_cadence CHECK ((every_seconds IS NULL) <> (cron IS NULL)),
    CONSTRAINT ck_schedules_one_target CHECK ((task IS NULL) <> (queue IS NULL))
);

CREATE INDEX ix_schedules_due ON schedules (next_run_at) WHERE enabled;

CREATE TABLE schedule_slots (
    id UUID NOT NULL,
    schedule TEXT NOT NULL,
    slot_at TIMESTAMP WITH TIME ZONE NOT NULL,
    first_slot_at TIMESTAMP WITH TIME ZONE NOT NULL,
    manual BOOLEAN DEFAULT false NOT NULL,
    outcome TEXT NOT NULL,
    count BIGINT DEFAULT '1' NOT NULL,
    fired_at TIMESTAMP WITH TIME ZONE NOT NULL,
    lateness_seconds DOUBLE PRECISION NOT NULL,
    reason TEXT,
    job_id UUID,
    request_key TEXT,
    request_sha256 BYTEA,
    task TEXT,
    run_token UUID,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_schedule_slots PRIMARY KEY (id),
    CONSTRAINT ck_schedule_slots_outcome CHECK (outcome IN ('fired', 'collapsed', 'skipped_overlap', 'skipped_paused', 'failed', 'interrupted'))
);

CREATE INDEX ix_schedule_slots_ledger ON schedule_slots (schedule, fired_at, id);

CREATE INDEX ix_schedule_slots_running ON schedule_slots (schedule, lease_expires_at) WHERE task IS NOT NULL AND ended_at IS NULL;

CREATE UNIQUE INDEX uq_schedule_slots_request_key ON schedule_slots (schedule, request_key) WHERE request_key IS NOT NULL;

CREATE UNIQUE INDEX uq_schedule_slots_slot ON schedule_slots (schedule, slot_at) WHERE NOT manual;

CREATE INDEX ix_jobs_schedule_live ON jobs (schedule) WHERE schedule IS NOT NULL AND status IN ('queued', 'processing', 'manual_review');

CREATE UNIQUE INDEX uq_jobs_schedule_slot ON jobs (schedule, slot_at) WHERE schedule IS NOT NULL;
"""

TUNING = """
ALTER TABLE schedules SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE schedule_slots SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
"""

# A build of 0001 can serve on this schema: it never writes what is new here.
ROWS = """
INSERT INTO loops (name) VALUES ('schedule');
INSERT INTO schema_compatibility (revision) VALUES ('0002');
INSERT INTO schedules (name, edition, every_seconds, anchor_at, next_run_at, task, startup_grace_seconds, overlap, enabled)
SELECT 'fencepost-prune', gen_random_uuid(), 3600, t.first, t.first, 'prune', 60, 'skip', true
FROM (SELECT date_trunc('second', fencepost_now()) + interval '60 seconds' AS first) t;
"""


def upgrade() -> None:
    for statements in (TABLES, TUNING, ROWS):
        for statement in statements.split(";"):
            if statement.strip():
                op.execute(statement)


def downgrade() -> None:
    raise NotImplementedError("drop the tables schedules and schedule_slots by hand if they are to go")
