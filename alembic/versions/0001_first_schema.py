"""The first schema: jobs, attempts, queues, loops, keys, audit; the clock function.

Revision ID: 0001
Revises:
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# plpgsql and STABLE: an SQL function would be inlined, which distributed PostgreSQL refuses, and this one serves as
# an index condition all the same. `fencepost.now` is for tests; `serve` refuses to start on a left-over.
CLOCK = """
CREATE FUNCTION fencepost_now() RETURNS timestamptz LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
BEGIN
    RETURN coalesce(nullif(current_setting('fencepost.now', true), '')::timestamptz, now());
END
$$
"""

TABLES = """
CREATE TABLE api_keys (
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    secret_sha256 BYTEA NOT NULL,
    scopes TEXT[] NOT NULL,
    queues TEXT[] DEFAULT '{*}' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE,
    revoked_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_api_keys PRIMARY KEY (id)
);

CREATE TABLE audit (
    id UUID NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    reason TEXT,
    before JSON,
    after JSON,
    CONSTRAINT pk_audit PRIMARY KEY (id)
);

CREATE INDEX ix_audit_at ON audit (at, id);

CREATE INDEX ix_audit_target ON audit (target, at);

CREATE TABLE claim_requests (
    key_id TEXT NOT NULL,
    worker_id TEXT NOT NULL,
    request_id UUID NOT NULL,
    content_sha256 BYTEA NOT NULL,
    job_ids UUID[] NOT NULL,
    fences BIGINT[] NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_claim_requests PRIMARY KEY (key_id, worker_id, request_id)
);

CREATE INDEX ix_claim_requests_created_at ON claim_requests (created_at);

CREATE TABLE fence_epoch (
    only_row BOOLEAN DEFAULT true NOT NULL,
    epoch INTEGER NOT NULL,
    system_identifier TEXT,
    timeline INTEGER,
    CONSTRAINT pk_fence_epoch PRIMARY KEY (only_row),
    CONSTRAINT ck_fence_epoch_only_row CHECK (only_row),
    CONSTRAINT ck_fence_epoch_epoch CHECK (epoch >= 0 AND epoch < 8192)
);

CREATE TABLE jobs (
    id UUID NOT NULL,
    queue TEXT NOT NULL,
    kind TEXT NOT NULL,
    payload JSON NOT NULL,
    status TEXT DEFAULT 'queued' NOT NULL,
    priority SMALLINT DEFAULT '4' NOT NULL,
    attempts INTEGER DEFAULT '0' NOT NULL,
    max_attempts INTEGER NOT NULL,
    recovery_policy TEXT DEFAULT 'auto' NOT NULL,
    reclaim_count INTEGER DEFAULT '0' NOT NULL,
    max_reclaims INTEGER NOT NULL,
    release_count INTEGER DEFAULT '0' NOT NULL,
    lease_seconds DOUBLE PRECISION,
    max_run_seconds DOUBLE PRECISION,
    backoff_base_seconds DOUBLE PRECISION,
    backoff_cap_seconds DOUBLE PRECISION,
    available_at TIMESTAMP WITH TIME ZONE NOT NULL,
    fence BIGINT DEFAULT '0' NOT NULL,
    attempt_token UUID,
    reserved_by TEXT,
    reserved_at TIMESTAMP WITH TIME ZONE,
    heartbeat_at TIMESTAMP WITH TIME ZONE,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    lease_granted_seconds DOUBLE PRECISION,
    cancel_requested_at TIMESTAMP WITH TIME ZONE,
    progress JSON,
    result JSON,
    last_error TEXT,
    unique_key TEXT,
    idempotency_key TEXT,
    content_sha256 BYTEA,
    traceparent TEXT,
    schedule TEXT,
    slot_at TIMESTAMP WITH TIME ZONE,
    done_by TEXT,
    done_claimed_at TIMESTAMP WITH TIME ZONE,
    done_heartbeat_at TIMESTAMP WITH TIME ZONE,
    done_token_sha256 BYTEA,
    done_sha256 BYTEA,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    finished_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_jobs PRIMARY KEY (id),
    CONSTRAINT ck_jobs_status CHECK (status IN ('queued', 'processing', 'manual_review') OR status IN ('done', 'failed', 'cancelled')),
    CONSTRAINT ck_jobs_recovery_policy CHECK (recovery_policy IN ('auto', 'manual')),
    CONSTRAINT ck_jobs_priority CHECK (priority BETWEEN 0 AND 9),
    CONSTRAINT ck_jobs_counts CHECK (attempts >= 0 AND max_attempts >= 1 AND reclaim_count >= 0 AND max_reclaims >= 0 AND release_count >= 0),
    CONSTRAINT ck_jobs_fence CHECK (fence >= 0 AND fence < 9007199254740992),
    CONSTRAINT ck_jobs_lease_while_processing CHECK ((status = 'processing') = (attempt_token IS NOT NULL) AND (status = 'processing') = (lease_expires_at IS NOT NULL) AND (status = 'processing') = (lease_granted_seconds IS NOT NULL) AND (status = 'processing') = (reserved_by IS NOT NULL) AND (status = 'processing') = (reserved_at IS NOT NULL) AND (heartbeat_at IS NULL OR status = 'processing')),
    CONSTRAINT ck_jobs_finished_when_final CHECK ((status IN ('done', 'failed', 'cancelled')) = (finished_at IS NOT NULL)),
    CONSTRAINT ck_jobs_cancel_request_while_processing CHECK (cancel_requested_at IS NULL OR status = 'processing')
);

CREATE INDEX ix_jobs_claim ON jobs (queue, priority, available_at, id) WHERE status = 'queued';

CREATE INDEX ix_jobs_manual_review ON jobs (queue, created_at) WHERE status = 'manual_review';

CREATE INDEX ix_jobs_created ON jobs (created_at, id);

CREATE INDEX ix_jobs_finished ON jobs (queue, status, finished_at) WHERE finished_at IS NOT NULL;

CREATE INDEX ix_jobs_processing_timeout ON jobs (lease_expires_at, id) WHERE status = 'processing';

CREATE UNIQUE INDEX uq_jobs_idempotency_key ON jobs (queue, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE UNIQUE INDEX uq_jobs_live_unique_key ON jobs (queue, unique_key) WHERE unique_key IS NOT NULL AND status IN ('queued', 'processing', 'manual_review');

CREATE TABLE loops (
    name TEXT NOT NULL,
    last_pass_at TIMESTAMP WITH TIME ZONE,
    grace_until TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_loops PRIMARY KEY (name)
);

CREATE TABLE queues (
    name TEXT NOT NULL,
    paused BOOLEAN DEFAULT false NOT NULL,
    paused_by TEXT,
    paused_reason TEXT,
    paused_since TIMESTAMP WITH TIME ZONE,
    max_processing INTEGER,
    lease_seconds DOUBLE PRECISION,
    max_attempts INTEGER,
    max_reclaims INTEGER,
    backoff_base_seconds DOUBLE PRECISION,
    backoff_cap_seconds DOUBLE PRECISION,
    recovery_policy TEXT,
    reclaim_delay_seconds DOUBLE PRECISION,
    reclaim_burst INTEGER,
    reclaim_hold_seconds DOUBLE PRECISION DEFAULT 600 NOT NULL,
    burst_started_at TIMESTAMP WITH TIME ZONE,
    burst_count INTEGER DEFAULT '0' NOT NULL,
    hold_since TIMESTAMP WITH TIME ZONE,
    hold_until TIMESTAMP WITH TIME ZONE,
    owner TEXT,
    runbook_url TEXT,
    retention_seconds DOUBLE PRECISION,
    failed_retention_seconds DOUBLE PRECISION,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT fencepost_now() NOT NULL,
    CONSTRAINT pk_queues PRIMARY KEY (name),
    CONSTRAINT ck_queues_recovery_policy CHECK (recovery_policy IN ('auto', 'manual')),
    CONSTRAINT ck_queues_hold CHECK ((hold_since IS NULL) = (hold_until IS NULL))
);

CREATE TABLE reclaim_set_aside (
    job_id UUID NOT NULL,
    tries INTEGER NOT NULL,
    error TEXT NOT NULL,
    set_aside_at TIMESTAMP WITH TIME ZONE NOT NULL,
    next_try_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_reclaim_set_aside PRIMARY KEY (job_id)
);

CREATE TABLE schema_compatibility (
    revision TEXT NOT NULL,
    CONSTRAINT pk_schema_compatibility PRIMARY KEY (revision)
);

CREATE TABLE job_attempts (
    job_id UUID NOT NULL,
    fence BIGINT NOT NULL,
    number INTEGER NOT NULL,
    worker_id TEXT NOT NULL,
    claimed_at TIMESTAMP WITH TIME ZONE NOT NULL,
    last_heartbeat_at TIMESTAMP WITH TIME ZONE,
    lease_seconds DOUBLE PRECISION,
    ended_at TIMESTAMP WITH TIME ZONE NOT NULL,
    outcome TEXT NOT NULL,
    error_type TEXT,
    error_message TEXT,
    progress JSON,
    result JSON,
    token_sha256 BYTEA NOT NULL,
    ending_sha256 BYTEA,
    status_after TEXT NOT NULL,
    available_after TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_job_attempts PRIMARY KEY (job_id, fence),
    CONSTRAINT ck_job_attempts_outcome CHECK (outcome IN ('done', 'failed', 'reclaimed', 'released', 'cancelled', 'requeued')),
    CONSTRAINT fk_job_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE TABLE late_results (
    job_id UUID NOT NULL,
    fence BIGINT NOT NULL,
    worker_id TEXT NOT NULL,
    result JSON,
    received_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_late_results PRIMARY KEY (job_id),
    CONSTRAINT fk_late_results_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
"""

# Hot rows are updated three times in a life: room on the page keeps heartbeats near, and vacuum comes early.
TUNING = """
ALTER TABLE jobs SET (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
ALTER TABLE queues SET (fillfactor = 50);
ALTER TABLE loops SET (fillfactor = 50);
"""

ROWS = """
INSERT INTO loops (name) VALUES ('reclaim'), ('prune');
INSERT INTO fence_epoch (epoch) VALUES (0);
INSERT INTO schema_compatibility (revision) VALUES ('0001');
"""


def upgrade() -> None:
    op.execute(CLOCK)
    for statements in (TABLES, TUNING, ROWS):
        for statement in statements.split(";"):
            if statement.strip():
                op.execute(statement)


def downgrade() -> None:
    raise NotImplementedError("the first revision has nothing before it: drop the database instead")
