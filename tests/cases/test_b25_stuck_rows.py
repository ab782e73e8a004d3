"""B25: one row that cannot be moved stops no other; it is reported, tried alone, and moves when its obstacle goes."""

import signal
import time

import psycopg
import pytest

from tests.cases.support import Sql, books
from tests.harness import wait_for

QUEUES = ("one", "two", "three")
BLOCK = """
CREATE TABLE blocked (id uuid PRIMARY KEY);
CREATE FUNCTION block() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM blocked b WHERE b.id = {id}) THEN
        RAISE EXCEPTION 'blocked for the test' USING ERRCODE = '{state}';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER block BEFORE {event} FOR EACH ROW EXECUTE FUNCTION block();
"""
EVENTS = {
    "the job": ("UPDATE ON jobs", "NEW.id"),
    "its history": ("INSERT ON job_attempts", "NEW.job_id"),
}


def claimed(api, bad=1):
    """The ids of so many bad ones; beside them 50 good ones in three queues; all claimed."""
    bad_ids = api.enqueued("bad", bad)
    for queue, count in zip(QUEUES, (17, 17, 16), strict=True):
        api.enqueued(queue, count)
    assert sum(len(api.claim(["bad", *QUEUES], 100, lease=600)) for _ in range(2)) == bad + 50
    return bad_ids


def let_lapse(sql, bad_ids):
    sql(
        "UPDATE jobs SET lease_expires_at = fencepost_now() - CASE WHEN id = ANY(%s::uuid[]) "
        "THEN interval '1 minute' ELSE interval '1 second' END WHERE status = 'processing'",
        bad_ids,
        options="-c session_replication_role=replica",  # past the triggers of the case
    )


def returned(api, queues=QUEUES):
    return sum(api.counts(queue)["queued"] for queue in queues)


def set_asides(*apis):
    return sum(api.metric("fencepost_set_asides_total", loop="reclaim") for api in apis)


@pytest.mark.parametrize("where", EVENTS)
def test_a_row_that_the_database_refuses(instance, sql, where):
    """Two instances; a trigger that raises for one id, on the job itself and on its history."""
    apis = [instance(), instance()]
    event, column = EVENTS[where]
    bad = claimed(apis[0])
    sql(BLOCK.format(event=event, id=column, state="P0001"))
    sql("INSERT INTO blocked VALUES (%s)", bad[0])
    let_lapse(sql, bad)
    wait_for(lambda: returned(apis[0]) == 50, 3)
    assert apis[0].get(bad[0])["status"] == "processing"
    wait_for(lambda: set_asides(*apis) >= 2, 10)  # reported, and again when tried alone
    assert any("blocked for the test" in api.service.log() and bad[0] in api.service.log() for api in apis)
    assert apis[0].call("GET", "/readyz").status == 200
    # Others still go, pass after pass.
    more = apis[1].enqueued("one", 5)
    sql.lapse(*[job["id"] for job in apis[0].claim("one", 50, lease=600)])
    wait_for(lambda: returned(apis[0]) == 50 + len(more), 3)
    sql("TRUNCATE blocked")
    wait_for(lambda: apis[1].get(bad[0])["status"] == "queued", 20)
    assert apis[1].get(bad[0])["reclaim_count"] == 1
    wait_for(lambda: not sql("SELECT FROM reclaim_set_aside"), 5)
    for queue, count in (("bad", 1), ("one", 22), ("two", 17), ("three", 16)):
        books(apis[0], sql, queue, count)


@pytest.mark.parametrize("state", ["P0001", "22003", "23514", "42501", "55000"])
def test_more_bad_rows_than_a_batch_holds(instance, sql, state):
    """Sixty of them, all older than the good ones: they fill whole batches. With any error that a row can raise."""
    api = instance()
    bad = claimed(api, 60)
    sql(BLOCK.format(event="UPDATE ON jobs", id="NEW.id", state=state))
    for job_id in bad:
        sql("INSERT INTO blocked VALUES (%s)", job_id)
    let_lapse(sql, bad)
    wait_for(lambda: returned(api) == 50, 10)
    assert api.counts("bad")["processing"] == 60
    sql("TRUNCATE blocked")
    wait_for(lambda: api.counts("bad")["queued"] == 60, 30)


def test_a_number_at_its_end(instance, sql):
    """A count that cannot be raised any more."""
    api = instance()
    bad = claimed(api)
    sql("UPDATE jobs SET reclaim_count = 2147483647, max_reclaims = 2147483647 WHERE id = %s", bad[0])
    let_lapse(sql, bad)
    wait_for(lambda: returned(api) == 50, 3)
    wait_for(lambda: set_asides(api) >= 1, 5)
    # An operator can still decide it.
    assert api.operate("cancel", bad[0], force=True).body["status"] == "cancelled"
    wait_for(lambda: not sql("SELECT FROM reclaim_set_aside"), 5)


@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR KEY SHARE"])
def test_a_row_that_an_open_transaction_locks(instance, sql, lock):
    api = instance()
    bad = claimed(api)
    api.service.process.send_signal(signal.SIGSTOP)  # so that the lock is there before the first look
    let_lapse(sql, bad)
    with sql.open_transaction(f"SELECT FROM jobs WHERE id = %s {lock}", bad[0]):
        api.service.process.send_signal(signal.SIGCONT)
        wait_for(lambda: returned(api) == 50, 3)
        assert api.get(bad[0])["status"] == "processing"
        assert api.call("GET", "/readyz?strict=true").status == 200
    wait_for(lambda: api.get(bad[0])["status"] == "queued", 5)
    assert api.get(bad[0])["reclaim_count"] == 1


@pytest.mark.parametrize("bad_count", [1, 55])
def test_a_queue_whose_row_is_locked(instance, sql, bad_count):
    """A queue with a storm brake, its row held by an open transaction: the other queues do not wait for it."""
    api = instance()
    api.call("PUT", "/v1/queues/bad", {"reclaim_burst": 1000}, expect=201)
    bad = claimed(api, bad_count)
    with sql.open_transaction("SELECT FROM queues WHERE name = 'bad' FOR UPDATE"):
        let_lapse(sql, bad)
        wait_for(lambda: returned(api) == 50, 8)
        assert api.counts("bad")["processing"] == bad_count
    wait_for(lambda: api.counts("bad")["queued"] == bad_count, 10)


def test_a_newer_job_cannot_take_the_key_of_a_lapsed_one(instance, sql):
    """The conflict that disabled the source's reclaim cannot be made here: a lapsed job is live and holds its key."""
    api = instance(FENCEPOST_LOOPS="false")
    old = api.enqueue("bad", unique_key="u").body["id"]
    api.claim_one("bad", lease=600)
    sql.lapse(old)
    again = api.enqueue("bad", unique_key="u")
    assert (again.status, again.body["id"]) == (200, old)
    with pytest.raises(psycopg.errors.UniqueViolation):
        sql(
            "INSERT INTO jobs (id, queue, kind, payload, max_attempts, max_reclaims, available_at, unique_key) "
            "VALUES (gen_random_uuid(), 'bad', 'k', '1', 5, 3, now(), 'u')"
        )
    second = instance()
    wait_for(lambda: second.get(old)["status"] == "queued", 5)


def test_a_held_queue_fills_no_batch(instance, sql):
    """Sixty lapses on hold by the storm brake, older than the good ones."""
    api = instance()
    api.call("PUT", "/v1/queues/bad", {"reclaim_burst": 2}, expect=201)
    bad = claimed(api, 60)
    let_lapse(sql, bad)
    wait_for(lambda: returned(api) == 50, 3)
    counts = books(api, sql, "bad", 60)
    assert (counts["queued"], counts["processing"]) == (2, 58)
    assert api.call("GET", "/v1/queues/bad").body["hold"]["until"]
    # A request to stop passes the hold.
    held = [str(row["id"]) for row in sql("SELECT id FROM jobs WHERE queue = 'bad' AND status = 'processing'")]
    assert api.operate("cancel", held[0]).status == 202
    wait_for(lambda: api.get(held[0])["status"] == "cancelled", 3)
    assert api.call("POST", "/v1/queues/bad/release-hold").status == 200
    wait_for(lambda: api.counts("bad")["queued"] >= 4, 3)


def test_with_a_grace_after_an_outage(instance, sql, database_url):
    """An outage of a minute, a bad row, a grace of 5 s: none before its end, all by 10 s after it, one grace only."""
    first = instance()
    bad = claimed(first)
    first.service.kill()
    sql(BLOCK.format(event="UPDATE ON jobs", id="NEW.id", state="P0001"))
    let_lapse(sql, bad)
    sql("INSERT INTO blocked VALUES (%s)", bad[0])
    sql("UPDATE loops SET last_pass_at = fencepost_now() - interval '1 minute' WHERE name = 'reclaim'")
    began = time.monotonic()
    api = instance(FENCEPOST_OUTAGE_GRACE_SECONDS="5")
    wait_for(lambda: sql("SELECT grace_until FROM loops WHERE name = 'reclaim'")[0]["grace_until"], 10)
    granted = sql("SELECT grace_until FROM loops WHERE name = 'reclaim'")[0]["grace_until"]
    assert returned(api) == 0
    # A second start within the grace renews nothing.
    api.service.kill()
    api = instance(FENCEPOST_OUTAGE_GRACE_SECONDS="5")
    assert sql("SELECT grace_until FROM loops WHERE name = 'reclaim'")[0]["grace_until"] == granted
    wait_for(lambda: returned(api) == 50, 15)
    assert Sql(database_url)("SELECT fencepost_now() >= %s AS past", granted) == [{"past": True}]
    assert time.monotonic() - began < 5 + 10
    assert api.get(bad[0])["status"] == "processing"
    wait_for(lambda: set_asides(api) >= 1, 5)
