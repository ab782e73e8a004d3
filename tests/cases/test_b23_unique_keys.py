"""B23: a unique key is held while its job lives, free when it ended, and never a 2xx without a job."""

# ruff: noqa: B023 (the calls have run before their loop goes on)

import json

import pytest

from tests.cases.support import LIVE, at_once, books, new_queue, wait_for_status
from tests.harness import wait_for

KEY = "order 17 · größer"


def claimed(pair, queue):
    return pair.a.claim_one(queue, worker="w", lease=60)


def lapsed(pair, queue, status):
    job = claimed(pair, queue)
    pair.sql.lapse(job["id"])
    return wait_for_status(pair.a, job["id"], status)


def in_review(pair, queue):
    return lapsed(pair, queue, "manual_review")


def deleted(pair, queue):
    pair.a.call("PUT", f"/v1/queues/{queue}", {"retention_seconds": 0}, expect=200)
    job = claimed(pair, queue)
    pair.a.complete(job)
    wait_for(lambda: pair.a.call("GET", f"/v1/jobs/{job['id']}").status == 404, 15)


def exhausted_by_releases(pair, queue):
    for _ in range(10):
        pair.a.end("release", claimed(pair, queue))
    assert pair.a.end("release", claimed(pair, queue)).body["status"] == "failed"


def resolved(pair, queue, outcome):
    job = in_review(pair, queue)
    assert pair.a.operate("resolve", job["id"], outcome=outcome).body["status"] == outcome


def stopped(pair, queue, verb):
    job = claimed(pair, queue)
    pair.a.operate("cancel", job["id"])
    assert pair.a.end(verb, job).body["status"] == "cancelled"


ENDS = {
    "done": ({}, lambda p, q: p.a.complete(claimed(p, q))),
    "failed for good": ({}, lambda p, q: p.a.fail(claimed(p, q), retryable=False)),
    "failed, no attempt left": ({"max_attempts": 1}, lambda p, q: p.a.fail(claimed(p, q))),
    "exhausted by lapse": ({"max_attempts": 1}, lambda p, q: lapsed(p, q, "failed")),
    "released too often": ({"max_attempts": 1}, exhausted_by_releases),
    "cancelled while queued": ({}, lambda p, q: p.a.operate("cancel", p.a.claimless)),
    "cancelled by force": ({}, lambda p, q: p.a.operate("cancel", claimed(p, q)["id"], force=True)),
    "stopped, then failed": ({}, lambda p, q: stopped(p, q, "fail")),
    "stopped, then released": ({}, lambda p, q: stopped(p, q, "release")),
    "cancelled in review": (
        {"recovery_policy": "manual"},
        lambda p, q: p.a.operate("cancel", in_review(p, q)["id"]),
    ),
    "resolved as done": ({"recovery_policy": "manual"}, lambda p, q: resolved(p, q, "done")),
    "resolved as failed": ({"recovery_policy": "manual"}, lambda p, q: resolved(p, q, "failed")),
    "deleted": ({}, deleted),
}


def held_by(pair, queue, job_id, status):
    """An enqueue with the key, in each way of asking: the live job or a refusal that names it."""
    for api in (pair.a, pair.b):
        again = api.enqueue(queue, {"n": "again"}, unique_key=KEY)
        assert (again.status, again.body["deduplicated"]) == (200, True)
        assert (again.body["id"], again.body["status"]) == (job_id, status)
        refused = api.enqueue(queue, {"n": "again"}, unique_key=KEY, on_conflict="reject")
        assert (refused.status, refused.code, refused.body["holder_id"]) == (409, "unique-key-held", job_id)
    items = [
        {"queue": queue, "payload": 1, "unique_key": KEY},
        {"queue": queue, "payload": 2, "unique_key": KEY, "on_conflict": "reject"},
    ]
    results = pair.b.call("POST", "/v1/jobs/batch", {"jobs": items}, expect=200).body["results"]
    assert (results[0]["ok"], results[0]["id"], results[0]["deduplicated"]) == (True, job_id, True)
    assert (results[1]["ok"], results[1]["problem"]["holder_id"]) == (False, job_id)


@pytest.mark.parametrize("end", ENDS)
def test_every_end_frees_the_key(pair, end):
    fields, drive = ENDS[end]
    queue = new_queue("key")
    first = pair.a.enqueue(queue, unique_key=KEY, **fields)
    assert (first.status, first.body["deduplicated"]) == (201, False)
    held_by(pair, queue, first.body["id"], "queued")
    pair.a.claimless = first.body["id"]
    drive(pair, queue)
    gone = end == "deleted"
    if not gone:
        assert pair.a.get(first.body["id"])["status"] not in LIVE
    second = pair.b.enqueue(queue, {"n": 2}, unique_key=KEY)
    assert (second.status, second.body["deduplicated"]) == (201, False), second.body
    assert second.body["id"] != first.body["id"]
    held_by(pair, queue, second.body["id"], "queued")
    books(pair.a, pair.sql, queue, 1 if gone else 2)


def test_every_live_state_holds_it(pair):
    queue = new_queue("key")
    job_id = pair.a.enqueue(queue, unique_key=KEY, delay_seconds=60, recovery_policy="manual").body["id"]
    held_by(pair, queue, job_id, "queued")
    pair.a.operate("requeue", job_id)
    job = claimed(pair, queue)
    held_by(pair, queue, job_id, "processing")
    assert pair.a.fail(job, retry_after_seconds=600).body["status"] == "queued"
    held_by(pair, queue, job_id, "queued")
    pair.a.operate("requeue", job_id)
    job = claimed(pair, queue)
    pair.a.operate("cancel", job_id)
    held_by(pair, queue, job_id, "processing")
    pair.a.operate("requeue", job_id, force=True)
    in_review(pair, queue)
    held_by(pair, queue, job_id, "manual_review")
    books(pair.a, pair.sql, queue, 1)


@pytest.mark.parametrize("end", ["done", "failed for good", "cancelled while queued"])
def test_an_old_job_does_not_come_back_beside_a_newer_one(pair, end):
    queue = new_queue("key")
    old = pair.a.enqueue(queue, unique_key=KEY).body["id"]
    pair.a.claimless = old
    ENDS[end][1](pair, queue)
    new = pair.b.enqueue(queue, unique_key=KEY).body["id"]
    before = pair.a.get(old)
    for _ in range(2):
        reply = pair.a.operate("requeue", old, from_done=True)
        assert (reply.status, reply.code, reply.body["holder_id"]) == (409, "unique-key-held", new)
    assert pair.a.get(old) == before
    pair.a.complete(claimed(pair, queue))
    assert pair.a.operate("requeue", old, from_done=True).status == 200
    held_by(pair, queue, old, "queued")
    books(pair.a, pair.sql, queue, 2)


def test_thirty_at_once_make_one_job(pair):
    for body in ({}, {"on_conflict": "reject"}):
        queue = new_queue("key")
        replies = at_once(
            *[lambda n=n: pair.each(n).enqueue(queue, {"n": n}, unique_key=KEY, **body) for n in range(30)]
        )
        made = [reply for reply in replies if reply.status == 201]
        assert len(made) == 1
        others = {reply.status for reply in replies if reply.status != 201}
        assert others == ({409} if body else {200})
        ids = {reply.body["id"] if reply.ok else reply.body["holder_id"] for reply in replies}
        assert ids == {made[0].body["id"]}
        books(pair.a, pair.sql, queue, 1)


def test_batches_that_cross_over_the_same_keys(pair):
    """In opposite orders, at once, on both instances: no deadlock comes through, each key has one job."""
    queue = new_queue("key")
    keys = [f"k{n}" for n in range(40)]

    def batch(number):
        order = keys if number % 2 else list(reversed(keys))
        jobs = [{"queue": queue, "payload": 1, "unique_key": key, "idempotency_key": f"i-{key}"} for key in order]
        results = pair.each(number // 2).call("POST", "/v1/jobs/batch", {"jobs": jobs}, expect=200).body["results"]
        assert all(result["ok"] for result in results)
        return {key: result["id"] for key, result in zip(order, results, strict=True)}

    found = at_once(*[lambda n=n: batch(n) for n in range(8)])
    assert all(each == found[0] for each in found)
    assert len(set(found[0].values())) == 40
    books(pair.a, pair.sql, queue, 40)


def test_the_key_against_the_end_of_its_holder(pair):
    """An enqueue in the moment in which the holder completes: a new job, or the holder; never a 2xx without a job."""
    queue, made = new_queue("key"), 0
    job_id = pair.a.enqueue(queue, unique_key=KEY).body["id"]
    total = 1
    for number in range(60):
        job = claimed(pair, queue)
        done, enqueued = at_once(
            lambda job=job, n=number: pair.each(n).complete(job),
            lambda n=number: pair.each(n // 2).enqueue(queue, unique_key=KEY),
        )
        assert done.status == 200
        if enqueued.status == 201:
            made += 1
            assert enqueued.body["id"] != job_id
        else:
            assert (enqueued.status, enqueued.body["id"], enqueued.body["deduplicated"]) == (200, job_id, True)
            enqueued = pair.a.enqueue(queue, unique_key=KEY)
            assert enqueued.status == 201
        job_id = enqueued.body["id"]
        total += 1
    counts = books(pair.a, pair.sql, queue, total)
    assert (counts["done"], counts["queued"]) == (60, 1)
    assert made


def test_two_old_jobs_requeued_at_once(pair):
    for _ in range(10):
        queue = new_queue("key")
        ids = []
        for _ in range(2):
            ids.append(pair.a.enqueue(queue, unique_key=KEY).body["id"])
            pair.a.operate("cancel", ids[-1])
        replies = at_once(*[lambda n=n: pair.each(n).operate("requeue", ids[n % 2]) for n in range(6)])
        statuses = {job_id: pair.a.get(job_id)["status"] for job_id in ids}
        assert sorted(statuses.values()) == ["cancelled", "queued"]
        for number, reply in enumerate(replies):
            wanted = 200 if statuses[ids[number % 2]] == "queued" else 409
            assert reply.status == wanted, (reply.body, statuses)
        books(pair.a, pair.sql, queue, 2)


def test_the_same_key_twice_in_one_batch(pair):
    queue = new_queue("key")
    items = [{"queue": queue, "payload": n, "unique_key": KEY} for n in range(3)]
    items[2]["on_conflict"] = "reject"
    results = pair.a.call("POST", "/v1/jobs/batch", {"jobs": items}, expect=200).body["results"]
    assert [result["ok"] for result in results] == [True, True, False]
    assert results[0]["id"] == results[1]["id"] == results[2]["problem"]["holder_id"]
    assert [result.get("deduplicated") for result in results[:2]] == [False, True]
    assert json.loads(pair.sql("SELECT payload::text AS p FROM jobs WHERE queue = %s", queue)[0]["p"]) == 0
    books(pair.a, pair.sql, queue, 1)


def test_keys_are_compared_as_sent_and_per_queue(pair):
    queue, other = new_queue("key"), new_queue("key")
    keys = ["Key", "key", "ключ", "é", "e\u0301", "k" * 200]
    replies = [pair.a.enqueue(queue, unique_key=key) for key in keys] + [pair.a.enqueue(other, unique_key="key")]
    assert [reply.status for reply in replies] == [201] * 7
    assert [reply.body["unique_key"] for reply in replies[:6]] == keys
    for bad in ("", " k", "k ", "k\n", "k\u0001", "k" * 201, 7, ["k"]):
        assert pair.a.enqueue(queue, unique_key=bad).status == 422, bad
    books(pair.a, pair.sql, queue, 6)


def test_an_idempotency_key_outlives_the_unique_key(pair):
    """The repeat of an old enqueue gets the old job, though a newer one holds the unique key by now."""
    queue = new_queue("key")
    old = pair.a.enqueue(queue, {"n": 1}, key="i1", unique_key=KEY).body["id"]
    pair.a.complete(claimed(pair, queue))
    new = pair.a.enqueue(queue, {"n": 2}, key="i2", unique_key=KEY)
    assert new.status == 201
    again = pair.b.enqueue(queue, {"n": 1}, key="i1", unique_key=KEY)
    assert (again.status, again.body["id"], again.body["status"]) == (200, old, "done")
