"""B19: a cancel meets another call: one of them wins, both are told the truth, and a cancelled job stays so."""

# ruff: noqa: B023 (the calls have run before their loop goes on)

import pytest

from tests.cases.support import at_once, books, new_queue, passes

ROUNDS = 100


def judged(reply, *allowed):
    assert (reply.status, reply.code) in allowed, (reply.status, reply.body)
    return reply


def crossed(pair, rounds, first, second):
    """Both calls at once, on the two instances in turn."""
    return at_once(lambda: first(pair.each(rounds)), lambda: second(pair.each(rounds // 2)))


def held(pair, queue, **fields):
    pair.a.enqueued(queue, backoff={"base_seconds": 0}, **fields)
    return pair.a.claim_one(queue, worker="w", lease=60)


def test_a_forced_cancel_against_done(pair):
    queue, winners = new_queue("cross"), []
    for number in range(ROUNDS):
        job = held(pair, queue)
        cancel, done = crossed(
            pair,
            number,
            lambda api, job=job: api.operate("cancel", job["id"], force=True),
            lambda api, job=job: api.complete(job, result="kept"),
        )
        after = pair.a.get(job["id"])
        if cancel.status == 200:
            judged(done, (409, "lease-lost"))
            assert done.body["ended_by"] == "cancelled"
            assert (cancel.body["status"], after["status"], after["result"]) == ("cancelled", "cancelled", None)
        else:
            judged(cancel, (409, "move-refused"))
            assert cancel.body["job_status"] == "done"
            judged(done, (200, None))
            assert (after["status"], after["result"]) == ("done", "kept")
        winners.append(after["status"])
        # The loser's repeat hears the same.
        assert pair.a.complete(job, result="kept").status == done.status
        assert pair.b.operate("cancel", job["id"], force=True).status == cancel.status
        assert pair.a.get(job["id"]) == after
    counts = books(pair.a, pair.sql, queue, ROUNDS)
    assert (counts["cancelled"], counts["done"]) == (winners.count("cancelled"), winners.count("done"))
    assert set(winners) == {"cancelled", "done"}


def test_a_request_to_stop_against_done(pair):
    """202 promises no end: the done counts either way."""
    queue, heard = new_queue("cross"), []
    for number in range(ROUNDS):
        job = held(pair, queue)
        cancel, done = crossed(
            pair,
            number,
            lambda api, job=job: api.operate("cancel", job["id"]),
            lambda api, job=job: api.complete(job, result="kept"),
        )
        judged(cancel, (202, None), (409, "move-refused"))
        if cancel.status == 202:
            assert (cancel.body["status"], cancel.body["cancel_requested"]) == ("processing", True)
        else:
            assert cancel.body["job_status"] == "done"
        judged(done, (200, None))
        assert done.body["status"] == "done"
        heard.append(cancel.status)
        after = pair.b.get(job["id"])
        assert (after["status"], after["result"], after["cancel_requested"]) == ("done", "kept", False)
    assert books(pair.a, pair.sql, queue, ROUNDS)["done"] == ROUNDS
    assert set(heard) == {202, 409}


def test_a_cancel_against_a_claim(pair):
    queue, seen = new_queue("cross"), []
    for number in range(ROUNDS):
        [job_id] = pair.a.enqueued(queue)
        cancel, jobs = crossed(
            pair,
            number,
            lambda api, job_id=job_id: api.operate("cancel", job_id),
            lambda api: api.claim(queue, worker="w", lease=60),
        )
        after = pair.a.get(job_id)
        if cancel.status == 200:
            assert cancel.body["status"] == "cancelled"
            assert jobs == []
            assert after["status"] == "cancelled"
        else:
            judged(cancel, (202, None))
            [job] = jobs
            assert job["id"] == job_id
            assert (after["status"], after["cancel_requested"]) == ("processing", True)
            # The worker hears it, and nothing but a done or an end follows.
            beat = pair.each(number).heartbeat(job)
            assert beat.body["cancel_requested"] is True
            assert pair.a.fail(job).body["status"] == "cancelled"
        seen.append(cancel.status)
        assert pair.b.claim(queue) == []
    assert books(pair.a, pair.sql, queue, ROUNDS)["cancelled"] == ROUNDS
    assert set(seen) == {200, 202}


@pytest.mark.parametrize("verb", ["fail", "release"])
@pytest.mark.parametrize("force", [False, True], ids=["asked", "forced"])
def test_a_cancel_against_an_ending_that_would_bring_it_back(pair, verb, force):
    rounds, queue, seen = ROUNDS // 2, new_queue("cross"), set()
    for number in range(rounds):
        job = held(pair, queue)
        body = {"force": True} if force else {}
        cancel, ending = crossed(
            pair,
            number,
            lambda api, job=job, body=body: api.operate("cancel", job["id"], **body),
            lambda api, job=job: api.end(verb, job),
        )
        judged(cancel, (200, None), (202, None))
        judged(ending, (200, None), (409, "lease-lost"))
        if cancel.status == 202:
            assert (ending.status, ending.body["status"]) == (200, "cancelled")
        elif ending.status == 200:
            # Back in the queue first, cancelled there.
            assert ending.body["status"] == "queued"
        else:
            assert force
            assert ending.body["ended_by"] == "cancelled"
        seen.add((cancel.status, ending.status))
        assert pair.a.get(job["id"])["status"] == "cancelled"
        assert pair.b.claim(queue) == []
    assert books(pair.a, pair.sql, queue, rounds)["cancelled"] == rounds
    assert len(seen) == 2, seen


def test_a_cancel_against_a_reclaim(pair):
    queue = new_queue("cross")
    ids = pair.a.enqueued(queue, 40)
    assert len(pair.a.claim(queue, 40, lease=60)) == 40
    lapses = [lambda n=n: pair.sql.lapse(*ids[n::4]) for n in range(4)]
    cancels = [lambda n=n: [pair.each(n).operate("cancel", job_id) for job_id in ids[n::4]] for n in range(4)]
    replies = [reply for found in at_once(*lapses, *cancels)[4:] for reply in found]
    assert {reply.status for reply in replies} <= {200, 202}
    passes(pair.sql, 5)
    assert books(pair.a, pair.sql, queue, 40)["cancelled"] == 40
    assert pair.a.claim(queue) == []


@pytest.mark.parametrize("other", ["requeue", "resolve"])
def test_two_operators_decide_at_once(pair, other):
    """A job in manual review: cancel, and requeue or resolve, at once."""
    rounds, queue = 30, new_queue("cross")
    ids = pair.a.enqueued(queue, rounds, recovery_policy="manual")
    pair.a.claim(queue, rounds, lease=60)
    pair.sql.lapse(*ids)
    passes(pair.sql, 3)
    body = {"outcome": "done", "result": "by hand"} if other == "resolve" else {}
    for number, job_id in enumerate(ids):
        assert pair.a.get(job_id)["status"] == "manual_review"
        cancel, decision = crossed(
            pair,
            number,
            lambda api, job_id=job_id: api.operate("cancel", job_id),
            lambda api, job_id=job_id: api.operate(other, job_id, **body),
        )
        after = pair.a.get(job_id)
        if other == "resolve":
            assert sorted([cancel.status, decision.status]) == [200, 409]
            assert after["status"] == ("cancelled" if cancel.status == 200 else "done")
        else:
            # A requeued job may be cancelled and a cancelled one requeued: both may be told yes, the later holds.
            assert (cancel.status, decision.status) == (200, 200)
            assert after["status"] in ("cancelled", "queued")
    books(pair.a, pair.sql, queue, rounds)


@pytest.mark.parametrize("verb", ["complete", "fail"])
def test_a_forced_requeue_against_an_ending(pair, verb):
    rounds, queue = ROUNDS // 2, new_queue("cross")
    for number in range(rounds):
        job = held(pair, queue)
        requeue, ending = crossed(
            pair,
            number,
            lambda api, job=job: api.operate("requeue", job["id"], force=True),
            lambda api, job=job: api.end(verb, job),
        )
        after = pair.a.get(job["id"])
        if ending.status == 409:
            judged(ending, (409, "lease-lost"))
            assert ending.body["ended_by"] == "requeued"
            assert (requeue.status, after["status"]) == (200, "queued")
        elif verb == "complete":
            judged(requeue, (409, "move-refused"))
            assert (requeue.body["job_status"], after["status"]) == ("done", "done")
        else:
            assert (requeue.status, after["status"]) == (200, "queued")
        pair.a.operate("cancel", job["id"])
    counts = books(pair.a, pair.sql, queue, rounds)
    assert counts["done"] + counts["cancelled"] == rounds


@pytest.mark.parametrize("status", ["done", "failed"])
def test_what_has_ended_is_not_cancelled(pair, status):
    queue = new_queue("ended")
    job = held(pair, queue)
    reply = pair.a.complete(job, result="kept") if status == "done" else pair.a.fail(job, retryable=False)
    assert reply.body["status"] == status
    before = pair.a.get(job["id"])
    for body in ({}, {"force": True}):
        reply = pair.b.operate("cancel", job["id"], **body)
        judged(reply, (409, "move-refused"))
        assert reply.body["job_status"] == status
    assert pair.a.get(job["id"]) == before


def test_twenty_at_once_on_one_job(pair):
    """Done, fail, release, heartbeat and cancels of both kinds, on both instances: one final outcome."""
    queue, rounds = new_queue("crowd"), 10
    for _ in range(rounds):
        job = held(pair, queue)
        calls = []
        for number in range(4):
            api = pair.each(number)
            calls += [
                lambda api=api: api.complete(job, result="kept"),
                lambda api=api: api.fail(job),
                lambda api=api: api.end("release", job),
                lambda api=api: api.heartbeat(job, lease_seconds=60),
                lambda api=api: api.operate("cancel", job["id"], force=True),
            ]
        replies = at_once(*calls)
        assert {reply.status for reply in replies} <= {200, 409}
        by_verb = {verb: replies[n::5] for n, verb in enumerate(["complete", "fail", "release", "heartbeat", "cancel"])}
        ended = {verb for verb in ("complete", "fail", "release") if any(r.status == 200 for r in by_verb[verb])}
        assert len(ended) <= 1
        after = pair.a.get(job["id"])
        # A fail or a release puts it back, where a cancel finds it.
        assert after["status"] == ("done" if ended == {"complete"} else "cancelled")
        assert len(pair.a.attempts(job["id"])) == 1
    books(pair.a, pair.sql, queue, rounds)


def test_an_operator_who_looked_before_the_claim_is_told(pair):
    queue = new_queue("fence")
    [job_id] = pair.a.enqueued(queue)
    seen = pair.a.get(job_id)["fence"]
    job = pair.b.claim_one(queue, lease=60)
    for verb, body in (("cancel", {}), ("cancel", {"force": True}), ("requeue", {"force": True})):
        reply = pair.a.operate(verb, job_id, expected_fence=seen, **body)
        judged(reply, (409, "fence-moved"))
        assert reply.body["fence"] == job["fence"]
    assert pair.a.get(job_id)["lease_expires_at"] == job["lease_expires_at"]
    assert pair.a.operate("cancel", job_id, expected_fence=job["fence"]).status == 202
