"""Enqueue with keys, and the operator's requeue, cancel, resolve beyond the matrix of moves."""

import asyncio
from datetime import timedelta

import pytest

from app.errors import FenceMoved, IdempotencyMismatch, InvalidInput, JobNotFound, MoveRefused, UniqueKeyHeld
from app.jobs import intake, lease, reclaim
from app.jobs.model import ClaimCall, Ending, NewJob, new_id
from tests.factories import a_job, read

OPERATOR = {"actor": "op", "reason": "because", "expected_fence": None}
REQUEUE = {**OPERATOR, "extra_attempts": 1, "force": False, "from_done": False}


async def enqueue(db, *jobs):
    async with db.begin() as tx:
        return await intake.enqueue(tx, list(jobs))


async def test_the_same_idempotency_key_is_one_job_and_other_content_is_refused(db):
    first, same, other, elsewhere = await enqueue(
        db,
        NewJob("q", "1", idempotency_key="k", content_sha256=b"1"),
        NewJob("q", "1", idempotency_key="k", content_sha256=b"1"),
        NewJob("q", "2", idempotency_key="k", content_sha256=b"2"),
        NewJob("r", "2", idempotency_key="k", content_sha256=b"2"),
    )
    assert (first["deduplicated"], same["deduplicated"], same["id"]) == (False, True, first["id"])
    assert isinstance(other, IdempotencyMismatch)
    assert elsewhere["id"] != first["id"]
    [again] = await enqueue(db, NewJob("q", "1", idempotency_key="k", content_sha256=b"1"))
    assert again["id"] == first["id"]


async def test_many_enqueues_of_one_key_at_once_make_one_job(db):
    for key in ("idempotency_key", "unique_key"):
        answers = await asyncio.gather(
            *(enqueue(db, NewJob("q", "1", content_sha256=b"1", **{key: "same"})) for _ in range(20))
        )
        assert len({answer["id"] for [answer] in answers}) == 1
        assert sum(not answer["deduplicated"] for [answer] in answers) == 1


@pytest.mark.parametrize("status", ["queued", "processing", "manual_review", "done", "failed", "cancelled"])
async def test_a_unique_key_is_held_by_live_jobs_only(db, status):
    async with db.begin() as tx:
        held = await a_job(tx, status, unique_key="u")
    live = status in ("queued", "processing", "manual_review")
    [returned] = await enqueue(db, NewJob("q", "2", unique_key="u"))
    assert (returned["id"] == held.id, returned["deduplicated"]) == (live, live)
    [rejected] = await enqueue(db, NewJob("q", "2", unique_key="u", reject_conflict=True))
    assert isinstance(rejected, UniqueKeyHeld)
    assert rejected.facts["holder_id"] == str(returned["id"])
    [other_queue] = await enqueue(db, NewJob("r", "2", unique_key="u", reject_conflict=True))
    assert other_queue["status"] == "queued"


async def test_batches_with_crossed_keys_end_without_a_deadlock(db):
    def batch(order):
        return [NewJob("q", "1", unique_key=f"u{n}") for n in order]

    for _ in range(10):
        outcomes = await asyncio.gather(
            db.again(lambda tx: intake.enqueue(tx, batch(range(30)))),
            db.again(lambda tx: intake.enqueue(tx, batch(reversed(range(30))))),
        )
        assert all(isinstance(job, dict) for outcome in outcomes for job in outcome)


async def test_first_in_first_out_within_a_batch_whatever_the_keys(db):
    jobs = await enqueue(db, *(NewJob("q", str(n), unique_key=f"{9 - n}") for n in range(10)))
    async with db.begin() as tx:
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 10)])
    assert [job["id"] for job in grant.jobs] == [job["id"] for job in jobs]


async def test_an_instant_in_the_past_counts_as_now_and_one_too_far_ahead_is_refused(db):
    async with db.begin() as tx:
        now = (await tx.row("SELECT fencepost_now() AS now"))["now"]
    [past, now_job] = await enqueue(db, NewJob("q", "1", available_at=now - timedelta(days=99)), NewJob("q", "1"))
    assert past["available_at"] == now_job["available_at"]
    await enqueue(db, NewJob("q", "1", available_at=now + timedelta(days=365)))
    with pytest.raises(InvalidInput) as refused:
        await enqueue(db, NewJob("q", "1"), NewJob("q", "1", available_at=now + timedelta(days=367)))
    assert "jobs[1].available_at" in refused.value.detail


async def test_defaults_come_from_the_queue(db):
    async with db.begin() as tx:
        await tx.run(
            "INSERT INTO queues (name, max_attempts, max_reclaims, recovery_policy) VALUES ('q', 9, 8, 'manual')"
        )
    [job, own] = await enqueue(db, NewJob("q", "1"), NewJob("q", "1", max_attempts=2, recovery_policy="auto"))
    assert (job["max_attempts"], job["max_reclaims"], job["recovery_policy"]) == (9, 8, "manual")
    assert (own["max_attempts"], own["recovery_policy"]) == (2, "auto")


async def test_requeue_raises_the_limits_keeps_the_fence_and_the_history(db):
    async with db.begin() as tx:
        job = await a_job(tx, "failed", attempts=5, max_attempts=5, reclaim_count=7, fence=9)
    row = await intake.requeue(db, job.id, **{**REQUEUE, "extra_attempts": 2})
    assert (row["max_attempts"], row["attempts"], row["fence"], row["status"]) == (7, 5, 9, "queued")
    assert row["max_reclaims"] == 9
    again = await intake.requeue(db, job.id, **REQUEUE)
    assert (again["max_attempts"], again["available_at"]) == (7, row["available_at"])


async def test_requeue_of_a_job_that_is_not_due_runs_it_now(db):
    async with db.begin() as tx:
        job = await a_job(tx, due_in=500, attempts=1, fence=1)
    row = await intake.requeue(db, job.id, **REQUEUE)
    assert row["attempts"] == 1
    async with db.begin() as tx:
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 1)])
    assert len(grant.jobs) == 1


async def test_requeue_from_done_moves_the_result_into_the_history(db):
    async with db.begin() as tx:
        job = await a_job(tx, "done", result='{"answer": 42}')
    await intake.requeue(db, job.id, **{**REQUEUE, "from_done": True})
    async with db.begin() as tx:
        row = await read(tx, job)
        kept = await tx.row("SELECT outcome, result FROM job_attempts WHERE job_id = %(id)s", {"id": job.id})
    assert (row["result"], row["done_by"]) == (None, None)
    assert kept == {"outcome": "done", "result": {"answer": 42}}


async def test_requeue_while_a_newer_job_holds_the_key_names_the_holder(db):
    async with db.begin() as tx:
        old = await a_job(tx, "failed", unique_key="u")
        new = await a_job(tx, "queued", unique_key="u")
    with pytest.raises(UniqueKeyHeld) as refused:
        await intake.requeue(db, old.id, **REQUEUE)
    assert refused.value.facts["holder_id"] == str(new.id)


async def test_a_forced_requeue_ends_the_attempt_in_the_history(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing", cancel_requested=True)
    await intake.requeue(db, job.id, **{**REQUEUE, "force": True})
    async with db.begin() as tx:
        kept = await tx.row("SELECT outcome, error_message FROM job_attempts WHERE job_id = %(id)s", {"id": job.id})
        [refused] = await lease.complete(tx, [Ending("complete", job.id, job.token, b"x")])
    assert kept == {"outcome": "requeued", "error_message": "because"}
    assert refused.facts["ended_by"] == "requeued"


async def test_force_does_not_stand_in_for_from_done(db):
    async with db.begin() as tx:
        job = await a_job(tx, "done")
    with pytest.raises(MoveRefused):
        await intake.requeue(db, job.id, **{**REQUEUE, "force": True})


async def test_an_expected_fence_that_moved_on_is_refused_in_every_verb(db):
    old = {**OPERATOR, "expected_fence": 1}
    async with db.begin() as tx:
        job = await a_job(tx, "failed", fence=2)
        review = await a_job(tx, "manual_review", fence=2)
    with pytest.raises(FenceMoved):
        await intake.requeue(db, job.id, **{**REQUEUE, "expected_fence": 1})
    async with db.begin() as tx:
        with pytest.raises(FenceMoved):
            await intake.cancel(tx, review.id, **old, force=False)
        with pytest.raises(FenceMoved):
            await intake.resolve(
                tx, review.id, actor="op", outcome="done", result=None, note=None, accept_late_result=False,
                expected_fence=1,
            )  # fmt: skip
        done = await intake.cancel(tx, review.id, **{**old, "expected_fence": 2}, force=False)
    assert done["status"] == "cancelled"


async def test_unknown_jobs_are_not_found(db):
    with pytest.raises(JobNotFound):
        await intake.requeue(db, new_id(), **REQUEUE)
    async with db.begin() as tx:
        with pytest.raises(JobNotFound):
            await intake.cancel(tx, new_id(), **OPERATOR, force=False)
        with pytest.raises(JobNotFound):
            await intake.attempts(tx, new_id(), after=-1, limit=1)


async def test_a_late_result_is_kept_once_and_can_be_accepted(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing", lease_over=True, recovery_policy="manual")
    await reclaim.reclaim_pass(db, reclaim.Pacing(2.0, 0.0))
    for result in ('{"first": 1}', '{"second": 2}'):
        async with db.begin() as tx:
            [refused] = await lease.complete(tx, [Ending("complete", job.id, job.token, b"x", result=result)])
        assert refused.facts["ended_by"] == "reclaimed"
    async with db.begin() as tx:
        assert (await intake.get(tx, job.id))["late_result"] == '{"first": 1}'
        row = await intake.resolve(
            tx, job.id, actor="op", outcome="done", result=None, note="looked", accept_late_result=True,
            expected_fence=None,
        )  # fmt: skip
    assert (row["status"], row["result"]) == ("done", '{"first": 1}')
    async with db.begin() as tx:
        assert (await intake.get(tx, job.id))["late_fence"] is None


async def test_the_next_claim_makes_a_late_result_nobodys(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing", lease_over=True)
    await reclaim.reclaim_pass(db, reclaim.Pacing(2.0, 0.0))
    async with db.begin() as tx:
        await lease.complete(tx, [Ending("complete", job.id, job.token, b"x", result="1")])
        assert (await intake.get(tx, job.id))["late_fence"] == 1
        await lease.claim(tx, ["q"], [ClaimCall("w2", 1)])
        assert (await intake.get(tx, job.id))["late_fence"] is None
    async with db.begin() as tx:
        with pytest.raises(MoveRefused):
            await intake.resolve(
                tx, job.id, actor="op", outcome="done", result=None, note=None, accept_late_result=True,
                expected_fence=None,
            )  # fmt: skip


async def test_every_operator_action_leaves_one_audit_row_and_a_refused_one_none(db):
    async with db.begin() as tx:
        job = await a_job(tx, "failed")
    await intake.requeue(db, job.id, **REQUEUE)
    await intake.requeue(db, job.id, **REQUEUE)
    async with db.begin() as tx:
        await intake.cancel(tx, job.id, **OPERATOR, force=False)
        await intake.cancel(tx, job.id, **OPERATOR, force=False)
    async with db.begin() as tx:
        rows = await tx.rows("SELECT actor, action, target, reason, before, after FROM audit ORDER BY at")
    assert [(row["action"], row["before"]["status"], row["after"]["status"]) for row in rows] == [
        ("job.requeue", "failed", "queued"),
        ("job.cancel", "queued", "cancelled"),
    ]
    assert {(row["actor"], row["reason"], row["target"]) for row in rows} == {("op", "because", str(job.id))}


async def test_asking_twice_to_cancel_changes_nothing_the_second_time(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
        first = await intake.cancel(tx, job.id, **OPERATOR, force=False)
    async with db.begin() as tx:
        second = await intake.cancel(tx, job.id, **OPERATOR, force=False)
        audit = await tx.rows("SELECT * FROM audit")
    assert second == first
    assert (second["status"], second["cancel_requested"], len(audit)) == ("processing", True, 1)


async def test_a_requeue_brings_a_deleted_queue_back(db):
    async with db.begin() as tx:
        job = await a_job(tx, "failed", queue="gone")
    await intake.requeue(db, job.id, **REQUEUE)
    async with db.begin() as tx:
        assert await tx.rows("SELECT name FROM queues") == [{"name": "gone"}]


async def test_a_page_ends_early_where_payloads_are_large_and_loses_nothing(db):
    import secrets

    big = [NewJob("q", f'"{secrets.token_hex(125_000)}"') for _ in range(40)]
    await enqueue(db, *big)
    seen, position = [], {}
    for _ in range(40):
        async with db.begin() as tx:
            rows = await intake.search(tx, {"queue": "q", "limit": 41, **position})
        seen += [row["id"] for row in rows]
        if rows[0]["found"] == len(rows):
            break
        position = {"before_at": rows[-1]["created_at"], "before_id": rows[-1]["id"]}
    assert len(seen) == len(set(seen)) == 40
    assert len(rows) < 40
