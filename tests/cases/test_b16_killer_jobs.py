"""B16: a job that kills its worker ends, by counters that everybody can see."""

import pytest

from tests.cases.support import books, new_queue, wait_for_job, wait_for_status


def lapse_once(pair, queue, **how):
    """Claim, vanish, and the reclaim that follows; the job after it, or None where none is offered."""
    jobs = pair.a.claim(queue, worker="doomed", lease=60, **how)
    if not jobs:
        return None
    [job] = jobs
    pair.sql.lapse(job["id"])
    return wait_for_job(pair.b, job["id"], lambda now: now["status"] != "processing")


def test_offered_three_times_then_never_again(pair):
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue, max_attempts=3)
    offered = [job for _ in range(10) if (job := lapse_once(pair, queue)) is not None]
    assert [job["status"] for job in offered] == ["queued", "queued", "failed"]
    assert [job["attempts"] for job in offered] == [1, 2, 3]
    assert [job["reclaim_count"] for job in offered] == [1, 2, 3]
    job = pair.a.get(job_id)
    assert job["last_error"] == "lease expired before completion"
    assert job["finished_at"] is not None
    kept = pair.a.attempts(job_id)
    assert [(attempt["number"], attempt["outcome"]) for attempt in kept] == [(n, "reclaimed") for n in (1, 2, 3)]
    books(pair.a, pair.sql, queue, 1)


def test_by_the_clock_alone(pair):
    """The same without SQL: leases of one second that run out."""
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue, max_attempts=2)
    for number in (1, 2):
        job = pair.each(number).claim_one(queue, lease=1, wait_seconds=5)
        assert job["attempts"] == number
    assert wait_for_status(pair.a, job_id, "failed")["reclaim_count"] == 2
    assert pair.b.claim(queue) == []


def test_a_success_between_lapses_is_judged_by_the_documented_counters(pair):
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue)
    assert lapse_once(pair, queue)["status"] == "queued"
    second = pair.a.claim_one(queue, lease=60)
    assert pair.a.heartbeat(second).status == 200
    assert pair.a.complete(second).status == 200
    job = pair.b.operate("requeue", job_id, from_done=True).body
    # The limits rise only where they would leave no attempt: greatest(5, 2 + 1) and greatest(3, 1 + 1).
    assert (job["attempts"], job["max_attempts"], job["reclaim_count"], job["max_reclaims"]) == (2, 5, 1, 3)
    after = [lapse_once(pair, queue) for _ in range(3)]
    assert [job["attempts"] for job in after] == [3, 4, 5]
    assert [job["reclaim_count"] for job in after] == [2, 3, 4]
    assert [job["status"] for job in after] == ["queued", "queued", "failed"]
    assert lapse_once(pair, queue) is None


def test_lapses_and_polite_failures_count_together(pair):
    queue = new_queue("killer")
    pair.a.enqueued(queue, max_attempts=4, backoff={"base_seconds": 0})
    assert lapse_once(pair, queue)["attempts"] == 1
    assert pair.a.fail(pair.a.claim_one(queue, lease=60)).body["status"] == "queued"
    assert lapse_once(pair, queue)["attempts"] == 3
    assert pair.b.fail(pair.b.claim_one(queue, lease=60)).body["status"] == "failed"
    assert pair.a.claim(queue) == []


@pytest.mark.parametrize("most", [0, 1, 3])
def test_lapses_of_unknown_cause_end_with_a_person(pair, most):
    queue = new_queue("killer")
    fields = {} if most == 3 else {"max_reclaims": most}
    pair.a.enqueued(queue, max_attempts=100, **fields)
    after = [lapse_once(pair, queue) for _ in range(most + 1)]
    assert [job["status"] for job in after] == ["queued"] * most + ["manual_review"]
    assert after[-1]["reclaim_count"] == most + 1
    assert lapse_once(pair, queue) is None


@pytest.mark.parametrize("attempts", [1, 5])
def test_a_manual_job_waits_for_a_person_also_with_no_attempt_left(pair, attempts):
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue, recovery_policy="manual", max_attempts=attempts)
    job = lapse_once(pair, queue)
    assert (job["status"], job["attempts"], job["reclaim_count"]) == ("manual_review", 1, 1)
    assert lapse_once(pair, queue) is None
    resolved = pair.b.operate("resolve", job_id, outcome="done", result="by hand")
    assert (resolved.status, resolved.body["status"], resolved.body["result"]) == (200, "done", "by hand")


@pytest.mark.parametrize("extra", [1, 2])
def test_a_requeue_gives_so_many_attempts_and_no_more(pair, extra):
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue, max_attempts=1, max_reclaims=0)
    assert lapse_once(pair, queue)["status"] == "failed"
    body = {} if extra == 1 else {"extra_attempts": extra}
    job = pair.a.operate("requeue", job_id, **body).body
    assert (job["max_attempts"], job["max_reclaims"]) == (1 + extra, 1 + extra)
    after = [lapse_once(pair, queue) for _ in range(extra)]
    assert [job["status"] for job in after] == ["queued"] * (extra - 1) + ["failed"]
    assert lapse_once(pair, queue) is None


def test_a_requeue_beyond_the_limits_of_an_enqueue(pair):
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue, max_attempts=100, max_reclaims=100)
    pair.sql("UPDATE jobs SET attempts = 100, reclaim_count = 100 WHERE id = %s", job_id)
    pair.a.operate("cancel", job_id)
    job = pair.b.operate("requeue", job_id, extra_attempts=100).body
    assert (job["status"], job["max_attempts"], job["max_reclaims"]) == ("queued", 200, 200)
    assert lapse_once(pair, queue)["status"] == "queued"


def test_a_job_asked_to_stop_is_not_offered_again(pair):
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue, recovery_policy="manual")
    job = pair.a.claim_one(queue, lease=60)
    assert pair.b.operate("cancel", job_id).status == 202
    pair.sql.lapse(job_id)
    after = wait_for_status(pair.a, job_id, "cancelled", "queued", "manual_review")
    assert (after["status"], after["reclaim_count"], after["cancel_requested"]) == ("cancelled", 1, False)
    assert pair.a.complete(job).code == "lease-lost"
    assert pair.a.claim(queue) == []


def test_releases_end_too(pair):
    queue = new_queue("killer")
    [job_id] = pair.a.enqueued(queue, max_attempts=2)
    for number in range(10):
        job = pair.each(number).claim_one(queue, lease=60)
        assert job["attempts"] == 1
        assert pair.a.end("release", job).body["status"] == "queued"
    assert pair.a.end("release", pair.a.claim_one(queue, lease=60)).body["status"] == "queued"
    assert pair.a.get(job_id)["attempts"] == 1
    assert pair.a.end("release", pair.a.claim_one(queue, lease=60)).body["status"] == "failed"
    assert pair.a.get(job_id)["last_error"] == "released too often"
    fences = [attempt["fence"] for attempt in pair.a.attempts(job_id)]
    assert fences == sorted(set(fences))
    assert len(fences) == 12


def test_counters_survive_the_instance(instance, sql):
    """kill -9 of the instance between claim and reclaim, each time: three offers in all."""
    api = instance()
    [job_id] = api.enqueued("q", max_attempts=3)
    for number in (1, 2, 3):
        assert api.claim_one("q", lease=60)["attempts"] == number
        api.service.kill()
        sql.lapse(job_id)
        api = instance()
        wait_for_job(api, job_id, lambda now: now["status"] != "processing")
    job = api.get(job_id)
    assert (job["status"], job["reclaim_count"], job["attempts"]) == ("failed", 3, 3)
    assert api.claim("q") == []
