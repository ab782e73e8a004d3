"""The routes of jobs. Thin: the transaction closes before the answer, refusals of items become problems here."""

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

import orjson

from app.errors import InvalidInput, Refusal
from app.jobs import intake, lease, schemas
from app.jobs.model import Beat, ClaimCall, Ending, NewJob
from app.jobs.waiting import Gone, wait_for_jobs
from app.web import pages
from app.web.door import MIB, Answer, Call, Doors
from app.web.jsontext import canonical_digest
from app.web.problems import problem
from app.web.shapes import RawJson, check_key, parse_id, parse_instant

jobs = Doors("jobs")
work = Doors("work")
operate = Doors("operate")

BATCH_BODY = 16 * MIB

Outcome = dict[str, Any] | Refusal


# --- views -----------------------------------------------------------------------------------------------------------

_RAW = ("payload", "progress", "result")
_JOB = tuple(name for name in schemas.Job.model_fields if name != "backoff")
_BEAT = ("id", "lease_expires_at", "run_deadline_at", "cancel_requested", "queue_paused", "server_time", "fence")
_of_job, _of_beat = itemgetter(*_JOB), itemgetter(*_BEAT)


def job_view(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a job on the wire: JSON columns go out as they were sent, times in the database's words."""
    view = dict(zip(_JOB, _of_job(row), strict=True))
    view["backoff"] = {"base_seconds": row["backoff_base_seconds"], "cap_seconds": row["backoff_cap_seconds"]}
    for name in _RAW:
        if view[name] is not None:
            view[name] = orjson.Fragment(view[name])
    return view


def enqueued_view(row: dict[str, Any]) -> dict[str, Any]:
    view = job_view(row)
    view["deduplicated"] = row["deduplicated"]
    return view


def claimed_view(row: dict[str, Any]) -> dict[str, Any]:
    view, previous = job_view(row), row["previous_attempt"]
    view["attempt_token"] = row["attempt_token"]
    view["run_deadline_at"] = row["run_deadline_at"]
    view["previous_attempt"] = orjson.Fragment(previous) if previous is not None else None
    return view


def beat_view(row: dict[str, Any]) -> dict[str, Any]:
    view = dict(zip(_BEAT, _of_beat(row), strict=True))
    view["status"] = "processing"
    return view


def results_view(
    ids: Sequence[UUID | None], outcomes: Sequence[Outcome], view: Callable[[dict[str, Any]], dict[str, Any]]
) -> Answer:
    results: list[dict[str, Any]] = []
    for index, (job_id, outcome) in enumerate(zip(ids, outcomes, strict=True)):
        if isinstance(outcome, Refusal):
            results.append(
                {
                    "index": index,
                    "id": job_id,
                    "ok": False,
                    "status": outcome.facts.get("job_status"),
                    "problem": problem(outcome),
                }
            )
        else:
            results.append({"index": index, "ok": True, **view(outcome)})
    return Answer(200, {"results": results})


def _one(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome


# --- the producer ----------------------------------------------------------------------------------------------------


_NO_BACKOFF = schemas.Backoff()


def _new_job(body: schemas.Enqueue, place: str, key: str | None, traceparent: str | None) -> NewJob:
    if body.available_at is not None and body.delay_seconds is not None:
        raise InvalidInput.at(f"{place}.delay_seconds", "give available_at or delay_seconds, not both")
    if body.available_at is not None and body.available_at.year < 2000:
        raise InvalidInput.at(f"{place}.available_at", "must not be before the year 2000")
    backoff = body.backoff or _NO_BACKOFF
    return NewJob(
        queue=body.queue,
        payload=str(body.payload),
        kind=body.kind,
        priority=body.priority,
        available_at=body.available_at,
        delay_seconds=body.delay_seconds,
        max_attempts=body.max_attempts,
        max_reclaims=body.max_reclaims,
        recovery_policy=body.recovery_policy,
        lease_seconds=body.lease_seconds,
        max_run_seconds=body.max_run_seconds,
        backoff_base_seconds=backoff.base_seconds,
        backoff_cap_seconds=backoff.cap_seconds,
        unique_key=body.unique_key,
        reject_conflict=body.on_conflict == "reject",
        idempotency_key=key,
        content_sha256=canonical_digest({name: getattr(body, name) for name in schemas.Enqueue.model_fields})
        if key is not None
        else None,
        traceparent=traceparent,
    )


_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def _traceparent(call: Call) -> str | None:
    value = call.request.headers.get("traceparent")
    # Kept as the W3C format has it; what is not one is dropped, for a trace never refuses work.
    return value if value is not None and _TRACEPARENT.fullmatch(value) else None


@jobs.post(
    "/v1/jobs",
    scope="enqueue",
    body=schemas.Enqueue,
    answers={201: schemas.Enqueued, 200: schemas.Enqueued},
    refusals=("unique-key-held", "idempotency-mismatch"),
    headers=("Idempotency-Key",),
)
async def enqueue_job(call: Call) -> Answer:
    """Enqueue a job.

    201 with the new job, or 200 with the one that holds its `Idempotency-Key` or `unique_key`.
    """
    keys = call.request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise InvalidInput.at("header.Idempotency-Key", "is given twice")
    key = check_key("header.Idempotency-Key", keys[0]) if keys else None
    job = _new_job(call.body, "body", key, _traceparent(call))
    if job.available_at is None:
        outcome = await call.app.enqueues(job)
    else:
        # To be compared with the database's clock first.
        [outcome] = await call.app.db.again(lambda tx: intake.enqueue(tx, [job], place="body"))
    row = _one(outcome)
    return Answer(200 if row["deduplicated"] else 201, enqueued_view(row), {"location": f"/v1/jobs/{row['id']}"})


@jobs.post(
    "/v1/jobs/batch",
    scope="enqueue",
    body=schemas.EnqueueBatch,
    max_body=BATCH_BODY,
    answers={200: schemas.EnqueueResults},
    refusals=("idempotency-mismatch",),
)
async def enqueue_jobs(call: Call) -> Answer:
    """Enqueue up to 1 000 jobs in one transaction.

    Invalid input refuses the whole and names the items; keys are judged item by item.
    """
    if "idempotency-key" in call.request.headers:
        raise InvalidInput.at("header.Idempotency-Key", "in a batch each item has its own idempotency_key")
    traceparent = _traceparent(call)
    jobs, errors = [], []
    for index, item in enumerate(call.body.jobs):
        try:
            jobs.append(_new_job(item, f"body.jobs[{index}]", item.idempotency_key, traceparent))
        except InvalidInput as refusal:
            errors.extend(refusal.facts["errors"])
    first: dict[tuple[str, str], bytes | None] = {}
    for index, job in enumerate(jobs if not errors else []):
        if job.idempotency_key is not None:
            known = first.setdefault((job.queue, job.idempotency_key), job.content_sha256)
            if known != job.content_sha256:
                place = f"body.jobs[{index}].idempotency_key"
                errors.append({"place": place, "message": "stands twice in this batch with different content"})
    if errors:
        raise InvalidInput(errors)
    if not jobs:
        return Answer(200, {"results": []})
    outcomes = await call.app.db.again(lambda tx: intake.enqueue(tx, jobs))
    return results_view([None] * len(jobs), outcomes, enqueued_view)


@jobs.get(
    "/v1/jobs",
    scope="read",
    query=schemas.JobList,
    answers={200: schemas.Jobs},
)
async def list_jobs(call: Call) -> Answer:
    """List jobs, the newest first.

    Pages go by creation time and id: a job that exists and matches all the time is seen exactly once. A page ends
    early where its payloads and results are large; `next_cursor` is null on the last one only.
    """
    filters = {
        name: getattr(call.query, name) for name in schemas.JobList.model_fields if name not in ("cursor", "limit")
    }
    position: dict[str, Any] = {}
    if call.query.cursor is not None:
        at, job_id = pages.read(call.query.cursor, filters, (str, str))
        try:
            position = {"before_at": parse_instant(at), "before_id": parse_id(job_id)}
        except ValueError:
            raise InvalidInput.at("query.cursor", "is not a cursor of this list; start again without one") from None
    limit = call.query.limit
    async with call.app.reads_at_once, call.app.db.begin() as tx:
        rows = await intake.search(tx, {**filters, **position, "limit": limit + 1})
    shown = rows[:limit]
    last = shown[-1] if shown and shown[0]["found"] > len(shown) else None
    cursor = pages.make([last["created_at"].isoformat(), str(last["id"])], filters) if last else None
    return Answer(200, {"jobs": [job_view(row) for row in shown], "next_cursor": cursor})


@jobs.get("/v1/jobs/{id}", scope="read", answers={200: schemas.JobRead}, refusals=("job-not-found",))
async def get_job(call: Call) -> Answer:
    """Read one job."""
    async with call.app.db.begin() as tx:
        row = await intake.get(tx, call.path["id"])
    return Answer(200, read_view(row))


def read_view(row: dict[str, Any]) -> dict[str, Any]:
    late = None
    if row.get("late_fence") is not None:
        late = {
            "fence": row["late_fence"],
            "worker_id": row["late_worker_id"],
            "received_at": row["late_received_at"],
            "result": RawJson(row["late_result"]) if row["late_result"] is not None else None,
        }
    return {**job_view(row), "late_result": late}


@jobs.get(
    "/v1/jobs/{id}/attempts",
    scope="read",
    query=schemas.AttemptList,
    answers={200: schemas.Attempts},
    refusals=("job-not-found",),
)
async def list_attempts(call: Call) -> Answer:
    """List the ended attempts of a job, in the order of their fences."""
    limit = call.query.limit
    bound = {"id": call.path["id"]}
    after = pages.read(call.query.cursor, bound, (int,))[0] if call.query.cursor is not None else -1
    if not -1 <= after < 2**53:
        raise InvalidInput.at("query.cursor", "is not a cursor of this list; start again without one")
    async with call.app.reads_at_once, call.app.db.begin() as tx:
        rows = await intake.attempts(tx, call.path["id"], after=after, limit=limit + 1)
    for row in rows:
        row["progress"] = RawJson(row["progress"]) if row["progress"] is not None else None
    more = len(rows) > limit
    cursor = pages.make([rows[limit - 1]["fence"]], bound) if more else None
    return Answer(200, {"attempts": rows[:limit], "next_cursor": cursor})


# --- the worker ------------------------------------------------------------------------------------------------------


@work.post(
    "/v1/jobs/claim",
    scope="work",
    body=schemas.Claim,
    answers={200: schemas.Claimed},
    refusals=("idempotency-mismatch", "too-many-waiters"),
)
async def claim_jobs(call: Call) -> Answer:
    """Claim due jobs, waiting for them if asked to.

    Answers an empty list when there is none. Each job comes with an attempt token, the proof of the right to run it,
    and a fence. A client that closes its connection while it waits gets no job. With a `request_id` the call can be
    repeated for 24 hours: it answers the jobs of the first call that are still held, never new ones.
    """
    body: schemas.Claim = call.body
    queues = list(dict.fromkeys(body.queues))
    claim = ClaimCall(
        worker_id=body.worker_id,
        max_jobs=body.max_jobs,
        lease_seconds=body.lease_seconds,
        key_id=call.caller.key_id,
        request_id=body.request_id,
        content_sha256=canonical_digest([queues, body.max_jobs, body.lease_seconds])
        if body.request_id is not None
        else b"",
    )
    wish = lease.Wish(tuple(queues), claim)
    if body.wait_seconds == 0 and body.request_id is None:
        grant = await call.app.claims(wish)
        return await _hand_over(call, grant, gone=False)
    grants: list[lease.Grant] = []

    async def attempt() -> set[str]:
        if claim.request_id is None:
            grants.append(await call.app.claims(wish))
        else:
            async with call.app.claims_at_once:
                if gone.is_set():
                    return set()
                grants.append(await lease.claim_once(call.app.db, queues, claim))
        return {job["queue"] for job in grants[-1].jobs} or ({""} if grants[-1].replayed else set())

    gone = Gone()
    if body.wait_seconds == 0:
        await attempt()
    else:
        with call.watched(gone.set):
            request = (claim.key_id, claim.worker_id, claim.request_id) if claim.request_id is not None else None
            await wait_for_jobs(
                call.app.waiting,
                queues,
                body.wait_seconds,
                attempt,
                request=request,
                gone=gone,
                confirm=call.app.clock.confirm,
            )
    return await _hand_over(call, grants[-1] if grants else lease.Grant([], None), gone=gone.is_set())


async def _hand_over(call: Call, grant: lease.Grant, *, gone: bool) -> Answer:
    # One turn of the event loop: a connection closed while the claim ran is known after it.
    await asyncio.sleep(0)
    # With a request id its client can ask again, and then finds what this claim took.
    if grant.jobs and call.body.request_id is None and (gone or call.left()):
        await lease.give_back(call.app.db, grant.jobs)
    return Answer(
        200,
        {
            "jobs": [claimed_view(job) for job in grant.jobs],
            "server_time": grant.server_time,
            "replayed": grant.replayed,
        },
    )


def _beat(job_id: UUID, body: schemas.Heartbeat) -> Beat:
    progress = str(body.progress) if body.progress is not None else None
    return Beat(job_id, body.attempt_token, body.worker_id, body.lease_seconds, progress)


@work.post(
    "/v1/jobs/{id}/heartbeat",
    scope="work",
    body=schemas.Heartbeat,
    answers={200: schemas.HeartbeatAnswer},
    refusals=("job-not-found", "lease-lost", "attempt-ended", "worker-mismatch"),
)
async def heartbeat_job(call: Call) -> Answer:
    """Extend a lease; it never gets shorter.

    `cancel_requested` asks the worker to stop. A 409 means: drop the work.
    """
    beat = _beat(call.path["id"], call.body)
    outcome = await call.app.heartbeats(beat)
    return Answer(200, beat_view(_one(outcome)))


@work.post(
    "/v1/jobs/heartbeat",
    scope="work",
    body=schemas.HeartbeatBatch,
    max_body=BATCH_BODY,
    answers={200: schemas.HeartbeatResults},
)
async def heartbeat_jobs(call: Call) -> Answer:
    """Extend up to 1 000 leases; one stale token spoils no other."""
    beats = [_beat(item.id, item) for item in call.body.items]
    outcomes = await call.app.db.again(lambda tx: lease.heartbeat(tx, beats)) if beats else []
    return results_view([beat.job_id for beat in beats], outcomes, beat_view)


def _complete(job_id: UUID, body: schemas.Complete) -> Ending:
    return Ending(
        "complete",
        job_id,
        body.attempt_token,
        canonical_digest(["complete", body.result]),
        result=str(body.result) if body.result is not None else None,
    )


def _fail(job_id: UUID, body: schemas.Fail) -> Ending:
    return Ending(
        "fail",
        job_id,
        body.attempt_token,
        canonical_digest(["fail", body.error_type, body.error_message, body.retryable, body.retry_after_seconds]),
        error_type=body.error_type,
        error_message=body.error_message,
        retryable=body.retryable,
        delay_seconds=body.retry_after_seconds,
        jitter=random.random(),  # noqa: S311 spreads retries; nothing secret
    )


def _release(job_id: UUID, body: schemas.Release) -> Ending:
    return Ending(
        "release",
        job_id,
        body.attempt_token,
        canonical_digest(["release", body.reason, body.delay_seconds]),
        error_message=body.reason,
        delay_seconds=body.delay_seconds,
    )


async def _end_one(call: Call, ending: Ending) -> Answer:
    return Answer(200, _one(await call.app.endings(ending)))


async def _end_many(call: Call, endings: list[Ending]) -> Answer:
    outcomes = await call.app.db.again(lambda tx: lease.end(tx, endings)) if endings else []
    return results_view([ending.job_id for ending in endings], outcomes, dict)


_ENDED = ("job-not-found", "lease-lost", "attempt-ended")


@work.post("/v1/jobs/{id}/complete", scope="work", body=schemas.Complete, answers={200: schemas.Ended}, refusals=_ENDED)
async def complete_job(call: Call) -> Answer:
    """Complete a job with its result.

    The same call may be repeated and gets its first answer. After `lease-lost` drop the work.
    """
    return await _end_one(call, _complete(call.path["id"], call.body))


@work.post(
    "/v1/jobs/complete",
    scope="work",
    body=schemas.CompleteBatch,
    max_body=BATCH_BODY,
    answers={200: schemas.CompleteResults},
)
async def complete_jobs(call: Call) -> Answer:
    """Complete up to 1 000 jobs; one stale token spoils no other."""
    return await _end_many(call, [_complete(item.id, item) for item in call.body.items])


@work.post(
    "/v1/jobs/{id}/fail",
    scope="work",
    body=schemas.Fail,
    lenient=True,
    max_body=BATCH_BODY,
    answers={200: schemas.Ended},
    refusals=_ENDED,
)
async def fail_job(call: Call) -> Answer:
    """Report that an attempt failed.

    The job waits for its next attempt, or ends in `failed` when none is left or `retryable` is false.
    """
    return await _end_one(call, _fail(call.path["id"], call.body))


@work.post(
    "/v1/jobs/fail",
    scope="work",
    body=schemas.FailBatch,
    lenient=True,
    max_body=BATCH_BODY,
    answers={200: schemas.FailResults},
)
async def fail_jobs(call: Call) -> Answer:
    """Report up to 1 000 failed attempts; one stale token spoils no other."""
    return await _end_many(call, [_fail(item.id, item) for item in call.body.items])


@work.post(
    "/v1/jobs/{id}/release",
    scope="work",
    body=schemas.Release,
    lenient=True,
    answers={200: schemas.Ended},
    refusals=_ENDED,
)
async def release_job(call: Call) -> Answer:
    """Give an attempt back unfinished, as when a worker shuts down.

    Up to the tenth release in a row the attempt is not counted.
    """
    return await _end_one(call, _release(call.path["id"], call.body))


@work.post(
    "/v1/jobs/release",
    scope="work",
    body=schemas.ReleaseBatch,
    lenient=True,
    max_body=BATCH_BODY,
    answers={200: schemas.ReleaseResults},
)
async def release_jobs(call: Call) -> Answer:
    """Give up to 1 000 attempts back; one stale token spoils no other."""
    return await _end_many(call, [_release(item.id, item) for item in call.body.items])


# --- the operator ----------------------------------------------------------------------------------------------------


@operate.post(
    "/v1/jobs/{id}/cancel",
    scope="operate",
    body=schemas.Cancel,
    body_required=False,
    answers={200: schemas.JobRead, 202: schemas.JobRead},
    refusals=("job-not-found", "move-refused", "fence-moved"),
)
async def cancel_job(call: Call) -> Answer:
    """Cancel a job.

    A processing job is asked to stop (202): its worker hears it at the next heartbeat, and what then fails or lapses
    is not retried; a completion still counts. With `force` it ends at once.
    """
    body: schemas.Cancel = call.body
    row = await call.app.db.again(
        lambda tx: intake.cancel(
            tx,
            call.path["id"],
            actor=call.caller.name,
            reason=body.reason,
            force=body.force,
            expected_fence=body.expected_fence,
        )
    )
    return Answer(202 if row["status"] == "processing" else 200, read_view(row))


@operate.post(
    "/v1/jobs/{id}/requeue",
    scope="operate",
    body=schemas.Requeue,
    body_required=False,
    answers={200: schemas.JobRead},
    refusals=("job-not-found", "move-refused", "fence-moved", "unique-key-held"),
)
async def requeue_job(call: Call) -> Answer:
    """Put a job back in its queue, due now, with at least `extra_attempts` attempts left.

    From failed, cancelled and manual_review; from done with `from_done`; from processing with `force`.
    """
    body: schemas.Requeue = call.body
    row = await intake.requeue(
        call.app.db,
        call.path["id"],
        actor=call.caller.name,
        reason=body.reason,
        extra_attempts=body.extra_attempts,
        force=body.force,
        from_done=body.from_done,
        expected_fence=body.expected_fence,
    )
    return Answer(200, read_view(row))


@operate.post(
    "/v1/jobs/{id}/resolve",
    scope="operate",
    body=schemas.Resolve,
    answers={200: schemas.JobRead},
    refusals=("job-not-found", "move-refused", "fence-moved"),
)
async def resolve_job(call: Call) -> Answer:
    """Decide a job in manual review: done (with a result, if there is one) or failed.

    With `accept_late_result` the refused result of the latest attempt is taken, also from queued and failed.
    """
    body: schemas.Resolve = call.body
    if body.accept_late_result and body.outcome != "done":
        raise InvalidInput.at("body.accept_late_result", "goes with the outcome `done` only")
    if body.accept_late_result and body.result is not None:
        raise InvalidInput.at("body.result", "give a result or accept the late one, not both")
    row = await call.app.db.again(
        lambda tx: intake.resolve(
            tx,
            call.path["id"],
            actor=call.caller.name,
            outcome=body.outcome,
            result=str(body.result) if body.result is not None else None,
            note=body.note,
            accept_late_result=body.accept_late_result,
            expected_fence=body.expected_fence,
        )
    )
    return Answer(200, read_view(row))


all_doors = [*jobs.doors, *work.doors, *operate.doors]
