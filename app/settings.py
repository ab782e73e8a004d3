"""The settings, read once from `FENCEPOST_*`; built on the roof only and handed down. Durations in seconds."""

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="FENCEPOST_", frozen=True, extra="ignore", hide_input_in_errors=True)

    database_url: str | None = Field(default=None, repr=False)
    """Any PostgreSQL 15 or newer. Absent: the embedded one."""
    direct_url: str | None = Field(default=None, repr=False)
    """A way round the pooler, for migrations and LISTEN. Absent: `database_url`."""
    prepared_statements: bool = True
    """False behind pgbouncer in transaction mode."""
    admin_key: SecretStr | None = None
    """The bootstrap key (scope admin); only its hash is kept."""
    test_clock: bool = False
    """Allow `fencepost.now`, a pretended database clock. For tests."""

    data_dir: Path = Path(".fencepost")
    pg_bin: Path | None = None
    """Folder with `postgres` and `initdb`, in place of the wheel's."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=64)

    loops: bool = True
    """False: API only, no background loops in this instance."""
    reclaim_interval_seconds: float = Field(default=2.0, gt=0)
    outage_grace_seconds: float = Field(default=30.0, ge=0)
    prune_interval_seconds: float = Field(default=60.0, gt=0)
    retention_seconds: float = Field(default=7 * 86400.0, gt=0)
    """How long done jobs are kept."""
    failed_retention_seconds: float = Field(default=30 * 86400.0, gt=0)
    """How long failed and cancelled jobs are kept."""

    max_waiters: int = Field(default=10_000, ge=0)
    shutdown_grace_seconds: float = Field(default=10.0, ge=0)
    pool_size: int = Field(default=10, ge=1)
    statement_timeout_seconds: float = Field(default=5.0, gt=0)
