"""One row for each operator action, written in the action's own transaction."""

from typing import Any

import orjson

from app.db import Tx
from app.jobs.model import new_id

RECORD = """
INSERT INTO audit (id, actor, action, target, reason, before, after)
VALUES (%(id)s, %(actor)s, %(action)s, %(target)s, %(reason)s, %(before)s::json, %(after)s::json)
"""


async def record(
    tx: Tx,
    *,
    actor: str,
    action: str,
    target: str,
    reason: str | None,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    """`before` and `after` hold the facts that the action changed, not whole rows (a payload has no place here)."""
    await tx.run(
        RECORD,
        {
            "id": new_id(),
            "actor": actor,
            "action": action,
            "target": target,
            "reason": reason,
            "before": orjson.dumps(before).decode() if before is not None else None,
            "after": orjson.dumps(after).decode() if after is not None else None,
        },
    )
