"""The only place where a refusal becomes an HTTP status and an RFC 9457 problem document.

`PROBLEMS` says for each code: the status, the title, and what the caller can do about it (shown in /docs).
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.errors import InvalidInput, Refusal
from app.web.jsontext import MAX_ERRORS

MEDIA_TYPE = "application/problem+json"


class Kind(NamedTuple):
    status: int
    title: str
    advice: str


class NotFound(Refusal):
    """No such route."""

    code = "not-found"


class MethodNotAllowed(Refusal):
    code = "method-not-allowed"


class RequestTimeout(Refusal):
    """The body did not arrive in time."""

    code = "request-timeout"


class MalformedRequest(Refusal):
    """What came over the socket is no HTTP request, or its head is beyond the bounds."""

    code = "malformed-request"


class Internal(Refusal):
    """A fault of the service itself; nothing inner is told."""

    code = "internal"


PROBLEMS: Mapping[str, Kind] = {
    "malformed-request": Kind(400, "This is no HTTP request", "Look at the client's HTTP library or proxy."),
    "invalid-input": Kind(
        422, "The request breaks the contract", "Look at `errors`: each names a place and says what is wanted there."
    ),
    "not-json": Kind(
        422, "The body is not JSON", "Send one JSON value in UTF-8; `position` is the byte at which reading stopped."
    ),
    "idempotency-mismatch": Kind(
        422,
        "The key was used with other content",
        "Send the same content as the first time, or use a new key for new content.",
    ),
    "key-rejected": Kind(
        401,
        "A valid key is needed",
        "Send `Authorization: Bearer <key>`. A key is refused when it is unknown, expired or revoked; "
        "a key in the URL is never accepted.",
    ),
    "scope-missing": Kind(403, "The key may not do this", "Use a key with the scope named in `scope`."),
    "cross-site": Kind(
        403, "Refused: another site's page sent this", "Call from your own program, or open the page of this service."
    ),
    "not-local": Kind(
        403,
        "Without keys only local calls are served",
        "Call 127.0.0.1 or localhost directly. To serve others, set FENCEPOST_ADMIN_KEY.",
    ),
    "not-found": Kind(404, "No such route", "Compare method and path with /docs; a trailing slash makes another path."),
    "job-not-found": Kind(404, "No such job", "Check the id. Finished jobs are deleted after their retention time."),
    "queue-not-found": Kind(404, "No such queue", "Check the name. A queue comes into being at its first enqueue."),
    "schedule-not-found": Kind(404, "No such schedule", "Check the name; PUT makes one."),
    "method-not-allowed": Kind(405, "The path does not take this method", "Use a method listed in `Allow`."),
    "request-timeout": Kind(408, "The body came too slowly", "Send the whole body at once, and repeat the call."),
    "lease-lost": Kind(
        409,
        "The attempt is over; its lease was lost",
        "Drop the work: `ended_by` says how the attempt ended. Do not repeat the call; claim again.",
    ),
    "attempt-ended": Kind(
        409,
        "The attempt was already ended otherwise",
        "The stored outcome stays. Do not repeat the call; claim again.",
    ),
    "worker-mismatch": Kind(
        409, "The attempt belongs to another worker", "Send the `worker_id` that was used in the claim."
    ),
    "move-refused": Kind(
        409, "The job's status does not allow this", "Look at `job_status`; some moves need `force` or another flag."
    ),
    "fence-moved": Kind(
        409, "The job moved on", "Read the job again, decide anew, and send its present fence as `expected_fence`."
    ),
    "unique-key-held": Kind(
        409, "Another live job holds the unique key", "`holder_id` names it: wait for it, cancel it, or use its result."
    ),
    "queue-not-empty": Kind(409, "The queue has live jobs", "Let them finish or cancel them, then delete the queue."),
    "schedule-broken": Kind(409, "The schedule cannot be read", "Put it again with a valid cadence."),
    "overlap": Kind(409, "A run of the schedule is unfinished", "Wait for the job named in the facts, or force it."),
    "precondition-failed": Kind(412, "It was changed meanwhile", "Read it again and send the new ETag in `If-Match`."),
    "too-large": Kind(413, "The body is too large", "`limit` is the most this route takes, in bytes: send less."),
    "unsupported-media-type": Kind(
        415, "The body's type is not supported", "Send `Content-Type: application/json` and no Content-Encoding."
    ),
    "too-many-waiters": Kind(
        503, "Too many calls wait already", "Wait `Retry-After` seconds, or claim without `wait_seconds`."
    ),
    "internal": Kind(
        500, "The service failed", "Nothing was promised. Repeat the call with the same keys; tell the operator."
    ),
    "unavailable": Kind(
        503, "The service cannot do this now", "Nothing was done. Repeat the same call after `Retry-After` seconds."
    ),
    "outcome-unknown": Kind(
        503,
        "It is unknown whether this was done",
        "The database was lost while committing. Repeat the same call with the same keys: it is safe.",
    ),
}

_RESERVED = frozenset({"type", "title", "status", "detail", "code"})


def problem(refusal: Refusal) -> dict[str, Any]:
    """The problem document: also the `problem` member of a batch's item."""
    kind = PROBLEMS.get(refusal.code) or PROBLEMS["internal"]
    facts = {name: fact for name, fact in refusal.facts.items() if name not in _RESERVED}
    return {
        "type": f"/docs#problem-{refusal.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": refusal.detail,
        "code": refusal.code,
        **facts,
    }


def status_of(refusal: Refusal) -> int:
    return (PROBLEMS.get(refusal.code) or PROBLEMS["internal"]).status


def headers_of(refusal: Refusal) -> dict[str, str]:
    """Headers that belong to the refusal itself: when to come back, how to prove who one is."""
    status = status_of(refusal)
    if status in (408, 429, 503):
        return {"retry-after": str(max(1, round(float(refusal.facts.get("retry_after_seconds", 1)))))}
    if status == 401:
        return {"www-authenticate": 'Bearer realm="fencepost"'}
    if status == 405:
        return {"allow": ", ".join(refusal.facts.get("allow", ()))}
    return {}


MAX_GUESSES = 10
"""Names looked for per request: each look compares with every name there is."""

# Validation errors ----------------------------------------------------------------------------------------

_MESSAGES = {
    "missing": "is required",
    "string_type": "text is needed",
    "int_type": "an integer is needed",
    "float_type": "a number is needed",
    "bool_type": "true or false is needed",
    "list_type": "a list is needed",
    "dict_type": "an object is needed",
    "model_type": "an object is needed",
    "model_attributes_type": "an object is needed",
    "none_required": "must be null",
    "int_from_float": "an integer is needed",
}


def from_validation(error: ValidationError, root: str, model: type[Any] | None = None) -> InvalidInput:
    """What pydantic found, by place: `body.jobs[3].priority`. Values that were sent are not repeated."""
    errors: dict[tuple[str, str], dict[str, str]] = {}
    guesses = MAX_GUESSES
    for details in error.errors(include_url=False, include_input=False):
        place = place_of(root, details["loc"])
        message = _message(details, root)
        if details["type"] == "extra_forbidden" and guesses > 0:
            guesses -= 1
            message += _hint(str(details["loc"][-1]), _names(model, details["loc"][:-1]))
        errors.setdefault((place, message), {"place": place, "message": message})
        if len(errors) >= MAX_ERRORS:
            break
    return InvalidInput(_merged(errors.values()))


def _merged(errors: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """One error a place: the branches of a union say the same thing in other words."""
    by_place: dict[str, list[str]] = {}
    for error in errors:
        by_place.setdefault(error["place"], []).append(error["message"])
    return [{"place": place, "message": "; or ".join(messages[:4])} for place, messages in by_place.items()]


def _message(details: ErrorDetails, root: str) -> str:
    kind = details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        what = "parameter" if root == "query" else "member"
        return f"unknown {what}"
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    if kind in ("literal_error", "enum"):
        return f"must be one of {context.get('expected', '')}"
    if kind == "greater_than_equal":
        return f"must be at least {context.get('ge')}"
    if kind == "less_than_equal":
        return f"must be at most {context.get('le')}"
    if kind == "greater_than":
        return f"must be more than {context.get('gt')}"
    if kind == "less_than":
        return f"must be less than {context.get('lt')}"
    if kind == "too_long":
        return f"at most {context.get('max_length')} items"
    if kind == "too_short":
        return f"at least {context.get('min_length')} items"
    if kind == "string_too_long":
        return f"at most {context.get('max_length')} characters"
    if kind == "string_too_short":
        return f"at least {context.get('min_length')} characters"
    if kind in ("value_error", "assertion_error") and "error" in context:
        return str(context["error"])[:500]
    return details["msg"][:500]


def _names(model: type[Any] | None, path: Iterable[int | str]) -> Collection[str]:
    """The members that the model has at a path, as far as that can be followed."""
    for step in path:
        if isinstance(step, int) or model is None:
            continue
        field = getattr(model, "model_fields", {}).get(step)
        model = _inner_model(field.annotation) if field is not None else None
    return getattr(model, "model_fields", {}).keys() if model is not None else ()


def _inner_model(annotation: Any) -> type[Any] | None:
    if hasattr(annotation, "model_fields"):
        return annotation  # type: ignore[no-any-return]
    for argument in getattr(annotation, "__args__", ()):
        found = _inner_model(argument)
        if found is not None:
            return found
    return None


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_parameter(name: str, known: Collection[str]) -> dict[str, str]:
    return {"place": place_of("query", (name,)), "message": f"unknown parameter{_hint(name, known)}"}


def place_of(root: str, path: Iterable[int | str]) -> str:
    place = root
    for step in path:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step.isidentifier() and len(step) <= 60 and step.isascii():
            place += f".{step}"
        elif step.startswith(("function-", "list[", "constrained-", "literal[", "nullable", "json-or-python")):
            continue  # the branch of a union, which no caller knows
        else:
            shown = step[:40] + ("…" if len(step) > 40 else "")
            place += "[" + shown.encode("ascii", "backslashreplace").decode().__repr__().replace("'", '"') + "]"
    return place
