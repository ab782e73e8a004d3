"""B54: hundreds of polls that wait take nothing from the others: no connection, no thread, no patience."""

import statistics
import time

from tests.cases.support import Sql, at_once, books, new_queue, read_answer
from tests.harness import wait_for

POLLS = 500
POOL = 10
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
    # The pool, and the one that listens.
    assert most <= POOL + 1
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
