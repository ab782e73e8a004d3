"""B10: a poller that is gone gets no job, holds no place, and costs no attempt."""

import select
import socket
import time

import pytest

from tests.cases.support import books, new_queue, read_answer, reset
from tests.harness import wait_for

WAIT = {"worker_id": "dead", "max_jobs": 1, "lease_seconds": 60, "wait_seconds": 30}


def finish(sock):
    sock.close()


def half_close(sock):
    """The FIN alone: the socket stays open on this side and nothing is read."""
    sock.shutdown(socket.SHUT_WR)


GOODBYES = {"FIN": finish, "RST": reset, "half-closed": half_close}


def waiters(*apis):
    return sum(api.metric("fencepost_waiters") for api in apis)


def parked(api, queue, count=1, **more):
    """So many polls that wait. That they do is shown by nothing that is quick to ask, hence the moment at the end; a
    poll that did not come so far leaves earlier, which is as good a case."""
    socks = [api.send_raw("POST", "/v1/jobs/claim", {**WAIT, "queues": [queue], **more}) for _ in range(count)]
    time.sleep(0.15)
    return socks


def served_soon(pair, live, other, queue, goodbye, enqueue_at):
    """The dead one waits first; the job comes in the moment in which it leaves; a live one must have it in 2 s."""
    [sock] = parked(live, queue)
    goodbye(sock)
    [job_id] = enqueue_at.enqueued(queue)
    began = time.monotonic()
    job = other.claim_one(queue, worker="live", lease=60, wait_seconds=10)
    assert time.monotonic() - began < 2
    assert job["id"] == job_id
    assert job["attempts"] == 1
    assert job["reserved_by"] == "live"
    sock.close()
    assert other.complete(job).status == 200
    after = pair.a.get(job_id)
    assert (after["status"], after["attempts"]) == ("done", 1)
    assert {attempt["outcome"] for attempt in pair.a.attempts(job_id)} <= {"released", "done"}


@pytest.mark.parametrize("goodbye", GOODBYES)
def test_the_live_one_gets_the_job_at_once(pair, goodbye):
    """On the same instance, on another one, and enqueued at another one."""
    for live, other, at in ((pair.a, pair.a, pair.a), (pair.a, pair.b, pair.a), (pair.b, pair.b, pair.a)):
        queue = new_queue("dead")
        served_soon(pair, live, other, queue, GOODBYES[goodbye], at)
        books(pair.a, pair.sql, queue, 1)


@pytest.mark.parametrize("goodbye", ["FIN", "RST"])
def test_twenty_leave_as_twenty_jobs_come(pair, goodbye):
    queue = new_queue("dead")
    socks = parked(pair.a, queue, 20)
    for sock in socks:
        GOODBYES[goodbye](sock)
    ids = pair.a.enqueued(queue, 20)
    got = []
    deadline = time.monotonic() + 4
    while len(got) < 20 and time.monotonic() < deadline:
        got += pair.a.claim(queue, 20, worker="live", lease=60, wait_seconds=1)
    assert sorted(job["id"] for job in got) == sorted(ids)
    assert {job["attempts"] for job in got} == {1}
    books(pair.a, pair.sql, queue, 20)


def test_a_live_poll_that_waits_behind_a_dead_one_is_woken(pair):
    """One wake, and the one whom it would reach has just left: the wake must not be lost with it."""
    for goodbye in GOODBYES.values():
        queue = new_queue("dead")
        [dead] = parked(pair.a, queue)
        [live] = parked(pair.a, queue, worker_id="live")
        goodbye(dead)
        pair.a.enqueued(queue)
        began = time.monotonic()
        status, body = read_answer(live)
        assert status == 200
        assert b'"reserved_by":"live"' in body.replace(b": ", b":"), body
        assert time.monotonic() - began < 2
        live.close()
        dead.close()


def test_one_that_only_stops_reading_keeps_the_job_until_its_lease_ends(pair):
    queue = new_queue("deaf")
    [deaf] = parked(pair.a, queue, lease_seconds=1)
    [job_id] = pair.a.enqueued(queue)
    began = time.monotonic()
    job = pair.b.claim_one(queue, worker="live", lease=60, wait_seconds=10)
    took = time.monotonic() - began
    assert job["id"] == job_id
    assert 0.5 < took < 4
    assert (job["attempts"], job["reclaim_count"]) == (2, 1)
    wait_for(lambda: waiters(pair.a, pair.b) == 0, 5, 0.1)
    deaf.close()


def test_hundreds_of_dead_polls_use_up_no_place(instance):
    api = instance(FENCEPOST_MAX_WAITERS="50")
    for round_ in range(10):
        goodbye = (finish, reset)[round_ % 2]
        # As a poll that left gives its place back in a moment, not in the same instant, more are let in than stay.
        socks = [api.send_raw("POST", "/v1/jobs/claim", {**WAIT, "queues": [f"q{round_}"]}) for _ in range(50)]
        for sock in socks:
            goodbye(sock)
    # Places come free in a moment, not in the same instant: one that was refused comes again.
    socks = parked(api, "alive", 50)
    deadline = time.monotonic() + 5
    while refused := select.select(socks, [], [], 0.3)[0]:
        assert time.monotonic() < deadline
        assert {read_answer(sock)[0] for sock in refused} <= {429, 503}
        socks = [sock for sock in socks if sock not in refused] + parked(api, "alive", len(refused))
    full = api.call(
        "POST", "/v1/jobs/claim", {"worker_id": "w", "queues": ["alive"], "wait_seconds": 5}, expect=(429, 503)
    )
    assert full.code == "too-many-waiters"
    # One that does not wait needs no place.
    assert api.claim("alive", wait_seconds=0) == []
    api.enqueued("alive", 50)
    for sock in socks:
        status, body = read_answer(sock)
        assert status == 200
        assert b"attempt_token" in body
        sock.close()
    assert api.counts("alive")["processing"] == 50


def test_a_poll_cut_within_its_request_does_no_harm(pair):
    queue = new_queue("cut")
    whole = pair.a.request_bytes("POST", "/v1/jobs/claim", b'{"worker_id": "w", "queues": ["%s"]}' % queue.encode())
    for cut in (5, 40, len(whole) - 3):
        for goodbye in (finish, reset):
            sock = pair.a.connect()
            sock.sendall(whole[:cut])
            goodbye(sock)
    [job_id] = pair.a.enqueued(queue)
    assert pair.a.claim_one(queue, lease=60)["id"] == job_id


def test_a_dead_poll_over_several_queues_leaves_all_of_them(pair):
    first, second = new_queue("dead"), new_queue("dead")
    [sock] = parked(pair.a, first, queues=[first, second], max_jobs=10)
    reset(sock)
    pair.b.enqueued(first)
    pair.a.enqueued(second)
    got = []
    deadline = time.monotonic() + 4
    while len(got) < 2 and time.monotonic() < deadline:
        got += pair.b.claim([second, first], 2, worker="live", lease=60, wait_seconds=1)
    assert {job["queue"] for job in got} == {first, second}
    assert {job["attempts"] for job in got} == {1}
