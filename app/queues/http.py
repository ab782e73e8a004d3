"""The routes of queues."""

from typing import Any

from app.queues import ops, schemas
from app.queues.sql import SETTINGS
from app.web import pages
from app.web.door import Answer, Call, Doors
from app.web.shapes import NAME

doors = Doors("queues")


def queue_view(row: dict[str, Any]) -> dict[str, Any]:
    view = {name: row[name] for name in schemas.Queue.model_fields if name != "backoff"}
    view["backoff"] = {"base_seconds": row["backoff_base_seconds"], "cap_seconds": row["backoff_cap_seconds"]}
    return view


@doors.get("/v1/queues", scope="read", query=schemas.QueueList, answers={200: schemas.Queues})
async def list_queues(call: Call) -> Answer:
    """List queues by name, with counts capped at 10 000."""
    limit = call.query.limit
    after = pages.read(call.query.cursor, {}, (str,))[0] if call.query.cursor is not None else ""
    if call.query.cursor is not None and not NAME.fullmatch(after):
        raise pages.not_of_this_list()
    async with call.app.reads_at_once, call.app.db.begin() as tx:
        rows = await ops.page(tx, after=after, limit=limit + 1)
    cursor = pages.make([rows[limit - 1]["name"]], {}) if len(rows) > limit else None
    return Answer(200, {"queues": [queue_view(row) for row in rows[:limit]], "next_cursor": cursor})


@doors.get("/v1/queues/{name}", scope="read", answers={200: schemas.Queue}, refusals=("queue-not-found",))
async def get_queue(call: Call) -> Answer:
    """Read one queue."""
    async with call.app.db.begin() as tx:
        return Answer(200, queue_view(await ops.get(tx, call.path["name"])))


@doors.put(
    "/v1/queues/{name}",
    scope="operate",
    body=schemas.PutQueue,
    answers={200: schemas.Queue, 201: schemas.Queue},
)
async def put_queue(call: Call) -> Answer:
    """Set all settings of a queue.

    An absent setting gets its default; pause and hold are never touched.
    """
    body: schemas.PutQueue = call.body
    backoff = body.backoff or schemas.BackoffSetting()
    flat = {
        **{name: getattr(body, name, None) for name in SETTINGS},
        "backoff_base_seconds": backoff.base_seconds,
        "backoff_cap_seconds": backoff.cap_seconds,
    }
    row, created = await call.app.db.again(lambda tx: ops.put(tx, call.path["name"], flat, actor=call.caller.name))
    return Answer(201 if created else 200, queue_view(row))


@doors.delete(
    "/v1/queues/{name}", scope="operate", answers={204: None}, refusals=("queue-not-found", "queue-not-empty")
)
async def delete_queue(call: Call) -> Answer:
    """Delete a queue that has no live jobs; its finished jobs stay until their retention ends."""
    async with call.app.db.begin() as tx:
        await ops.delete(tx, call.path["name"], actor=call.caller.name)
    return Answer(204)


@doors.post(
    "/v1/queues/{name}/pause",
    scope="operate",
    body=schemas.Why,
    body_required=False,
    answers={200: schemas.Queue},
    refusals=("queue-not-found",),
)
async def pause_queue(call: Call) -> Answer:
    """Pause a queue: no new claims; jobs that run may end, and their heartbeats say `queue_paused`."""
    return await _switch(call, ops.pause)


@doors.post(
    "/v1/queues/{name}/resume",
    scope="operate",
    body=schemas.Why,
    body_required=False,
    answers={200: schemas.Queue},
    refusals=("queue-not-found",),
)
async def resume_queue(call: Call) -> Answer:
    """Resume a paused queue."""
    return await _switch(call, ops.resume)


@doors.post(
    "/v1/queues/{name}/release-hold",
    scope="operate",
    body=schemas.Why,
    body_required=False,
    answers={200: schemas.Queue},
    refusals=("queue-not-found",),
)
async def release_hold(call: Call) -> Answer:
    """Let a queue's automatic reclaim go on after the storm brake held it."""
    return await _switch(call, ops.release_hold)


async def _switch(call: Call, act: Any) -> Answer:
    async with call.app.db.begin() as tx:
        row = await act(tx, call.path["name"], actor=call.caller.name, reason=call.body.reason)
    return Answer(200, queue_view(row))
