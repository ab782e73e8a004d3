"""The schema, as Alembic compares it: tables, named CHECK and UNIQUE constraints, indexes.

The database forbids what must not be: the CHECKs of `jobs` tie columns to the status (token and lease exist
exactly while processing), partial unique indexes hold one live job per unique key. The tuning of hot tables
(fillfactor, autovacuum) and the function `fencepost_now()` stand in the migrations alone.
"""

from sqlalchemy import (
    ARRAY,
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)

REVISION = "0002"
"""The schema revision that this build was made for; `schema_compatibility` lists those the database serves."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

Instant = DateTime(timezone=True)
_now = text("fencepost_now()")

LIVE = "status IN ('queued', 'processing', 'manual_review')"
FINAL = "status IN ('done', 'failed', 'cancelled')"

jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("queue", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("payload", JSON, nullable=False),
    Column("status", Text, nullable=False, server_default="queued"),
    Column("priority", SmallInteger, nullable=False, server_default="4"),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("max_attempts", Integer, nullable=False),
    Column("recovery_policy", Text, nullable=False, server_default="auto"),
    Column("reclaim_count", Integer, nullable=False, server_default="0"),
    Column("max_reclaims", Integer, nullable=False),
    Column("release_count", Integer, nullable=False, server_default="0"),
    Column("lease_seconds", Double),
    Column("max_run_seconds", Double),
    Column("backoff_base_seconds", Double),
    Column("backoff_cap_seconds", Double),
    Column("available_at", Instant, nullable=False),
    Column("fence", BigInteger, nullable=False, server_default="0"),
    Column("attempt_token", Uuid),
    Column("reserved_by", Text),
    Column("reserved_at", Instant),
    Column("heartbeat_at", Instant),
    Column("lease_expires_at", Instant),
    Column("lease_granted_seconds", Double),
    Column("cancel_requested_at", Instant),
    Column("progress", JSON),
    Column("result", JSON),
    Column("last_error", Text),
    Column("unique_key", Text),
    Column("idempotency_key", Text),
    Column("content_sha256", LargeBinary),
    Column("traceparent", Text),
    Column("schedule", Text),
    Column("slot_at", Instant),
    # The attempt that completed the job; others go to job_attempts. Here, so that a completion is one write.
    Column("done_by", Text),
    Column("done_claimed_at", Instant),
    Column("done_heartbeat_at", Instant),
    Column("done_token_sha256", LargeBinary),
    Column("done_sha256", LargeBinary),
    Column("created_at", Instant, nullable=False, server_default=_now),
    Column("updated_at", Instant, nullable=False, server_default=_now),
    Column("finished_at", Instant),
    CheckConstraint(f"{LIVE} OR {FINAL}", name="status"),
    CheckConstraint("recovery_policy IN ('auto', 'manual')", name="recovery_policy"),
    CheckConstraint("priority BETWEEN 0 AND 9", name="priority"),
    CheckConstraint(
        "attempts >= 0 AND max_attempts >= 1 AND reclaim_count >= 0 AND max_reclaims >= 0 AND release_count >= 0",
        name="counts",
    ),
    CheckConstraint("fence >= 0 AND fence < 9007199254740992", name="fence"),
    CheckConstraint(
        "(status = 'processing') = (attempt_token IS NOT NULL)"
        " AND (status = 'processing') = (lease_expires_at IS NOT NULL)"
        " AND (status = 'processing') = (lease_granted_seconds IS NOT NULL)"
        " AND (status = 'processing') = (reserved_by IS NOT NULL)"
        " AND (status = 'processing') = (reserved_at IS NOT NULL)"
        " AND (heartbeat_at IS NULL OR status = 'processing')",
        name="lease_while_processing",
    ),
    CheckConstraint(f"({FINAL}) = (finished_at IS NOT NULL)", name="finished_when_final"),
    CheckConstraint("cancel_requested_at IS NULL OR status = 'processing'", name="cancel_request_while_processing"),
    Index(
        "ix_jobs_claim",
        "queue",
        "priority",
        "available_at",
        "id",
        postgresql_where=text("status = 'queued'"),
    ),
    Index("ix_jobs_processing_timeout", "lease_expires_at", "id", postgresql_where=text("status = 'processing'")),
    Index(
        "uq_jobs_live_unique_key",
        "queue",
        "unique_key",
        unique=True,
        postgresql_where=text(f"unique_key IS NOT NULL AND {LIVE}"),
    ),
    Index(
        "uq_jobs_idempotency_key",
        "queue",
        "idempotency_key",
        unique=True,
        postgresql_where=text("idempotency_key IS NOT NULL"),
    ),
    Index("ix_jobs_manual_review", "queue", "created_at", postgresql_where=text("status = 'manual_review'")),
    Index("ix_jobs_created", "created_at", "id"),
    Index(
        "ix_jobs_finished",
        "queue",
        "status",
        "finished_at",
        postgresql_where=text("finished_at IS NOT NULL"),
    ),
    # Of a run fired by hand `slot_at` is null, and it stands outside the grid.
    Index("uq_jobs_schedule_slot", "schedule", "slot_at", unique=True, postgresql_where=text("schedule IS NOT NULL")),
    Index("ix_jobs_schedule_live", "schedule", postgresql_where=text(f"schedule IS NOT NULL AND {LIVE}")),
)

job_attempts = Table(
    "job_attempts",
    metadata,
    Column("job_id", Uuid, ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("claimed_at", Instant, nullable=False),
    Column("last_heartbeat_at", Instant),
    Column("lease_seconds", Double),
    Column("ended_at", Instant, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("error_type", Text),
    Column("error_message", Text),
    Column("progress", JSON),
    Column("result", JSON),
    Column("token_sha256", LargeBinary, nullable=False),
    Column("ending_sha256", LargeBinary),
    Column("status_after", Text, nullable=False),
    Column("available_after", Instant),
    PrimaryKeyConstraint("job_id", "fence"),
    CheckConstraint(
        "outcome IN ('done', 'failed', 'reclaimed', 'released', 'cancelled', 'requeued')",
        name="outcome",
    ),
)

late_results = Table(
    "late_results",
    metadata,
    Column("job_id", Uuid, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("fence", BigInteger, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("result", JSON),
    Column("received_at", Instant, nullable=False),
)

claim_requests = Table(
    "claim_requests",
    metadata,
    Column("key_id", Text, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("request_id", Uuid, nullable=False),
    Column("content_sha256", LargeBinary, nullable=False),
    Column("job_ids", ARRAY(Uuid), nullable=False),
    Column("fences", ARRAY(BigInteger), nullable=False),
    Column("created_at", Instant, nullable=False),
    PrimaryKeyConstraint("key_id", "worker_id", "request_id"),
    Index("ix_claim_requests_created_at", "created_at"),
)

reclaim_set_aside = Table(
    "reclaim_set_aside",
    metadata,
    # No foreign key: the row that cannot be moved may be one that cannot even be locked.
    Column("job_id", Uuid, primary_key=True),
    Column("tries", Integer, nullable=False),
    Column("error", Text, nullable=False),
    Column("set_aside_at", Instant, nullable=False),
    Column("next_try_at", Instant, nullable=False),
)

queues = Table(
    "queues",
    metadata,
    Column("name", Text, primary_key=True),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("paused_by", Text),
    Column("paused_reason", Text),
    Column("paused_since", Instant),
    Column("max_processing", Integer),
    Column("lease_seconds", Double),
    Column("max_attempts", Integer),
    Column("max_reclaims", Integer),
    Column("backoff_base_seconds", Double),
    Column("backoff_cap_seconds", Double),
    Column("recovery_policy", Text),
    Column("reclaim_delay_seconds", Double),
    Column("reclaim_burst", Integer),
    Column("reclaim_hold_seconds", Double, nullable=False, server_default=text("600")),
    Column("burst_started_at", Instant),
    Column("burst_count", Integer, nullable=False, server_default="0"),
    Column("hold_since", Instant),
    Column("hold_until", Instant),
    Column("owner", Text),
    Column("runbook_url", Text),
    Column("retention_seconds", Double),
    Column("failed_retention_seconds", Double),
    Column("created_at", Instant, nullable=False, server_default=_now),
    Column("updated_at", Instant, nullable=False, server_default=_now),
    CheckConstraint("recovery_policy IN ('auto', 'manual')", name="recovery_policy"),
    CheckConstraint("(hold_since IS NULL) = (hold_until IS NULL)", name="hold"),
)

loops = Table(
    "loops",
    metadata,
    Column("name", Text, primary_key=True),
    Column("last_pass_at", Instant),
    Column("grace_until", Instant),
)

schedules = Table(
    "schedules",
    metadata,
    Column("name", Text, primary_key=True),
    Column("edition", Uuid, nullable=False),
    # Cadence
    Column("every_seconds", Integer),
    Column("cron", Text),
    Column("timezone", Text),
    Column("anchor_at", Instant),
    # Target
    Column("task", Text),
    Column("queue", Text),
    Column("kind", Text),
    Column("payload", JSON),
    Column("priority", SmallInteger),
    Column("max_attempts", Integer),
    Column("max_reclaims", Integer),
    Column("recovery_policy", Text),
    Column("lease_seconds", Double),
    Column("max_run_seconds", Double),
    Column("backoff_base_seconds", Double),
    Column("backoff_cap_seconds", Double),
    Column("unique_key", Text),
    # How it runs
    Column("startup_grace_seconds", Double, nullable=False),
    Column("overlap", Text, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("paused_by", Text),
    Column("paused_reason", Text),
    Column("paused_since", Instant),
    # State. `next_run_at` and `error` take anything: a row that was damaged must be readable, marked and repaired.
    Column("next_run_at", Instant),
    Column("grace_for", Instant),
    Column("last_fired_at", Instant),
    Column("worst_lateness_seconds", Double),
    Column("blocked_by", Uuid),
    Column("skip_row", Uuid),
    Column("error", Text),
    Column("created_at", Instant, nullable=False, server_default=_now),
    Column("updated_at", Instant, nullable=False, server_default=_now),
    CheckConstraint("overlap IN ('skip', 'allow')", name="overlap"),
    CheckConstraint("(every_seconds IS NULL) <> (cron IS NULL)", name="one_cadence"),
    CheckConstraint("(task IS NULL) <> (queue IS NULL)", name="one_target"),
    Index("ix_schedules_due", "next_run_at", postgresql_where=text("enabled")),
)

schedule_slots = Table(
    "schedule_slots",
    metadata,
    # The ledger. No foreign keys: it outlives its schedule and its jobs.
    Column("id", Uuid, primary_key=True),
    Column("schedule", Text, nullable=False),
    Column("slot_at", Instant, nullable=False),
    Column("first_slot_at", Instant, nullable=False),
    Column("manual", Boolean, nullable=False, server_default=text("false")),
    Column("outcome", Text, nullable=False),
    Column("count", BigInteger, nullable=False, server_default="1"),
    Column("fired_at", Instant, nullable=False),
    Column("lateness_seconds", Double, nullable=False),
    Column("reason", Text),
    Column("job_id", Uuid),
    # Of a fire that can be repeated
    Column("request_key", Text),
    Column("request_sha256", LargeBinary),
    # Of a maintenance run: under way while `ended_at` is null; without a lease it waits for somebody to take it.
    Column("task", Text),
    Column("run_token", Uuid),
    Column("lease_expires_at", Instant),
    Column("ended_at", Instant),
    CheckConstraint(
        "outcome IN ('fired', 'collapsed', 'skipped_overlap', 'skipped_paused', 'failed', 'interrupted')",
        name="outcome",
    ),
    Index("uq_schedule_slots_slot", "schedule", "slot_at", unique=True, postgresql_where=text("NOT manual")),
    Index(
        "uq_schedule_slots_request_key",
        "schedule",
        "request_key",
        unique=True,
        postgresql_where=text("request_key IS NOT NULL"),
    ),
    Index("ix_schedule_slots_ledger", "schedule", "fired_at", "id"),
    Index(
        "ix_schedule_slots_running",
        "schedule",
        "lease_expires_at",
        postgresql_where=text("task IS NOT NULL AND ended_at IS NULL"),
    ),
)

fence_epoch = Table(
    "fence_epoch",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=text("true")),
    Column("epoch", Integer, nullable=False),
    Column("system_identifier", Text),
    Column("timeline", Integer),
    CheckConstraint("only_row", name="only_row"),
    CheckConstraint("epoch >= 0 AND epoch < 8192", name="epoch"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("at", Instant, nullable=False, server_default=_now),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("reason", Text),
    Column("before", JSON),
    Column("after", JSON),
    Index("ix_audit_at", "at", "id"),
    Index("ix_audit_target", "target", "at"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("secret_sha256", LargeBinary, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    Column("queues", ARRAY(Text), nullable=False, server_default=text("'{*}'")),
    Column("created_at", Instant, nullable=False, server_default=_now),
    Column("expires_at", Instant),
    Column("revoked_at", Instant),
)

schema_compatibility = Table(
    "schema_compatibility",
    metadata,
    # One row for each revision whose build may serve on the schema as it is now. A migration adds its own and
    # takes out those it breaks, so that an older build knows that it must not be ready.
    Column("revision", Text, primary_key=True),
)
