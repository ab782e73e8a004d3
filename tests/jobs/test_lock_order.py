"""Whoever locks several jobs locks them in the order of their ids, and keys in one order: then nobody deadlocks."""

import asyncio

import psycopg
import pytest

from app.jobs import intake, lease
from app.jobs.model import Beat, Ending, NewJob, new_id
from app.lanes import OPTIONS
from tests.factories import a_job
from tests.harness import wait_until

VERBS = ("heartbeat", "complete", "fail", "release")
WAITS = """
SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


def act(verb, jobs):
    if verb == "heartbeat":
        beats = [Beat(job.id, job.token, "w", 60.0) for job in jobs]
        return lambda tx: lease.heartbeat(tx, beats)
    endings = [Ending(verb, job.id, job.token, b"x") for job in jobs]
    return lambda tx: lease.end(tx, endings)


@pytest.mark.parametrize("rows", [6, 400])
@pytest.mark.parametrize("how", ["batch", "lane"])
@pytest.mark.parametrize("verb", VERBS)
async def test_jobs_are_locked_in_the_order_of_their_ids(db, database_url, verb, how, rows):
    """The first is held by another session: whoever waits for it must not have the others yet."""
    ids = sorted(new_id() for _ in range(rows))
    async with db.begin() as tx:
        # They lie in the table the other way round, so that reading it from its beginning is the wrong order.
        made = [await a_job(tx, "processing", id=job_id) for job_id in reversed(ids)]
    chosen = made[-6:]
    own = db.own(**OPTIONS)
    with psycopg.connect(database_url, autocommit=True) as looker, psycopg.connect(database_url) as holder:
        looker.execute("ANALYZE jobs")
        holder.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", [ids[0]])
        work = db.again(act(verb, chosen)) if how == "batch" else own.run(act(verb, chosen))
        task = asyncio.create_task(work)
        await wait_until(lambda: asyncio.to_thread(lambda: looker.execute(WAITS).fetchall()), 5, every=0)
        free = looker.execute("SELECT id FROM jobs WHERE id = ANY(%s) FOR UPDATE SKIP LOCKED", [ids]).fetchall()
        holder.rollback()
        await asyncio.gather(task, return_exceptions=True)
    await own.aclose()
    assert sorted(job_id for (job_id,) in free) == ids[1:]


MEET = """
CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- Before its second job a batch looks for some moments whether another one has its first one in, too.
    IF NEW.payload::text = '1' THEN
        PERFORM pg_advisory_xact_lock_shared(7);
    ELSE
        FOR n IN 1..60 LOOP
            EXIT WHEN (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND granted) >= 2;
            PERFORM pg_sleep(0.005);
        END LOOP;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER meet BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION meet();
"""


async def test_batches_with_the_same_business_keys_do_not_take_them_crosswise(db, database_url, caplog):
    """Whatever other keys they have: an idempotency key of its own for each job is what producers should give."""
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(MEET)

    def batch(name, *unique_keys):
        return [
            NewJob("q", str(n), unique_key=key, idempotency_key=f"{name}{n}", content_sha256=name.encode())
            for n, key in enumerate(unique_keys, 1)
        ]

    both = [batch("a", "x", "y"), batch("b", "y", "x")]
    answers = await asyncio.gather(*(db.again(lambda tx, jobs=jobs: intake.enqueue(tx, jobs)) for jobs in both))
    ids = [{row["unique_key"]: row["id"] for row in rows} for rows in answers]
    assert ids[0] == ids[1]
    # Nor did a deadlock or a wait for a lock have to be tried again.
    assert [record.getMessage() for record in caplog.records if record.name == "fencepost.db"] == []
