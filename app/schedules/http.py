"""The routes of schedules."""

import asyncio
from typing import Any

from app.errors import InvalidInput
from app.jobs.http import job_view
from app.jobs.schemas import Backoff, Job
from app.schedules import ops, schemas, sql
from app.schedules.tick import tolerance
from app.web import pages
from app.web.door import Answer, Call, Doors
from app.web.jsontext import canonical_digest
from app.web.shapes import NULL, RawJson, check_key, parse_id, parse_instant

doors = Doors("schedules")

_ONLY_OF_JOBS = (
    "kind",
    "payload",
    "priority",
    "max_attempts",
    "max_reclaims",
    "recovery_policy",
    "lease_seconds",
    "max_run_seconds",
    "backoff",
    "unique_key",
)


def schedule_view(row: dict[str, Any]) -> dict[str, Any]:
    view = {name: row[name] for name in schemas.Schedule.model_fields if name != "backoff"}
    view["backoff"] = {"base_seconds": row["backoff_base_seconds"], "cap_seconds": row["backoff_cap_seconds"]}
    view["payload"] = RawJson(row["payload"]) if row["payload"] is not None else None
    return view


def slot_view(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in schemas.Slot.model_fields}


def _etag(row: dict[str, Any]) -> dict[str, str]:
    return {"etag": f'"{row["edition"]}"'}


def _if_match(call: Call) -> frozenset[str] | None:
    """The editions that the caller has seen, `*` for any; RFC 9110 13.1.1: a weak tag never matches. Quotes may be
    left out, as people do with curl."""
    headers = call.request.headers.getlist("if-match")
    if not headers:
        return None
    tags = [tag.strip() for header in headers for tag in header.split(",")]
    return frozenset(tag if tag == "*" else tag.strip('"') for tag in tags if not tag.startswith("W/") and tag != '"*"')


def _only_new(call: Call) -> bool:
    """`If-None-Match: *`: make it, change none."""
    tags = call.request.headers.getlist("if-none-match")
    if tags and tags != ["*"]:
        raise InvalidInput.at("header.If-None-Match", "only * is taken here: make the schedule where there is none")
    return bool(tags)


def _tolerance(call: Call) -> float:
    return tolerance(call.app.settings.schedule_interval_seconds)


def definition_of(body: schemas.PutSchedule) -> dict[str, Any]:
    """What `ops.put` takes. Raises InvalidInput for two cadences or targets, or none."""
    errors = []
    if (body.every_seconds is None) == (body.cron is None):
        errors.append({"place": "body.every_seconds", "message": "give every_seconds or cron, exactly one of them"})
    if body.timezone is not None and body.cron is None:
        errors.append({"place": "body.timezone", "message": "belongs to a cron; an interval has no zone"})
    if (body.queue is None) == (body.task is None):
        errors.append({"place": "body.queue", "message": "give queue or task, exactly one of them"})
    elif body.task is not None:
        errors += [
            {"place": f"body.{name}", "message": "belongs to a job; this schedule runs a task"}
            for name in _ONLY_OF_JOBS
            if getattr(body, name) is not None
        ]
    if errors:
        raise InvalidInput(errors)
    backoff = body.backoff or Backoff()
    definition = {name: getattr(body, name, None) for name in sql.DEFINITION}
    definition["backoff_base_seconds"], definition["backoff_cap_seconds"] = backoff.base_seconds, backoff.cap_seconds
    if body.cron is not None:
        definition["timezone"] = body.timezone if body.timezone is not None else "UTC"
    if body.queue is not None:
        definition["kind"] = body.kind or body.queue
        definition["payload"] = str(body.payload if body.payload is not None else NULL)
        definition["priority"] = body.priority if body.priority is not None else 4
    return definition


@doors.get("/v1/schedules", scope="read", query=schemas.ScheduleList, answers={200: schemas.Schedules})
async def list_schedules(call: Call) -> Answer:
    """List schedules by name."""
    limit = call.query.limit
    after = pages.read(call.query.cursor, {}, (str,))[0] if call.query.cursor is not None else ""
    async with call.app.reads_at_once, call.app.db.begin() as tx:
        rows = await ops.page(tx, after=after, limit=limit + 1, tolerance=_tolerance(call))
    cursor = pages.make([rows[limit - 1]["name"]], {}) if len(rows) > limit else None
    return Answer(200, {"schedules": [schedule_view(row) for row in rows[:limit]], "next_cursor": cursor})


@doors.get(
    "/v1/schedules/{name}",
    scope="read",
    answers={200: schemas.Schedule},
    refusals=("schedule-not-found",),
    etag=True,
)
async def get_schedule(call: Call) -> Answer:
    """Read one schedule.

    The `ETag` names its edition, which changes with what people set, not with each firing.
    """
    async with call.app.db.begin() as tx:
        row = await ops.get(tx, call.path["name"], tolerance=_tolerance(call))
    return Answer(200, schedule_view(row), _etag(row))


@doors.put(
    "/v1/schedules/{name}",
    scope="operate",
    body=schemas.PutSchedule,
    answers={200: schemas.Schedule, 201: schemas.Schedule},
    refusals=("precondition-failed",),
    headers=("If-Match", "If-None-Match"),
    etag=True,
)
async def put_schedule(call: Call) -> Answer:
    """Set all of a schedule.

    The same again changes nothing, so a deploy may put its schedules each time: the next time stays. Another payload
    keeps the next time; another cadence reckons it anew. Without `enabled` a paused schedule stays paused.
    """
    definition, match, only_new = definition_of(call.body), _if_match(call), _only_new(call)
    row, created = await call.app.db.again(
        lambda tx: ops.put(
            tx,
            call.path["name"],
            definition,
            enabled=call.body.enabled,
            if_match=match,
            only_new=only_new,
            actor=call.caller.name,
            tolerance=_tolerance(call),
        )
    )
    headers = {**_etag(row), "location": f"/v1/schedules/{row['name']}"} if created else _etag(row)
    return Answer(201 if created else 200, schedule_view(row), headers)


@doors.delete(
    "/v1/schedules/{name}",
    scope="operate",
    answers={204: None},
    refusals=("schedule-not-found", "precondition-failed"),
    headers=("If-Match",),
)
async def delete_schedule(call: Call) -> Answer:
    """Delete a schedule; its jobs and its ledger stay, and a run in progress still ends its slot."""
    match = _if_match(call)
    async with call.app.db.begin() as tx:
        await ops.delete(tx, call.path["name"], if_match=match, actor=call.caller.name)
    return Answer(204)


@doors.post(
    "/v1/schedules/{name}/pause",
    scope="operate",
    body=schemas.Why,
    body_required=False,
    answers={200: schemas.Schedule},
    refusals=("schedule-not-found", "precondition-failed"),
    headers=("If-Match",),
    etag=True,
)
async def pause_schedule(call: Call) -> Answer:
    """Pause a schedule: it fires no more until it is resumed; a run in progress goes on."""
    return await _switch(call, ops.pause)


@doors.post(
    "/v1/schedules/{name}/resume",
    scope="operate",
    body=schemas.Why,
    body_required=False,
    answers={200: schemas.Schedule},
    refusals=("schedule-not-found", "precondition-failed"),
    headers=("If-Match",),
    etag=True,
)
async def resume_schedule(call: Call) -> Answer:
    """Resume a paused schedule with the next slot of its grid; what was missed is not caught up."""
    return await _switch(call, ops.resume)


async def _switch(call: Call, act: Any) -> Answer:
    match = _if_match(call)
    async with call.app.db.begin() as tx:
        row = await act(
            tx,
            call.path["name"],
            actor=call.caller.name,
            reason=call.body.reason,
            tolerance=_tolerance(call),
            if_match=match,
        )
    return Answer(200, schedule_view(row), _etag(row))


@doors.post(
    "/v1/schedules/{name}/fire",
    scope="operate",
    body=schemas.Fire,
    body_required=False,
    answers={201: Job, 200: Job, 202: schemas.Slot},
    refusals=(
        "schedule-not-found",
        "overlap",
        "idempotency-mismatch",
        "unique-key-held",
        "job-not-found",
        "schedule-broken",
        "precondition-failed",
    ),
    headers=("Idempotency-Key", "If-Match"),
)
async def fire_schedule(call: Call) -> Answer:
    """Run a schedule now, also while it is paused; its next time stays.

    201 with the job, 200 with the same job for a repeat of the `Idempotency-Key`; 202 with the row of the ledger for
    a maintenance task, which an instance takes up within a second or so.
    """
    keys = call.request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise InvalidInput.at("header.Idempotency-Key", "is given twice")
    key = check_key("header.Idempotency-Key", keys[0]) if keys else None
    match = _if_match(call)
    digest = canonical_digest({"fire": call.path["name"], "force": call.body.force, "reason": call.body.reason})
    slot, job, created = await call.app.db.again(
        lambda tx: ops.fire(
            tx,
            call.path["name"],
            actor=call.caller.name,
            reason=call.body.reason,
            force=call.body.force,
            key=key,
            digest=digest if key is not None else None,
            if_match=match,
        )
    )
    if slot is not None and job is None:
        return Answer(202, slot_view(slot))
    return Answer(201 if created else 200, job_view(job), {"location": f"/v1/jobs/{job['id']}"})


@doors.get(
    "/v1/schedules/{name}/preview",
    scope="read",
    query=schemas.PreviewQuery,
    answers={200: schemas.Preview},
    refusals=("schedule-not-found", "schedule-broken"),
)
async def preview_schedule(call: Call) -> Answer:
    """The next times of a schedule, in UTC and on its own clock, with a note where that clock is odd."""
    async with call.app.db.begin() as tx:
        row = await ops.get(tx, call.path["name"], tolerance=_tolerance(call))
    # 500 times of a rare cron take a quarter of a second of reckoning.
    return Answer(200, await asyncio.to_thread(ops.preview, row, call.query.count))


@doors.get(
    "/v1/schedules/{name}/slots",
    scope="read",
    query=schemas.SlotList,
    answers={200: schemas.Slots},
    refusals=("schedule-not-found",),
)
async def list_slots(call: Call) -> Answer:
    """The ledger of a schedule, the newest first: what was fired, skipped, collapsed, and how late.

    It is kept 30 days; of each schedule at least the last 100 rows and at most the last 10 000.
    """
    limit, bound, before = call.query.limit, {"name": call.path["name"]}, None
    if call.query.cursor is not None:
        at, slot_id = pages.read(call.query.cursor, bound, (str, str))
        try:
            before = (parse_instant(at), parse_id(slot_id))
        except ValueError:
            raise pages.not_of_this_list() from None
    async with call.app.reads_at_once, call.app.db.begin() as tx:
        rows = await ops.slots(tx, call.path["name"], before=before, limit=limit + 1)
    last = rows[limit - 1] if len(rows) > limit else None
    cursor = pages.make([last["fired_at"].isoformat(), str(last["id"])], bound) if last else None
    return Answer(200, {"slots": [slot_view(row) for row in rows[:limit]], "next_cursor": cursor})
