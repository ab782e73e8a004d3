"""Why a token did not do what its holder asked: judged from how its own attempt ended. Pure.

The rule (specification 2.5): the same verb with the same content is answered as at the first time, also when the
job was claimed again since, for the reply may have been lost. Another verb or content is a conflict that names the
stored outcome. An attempt that somebody else ended is `lease-lost`.
"""

from typing import Any
from uuid import UUID

from app.errors import AttemptEnded, JobNotFound, LeaseLost, Refusal, Unavailable, WorkerMismatch

ENDED_BY_OTHERS = frozenset({"reclaimed", "cancelled", "requeued"})
_OUTCOME_OF = {"complete": "done", "fail": "failed", "release": "released"}


def judge(job_id: UUID, verb: str, content_sha256: bytes, fate: dict[str, Any]) -> dict[str, Any] | Refusal:
    """The first answer again, or the refusal. `fate` is a row of `sql.FATE_OF_TOKEN`."""
    if fate["id"] is None:
        return JobNotFound(job_id)
    if fate["current"]:
        if verb == "heartbeat":
            return WorkerMismatch(
                f"Job {job_id} is held by {fate['reserved_by']!r}; a heartbeat must name the worker that claimed.",
                job_id=str(job_id),
                worker_id=fate["reserved_by"],
            )
        return Unavailable("The attempt changed while this call was judged; nothing was done.")
    if fate["completed"]:
        if verb == "complete" and content_sha256 == fate["done_sha256"]:
            return answer(job_id, "done", fate["fence"], None, fate["finished_at"])
        return _ended(job_id, "done", fate["finished_at"], fate["fence"], fate)
    outcome = fate["outcome"]
    if outcome is None:
        return LeaseLost(f"This token is of no attempt of job {job_id}.", **_facts(job_id, fate))
    if outcome in ENDED_BY_OTHERS:
        return LeaseLost(
            f"The attempt was {outcome}: drop the work.",
            **_facts(job_id, fate, ended_by=outcome, ended_at=fate["ended_at"]),
        )
    if outcome == _OUTCOME_OF.get(verb) and content_sha256 == fate["ending_sha256"]:
        return answer(job_id, fate["status_after"], fate["attempt_fence"], fate["available_after"], fate["ended_at"])
    return _ended(job_id, outcome, fate["ended_at"], fate["attempt_fence"], fate)


def answer(job_id: UUID, status: str, fence: int, available_at: Any, server_time: Any) -> dict[str, Any]:
    return {"id": job_id, "status": status, "fence": fence, "available_at": available_at, "server_time": server_time}


def _ended(job_id: UUID, outcome: str, ended_at: Any, fence: int, fate: dict[str, Any]) -> AttemptEnded:
    return AttemptEnded(
        f"This attempt already ended as {outcome!r}; a repeat must be the same call with the same content.",
        job_id=str(job_id),
        outcome=outcome,
        ended_at=ended_at,
        attempt_fence=fence,
        job_status=fate["status"],
        fence=fate["fence"],
        retryable=False,
    )


def _facts(job_id: UUID, fate: dict[str, Any], ended_by: str | None = None, ended_at: Any = None) -> dict[str, Any]:
    return {
        "job_id": str(job_id),
        "job_status": fate["status"],
        "fence": fate["fence"],
        "ended_by": ended_by,
        "ended_at": ended_at,
        "retryable": False,
    }
