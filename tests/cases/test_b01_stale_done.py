"""B01: a worker whose attempt is over changes nothing, by no verb, no route, no instance, under no name."""

import uuid

import pytest

from tests.cases.support import books, instant, new_queue, wait_for_job

VERBS = ("complete", "fail", "release", "heartbeat")
CONTENT = {
    "complete": {"result": "A"},
    "fail": {"error_message": "A"},
    "release": {"reason": "A"},
    "heartbeat": {"lease_seconds": 600, "progress": "A"},
}


def refused(problem, job_id, ended_by, fence):
    assert problem["status"] == 409
    assert problem["code"] == "lease-lost"
    assert problem["job_id"] == job_id
    assert problem["ended_by"] == ended_by
    assert problem["fence"] == fence
    assert problem["retryable"] is False
    assert instant(problem["ended_at"])


@pytest.mark.parametrize("workers", [("A", "B"), ("same", "same")], ids=["two workers", "a worker restarted"])
def test_a_late_done_is_refused_and_the_second_attempt_untouched(pair, workers):
    queue = new_queue()
    [job_id] = pair.a.enqueued(queue)
    first = pair.a.claim_one(queue, worker=workers[0], lease=1)
    wait_for_job(pair.a, job_id, lambda job: job["reclaim_count"] == 1 and job["status"] == "queued")
    second = pair.b.claim_one(queue, worker=workers[1], lease=60)
    assert second["attempt_token"] != first["attempt_token"]
    assert second["fence"] > first["fence"]

    for api in (pair.a, pair.b):
        refused(api.complete(first, result="A").body, job_id, "reclaimed", second["fence"])
    job = pair.a.get(job_id)
    assert job["status"] == "processing"
    assert (job["reserved_by"], job["lease_expires_at"]) == (workers[1], second["lease_expires_at"])

    assert pair.a.heartbeat(second).status == 200
    assert pair.b.complete(second, result="B").status == 200
    refused(pair.a.complete(first, result="A").body, job_id, "reclaimed", second["fence"])
    job = pair.b.get(job_id)
    assert (job["status"], job["result"]) == ("done", "B")
    assert [attempt["outcome"] for attempt in pair.a.attempts(job_id)] == ["reclaimed", "done"]
    books(pair.a, pair.sql, queue, 1)


def test_every_verb_single_and_in_a_batch_before_and_after_the_second_claim(pair):
    queue = new_queue()
    ids = pair.a.enqueued(queue, 8, max_reclaims=10)
    stale = {job["id"]: job for job in pair.a.claim(queue, 8, worker="w", lease=30)}
    pair.sql.lapse(*ids)
    for job_id in ids:
        wait_for_job(pair.a, job_id, lambda job: job["status"] == "queued")

    def try_all(state, fences):
        for number, verb in enumerate(VERBS):
            alone, batched = stale[ids[number]], stale[ids[number + 4]]
            refused(
                pair.each(number).end(verb, alone, **CONTENT[verb]).body, alone["id"], "reclaimed", fences[alone["id"]]
            )
            [result] = pair.each(number + 1).end_many(verb, [batched], **CONTENT[verb])
            assert not result["ok"]
            assert result["status"] == state
            refused(result["problem"], batched["id"], "reclaimed", fences[batched["id"]])

    try_all("queued", {job_id: stale[job_id]["fence"] for job_id in ids})
    assert {pair.a.get(job_id)["status"] for job_id in ids} == {"queued"}

    second = {job["id"]: job for job in pair.b.claim(queue, 8, worker="w", lease=60)}
    assert set(second) == set(ids)
    try_all("processing", {job_id: second[job_id]["fence"] for job_id in ids})
    for job_id in ids:
        job = pair.a.get(job_id)
        assert job["status"] == "processing"
        assert job["lease_expires_at"] == second[job_id]["lease_expires_at"]
        assert (job["result"], job["progress"]) == (None, None)
    results = pair.a.end_many("complete", list(second.values()), result="B")
    assert all(result["ok"] for result in results)
    try_all("done", {job_id: second[job_id]["fence"] for job_id in ids})
    assert {pair.a.get(job_id)["result"] for job_id in ids} == {"B"}
    assert books(pair.a, pair.sql, queue, 8)["done"] == 8


@pytest.mark.parametrize("verb", VERBS)
def test_one_stale_token_spoils_no_other_item(pair, verb):
    queue = new_queue()
    ids = pair.a.enqueued(queue, 5)
    first = {job["id"]: job for job in pair.a.claim(queue, 5, lease=60)}
    pair.sql.lapse(ids[2])
    wait_for_job(pair.a, ids[2], lambda job: job["status"] == "queued")
    results = pair.b.end_many(verb, [first[job_id] for job_id in ids], **CONTENT[verb])
    assert [result["ok"] for result in results] == [True, True, False, True, True]
    assert [result["id"] for result in results] == ids
    refused(results[2]["problem"], ids[2], "reclaimed", first[ids[2]]["fence"])
    books(pair.a, pair.sql, queue, 5)


@pytest.mark.parametrize(("verb", "word"), [("cancel", "cancelled"), ("requeue", "requeued")])
def test_a_token_that_an_operator_took_away_is_dead_too(pair, verb, word):
    queue = new_queue()
    [job_id] = pair.a.enqueued(queue)
    job = pair.a.claim_one(queue, lease=60)
    assert pair.b.operate(verb, job_id, force=True).status == 200
    for number, ending in enumerate(VERBS):
        refused(pair.each(number).end(ending, job, **CONTENT[ending]).body, job_id, word, job["fence"])
    after = pair.a.get(job_id)
    assert after["status"] == {"cancel": "cancelled", "requeue": "queued"}[verb]
    assert after["result"] is None
    books(pair.a, pair.sql, queue, 1)


def test_three_generations_and_only_the_last_counts(pair):
    queue = new_queue()
    [job_id] = pair.a.enqueued(queue)
    generations = []
    for number in range(3):
        generations.append(pair.each(number).claim_one(queue, worker="same", lease=60))
        if number < 2:
            pair.sql.lapse(job_id)
            wait_for_job(pair.a, job_id, lambda job: job["status"] == "queued")
    fences = [job["fence"] for job in generations]
    assert fences == sorted(set(fences))
    for old in generations[:2]:
        refused(pair.a.complete(old, result="old").body, job_id, "reclaimed", fences[2])
    assert pair.b.complete(generations[2], result="new").status == 200
    assert pair.a.get(job_id)["result"] == "new"


@pytest.mark.parametrize("verb", VERBS)
def test_a_token_opens_its_own_job_only(pair, verb):
    queue = new_queue()
    pair.a.enqueued(queue, 2)
    one, other = pair.a.claim(queue, 2, lease=60)
    crossed = {**one, "attempt_token": other["attempt_token"]}
    guessed = {**one, "attempt_token": str(uuid.uuid4())}
    for wrong in (crossed, guessed):
        reply = pair.a.end(verb, wrong, **CONTENT[verb])
        assert (reply.status, reply.code) == (409, "lease-lost")
    nowhere = pair.a.end(verb, {**one, "id": str(uuid.uuid4())}, **CONTENT[verb])
    assert (nowhere.status, nowhere.code) == (404, "job-not-found")
    for job in (one, other):
        assert pair.a.get(job["id"])["lease_expires_at"] == job["lease_expires_at"]
        assert pair.b.complete(job).status == 200


def test_the_right_token_of_another_worker_is_told(pair):
    queue = new_queue()
    pair.a.enqueued(queue)
    job = pair.a.claim_one(queue, worker="A", lease=60)
    reply = pair.b.heartbeat(job, worker_id="B", lease_seconds=600)
    assert (reply.status, reply.code) == (409, "worker-mismatch")
    assert pair.a.get(job["id"])["lease_expires_at"] == job["lease_expires_at"]


def test_no_answer_but_the_claim_tells_a_token(pair):
    queue = new_queue()
    pair.a.enqueued(queue, unique_key="u")
    job = pair.a.claim_one(queue, lease=60)
    told = [
        pair.a.call("GET", f"/v1/jobs/{job['id']}"),
        pair.a.call("GET", f"/v1/jobs/{job['id']}/attempts"),
        pair.a.call("GET", f"/v1/jobs?queue={queue}"),
        pair.a.enqueue(queue, unique_key="u"),
        pair.a.heartbeat(job, worker_id="another"),
        pair.a.operate("cancel", job["id"]),
        pair.a.heartbeat(job),
        pair.a.complete(job),
    ]
    for reply in told:
        assert job["attempt_token"].encode() not in reply.raw, reply.raw
