"""The hot statements on a big table: right under any plan, and cheap under those that the planner may choose.

The table is loaded by one INSERT; `stale` was analysed while it was empty and never since, as a fresh installation
in its first minutes; `fresh` is the same, analysed.
"""

import itertools

import psycopg
import pytest

from app.jobs import sql
from app.jobs.intake import _columns
from app.jobs.model import NewJob, new_id
from tests import harness
from tests.reliability import plans

FINISHED, NOT_DUE, DUE, PROCESSING = 200_000, 20_000, 2_000, 5_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def big(server_url, template):
    """URLs of the loaded database by the state of its statistics."""
    stale = harness.create_database(server_url, template)
    with psycopg.connect(stale, autocommit=True) as connection:
        connection.execute("ALTER TABLE jobs SET (autovacuum_enabled = false)")
        connection.execute("ANALYZE")
        plans.load(connection, finished=FINISHED, not_due=NOT_DUE, due=DUE, processing=PROCESSING)
    fresh = harness.create_database(server_url, psycopg.conninfo.conninfo_to_dict(stale)["dbname"])
    with psycopg.connect(fresh, autocommit=True) as connection:
        connection.execute("ANALYZE")
    yield {"stale": stale, "fresh": fresh}
    for url in (stale, fresh):
        harness.drop_database(server_url, url)


@pytest.fixture(params=["stale", "fresh"])
def connection(big, request):
    """A session whose work is rolled back: each test meets the same table."""
    with psycopg.connect(big[request.param]) as connection:
        yield connection
        connection.rollback()


def claims_what_it_returns(connection, wanted):
    before = connection.execute("SELECT count(*) FROM jobs WHERE status = 'processing'").fetchone()[0]
    ids = plans.claim_ids(connection, wanted)
    after = connection.execute("SELECT count(*) FROM jobs WHERE status = 'processing'").fetchone()[0]
    claimed = connection.execute(
        "SELECT count(*), count(DISTINCT attempt_token) FROM jobs WHERE id = ANY(%s) AND status = 'processing'", [ids]
    ).fetchone()
    assert len(ids) == len(set(ids)) == wanted
    assert (after - before, *claimed) == (wanted, wanted, wanted)


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize("wanted", [1, 10, 100])
def test_claim_takes_its_index_and_few_pages(connection, mode, wanted):
    connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
    claims_what_it_returns(connection, wanted)
    explained = plans.explain(connection, sql.CLAIM, plans.claim_params(wanted))
    scans = plans.scans_of_jobs(explained)
    assert set(scans) == {"ix_jobs_claim", "pk_jobs"}, plans.told(explained)
    # A claimed row costs its look-up, its lock, and an entry in each of its new indexes.
    assert plans.buffers(explained) < 150 + 50 * wanted, plans.told(explained)


TOGGLES = ["enable_nestloop", "enable_indexscan", "enable_hashjoin", "enable_bitmapscan", "enable_mergejoin"]


@pytest.mark.parametrize("off", [c for n in range(1, 6) for c in itertools.combinations(TOGGLES, n)], ids="-".join)
def test_claim_changes_exactly_what_it_returns_under_any_plan(big, off):
    with psycopg.connect(big["stale"]) as connection:
        for mode in ("force_generic_plan", "force_custom_plan"):
            connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
            for toggle in off:
                connection.execute(f"SET LOCAL {toggle} = off".encode())
            for wanted in (1, 10):
                claims_what_it_returns(connection, wanted)
            connection.rollback()


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize("items", [1, 100])
@pytest.mark.parametrize("verb", ["HEARTBEAT", "COMPLETE", "FAIL", "RELEASE", "GIVE_BACK", "RECLAIM"])
def test_an_attempts_move_goes_by_the_primary_key(connection, verb, mode, items):
    connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
    params = plans.verb_params(plans.held(connection, items))
    explained = plans.explain(connection, getattr(sql, verb), params)
    assert set(plans.scans_of_jobs(explained)) == {"pk_jobs"}, plans.told(explained)
    assert plans.buffers(explained) < 100 + 60 * items, plans.told(explained)
    if verb == "HEARTBEAT":
        now = "SELECT count(*) FROM jobs WHERE status = 'processing' AND heartbeat_at IS NOT NULL"
    else:
        now = f"SELECT {PROCESSING} - count(*) FROM jobs WHERE status = 'processing'"
    assert connection.execute(now.encode()).fetchone()[0] == items


def new_jobs(count):
    jobs = [
        NewJob("q", "1", idempotency_key=f"key-{n}", unique_key=f"u-{n}", content_sha256=b"x") for n in range(count)
    ]
    return _columns([(new_id(), job) for job in jobs])


OTHERS = {
    # statement: (parameters for so many items, indexes it may go by, pages for each item)
    "ENQUEUE": (new_jobs, {"pk_jobs", "uq_jobs_idempotency_key", "uq_jobs_live_unique_key"}, 60),
    "HOLDERS": (new_jobs, {"uq_jobs_idempotency_key", "uq_jobs_live_unique_key"}, 10),
    "EXPIRED": (lambda count: {"limit": count}, {"ix_jobs_processing_timeout"}, 10),
    "NEXT_DUE": (lambda count: {"queues": ["q"]}, {"ix_jobs_claim"}, 10),
    "SET_ASIDE_DUE": (lambda count: {"limit": count}, {"pk_jobs", "ix_jobs_processing_timeout"}, 10),
    "GIVE_GRACE": (
        lambda count: {"name": "reclaim", "grace": 30.0, "outage_after": 6.0},
        {"ix_jobs_processing_timeout"},
        10,
    ),
}


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
@pytest.mark.parametrize("items", [1, 50])
@pytest.mark.parametrize("name", OTHERS)
def test_what_runs_all_the_time_goes_by_its_index(connection, name, mode, items):
    connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
    make, indexes, pages = OTHERS[name]
    explained = plans.explain(connection, getattr(sql, name), make(items))
    assert set(plans.scans_of_jobs(explained)) <= indexes, plans.told(explained)
    # A session's first statement also reads the catalogue.
    assert plans.buffers(explained) < 250 + pages * items, plans.told(explained)


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_the_fate_of_a_token_is_looked_up_by_keys(connection, mode):
    connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
    explained = plans.explain(connection, sql.FATE_OF_TOKEN, plans.verb_params(plans.held(connection, 50)))
    assert set(plans.scans_of_jobs(explained)) == {"pk_jobs"}, plans.told(explained)
    assert plans.buffers(explained) < 500, plans.told(explained)


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_pruning_goes_by_the_index_of_finished_jobs(connection, mode):
    connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
    explained = plans.explain(connection, sql.PRUNE, {"done": 3600.0, "failed": 3600.0, "limit": 100})
    assert set(plans.scans_of_jobs(explained)) <= {"ix_jobs_finished", "pk_jobs"}, plans.told(explained)
    assert plans.buffers(explained) < 3_000, plans.told(explained)
    assert plans.buffers(plans.explain(connection, sql.PRUNE, {"done": 1e9, "failed": 1e9, "limit": 100})) < 100
