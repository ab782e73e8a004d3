"""Every refusal of the service, as a class that holds facts (ids, statuses, counts).

This module must never know HTTP or SQL: `web/problems.py` alone turns a refusal into an answer, and a
loop or a command catches the same classes. `code` is the stable word that clients branch on.
"""

from collections.abc import Sequence
from typing import Any, ClassVar


class Refusal(Exception):
    """Something the service will not or cannot do; `detail` is for people, `facts` for machines."""

    code: ClassVar[str]

    def __init__(self, detail: str, **facts: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.facts = facts


class JobNotFound(Refusal):
    code = "job-not-found"

    def __init__(self, job_id: object) -> None:
        super().__init__(f"There is no job {job_id}.", job_id=str(job_id))


class QueueNotFound(Refusal):
    code = "queue-not-found"

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no queue {name!r}.", queue=name)


class QueueNotEmpty(Refusal):
    code = "queue-not-empty"


class ScheduleNotFound(Refusal):
    code = "schedule-not-found"

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no schedule {name!r}.", schedule=name)


class ScheduleBroken(Refusal):
    """What is stored of the schedule's cadence cannot be read."""

    code = "schedule-broken"


class Overlap(Refusal):
    """A run of the schedule is unfinished; facts name its job in `job_id`, where it has one."""

    code = "overlap"


class LeaseLost(Refusal):
    """The attempt was ended by somebody else; its worker must drop the work."""

    code = "lease-lost"


class AttemptEnded(Refusal):
    """The attempt was already ended by its own worker, in another way than is now asked."""

    code = "attempt-ended"


class WorkerMismatch(Refusal):
    code = "worker-mismatch"


class MoveRefused(Refusal):
    """The job's status does not allow this event."""

    code = "move-refused"


class FenceMoved(Refusal):
    code = "fence-moved"


class UniqueKeyHeld(Refusal):
    """Another live job of the queue holds the unique key; facts name it in `holder_id`."""

    code = "unique-key-held"


class IdempotencyMismatch(Refusal):
    """The key or request id was used before with other content."""

    code = "idempotency-mismatch"


class InvalidInput(Refusal):
    """Input that breaks the contract. `errors` is a list of {"place", "message"}."""

    code = "invalid-input"

    def __init__(self, errors: Sequence[dict[str, str]]) -> None:
        first = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        super().__init__(f"{first['place']}: {first['message']}{more}", errors=list(errors))

    @classmethod
    def at(cls, place: str, message: str) -> "InvalidInput":
        return cls([{"place": place, "message": message}])


class NotJson(Refusal):
    code = "not-json"


class TooLarge(Refusal):
    code = "too-large"


class UnsupportedMediaType(Refusal):
    code = "unsupported-media-type"


class KeyRejected(Refusal):
    code = "key-rejected"


class ScopeMissing(Refusal):
    code = "scope-missing"


class CrossSite(Refusal):
    """A browser's request from another site."""

    code = "cross-site"


class NotLocal(Refusal):
    """The keyless loopback listener was reached under a foreign host name or through a proxy."""

    code = "not-local"


class PreconditionFailed(Refusal):
    code = "precondition-failed"


class TooManyWaiters(Refusal):
    code = "too-many-waiters"


class Unavailable(Refusal):
    """The database cannot be used now; nothing was done; the call may be repeated."""

    code = "unavailable"


class OutcomeUnknown(Refusal):
    """The connection was lost while committing: it may or may not have happened. Repeat the same call."""

    code = "outcome-unknown"
