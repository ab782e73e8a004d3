"""B13: the reply was lost, the call is sent again: the first answer, nothing moved; other content is a conflict."""

import json
import uuid

import pytest

from tests.cases.support import books, new_queue, wait_for_job, wait_for_status
from tests.harness import wait_for

ENDINGS = {
    "complete": ({"result": {"a": 1, "b": [1.0]}}, {"result": {"a": 1, "b": [1]}}, "done", "done"),
    "fail": (
        {"error_type": "E", "error_message": "no", "retry_after_seconds": 600},
        {"error_type": "E", "error_message": "other", "retry_after_seconds": 600},
        "failed",
        "queued",
    ),
    "release": ({"reason": "going", "delay_seconds": 600}, {"reason": "going"}, "released", "queued"),
}


def cut_off(api, verb, job, content):
    """Send it whole, close before reading anything; return when the job has moved."""
    body = {"attempt_token": job["attempt_token"], **content}
    api.send_raw("POST", f"/v1/jobs/{job['id']}/{verb}", body).close()
    wait_for_job(api, job["id"], lambda now: now["status"] != "processing")


def held(pair, **fields):
    queue = new_queue("lost")
    pair.a.enqueued(queue, **fields)
    return pair.a.claim_one(queue, worker="w", lease=60)


@pytest.mark.parametrize("verb", ENDINGS)
def test_the_same_ending_again_gets_the_first_answer(pair, verb):
    content, other, outcome, status = ENDINGS[verb]
    job = held(pair)
    cut_off(pair.a, verb, job, content)
    before = pair.a.get(job["id"])
    answers = [pair.each(n).end(verb, job, **content) for n in range(3)]
    [batched] = pair.b.end_many(verb, [job], **content)
    for answer in [*[reply.body for reply in answers], batched]:
        assert (answer["status"], answer["fence"]) == (status, job["fence"]), answer
        assert answer["available_at"] == (before["available_at"] if status == "queued" else None)
    assert [reply.status for reply in answers] == [200, 200, 200]
    # Keys in another order and other white space are the same content.
    turned = json.dumps(dict(reversed({"attempt_token": job["attempt_token"], **content}.items())), indent=3)
    assert pair.a.call("POST", f"/v1/jobs/{job['id']}/{verb}", raw=turned.encode()).status == 200

    refused = [pair.a.end(verb, job, **other), pair.b.end(verb, job), pair.a.heartbeat(job)]
    refused += [pair.a.end(ending, job) for ending in ENDINGS if ending != verb]
    [batched] = pair.b.end_many(verb, [job], **other)
    assert not batched["ok"]
    for problem in [*[reply.body for reply in refused], batched["problem"]]:
        assert (problem["status"], problem["code"], problem["outcome"]) == (409, "attempt-ended", outcome), problem
    assert pair.a.get(job["id"]) == before
    assert len(pair.a.attempts(job["id"])) == 1
    books(pair.a, pair.sql, job["queue"], 1)


@pytest.mark.parametrize("verb", ["fail", "release"])
def test_also_when_the_job_was_claimed_again_since(pair, verb):
    job = held(pair)
    content = {"fail": {"retry_after_seconds": 0}, "release": {"delay_seconds": 0}}[verb]
    first = pair.a.end(verb, job, **content)
    second = pair.b.claim_one(job["queue"], worker="w", lease=60)
    assert second["fence"] > job["fence"]
    again = pair.b.end(verb, job, **content)
    assert again.status == 200
    assert {k: v for k, v in again.body.items() if k != "server_time"} == {
        k: v for k, v in first.body.items() if k != "server_time"
    }
    assert pair.a.end("complete", job).code == "attempt-ended"
    assert pair.a.get(job["id"])["lease_expires_at"] == second["lease_expires_at"]
    assert pair.a.complete(second).status == 200
    assert pair.a.end(verb, job, **content).status == 200
    assert pair.a.get(job["id"])["status"] == "done"


def test_a_done_is_repeatable_after_the_job_was_brought_back(pair):
    job = held(pair)
    assert pair.a.complete(job, result="r").status == 200
    assert pair.b.operate("requeue", job["id"], from_done=True).status == 200
    for _ in range(2):
        again = pair.a.complete(job, result="r")
        assert (again.status, again.body["status"], again.body["fence"]) == (200, "done", job["fence"])
        assert pair.a.complete(job, result="other").code == "attempt-ended"
        if pair.a.get(job["id"])["status"] == "queued":
            second = pair.a.claim_one(job["queue"], worker="w", lease=60)
    assert pair.a.get(job["id"])["status"] == "processing"
    assert pair.b.complete(second, result="second").status == 200
    assert pair.a.get(job["id"])["result"] == "second"
    assert [attempt["outcome"] for attempt in pair.a.attempts(job["id"])] == ["done", "done"]


def test_the_token_of_a_reclaimed_attempt_gets_no_replay(pair):
    job = held(pair)
    pair.sql.lapse(job["id"])
    wait_for_status(pair.a, job["id"], "queued")
    second = pair.a.claim_one(job["queue"], worker="w", lease=60)
    assert pair.a.complete(second, result="same").status == 200
    for api in (pair.a, pair.b):
        reply = api.complete(job, result="same")
        assert (reply.status, reply.code, reply.body["ended_by"]) == (409, "lease-lost", "reclaimed")


def test_the_same_item_twice_in_one_batch(pair):
    for verb, (content, other, outcome, status) in ENDINGS.items():
        job = held(pair)
        item = {"id": job["id"], "attempt_token": job["attempt_token"]}
        body = {"items": [{**item, **content}, {**item, **other}, {**item, **content}]}
        results = pair.b.call("POST", f"/v1/jobs/{verb}", body, expect=200).body["results"]
        assert [result["ok"] for result in results] == [True, False, True]
        assert (results[0]["status"], results[2]["status"]) == (status, status)
        assert results[1]["problem"]["code"] == "attempt-ended"
        assert results[1]["problem"]["outcome"] == outcome
        books(pair.a, pair.sql, job["queue"], 1)


def test_repeats_of_an_operator_change_nothing(pair):
    queue = new_queue("lost")
    [cancelled, requeued] = pair.a.enqueued(queue, 2)
    assert pair.a.operate("cancel", cancelled, reason="first").status == 200
    assert pair.a.operate("cancel", requeued).status == 200
    assert pair.a.operate("requeue", requeued, reason="first").status == 200
    for verb, job_id in (("cancel", cancelled), ("requeue", requeued)):
        before = pair.a.get(job_id)
        for api in (pair.a, pair.b):
            reply = api.operate(verb, job_id, reason="again")
            assert reply.status == 200
            assert pair.a.get(job_id) == before
    told = pair.sql(
        "SELECT action, count(*)::int AS n FROM audit WHERE target = ANY(%s) GROUP BY 1 ORDER BY 1",
        [cancelled, requeued],
    )
    assert told == [{"action": "job.cancel", "n": 2}, {"action": "job.requeue", "n": 1}]
    processing = held(pair)
    first = pair.a.operate("cancel", processing["id"])
    again = pair.b.operate("cancel", processing["id"])
    assert (first.status, again.status) == (202, 202)
    assert first.body["cancel_requested"]
    assert again.body["cancel_requested"]
    assert pair.a.complete(processing).status == 200


def test_an_enqueue_whose_reply_was_lost(pair):
    queue = new_queue("lost")
    body = json.dumps({"queue": queue, "payload": {"n": 1}}).encode()
    sock = pair.a.connect()
    sock.sendall(pair.a.request_bytes("POST", "/v1/jobs", body, ["Idempotency-Key: k1"]))
    sock.close()
    replies = [pair.each(n).enqueue(queue, {"n": 1}, key="k1") for n in range(3)]
    assert len({reply.body["id"] for reply in replies}) == 1
    assert [reply.status for reply in replies[1:]] == [200, 200]
    other = pair.b.enqueue(queue, {"n": 2}, key="k1")
    assert (other.status, other.code) == (422, "idempotency-mismatch")
    assert other.body["holder_id"] == replies[0].body["id"]
    # Kept as long as the job exists, also when it is done.
    job = pair.a.claim_one(queue, lease=60)
    pair.a.complete(job)
    assert pair.b.enqueue(queue, {"n": 1}, key="k1").body["id"] == job["id"]
    books(pair.a, pair.sql, queue, 1)


def test_a_claim_whose_reply_was_lost(pair):
    queue = new_queue("lost")
    ids = pair.a.enqueued(queue, 5)
    request = {"worker_id": "w", "queues": [queue], "max_jobs": 2, "lease_seconds": 60, "request_id": str(uuid.uuid4())}
    pair.a.send_raw("POST", "/v1/jobs/claim", request).close()
    wait_for(lambda: pair.a.counts(queue)["processing"] == 2)
    again = [pair.each(n).call("POST", "/v1/jobs/claim", request, expect=200).body for n in range(2)]
    for body in again:
        assert body["replayed"] is True
        assert {job["id"] for job in body["jobs"]} == set(ids[:2])
    assert [j["attempt_token"] for j in again[0]["jobs"]] == [j["attempt_token"] for j in again[1]["jobs"]]
    other = pair.a.call("POST", "/v1/jobs/claim", {**request, "max_jobs": 3})
    assert (other.status, other.code) == (422, "idempotency-mismatch")
    # Never a new job, even when none is left of its own.
    assert all(result["ok"] for result in pair.b.end_many("complete", again[0]["jobs"]))
    last = pair.a.call("POST", "/v1/jobs/claim", request, expect=200).body
    assert (last["jobs"], last["replayed"]) == ([], True)
    assert pair.a.counts(queue) == {
        "queued": 3, "processing": 0, "done": 2, "failed": 0, "cancelled": 0, "manual_review": 0
    }  # fmt: skip


def test_answers_are_remembered_by_the_database_not_by_the_instance(instance, sql):
    """kill -9 of the instance that took the first call; another one answers the repeat."""
    first = instance()
    ids = first.enqueued("q", 4)
    jobs = dict(zip(ENDINGS, first.claim("q", 3, worker="w", lease=60), strict=True))
    request = {"worker_id": "w", "queues": ["q"], "lease_seconds": 60, "request_id": str(uuid.uuid4())}
    claimed = first.call("POST", "/v1/jobs/claim", request, expect=200).body["jobs"]
    for verb, job in jobs.items():
        cut_off(first, verb, job, ENDINGS[verb][0])
    before = {job_id: first.get(job_id) for job_id in ids}
    first.service.kill()
    second = instance()
    for verb, job in jobs.items():
        reply = second.end(verb, job, **ENDINGS[verb][0])
        assert (reply.status, reply.body["status"]) == (200, ENDINGS[verb][3])
        assert second.end(verb, job, **ENDINGS[verb][1]).code == "attempt-ended"
    replay = second.call("POST", "/v1/jobs/claim", request, expect=200).body
    assert replay["replayed"]
    assert replay["jobs"][0]["attempt_token"] == claimed[0]["attempt_token"]
    assert {job_id: second.get(job_id) for job_id in ids} == before
    books(second, sql, "q", 4)
