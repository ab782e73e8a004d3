"""The hot statements on a big table: right under any plan, and cheap under those that the planner may choose.

The table is loaded by one INSERT; `stale` was analysed while it was empty and never since, as a fresh installation
in its first minutes; `fresh` is the same, analysed.
"""

import itertools

import psycopg
import pytest

from app.jobs import sql
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
