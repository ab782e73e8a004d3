"""The worker's side: who gets what, in which order, and what one gather makes of equal ids."""

import asyncio
import uuid

import pytest

from app.errors import AttemptEnded, IdempotencyMismatch, JobNotFound, LeaseLost, Refusal, WorkerMismatch
from app.jobs import intake, lease
from app.jobs.model import Beat, ClaimCall, Ending, NewJob
from tests.factories import a_job, read


def complete(job, digest=b"x", result=None, token=None):
    return Ending("complete", job.id, token or job.token, digest, result=result)


async def test_a_claim_takes_by_priority_then_first_in_first_out(db):
    async with db.begin() as tx:
        late = await a_job(tx, due_in=-1, priority=4)
        early = await a_job(tx, due_in=-9, priority=4)
        low = await a_job(tx, due_in=-99, priority=0)
        high = await a_job(tx, due_in=-1, priority=9)
        await a_job(tx, due_in=60, priority=9)
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 10)])
    assert [job["id"] for job in grant.jobs] == [high.id, early.id, late.id, low.id]


async def test_queues_are_tried_in_the_order_given(db):
    async with db.begin() as tx:
        first = await a_job(tx, queue="b", priority=0)
        await a_job(tx, queue="a", priority=9)
        [grant] = await lease.claim(tx, ["b", "a"], [ClaimCall("w", 1)])
    assert [job["id"] for job in grant.jobs] == [first.id]


async def test_one_claim_deals_to_many_callers_each_with_its_own_token_worker_and_lease(db):
    async with db.begin() as tx:
        for _ in range(5):
            await a_job(tx)
        grants = await lease.claim(
            tx,
            ["q"],
            [ClaimCall("one", 2, 10.0), ClaimCall("two", 2, 500.0), ClaimCall("three", 3), ClaimCall("four", 1)],
        )
    assert [len(grant.jobs) for grant in grants] == [2, 2, 1, 0]
    everything = [job for grant in grants for job in grant.jobs]
    assert len({job["id"] for job in everything}) == len({job["attempt_token"] for job in everything}) == 5
    assert [job["reserved_by"] for job in everything] == ["one", "one", "two", "two", "three"]
    granted = [round((job["lease_expires_at"] - job["reserved_at"]).total_seconds()) for job in everything]
    assert granted == [10, 10, 500, 500, 30]


async def test_claims_at_once_never_share_a_job(db):
    async with db.begin() as tx:
        for _ in range(40):
            await a_job(tx)
    grants = await asyncio.gather(*(lease.claim_once(db, ["q"], ClaimCall(f"w{n}", 3)) for n in range(20)))
    ids = [job["id"] for grant in grants for job in grant.jobs]
    assert len(ids) == len(set(ids)) == 40


async def test_the_lease_is_chosen_by_the_claimer_else_the_job_else_the_queue(db):
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name, lease_seconds) VALUES ('q', 77)")
        await intake.enqueue(tx, [NewJob("q", "1", priority=9), NewJob("q", "1", lease_seconds=55.0)])
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 2)])
        granted = [(job["lease_expires_at"] - job["reserved_at"]).total_seconds() for job in grant.jobs]
        assert granted == [77, 55]


async def test_max_run_clamps_the_lease_at_claim_and_heartbeat(db):
    async with db.begin() as tx:
        await intake.enqueue(tx, [NewJob("q", "1", max_run_seconds=100.0)])
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 1, 60.0)])
        [job] = grant.jobs
        assert (job["run_deadline_at"] - job["reserved_at"]).total_seconds() == 100
        [beat] = await lease.heartbeat(tx, [Beat(job["id"], job["attempt_token"], "w", 40_000.0)])
        assert beat["lease_expires_at"] == beat["run_deadline_at"] == job["run_deadline_at"]


async def test_a_heartbeat_never_shortens_and_defaults_to_the_length_granted(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing", lease=500.0, lease_left=600)
        before = (await read(tx, job))["lease_expires_at"]
        [beat] = await lease.heartbeat(tx, [Beat(job.id, job.token, "w", 1.0)])
        assert beat["lease_expires_at"] == before
        short = await a_job(tx, "processing", lease=500.0, lease_left=10)
        [beat] = await lease.heartbeat(tx, [Beat(short.id, short.token, "w")])
        assert (beat["lease_expires_at"] - beat["server_time"]).total_seconds() == 500


async def test_five_heartbeats_of_one_job_in_one_gather_end_at_the_longest(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing", lease=20.0)
        beats = [Beat(job.id, job.token, "w", seconds, progress) for seconds, progress in
                 [(5.0, "1"), (50.0, None), (None, "2"), (7.0, None), (3.0, "3")]]  # fmt: skip
        answers = await lease.heartbeat(tx, beats)
        after = await read(tx, job)
    assert {answer["lease_expires_at"] for answer in answers} == {after["lease_expires_at"]}
    assert (after["lease_expires_at"] - answers[0]["server_time"]).total_seconds() == 50
    assert after["progress"] == 3


async def test_a_gathered_heartbeat_without_a_length_beats_a_shorter_one(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing", lease=500.0)
        answers = await lease.heartbeat(tx, [Beat(job.id, job.token, "w", 5.0), Beat(job.id, job.token, "w")])
    for answer in answers:
        assert (answer["lease_expires_at"] - answer["server_time"]).total_seconds() == 500


async def test_one_stale_heartbeat_spoils_no_other(db):
    async with db.begin() as tx:
        good, ended = await a_job(tx, "processing"), await a_job(tx, "done")
        stale = await a_job(tx, "processing")
        answers = await lease.heartbeat(
            tx,
            [
                Beat(good.id, good.token, "w"),
                Beat(good.id, good.token, "another"),
                Beat(good.id, uuid.uuid4(), "w"),
                Beat(ended.id, ended.token, "w"),
                Beat(uuid.uuid4(), uuid.uuid4(), "w"),
                Beat(stale.id, good.token, "w"),
            ],
        )
    kinds = [type(answer) for answer in answers]
    assert kinds == [dict, WorkerMismatch, LeaseLost, AttemptEnded, JobNotFound, LeaseLost]


async def test_equal_completions_in_one_gather_are_judged_one_after_the_other(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
        answers = await lease.complete(
            tx,
            [
                complete(job, b"a", "1", token=uuid.uuid4()),
                complete(job, b"b", "2"),
                complete(job, b"b", "2"),
                complete(job, b"c", "3"),
            ],
        )
        after = await read(tx, job)
    assert isinstance(answers[0], LeaseLost)
    assert answers[1] == answers[2]
    assert isinstance(answers[3], AttemptEnded)
    assert after["result"] == 2


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
async def test_a_repeat_gets_the_first_answer_also_after_the_job_was_claimed_again(db, verb):
    end = getattr(lease, verb)
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
        ending = Ending(verb, job.id, job.token, b"same", delay_seconds=0.0, error_message="e")
        [first] = await end(tx, [ending])
    async with db.begin() as tx:
        [repeat] = await end(tx, [ending])
        assert repeat == first
        if verb != "complete":
            [grant] = await lease.claim(tx, ["q"], [ClaimCall("w2", 1)])
            assert [claimed["id"] for claimed in grant.jobs] == [job.id]
        else:
            await tx.run("SELECT 1")
    if verb == "complete":
        await intake.requeue(
            db, job.id, actor="op", reason=None, extra_attempts=1, force=False, from_done=True, expected_fence=None
        )
    async with db.begin() as tx:
        [again] = await end(tx, [ending])
        assert again == first
        [other] = await end(tx, [Ending(verb, job.id, job.token, b"other")])
        assert isinstance(other, AttemptEnded)
        assert other.facts["outcome"] == {"complete": "done", "fail": "failed", "release": "released"}[verb]


async def test_release_gives_the_attempt_back_ten_times_then_it_counts(db):
    async with db.begin() as tx:
        made = await a_job(tx, max_attempts=2)
    seen = []
    for _ in range(12):
        async with db.begin() as tx:
            [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 1)])
            [job] = grant.jobs
            [answer] = await lease.release(tx, [Ending("release", job["id"], job["attempt_token"], b"r")])
            row = await read(tx, made)
            seen.append((answer["status"], row["attempts"], row["release_count"]))
        if answer["status"] == "failed":
            break
    assert seen[9] == ("queued", 0, 10)
    assert seen[10] == ("queued", 1, 11)
    assert seen[11] == ("failed", 2, 12)
    assert row["last_error"] == "released too often"


async def test_give_back_touches_neither_count(db):
    async with db.begin() as tx:
        made = await a_job(tx, release_count=10)
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 1)])
    await lease.give_back(db, grant.jobs)
    async with db.begin() as tx:
        row = await read(tx, made)
    assert (row["status"], row["attempts"], row["release_count"], row["fence"]) == ("queued", 0, 10, 1)


async def test_back_off_grows_with_the_attempts_is_capped_and_drawn_at_the_door(db):
    expected = [(1, 0.5, 2.5), (2, 0.5, 5.0), (3, 1.0, 20.0), (20, 1.0, 3600.0), (99, 1.0, 3600.0)]
    for attempts, jitter, delay in expected:
        async with db.begin() as tx:
            job = await a_job(tx, "processing", attempts=attempts, max_attempts=100)
            [answer] = await lease.fail(tx, [Ending("fail", job.id, job.token, b"f", jitter=jitter)])
        assert (answer["available_at"] - answer["server_time"]).total_seconds() == pytest.approx(delay)


async def test_retry_after_and_not_retryable(db):
    async with db.begin() as tx:
        job, last = await a_job(tx, "processing"), await a_job(tx, "processing")
        [answer, end] = await lease.fail(
            tx,
            [
                Ending("fail", job.id, job.token, b"f", delay_seconds=1234.0, jitter=0.9),
                Ending("fail", last.id, last.token, b"f", retryable=False, delay_seconds=5.0),
            ],
        )
    assert (answer["available_at"] - answer["server_time"]).total_seconds() == 1234
    assert (end["status"], end["available_at"]) == ("failed", None)


async def test_a_claim_repeated_by_its_request_id_answers_the_same_jobs_and_never_a_new_one(db):
    async with db.begin() as tx:
        for _ in range(3):
            await a_job(tx)
    call = ClaimCall("w", 2, request_id=uuid.uuid4(), content_sha256=b"same")
    first = await lease.claim_once(db, ["q"], call)
    again = await lease.claim_once(db, ["q"], call)
    assert again.replayed
    assert [j["attempt_token"] for j in again.jobs] == [j["attempt_token"] for j in first.jobs]
    [gone, kept] = first.jobs
    async with db.begin() as tx:
        await lease.complete(tx, [Ending("complete", gone["id"], gone["attempt_token"], b"x")])
    again = await lease.claim_once(db, ["q"], call)
    assert [j["id"] for j in again.jobs] == [kept["id"]]
    async with db.begin() as tx:
        await lease.complete(tx, [Ending("complete", kept["id"], kept["attempt_token"], b"x")])
    again = await lease.claim_once(db, ["q"], call)
    assert again.replayed
    assert again.jobs == []
    with pytest.raises(IdempotencyMismatch):
        await lease.claim_once(db, ["q"], ClaimCall("w", 2, request_id=call.request_id, content_sha256=b"other"))
    other_worker = await lease.claim_once(db, ["q"], ClaimCall("v", 2, request_id=call.request_id))
    assert len(other_worker.jobs) == 1


async def test_the_same_claim_sent_many_times_at_once_takes_jobs_once(db):
    async with db.begin() as tx:
        for _ in range(30):
            await a_job(tx)
    call = ClaimCall("w", 2, request_id=uuid.uuid4(), content_sha256=b"same")
    grants = await asyncio.gather(*(lease.claim_once(db, ["q"], call) for _ in range(8)))
    assert len({tuple(sorted(j["id"] for j in grant.jobs)) for grant in grants}) == 1
    async with db.begin() as tx:
        row = await tx.row("SELECT count(*) FROM jobs WHERE status = 'processing'")
    assert row == {"count": 2}


async def test_an_empty_claim_leaves_no_row(db):
    call = ClaimCall("w", 2, request_id=uuid.uuid4(), content_sha256=b"same")
    await lease.claim_once(db, ["q"], call)
    async with db.begin() as tx:
        await a_job(tx)
    assert len((await lease.claim_once(db, ["q"], call)).jobs) == 1


async def test_a_paused_queue_gives_nothing_and_spoils_no_other(db):
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name, paused) VALUES ('q', true)")
        await a_job(tx)
        open_job = await a_job(tx, queue="open")
        [grant] = await lease.claim(tx, ["q", "open"], [ClaimCall("w", 5)])
    assert [job["id"] for job in grant.jobs] == [open_job.id]


async def test_max_processing_holds_under_concurrent_claims(db):
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name, max_processing) VALUES ('q', 3)")
        for _ in range(20):
            await a_job(tx)
        for _ in range(4):
            await a_job(tx, queue="free")
    grants = await asyncio.gather(*(lease.claim_once(db, ["q", "free"], ClaimCall(f"w{n}", 2)) for n in range(10)))
    taken = [job["queue"] for grant in grants for job in grant.jobs]
    assert taken.count("q") == 3
    assert taken.count("free") == 4
    tokens = [job["attempt_token"] for grant in grants for job in grant.jobs]
    assert len(set(tokens)) == 7


async def test_previous_attempt_is_told_to_the_next_claimer(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
        await lease.heartbeat(tx, [Beat(job.id, job.token, "w", progress='{"step": 2}')])
        ending = Ending("fail", job.id, job.token, b"f", error_type="E", error_message="boom", delay_seconds=0.0)
        await lease.fail(tx, [ending])
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w2", 1)])
    [claimed] = grant.jobs
    assert '"boom"' in claimed["previous_attempt"]
    assert '{"step": 2}' in claimed["previous_attempt"]
    assert claimed["progress"] is None


async def test_the_epoch_lifts_every_fence_above_the_old_ones(db):
    async with db.begin() as tx:
        job = await a_job(tx, fence=7)
        await tx.run("UPDATE fence_epoch SET epoch = 2")
        [grant] = await lease.claim(tx, ["q"], [ClaimCall("w", 1)])
        assert grant.jobs[0]["fence"] == 2 << 40
        [beat] = await lease.heartbeat(tx, [Beat(job.id, grant.jobs[0]["attempt_token"], "w")])
        assert not isinstance(beat, Refusal)


async def test_a_repeated_claim_tells_the_previous_attempt_too(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
        await lease.fail(tx, [Ending("fail", job.id, job.token, b"f", error_message="boom", delay_seconds=0.0)])
    call = ClaimCall("w", 1, request_id=uuid.uuid4(), content_sha256=b"same")
    first, again = [await lease.claim_once(db, ["q"], call) for _ in range(2)]
    assert '"boom"' in first.jobs[0]["previous_attempt"]
    assert '"boom"' in again.jobs[0]["previous_attempt"]


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
async def test_every_ending_in_a_queue_at_its_limit_tells_its_waiters(db, verb):
    heard = []
    db.hearers.append(lambda fact, facts: heard.append(fact))
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name, max_processing) VALUES ('q', 1)")
        job = await a_job(tx, "processing")
    async with db.begin() as tx:
        await getattr(lease, verb)(tx, [Ending(verb, job.id, job.token, b"x", delay_seconds=500.0)])
    assert "claimable" in heard
