"""B60: a loop that cannot work says so, keeps trying, and works again soon after; the process stays alive meanwhile."""

import contextlib
import re
import time

import psycopg
import pytest

from tests.cases.support import books
from tests.harness import wait_for

OBSTACLES = {
    # loop, what is put in its way, how it is taken away
    "a right revoked": (
        "reclaim",
        "REVOKE ALL ON reclaim_set_aside FROM fp_app",
        "GRANT ALL ON reclaim_set_aside TO fp_app",
    ),
    "a right on the history revoked": (
        "reclaim",
        "REVOKE INSERT ON job_attempts FROM fp_app",
        "GRANT INSERT ON job_attempts TO fp_app",
    ),
    "a column renamed": (
        "reclaim",
        "ALTER TABLE reclaim_set_aside RENAME COLUMN next_try_at TO other",
        "ALTER TABLE reclaim_set_aside RENAME COLUMN other TO next_try_at",
    ),
    "a table renamed": (
        "reclaim",
        "ALTER TABLE loops RENAME TO other",
        "ALTER TABLE other RENAME TO loops",
    ),
    "the row of its passes lost": (
        "reclaim",
        "CREATE TABLE kept AS SELECT * FROM loops; DELETE FROM loops WHERE name = 'reclaim'",
        "INSERT INTO loops SELECT * FROM kept WHERE name = 'reclaim'; DROP TABLE kept",
    ),
    "another loop": (
        "prune",
        "ALTER TABLE claim_requests RENAME COLUMN created_at TO other",
        "ALTER TABLE claim_requests RENAME COLUMN other TO created_at",
    ),
}


@pytest.fixture
def as_a_plain_role(sql, database_url):
    """The URL of a role that owns nothing and may do all that the service does."""
    url = re.sub(r"//(fencepost|postgres)@", "//fp_app@", database_url)
    if url == database_url:
        pytest.skip("on a given server the role would need a password")
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        sql("CREATE ROLE fp_app LOGIN")
    sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO fp_app")
    sql("GRANT USAGE, CREATE ON SCHEMA public TO fp_app")
    yield url
    sql("DROP OWNED BY fp_app")


def degraded(api):
    return {row["loop"] for row in api.call("GET", "/readyz?verbose=true", expect=200).body.get("degraded") or ()}


def lapsed_job(api, sql, queue):
    api.enqueued(queue)
    job = api.claim_one(queue, lease=600)
    sql.lapse(job["id"])
    return job["id"]


def told_while_it_fails(api, loop):
    """Within 5 periods (5 s at least, and the 2 s between two looks): degraded, by health and by the metric."""

    def told():
        assert api.call("GET", "/livez").status == 200
        return loop in degraded(api)

    wait_for(told, 12, 0.1)
    assert api.http.get("/readyz").status_code == 200
    assert api.http.get("/readyz?strict=true").status_code == 503
    wait_for(lambda: api.metric("fencepost_loop_age_seconds", loop=loop) > 3, 5, 0.2)
    assert api.metric("fencepost_loop_passes_total", loop=loop, ok="false") >= 2


def works_again(api, sql, loop, job_id):
    began = time.monotonic()
    if loop == "reclaim":
        wait_for(lambda: api.get(job_id)["status"] == "queued", 10)
    wait_for(lambda: not degraded(api), 10 - (time.monotonic() - began), 0.1)
    assert api.http.get("/readyz?strict=true").status_code == 200
    # Again and again, not once.
    another = lapsed_job(api, sql, "later")
    wait_for(lambda: api.get(another)["status"] == "queued", 3)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_told_while_it_fails_and_works_again_after(instance, sql, as_a_plain_role, obstacle):
    loop, make, undo = OBSTACLES[obstacle]
    api = instance(FENCEPOST_DATABASE_URL=as_a_plain_role)
    assert degraded(api) == set()
    sql(make)
    job_id = lapsed_job(api, sql, "q")
    told_while_it_fails(api, loop)
    # Work goes on meanwhile.
    api.enqueued("busy")
    job = api.claim_one("busy", lease=60)
    assert api.heartbeat(job).status == 200
    assert api.complete(job).status == 200
    # What passes cannot be written down in (the row lost) still moves jobs: it fails toward running.
    if loop == "reclaim" and obstacle != "the row of its passes lost":
        assert api.get(job_id)["status"] == "processing"
    sql(undo)
    works_again(api, sql, loop, job_id)
    books(api, sql, "q", 1)


def test_an_exclusive_lock(instance, sql):
    api = instance()
    with sql.open_transaction("LOCK TABLE reclaim_set_aside IN ACCESS EXCLUSIVE MODE"):
        job_id = lapsed_job(api, sql, "q")
        told_while_it_fails(api, "reclaim")
        assert api.get(job_id)["status"] == "processing"
    works_again(api, sql, "reclaim", job_id)


def test_its_backends_terminated_twenty_times(instance, sql):
    api = instance(away=True)
    before = api.metric("fencepost_loop_passes_total", loop="reclaim", ok="true")
    ended = 0
    while ended < 20:
        ended += sql(
            "SELECT count(pg_terminate_backend(pid))::int AS n FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'fencepost'"
        )[0]["n"]
        assert api.call("GET", "/livez").status == 200
    api.may_be_away = False
    wait_for(lambda: api.http.get("/readyz").status_code == 200, 10, 0.1)
    job_id = lapsed_job(api, sql, "q")
    works_again(api, sql, "reclaim", job_id)
    wait_for(lambda: api.metric("fencepost_loop_passes_total", loop="reclaim", ok="true") > before, 5, 0.2)


def test_an_instance_without_loops_tells_of_the_others(instance, sql):
    """API alone: it says degraded while nobody passes, and no longer once somebody does."""
    api = instance(FENCEPOST_LOOPS="false")
    sql("UPDATE loops SET last_pass_at = fencepost_now() - interval '1 minute'")
    wait_for(lambda: degraded(api) == {"reclaim", "prune", "schedule"}, 12, 0.1)
    assert api.http.get("/readyz").status_code == 200
    instance()
    wait_for(lambda: not degraded(api), 10, 0.1)
