"""The worker's side: claim, heartbeat, complete, fail, release, and the service's own give-back.

Every operation takes many items, since one statement for a hundred calls costs little more than one for one. A
refused item is a value in the answer, not an exception: one stale token spoils no other, and what is kept beside
a refusal (a late result) is committed with it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import errors as pg

from app.arrays import array
from app.db import Database, Tx
from app.errors import IdempotencyMismatch, LeaseLost, Refusal, Unavailable
from app.jobs import sql
from app.jobs.model import Beat, ClaimCall, Ending, new_token, token_digest
from app.jobs.verdict import answer, judge
from app.lanes import Beside

PRIORITIES = tuple(range(9, -1, -1))

Outcome = dict[str, Any] | Refusal


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim took: rows of `sql.CLAIM`, in the order of their claim."""

    jobs: list[dict[str, Any]]
    server_time: datetime | None
    replayed: bool = False


async def claim(tx: Tx, queues: Sequence[str], calls: Sequence[ClaimCall], *, in_one: bool = False) -> list[Grant]:
    """Deal due jobs of `queues` (tried in the order given) to the callers, first come first served.

    With `in_one` one statement must do, which may be a transaction of its own; raises Beside where a queue is limited.
    """
    owners = [index for index, call in enumerate(calls) for _ in range(call.max_jobs)]
    seats = [(new_token(), calls[index].worker_id, calls[index].lease_seconds) for index in owners]
    rows, server_time = await _take(tx, queues, seats, locked=False, in_one=in_one)
    grants: list[list[dict[str, Any]]] = [[] for _ in calls]
    for row in rows:
        grants[owners[row["place"] - 1]].append(row)
    for queue, count in Counter(row["queue"] for row in rows).items():
        tx.tell("claim", queue=queue, count=count)
    return [Grant(jobs, server_time) for jobs in grants]


@dataclass(frozen=True, slots=True)
class Wish:
    """A claim that may be gathered with others of the same queues: it has no `request_id`."""

    queues: tuple[str, ...]
    call: ClaimCall


async def claim_gathered(tx: Tx, wishes: Sequence[Wish]) -> list[Grant]:
    """The claims of all, who name the same queues, in one statement. Raises Beside where a queue has a limit."""
    return await claim(tx, wishes[0].queues, [wish.call for wish in wishes], in_one=True)


async def claim_together(tx: Tx, wishes: Sequence[Wish]) -> list[Grant]:
    """The same in as many statements as it takes, all in the transaction."""
    return await claim(tx, wishes[0].queues, [wish.call for wish in wishes])


_Seat = tuple[UUID, str, float | None]


async def _take(
    tx: Tx, queues: Sequence[str], seats: Sequence[_Seat], *, locked: bool, in_one: bool = False
) -> tuple[list[dict[str, Any]], datetime]:
    rows = await tx.rows(
        sql.CLAIM,
        {
            "queues": array(queue for queue in queues for _ in PRIORITIES),
            "priorities": array(PRIORITIES * len(queues)),
            "wanted": len(seats),
            "tokens": array(seat[0] for seat in seats),
            "workers": array(seat[1] for seat in seats),
            "leases": array(seat[2] for seat in seats),
            "locked": locked,
        },
    )
    server_time = rows[0]["server_time"]
    if rows[0]["limited"]:
        if in_one:
            raise Beside
        return await _take_limited(tx, queues, seats), server_time
    return [row for row in rows if row["id"] is not None], server_time


async def _take_limited(tx: Tx, queues: Sequence[str], seats: Sequence[_Seat]) -> list[dict[str, Any]]:
    limits = {row["name"]: row["max_processing"] for row in await tx.rows(sql.LOCK_LIMITED, {"queues": list(queues)})}
    counts = {row["queue"]: row["processing"] for row in await tx.rows(sql.COUNT_PROCESSING, {"queues": list(limits)})}
    taken: list[dict[str, Any]] = []
    for queue in queues:
        room = len(seats) - len(taken)
        if queue in limits:
            room = min(room, limits[queue] - counts.get(queue, 0))
        if room <= 0:
            continue
        before = len(taken)
        rows, _ = await _take(tx, [queue], seats[before : before + room], locked=True)
        taken += [{**row, "place": row["place"] + before} for row in rows]
    return taken


async def claim_once(db: Database, queues: Sequence[str], call: ClaimCall) -> Grant:
    """One caller's claim, repeatable by its `request_id`: a repeat never takes a new job.

    Raises IdempotencyMismatch where the request id was used with other parameters.
    """
    for _ in range(3):
        try:
            async with db.begin(generic_plan=True) as tx:
                if call.request_id is not None:
                    replayed = await _replay(tx, call)
                    if replayed is not None:
                        return replayed
                [grant] = await claim(tx, queues, [call])
                if call.request_id is not None and grant.jobs:
                    await tx.run(
                        sql.KEEP_CLAIM_REQUEST,
                        {
                            **_request(call),
                            "digest": call.content_sha256,
                            "ids": [job["id"] for job in grant.jobs],
                            "fences": [job["fence"] for job in grant.jobs],
                        },
                    )
                return grant
        except pg.UniqueViolation:
            # The same request ran beside this one and took its jobs first; ours went back with the roll-back.
            continue
    raise Unavailable("The same claim is being repeated too often at once.")


def _request(call: ClaimCall) -> dict[str, Any]:
    return {"key_id": call.key_id, "worker_id": call.worker_id, "request_id": call.request_id}


async def _replay(tx: Tx, call: ClaimCall) -> Grant | None:
    kept = await tx.row(sql.CLAIM_REQUEST, _request(call))
    if kept is None:
        return None
    if bytes(kept["content_sha256"]) != call.content_sha256:
        raise IdempotencyMismatch(
            "This request_id was used before with other parameters.", request_id=str(call.request_id)
        )
    rows = await tx.rows(sql.REPLAY_CLAIM, {"ids": kept["job_ids"], "fences": kept["fences"]})
    now = await tx.row(sql.NOW)
    return Grant(rows, now["now"] if now else None, replayed=True)


async def heartbeat(tx: Tx, beats: Sequence[Beat]) -> list[Outcome]:
    """Extend leases. Equal (job, token, worker) are folded to the longest lease, for one UPDATE applies one of them."""
    folded: dict[tuple[UUID, UUID, str], list[Beat]] = {}
    for beat in beats:
        folded.setdefault((beat.job_id, beat.token, beat.worker_id), []).append(beat)
    keys = sorted(folded)
    same = [folded[key] for key in keys]
    rows = {
        (row["id"], row["attempt_token"], row["reserved_by"]): row
        for row in await tx.rows(
            sql.HEARTBEAT,
            {
                "ids": array(job_id for job_id, _, _ in keys),
                "tokens": array(token for _, token, _ in keys),
                "workers": array(worker for _, _, worker in keys),
                "leases": array(
                    max((b.lease_seconds for b in each if b.lease_seconds is not None), default=None) for each in same
                ),
                "as_granted": array(any(b.lease_seconds is None for b in each) for each in same),
                "progress": array(
                    next((b.progress for b in reversed(each) if b.progress is not None), None) for each in same
                ),
            },
        )
    }
    missed = [i for i, beat in enumerate(beats) if (beat.job_id, beat.token, beat.worker_id) not in rows]
    fates = await _fates(tx, [(beats[i].job_id, beats[i].token) for i in missed])
    refused = {i: judge(beats[i].job_id, "heartbeat", b"", fate) for i, fate in zip(missed, fates, strict=True)}
    if rows:
        tx.tell("heartbeat", count=len(rows))
    if refused:
        tx.tell("stale_refused", count=len(refused), verb="heartbeat")
    return [
        refused[i] if i in refused else rows[beat.job_id, beat.token, beat.worker_id] for i, beat in enumerate(beats)
    ]


async def complete(tx: Tx, endings: Sequence[Ending]) -> list[Outcome]:
    outcomes = await _end(tx, sql.COMPLETE, endings)
    for index, (ending, outcome) in enumerate(zip(endings, outcomes, strict=True)):
        if isinstance(outcome, LeaseLost) and outcome.facts["ended_by"] == "reclaimed":
            kept = await tx.run(
                sql.KEEP_LATE_RESULT,
                {"id": ending.job_id, "token_sha256": token_digest(ending.token), "result": ending.result},
            )
            if kept:
                outcomes[index] = LeaseLost(
                    f"{outcome.detail} Its late result is kept, and an operator may accept it.",
                    **outcome.facts,
                    late_result_kept=True,
                )
                tx.tell("late_result")
    return outcomes


async def fail(tx: Tx, endings: Sequence[Ending]) -> list[Outcome]:
    return await _end(tx, sql.FAIL, endings)


async def release(tx: Tx, endings: Sequence[Ending]) -> list[Outcome]:
    return await _end(tx, sql.RELEASE, endings)


_ENDS = {"complete": complete, "fail": fail, "release": release}


async def end(tx: Tx, endings: Sequence[Ending]) -> list[Outcome]:
    """Endings of one verb, as that verb."""
    return await _ENDS[endings[0].verb](tx, endings)


async def _end(tx: Tx, statement: str, endings: Sequence[Ending]) -> list[Outcome]:
    """End attempts; of several endings of one attempt the first goes in, the others are judged by its outcome."""
    if not endings:
        return []
    verb = endings[0].verb
    first: dict[tuple[UUID, UUID], int] = {}
    for index, ending in enumerate(endings):
        first.setdefault((ending.job_id, ending.token), index)
    # In the order of the ids, so that two batches over the same jobs do not lock them crosswise.
    firsts = [endings[index] for _, index in sorted(first.items())]
    rows = await tx.rows(
        statement,
        {
            "ids": array(e.job_id for e in firsts),
            "tokens": array(e.token for e in firsts),
            "token_digests": array(token_digest(e.token) for e in firsts),
            "digests": array(e.content_sha256 for e in firsts),
            "results": array(e.result for e in firsts),
            "error_types": array(e.error_type for e in firsts),
            "error_messages": array(e.error_message for e in firsts),
            "retryables": array(e.retryable for e in firsts),
            "delays": array(e.delay_seconds for e in firsts),
            "jitters": array(e.jitter for e in firsts),
        },
    )
    outcomes: dict[int, Outcome] = {}
    for row in rows:
        outcomes[first[row["id"], row["token"]]] = answer(
            row["id"], row["status"], row["fence"], row["available_at"], row["server_time"]
        )
        if row.get("due") or row["limited"]:
            tx.tell("claimable", queue=row["queue"], count=1)
        elif row["status"] == "queued":
            tx.tell("due_later", queue=row["queue"], wait=row["wait"])
    for (queue, status), count in Counter((row["queue"], row["status"]) for row in rows).items():
        tx.tell(verb, queue=queue, to=status, count=count)
    missed = [index for index in range(len(endings)) if index not in outcomes]
    fates = await _fates(tx, [(endings[i].job_id, endings[i].token) for i in missed])
    for index, fate in zip(missed, fates, strict=True):
        outcomes[index] = judge(endings[index].job_id, verb, endings[index].content_sha256, fate)
    refused = sum(isinstance(outcomes[index], Refusal) for index in missed)
    if refused:
        tx.tell("stale_refused", count=refused, verb=verb)
    return [outcomes[index] for index in range(len(endings))]


async def _fates(tx: Tx, attempts: Sequence[tuple[UUID, UUID]]) -> list[dict[str, Any]]:
    if not attempts:
        return []
    rows = await tx.rows(
        sql.FATE_OF_TOKEN,
        {
            "ids": [job_id for job_id, _ in attempts],
            "tokens": [token for _, token in attempts],
            "token_digests": [token_digest(token) for _, token in attempts],
        },
    )
    for row in rows:
        for column in ("done_sha256", "ending_sha256"):
            row[column] = bytes(row[column]) if row[column] is not None else None
    return rows


async def give_back(db: Database, jobs: Sequence[dict[str, Any]]) -> None:
    """Return jobs whose claimer vanished before it was answered; neither `attempts` nor `release_count` moves."""
    async with db.begin() as tx:
        rows = await tx.rows(
            sql.GIVE_BACK, {"ids": [job["id"] for job in jobs], "tokens": [job["attempt_token"] for job in jobs]}
        )
        for row in rows:
            tx.tell("claimable", queue=row["queue"], count=1)
        if rows:
            tx.tell("give_back", count=len(rows))
