"""Every event against every status, on PostgreSQL, compared with the table MOVES.

What MOVES allows must happen and end where it says; what it does not name must be refused and change nothing.
"""

import pytest

from app.errors import Refusal
from app.jobs import intake, lease, reclaim
from app.jobs.model import MOVES, Beat, ClaimCall, Ending, Status, token_digest
from tests.factories import a_job, read

VARIANTS = {
    # How a job of a status may be made: each is tried with each event.
    Status.QUEUED: [{}, {"due_in": 60}, {"attempts": 4, "fence": 7}],
    Status.PROCESSING: [
        {},
        {"lease_over": True},
        {"lease_over": True, "attempts": 5},
        {"lease_over": True, "recovery_policy": "manual"},
        {"lease_over": True, "reclaim_count": 3},
        {"lease_over": True, "cancel_requested": True},
        {"attempts": 5},
        {"cancel_requested": True},
        {"release_count": 10, "attempts": 5},
    ],
    Status.DONE: [{}, {"result": "1"}],
    Status.FAILED: [{}, {"attempts": 5}],
    Status.CANCELLED: [{}],
    Status.MANUAL_REVIEW: [{}, {"attempts": 5, "reclaim_count": 9}],
}
EVENTS = [*MOVES]
CELLS = [(event, status, n) for event in EVENTS for status in Status for n in range(len(VARIANTS[status]))]

PACING = reclaim.Pacing(interval=2.0, grace=0.0)


async def play(db, event: str, job) -> None:
    """Try the event. Raises its refusal."""

    def ending(verb):
        return Ending(verb, job.id, job.token, b"other", error_message="e")

    operator = {"actor": "op", "reason": None, "expected_fence": None}
    outcome = None
    if event == "requeue" or event.startswith("requeue_"):
        await intake.requeue(
            db, job.id, **operator, extra_attempts=1, force=event == "requeue_force",
            from_done=event == "requeue_from_done",
        )  # fmt: skip
        return
    if event == "reclaim":
        await reclaim.reclaim_pass(db, PACING)
        return
    async with db.begin() as tx:
        if event == "claim":
            await lease.claim(tx, ["q"], [ClaimCall("w2", 5)])
        elif event == "heartbeat":
            [outcome] = await lease.heartbeat(tx, [Beat(job.id, job.token, "w")])
        elif event == "complete":
            [outcome] = await lease.complete(tx, [ending("complete")])
        elif event == "fail":
            [outcome] = await lease.fail(tx, [ending("fail")])
        elif event == "release":
            [outcome] = await lease.release(tx, [ending("release")])
        elif event.startswith("cancel"):
            await intake.cancel(tx, job.id, **operator, force=event == "cancel_force")
        elif event.startswith("resolve"):
            await intake.resolve(
                tx, job.id, actor="op", outcome="failed" if event == "resolve_failed" else "done", result=None,
                note=None, accept_late_result=event == "resolve_late", expected_fence=None,
            )  # fmt: skip
        else:
            raise AssertionError(event)
    if isinstance(outcome, Refusal):
        raise outcome


LATE = """
INSERT INTO late_results (job_id, fence, worker_id, result, received_at)
SELECT id, fence, 'w', '{"late": true}', fencepost_now() FROM jobs WHERE id = %(id)s
"""


@pytest.mark.parametrize(("event", "status", "variant"), CELLS, ids=[f"{e}-{s}-{n}" for e, s, n in CELLS])
async def test_event_against_status(db, event, status, variant):
    given = VARIANTS[status][variant]
    async with db.begin() as tx:
        job = await a_job(tx, status, **given)
        if event == "resolve_late":
            await tx.run(LATE, {"id": job.id})
        before = await read(tx, job)
    refused = None
    try:
        await play(db, event, job)
    except Refusal as refusal:
        refused = refusal
    async with db.begin() as tx:
        after = await read(tx, job)

    allowed = MOVES[event].get(status)
    if event == "claim" and given.get("due_in", -1) > 0:
        allowed = None
    if event == "reclaim" and not given.get("lease_over"):
        allowed = None
    if allowed is None:
        assert {**after, "updated_at": None} == {**before, "updated_at": None}
        assert refused is not None or event in ("claim", "reclaim")
        return
    assert refused is None, refused
    assert Status(after["status"]) in allowed
    assert after["fence"] >= before["fence"], "the fence never goes back"
    assert (after["attempt_token"] is None) == (after["status"] != "processing")
    if event == "claim":
        assert after["fence"] > before["fence"]
        assert after["attempts"] == before["attempts"] + 1
    expected = _where(event, status, given)
    if expected:
        assert after["status"] == expected


def _where(event: str, status: Status, given: dict) -> str | None:
    """Where exactly, for the events that decide by the row."""
    cancel = given.get("cancel_requested")
    attempts = given.get("attempts", 1)
    if event == "reclaim":
        if cancel:
            return "cancelled"
        if given.get("recovery_policy") == "manual":
            return "manual_review"
        if attempts >= 5:
            return "failed"
        return "manual_review" if given.get("reclaim_count", 0) >= 3 else "queued"
    if event == "fail":
        return "cancelled" if cancel else "queued" if attempts < 5 else "failed"
    if event == "release":
        if cancel:
            return "cancelled"
        return "failed" if given.get("release_count") == 10 and attempts >= 5 else "queued"
    if event == "complete":
        return "done"
    return None


def test_the_matrix_is_whole():
    assert len(CELLS) == len(EVENTS) * sum(map(len, VARIANTS.values()))
    assert {status for _, status, _ in CELLS} == set(Status)


async def test_resolve_late_without_a_late_result_is_refused(db):
    for status in ("queued", "failed", "manual_review"):
        async with db.begin() as tx:
            job = await a_job(tx, status)
        with pytest.raises(Refusal) as refused:
            await play(db, "resolve_late", job)
        assert refused.value.code == "move-refused"


async def test_a_late_result_of_an_older_attempt_is_nobodys(db):
    async with db.begin() as tx:
        job = await a_job(tx, "manual_review", fence=3)
        await tx.run(LATE.replace("fence, 'w'", "fence - 1, 'w'"), {"id": job.id})
    with pytest.raises(Refusal):
        await play(db, "resolve_late", job)


@pytest.mark.parametrize(
    "broken",
    [
        "UPDATE jobs SET attempt_token = NULL",
        "UPDATE jobs SET lease_expires_at = NULL",
        "UPDATE jobs SET status = 'queued'",
        "UPDATE jobs SET status = 'done', finished_at = fencepost_now()",
        "UPDATE jobs SET finished_at = fencepost_now()",
        "UPDATE jobs SET status = 'sleeping'",
        "UPDATE jobs SET fence = -1",
        "UPDATE jobs SET fence = 9007199254740992",
        "UPDATE jobs SET priority = 10",
    ],
)
async def test_the_database_forbids_what_must_not_be(db, broken):
    from psycopg.errors import CheckViolation

    async with db.begin() as tx:
        await a_job(tx, "processing")
    with pytest.raises(CheckViolation):
        async with db.begin() as tx:
            await tx.run(broken)


async def test_a_cancel_request_lives_only_while_processing(db):
    from psycopg.errors import CheckViolation

    async with db.begin() as tx:
        await a_job(tx, "queued")
    with pytest.raises(CheckViolation):
        async with db.begin() as tx:
            await tx.run("UPDATE jobs SET cancel_requested_at = fencepost_now()")


async def test_tokens_are_kept_as_digests_only(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
        await lease.complete(tx, [Ending("complete", job.id, job.token, b"x")])
        after = await read(tx, job)
    assert bytes(after["done_token_sha256"]) == token_digest(job.token)
    assert str(job.token) not in str(after)
