"""The settings, read once from `FENCEPOST_*`; built on the roof only and handed down. Durations in seconds."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

DAY = 86400.0
CENTURY = 100 * 366 * DAY

NOT_OURS = {"FENCEPOST_URL", "FENCEPOST_KEY", "FENCEPOST_QUEUE", "FENCEPOST_POSTGRES_PASSWORD"}
"""Those of workers, of the pages' examples and of the compose file."""
# Kubernetes sets the last two for a service that is named fencepost.
NOT_OURS_EITHER = ("FENCEPOST_TEST_", "FENCEPOST_SERVICE_", "FENCEPOST_PORT_")


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
    reclaim_interval_seconds: float = Field(default=2.0, ge=0.01, le=DAY)
    outage_grace_seconds: float = Field(default=30.0, ge=0, le=DAY)
    schedule_interval_seconds: float = Field(default=1.0, ge=0.01, le=DAY)
    """How often at least schedules are looked at; what is due before that is fired when it is due."""
    task_lease_seconds: float = Field(default=60.0, ge=1, le=DAY)
    """A maintenance run whose process vanished is taken as interrupted after so long."""
    prune_interval_seconds: float = Field(default=60.0, ge=0.01, le=DAY)
    retention_seconds: float = Field(default=7 * DAY, gt=0, le=CENTURY)
    """How long done jobs are kept."""
    failed_retention_seconds: float = Field(default=30 * DAY, gt=0, le=CENTURY)
    """How long failed and cancelled jobs are kept."""

    max_waiters: int = Field(default=10_000, ge=0, le=1_000_000)
    shutdown_grace_seconds: float = Field(default=10.0, ge=0, le=3600)
    pool_size: int = Field(default=10, ge=1, le=1000)
    statement_timeout_seconds: float = Field(default=5.0, ge=0.1, le=3600)
    """PostgreSQL counts in milliseconds and takes 0 as none, hence the lower bound."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_not_set(cls, values: Any) -> Any:
        """As compose files and shells write it. Not the key: an empty secret is a mistake that must be told."""
        if not isinstance(values, dict):
            return values
        optional = {"database_url", "direct_url", "data_dir", "pg_bin"}
        return {k: v for k, v in values.items() if k not in optional or not isinstance(v, str) or v.strip()}


def misspelt(names: Iterable[str]) -> list[str]:
    """For each name of a variable that looks like a setting and is none, what to tell of it."""
    known = {f"FENCEPOST_{name.upper()}" for name in Settings.model_fields}
    told = []
    for name in sorted(names):
        upper = name.upper()
        if not upper.startswith("FENCEPOST_") or upper in known | NOT_OURS or upper.startswith(NOT_OURS_EITHER):
            continue
        near = difflib.get_close_matches(
            upper.removeprefix("FENCEPOST_"), [each.removeprefix("FENCEPOST_") for each in known], 1
        )
        told.append(f"{name} is no setting and is ignored" + (f"; did you mean FENCEPOST_{near[0]}?" if near else "."))
    return told
