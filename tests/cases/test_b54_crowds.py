"""B54: hundreds of polls that wait take nothing from the others: no connection, no thread, no patience."""

import statistics
import threading
import time

from tests.cases.support import Sql, at_once, books, new_queue, read_answer
from tests.harness import wait_for

POLLS = 500
POOL = 10
BESIDE_THE_POOL = 6
"""One for each of the four lanes, one that listens, one that tells other instances."""
OPEN_NOW = """
SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s
"""


def test_five_hundred_polls_and_everything_else_goes_on(instance, database_url):
    api = instance(FENCEPOST_POOL_SIZE=str(POOL), FENCEPOST_RECLAIM_INTERVAL_SECONDS="1")
    sql = Sql(database_url)
    wait = {"worker_id": "w", "max_jobs": 1, "lease_seconds": 60, "wait_seconds": 30}
    polls = [api.send_raw("POST", "/v1/jobs/claim", {**wait, "queues": [f"idle{n % 5}"]}) for n in range(POLLS)]
    wait_for(lambda: api.metric("fencepost_waiters") == POLLS, 15, 0.1)

    api.enqueued("busy", 200)
    times: dict[str, list[float]] = {}

    def timed(what, call):
        began = time.monotonic()
        answer = call()
        times.setdefault(what, []).append(time.monotonic() - began)
        return answer

    most = 0
    for _ in range(60):
        assert timed("livez", lambda: api.call("GET", "/livez")).status == 200
        assert timed("readyz", lambda: api.call("GET", "/readyz")).status == 200
        job = timed("claim", lambda: api.claim_one("busy", lease=60))
        assert timed("heartbeat", lambda job=job: api.heartbeat(job)).status == 200
        assert timed("complete", lambda job=job: api.complete(job)).status == 200
        assert timed("enqueue", lambda: api.enqueue("busy")).status == 201
        assert timed("list", lambda: api.call("GET", "/v1/jobs?queue=busy&limit=20")).status == 200
        most = max(most, sql(OPEN_NOW, "fencepost%")[0]["n"])
    assert most <= POOL + BESIDE_THE_POOL
    for what, taken in times.items():
        assert statistics.quantiles(taken, n=20)[-1] < 0.3, (what, sorted(taken)[-5:])

    began = time.monotonic()
    for number in range(5):
        api.enqueued(f"idle{number}", POLLS // 5)
    got = [read_answer(sock) for sock in polls]
    assert {status for status, _ in got} == {200}
    ids = {body.split(b'"id":"')[1][:36] for _, body in got}
    assert len(ids) == POLLS
    assert time.monotonic() - began < 15
    counts = [api.counts(f"idle{number}") for number in range(5)]
    assert sum(count["processing"] for count in counts) == POLLS
    assert sum(count["queued"] for count in counts) == 0


def sharing(api, other, stop, times):
    """What everybody else does meanwhile, each call timed, until `stop`."""
    while not stop.is_set():
        for what, call in (
            ("livez", lambda: api.call("GET", "/livez", expect=200)),
            ("readyz", lambda: api.call("GET", "/readyz", expect=200)),
            ("enqueue", lambda: other.enqueue("busy")),
            ("claim", lambda: api.claim("busy", lease=60)),
        ):
            began = time.monotonic()
            answer = call()
            times.append((time.monotonic() - began, what))
        for job in answer:
            for end in (api.heartbeat, api.complete):
                began = time.monotonic()
                assert end(job).status == 200
                times.append((time.monotonic() - began, end.__name__))


def test_one_client_with_three_hundred_polls_and_a_job_for_each(instance):
    """One client alone holds 300 polls on one queue. The jobs come one by one, at this instance and at another, by many
    producers at once; each poll gets one, the others' calls stay quick, and so does the last poll."""
    here, there = instance(FENCEPOST_POOL_SIZE="4"), instance(FENCEPOST_POOL_SIZE="4")
    wait = {"worker_id": "w", "queues": ["crowd"], "max_jobs": 1, "lease_seconds": 60, "wait_seconds": 30}
    polls = [here.send_raw("POST", "/v1/jobs/claim", wait) for _ in range(300)]
    wait_for(lambda: here.metric("fencepost_waiters") == 300, 15, 0.1)
    claims = here.metric("fencepost_lane_calls_count", lane="claim")
    stop, times = threading.Event(), []
    load = threading.Thread(target=sharing, args=(here, there, stop, times))
    load.start()
    try:

        def produce(number):
            api = (here, there)[number % 2]
            for _ in range(30):
                assert api.enqueue("crowd").status == 201

        at_once(*(lambda n=n: produce(n) for n in range(10)))
        began = time.monotonic()
        got = [read_answer(sock) for sock in polls]
        assert time.monotonic() - began < 5
    finally:
        stop.set()
        load.join()
    assert {status for status, _ in got} == {200}
    assert len({body.split(b'"id":"')[1][:36] for _, body in got}) == 300
    counts = there.counts("crowd")
    assert (counts["processing"], counts["queued"]) == (300, 0)
    assert len(times) > 20
    assert statistics.quantiles([taken for taken, _ in times], n=20)[-1] < 0.3, sorted(times)[-5:]
    # A wake is no stampede: not all 300 asked each time one job came.
    asked = here.metric("fencepost_lane_calls_count", lane="claim") - claims
    assert asked < 3 * 300, asked


def test_polls_beyond_the_stated_cap_are_told_to_come_again(instance):
    """They hang nobody up and cost those who wait nothing; who comes again after the crowd has gone finds a place."""
    api = instance(FENCEPOST_MAX_WAITERS="40")
    wait = {"worker_id": "w", "queues": ["q"], "max_jobs": 1, "lease_seconds": 60, "wait_seconds": 30}
    inside = [api.send_raw("POST", "/v1/jobs/claim", wait) for _ in range(40)]
    wait_for(lambda: api.metric("fencepost_waiters") == 40, 15, 0.1)
    began = time.monotonic()
    beyond = at_once(*[lambda: api.call("POST", "/v1/jobs/claim", wait)] * 20)
    assert time.monotonic() - began < 3
    # The judge of answers looks for a Retry-After at each.
    assert {(reply.status, reply.code) for reply in beyond} <= {(429, "too-many-waiters"), (503, "too-many-waiters")}
    assert api.metric("fencepost_waiters") == 40
    for _ in range(40):
        assert api.enqueue("q").status == 201
    got = [read_answer(sock) for sock in inside]
    assert {status for status, _ in got} == {200}
    assert len({body.split(b'"id":"')[1][:36] for _, body in got}) == 40
    wait_for(lambda: api.metric("fencepost_waiters") == 0, 5, 0.05)
    api.enqueue("q")
    assert len(api.claim("q", lease=60, wait_seconds=30)) == 1


def test_twenty_claimers_share_a_hundred_jobs(pair):
    """At once, on both instances: each gets the five it asked for, nobody gets another's."""
    for _ in range(3):
        queue = new_queue("share")
        ids = pair.a.enqueued(queue, 100)
        calls = [lambda n=n, q=queue: pair.each(n).claim(q, 5, worker=f"w{n}", lease=60) for n in range(20)]
        shares = at_once(*calls)
        assert [len(share) for share in shares] == [5] * 20
        claimed = [job for share in shares for job in share]
        assert sorted(job["id"] for job in claimed) == sorted(ids)
        assert len({job["attempt_token"] for job in claimed}) == 100
        for number, share in enumerate(shares):
            assert {job["reserved_by"] for job in share} == {f"w{number}"}
        books(pair.a, pair.sql, queue, 100)


def test_a_locked_job_at_the_head_holds_nobody_up(pair):
    queue = new_queue("head")
    ids = pair.a.enqueued(queue, 5)
    with pair.sql.open_transaction("SELECT FROM jobs WHERE id = ANY(%s::uuid[]) FOR UPDATE", ids[:2]):
        began = time.monotonic()
        claimed = pair.b.claim(queue, 5, lease=60)
        assert time.monotonic() - began < 0.8  # a wait for a lock ends after a second
        assert [job["id"] for job in claimed] == ids[2:]
    assert [job["id"] for job in pair.a.claim(queue, 5, lease=60)] == ids[:2]
    books(pair.a, pair.sql, queue, 5)
