"""B07: a heartbeat moves the end of a lease later or not at all, in whatever order heartbeats arrive."""

import threading
import time
from datetime import timedelta

import pytest

from tests.cases.support import at_once, books, instant, new_queue, passes

LONGEST = 43_200


@pytest.fixture
def held(pair):
    """A factory: a claimed job."""

    def claim(lease=None, **fields):
        queue = new_queue("beat")
        pair.a.enqueued(queue, **fields)
        return pair.a.claim_one(queue, worker="w", lease=lease)

    return claim


def expiry(reply):
    assert reply.status == 200, reply.body
    return instant(reply.body["lease_expires_at"])


def test_a_short_heartbeat_does_not_cut_a_long_lease(pair, held):
    job = held(60)
    reply = pair.b.heartbeat(job, lease_seconds=1)
    assert expiry(reply) == instant(job["lease_expires_at"])
    # Past the second that was asked for nobody else gets it.
    assert pair.a.claim(job["queue"], worker="thief", wait_seconds=1.5) == []
    assert pair.a.get(job["id"])["fence"] == job["fence"]
    assert expiry(pair.b.heartbeat(job, lease_seconds=90)) > instant(job["lease_expires_at"])
    assert pair.a.complete(job).status == 200


def test_fifty_at_once_end_at_the_longest(pair, held):
    for base in (1, 10):
        job = held(10)
        leases = [float(base + n) for n in range(50)]
        seen, stop = [], threading.Event()

        def watch(job=job, seen=seen, stop=stop):
            while not stop.is_set():
                seen.append(instant(pair.a.get(job["id"])["lease_expires_at"]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            replies = at_once(
                *[lambda n=n, s=s, j=job: pair.each(n).heartbeat(j, lease_seconds=s) for n, s in enumerate(leases)]
            )
        finally:
            stop.set()
            watcher.join()
        assert seen == sorted(seen)
        ends = [expiry(reply) for reply in replies]
        final = instant(pair.b.get(job["id"])["lease_expires_at"])
        assert final == max(ends)
        for lease, reply in zip(leases, replies, strict=True):
            asked = instant(reply.body["server_time"]) + timedelta(seconds=lease)
            assert expiry(reply) >= asked - timedelta(milliseconds=1)
            assert final >= asked - timedelta(milliseconds=1)
        books(pair.a, pair.sql, job["queue"], 1)


def test_an_old_heartbeat_that_arrives_late_moves_nothing(pair, held):
    job = held(5)
    late = expiry(pair.a.heartbeat(job, lease_seconds=50))
    for lease in (5, 1, 49):
        assert expiry(pair.b.heartbeat(job, lease_seconds=lease)) == late
    assert instant(pair.a.get(job["id"])["lease_expires_at"]) == late


def test_equal_jobs_in_one_batch_end_at_the_longest(pair, held):
    job, other = held(5), held(5)
    items = [
        {"id": j["id"], "attempt_token": j["attempt_token"], "worker_id": "w", **lease}
        for j in (job, other)
        for lease in ({"lease_seconds": 3}, {"lease_seconds": 40}, {}, {"lease_seconds": 7})
    ]
    results = pair.a.call("POST", "/v1/jobs/heartbeat", {"items": items}, expect=200).body["results"]
    assert all(result["ok"] for result in results)
    for j, part in ((job, results[:4]), (other, results[4:])):
        asked = instant(part[1]["server_time"]) + timedelta(seconds=40)
        assert {instant(result["lease_expires_at"]) for result in part} == {asked}
        assert instant(pair.b.get(j["id"])["lease_expires_at"]) == asked


@pytest.mark.parametrize("absent", [{}, {"lease_seconds": None}])
def test_without_a_length_it_extends_by_the_length_granted(pair, held, absent):
    job = held(40)
    pair.a.heartbeat(job, lease_seconds=1)
    reply = pair.b.heartbeat(job, **absent)
    assert expiry(reply) == instant(reply.body["server_time"]) + timedelta(seconds=40)
    # Also one granted by the job, with a shorter wish beside it in one batch.
    granted = held(None, lease_seconds=50)
    item = {"id": granted["id"], "attempt_token": granted["attempt_token"], "worker_id": "w"}
    body = {"items": [{**item, "lease_seconds": 2}, {**item, **absent}]}
    results = pair.a.call("POST", "/v1/jobs/heartbeat", body, expect=200).body["results"]
    asked = instant(results[0]["server_time"]) + timedelta(seconds=50)
    assert {instant(result["lease_expires_at"]) for result in results} == {asked}


@pytest.mark.parametrize(
    "lease", ["0", "-5", "1e9", "0.999", "43200.5", '"10"', "true", "[]", "{}", "1e400", "NaN", "-0", '"60s"']
)
def test_a_length_out_of_range_is_refused_and_spends_nothing(pair, held, lease):
    job = held(20)
    head = f'"attempt_token": "{job["attempt_token"]}", "worker_id": "w", "lease_seconds": {lease}'
    alone = pair.a.call("POST", f"/v1/jobs/{job['id']}/heartbeat", raw=f"{{{head}}}".encode(), expect=422)
    batch = f'{{"items": [{{"id": "{job["id"]}", {head}}}]}}'.encode()
    pair.b.call("POST", "/v1/jobs/heartbeat", raw=batch, expect=422)
    claim = f'{{"worker_id": "w", "queues": ["{job["queue"]}"], "lease_seconds": {lease}}}'.encode()
    pair.a.call("POST", "/v1/jobs/claim", raw=claim, expect=422)
    if alone.code == "invalid-input":
        assert any("lease_seconds" in error["place"] for error in alone.body["errors"])
    assert pair.a.get(job["id"])["lease_expires_at"] == job["lease_expires_at"]
    assert pair.a.heartbeat(job, lease_seconds=30).status == 200


def test_the_cap_is_served_and_stated(pair, held):
    job = held(LONGEST)
    reply = pair.a.heartbeat(job, lease_seconds=LONGEST)
    assert expiry(reply) == instant(reply.body["server_time"]) + timedelta(seconds=LONGEST)
    schemas = pair.a.call("GET", "/openapi.json").body["components"]["schemas"]
    stated = repr(schemas["Heartbeat"]["properties"]["lease_seconds"])
    assert "43200" in stated


def test_the_longest_run_clamps_but_never_shortens(pair, held):
    job = held(60, max_run_seconds=30)
    deadline = instant(job["reserved_at"]) + timedelta(seconds=30)
    assert instant(job["run_deadline_at"]) == instant(job["lease_expires_at"]) == deadline
    reply = pair.b.heartbeat(job, lease_seconds=600)
    assert instant(reply.body["run_deadline_at"]) == expiry(reply) == deadline
    passes(pair.sql, 2)
    assert pair.a.get(job["id"])["status"] == "processing"


def test_a_handler_that_hangs_while_its_heart_beats_is_taken_back(pair, held):
    job = held(1, max_run_seconds=1)
    deadline = time.monotonic() + 10
    while (reply := pair.a.heartbeat(job, lease_seconds=60)).status == 200:
        assert time.monotonic() < deadline
    assert reply.code == "lease-lost"
    [attempt] = pair.a.attempts(job["id"])
    assert (attempt["outcome"], attempt["error_message"]) == ("reclaimed", "max run time exceeded")


def test_after_the_expiry_and_before_the_reclaim_a_heartbeat_counts(instance, sql):
    api = instance(FENCEPOST_LOOPS="false")
    api.enqueued("q")
    job = api.claim_one("q", lease=5)
    sql.lapse(job["id"])
    reply = api.heartbeat(job, lease_seconds=30)
    assert expiry(reply) == instant(reply.body["server_time"]) + timedelta(seconds=30)
    assert api.complete(job).status == 200
