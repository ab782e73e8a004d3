"""B04: a call at the very moment of the reclaim: either it counts for good or it is refused, never both."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cases.support import at_once, books, instant, new_queue, passes, wait_for_status

JOBS = 100
THREADS = 30


def race(pair, queue, verb, later=0.0, **content):
    """Claim with the shortest lease, send `verb` for all around its end (and `later` seconds); (claimed, replies)."""
    pair.a.enqueued(queue, JOBS, backoff={"base_seconds": 0})
    claimed = pair.a.claim(queue, JOBS, worker="w", lease=1)
    assert len(claimed) == JOBS
    first = claimed[0]
    ends = time.monotonic() + 1.0 - 0.05 + later  # the answer took a moment to come
    assert (instant(first["lease_expires_at"]) - instant(first["reserved_at"])).total_seconds() == 1.0
    shares = [claimed[n::THREADS] for n in range(THREADS)]

    def send(number):
        moment = ends + random.uniform(-0.08, 0.03)
        while (left := moment - time.monotonic()) > 0:
            time.sleep(left)
        return [(job, pair.each(number).end(verb, job, **content)) for job in shares[number]]

    with ThreadPoolExecutor(THREADS) as pool:
        return claimed, [pair_ for share in pool.map(send, range(THREADS)) for pair_ in share]


def reclaims(pair, queue):
    return sum(api.metric("fencepost_reclaims_total", queue=queue) for api in (pair.a, pair.b))


class Rounds:
    """Rounds until one had calls on both sides of the reclaim, otherwise it was no race. A busy machine moves the
    moment, so each round aims by the last one."""

    MOST = 12

    def __init__(self) -> None:
        self.later = 0.0
        self.ended: list[tuple[int, int]] = []

    def __iter__(self):
        while len(self.ended) < 2 or not any(won and lost for won, lost in self.ended):
            assert len(self.ended) < self.MOST, self.ended
            yield self.later

    def end(self, won, lost) -> None:
        self.ended.append((len(won), len(lost)))
        self.later += 0.03 if not lost else -0.03 if not won else 0.0


def test_done_against_reclaim(pair):
    rounds = Rounds()
    for later in rounds:
        queue = new_queue("race")
        _, replies = race(pair, queue, "complete", later, result="kept")
        won = [job for job, reply in replies if reply.status == 200]
        lost = [job for job, reply in replies if reply.status == 409 and reply.code == "lease-lost"]
        assert len(won) + len(lost) == JOBS
        rounds.end(won, lost)
        passes(pair.sql, 5)
        counts = books(pair.a, pair.sql, queue, JOBS)
        assert (counts["done"], counts["queued"]) == (len(won), len(lost))
        assert reclaims(pair, queue) == len(lost)
        rows = {str(row["id"]): row for row in pair.sql("SELECT * FROM jobs WHERE queue = %s", queue)}
        for job in won:
            assert (rows[job["id"]]["reclaim_count"], rows[job["id"]]["attempts"]) == (0, 1)
            assert rows[job["id"]]["result"] == "kept"
        assert all(rows[job["id"]]["reclaim_count"] == 1 for job in lost)
        again = {job["id"]: job for job in pair.b.claim(queue, 100, worker="second", lease=60)}
        assert set(again) == {job["id"] for job in lost}
        if again:
            assert all(result["ok"] for result in pair.b.end_many("complete", list(again.values()), result="second"))
        passes(pair.sql, 5)
        assert books(pair.a, pair.sql, queue, JOBS)["done"] == JOBS
        late = pair.sql(
            "SELECT result #>> '{}' AS result, count(*)::int AS n FROM jobs WHERE queue = %s GROUP BY 1", queue
        )
        assert {row["result"]: row["n"] for row in late} == {
            word: len(group) for word, group in (("kept", won), ("second", lost)) if group
        }


@pytest.mark.parametrize("verb", ["fail", "release"])
def test_another_ending_against_reclaim(pair, verb):
    rounds = Rounds()
    for later in rounds:
        queue = new_queue("race")
        _, replies = race(pair, queue, verb, later)
        won = [job for job, reply in replies if reply.status == 200]
        lost = [job for job, reply in replies if reply.status == 409 and reply.code == "lease-lost"]
        assert len(won) + len(lost) == JOBS
        rounds.end(won, lost)
        passes(pair.sql, 5)
        assert books(pair.a, pair.sql, queue, JOBS)["queued"] == JOBS
        assert reclaims(pair, queue) == len(lost)
        kept = pair.sql(
            "SELECT a.outcome, count(*)::int AS n, count(DISTINCT a.job_id)::int AS jobs FROM job_attempts a "
            "JOIN jobs j ON j.id = a.job_id WHERE j.queue = %s GROUP BY 1",
            queue,
        )
        assert sum(row["n"] for row in kept) == sum(row["jobs"] for row in kept) == JOBS
        assert {row["outcome"]: row["n"] for row in kept} == {
            word: len(group)
            for word, group in (({"fail": "failed"}.get(verb, "released"), won), ("reclaimed", lost))
            if group
        }


def test_a_heartbeat_that_was_answered_keeps_its_job(pair):
    rounds = Rounds()
    for later in rounds:
        queue = new_queue("race")
        _, replies = race(pair, queue, "heartbeat", later, lease_seconds=60)
        won = {job["id"]: (job, reply) for job, reply in replies if reply.status == 200}
        lost = {job["id"] for job, reply in replies if reply.status == 409 and reply.code == "lease-lost"}
        assert len(won) + len(lost) == JOBS
        rounds.end(won, lost)
        passes(pair.sql, 5)
        counts = books(pair.a, pair.sql, queue, JOBS)
        assert (counts["processing"], counts["queued"]) == (len(won), len(lost))
        rows = {str(row["id"]): row for row in pair.sql("SELECT * FROM jobs WHERE queue = %s", queue)}
        for job_id, (job, reply) in won.items():
            assert rows[job_id]["fence"] == job["fence"] == reply.body["fence"]
            assert rows[job_id]["lease_expires_at"] == instant(reply.body["lease_expires_at"])
        assert {job["id"] for job in pair.b.claim(queue, 100, worker="other", lease=60)} == lost


@pytest.mark.parametrize("verb", ["complete", "heartbeat"])
def test_a_call_that_waits_behind_a_lock_on_an_expired_row(pair, verb):
    queue = new_queue("locked")
    ids = pair.a.enqueued(queue, 20)
    claimed = pair.a.claim(queue, 20, worker="w", lease=60)
    content = {"complete": {"result": "kept"}, "heartbeat": {"lease_seconds": 60}}[verb]
    with pair.sql.open_transaction(
        "UPDATE jobs SET lease_expires_at = fencepost_now() - interval '1 second' WHERE id = ANY(%s::uuid[])", ids
    ) as connection:

        def let_go():
            # The calls must stand in the rows' queues before the sweep can take them.
            deadline = time.monotonic() + 0.8
            waiting = "SELECT count(*) AS n FROM pg_locks WHERE NOT granted"
            while pair.sql(waiting)[0]["n"] < 5 and time.monotonic() < deadline:
                time.sleep(0.01)
            connection.commit()

        calls = [lambda n=n, job=job: pair.each(n).end(verb, job, **content) for n, job in enumerate(claimed)]
        *replies, _ = at_once(*calls, let_go)
    passes(pair.sql, 5)
    won = [job["id"] for job, reply in zip(claimed, replies, strict=True) if reply.status == 200]
    lost = [job["id"] for job, reply in zip(claimed, replies, strict=True) if reply.code == "lease-lost"]
    assert len(won) + len(lost) == 20
    status = {"complete": "done", "heartbeat": "processing"}[verb]
    assert all(pair.a.get(job_id)["status"] == status for job_id in won)
    assert all(pair.a.get(job_id)["reclaim_count"] == 1 for job_id in lost)
    assert reclaims(pair, queue) == len(lost)
    books(pair.a, pair.sql, queue, 20)


def test_several_reclaiming_instances_take_each_lapse_once(pair):
    queue = new_queue("many")
    ids = pair.a.enqueued(queue, 300)
    for _ in range(3):
        assert len(pair.a.claim(queue, 100, lease=60)) == 100
    pair.sql.lapse(*ids)
    wait_for_status(pair.a, ids[-1], "queued")
    passes(pair.sql, 5)
    counts = books(pair.a, pair.sql, queue, 300)
    assert counts["queued"] == 300
    assert reclaims(pair, queue) == 300
    kept = pair.sql("SELECT sum(reclaim_count)::int AS n, max(reclaim_count) AS most FROM jobs WHERE queue = %s", queue)
    assert kept == [{"n": 300, "most": 1}]


def test_a_job_claimed_again_is_not_taken_by_the_pass_that_saw_it_lapsed(pair):
    """Lapse, reclaim and second claim in quick turns on both instances: no second attempt is ever taken back."""
    queue = new_queue("turns")
    ids = pair.a.enqueued(queue, 30, max_attempts=100, max_reclaims=100)
    for turn in range(1, 6):
        claimed = {}
        deadline = time.monotonic() + 10
        while len(claimed) < 30 and time.monotonic() < deadline:
            for number in range(2):
                claimed.update({job["id"]: job for job in pair.each(number).claim(queue, 30, worker="w", lease=600)})
        assert set(claimed) == set(ids)
        assert {job["reclaim_count"] for job in claimed.values()} == {turn - 1}
        assert {job["attempts"] for job in claimed.values()} == {turn}
        pair.sql.lapse(*ids)
    wait_for_status(pair.a, ids[0], "queued")
    passes(pair.sql, 5)
    assert books(pair.a, pair.sql, queue, 30)["queued"] == 30
    assert pair.sql("SELECT min(reclaim_count), max(reclaim_count) FROM jobs WHERE queue = %s", queue) == [
        {"min": 5, "max": 5}
    ]
