"""Reclaim: where jobs go, one grace an outage, the storm brake, and a row that cannot be moved."""

import asyncio

import pytest

from app.db import Database
from app.errors import LeaseLost, Unavailable
from app.jobs import epoch, lease, reclaim
from app.jobs.model import Ending
from tests.factories import a_job, read

NO_GRACE = reclaim.Pacing(interval=2.0, grace=0.0)
GRACE = reclaim.Pacing(interval=2.0, grace=30.0)


async def state(db):
    async with db.begin() as tx:
        return await tx.row(
            "SELECT last_pass_at, grace_until, grace_until > fencepost_now() AS in_grace FROM loops "
            "WHERE name = 'reclaim'"
        )


async def pretend_last_pass(db, seconds_ago: float):
    async with db.begin() as tx:
        await tx.run(
            "UPDATE loops SET last_pass_at = fencepost_now() - %(ago)s * interval '1 second' WHERE name = 'reclaim'",
            {"ago": seconds_ago},
        )


async def over_jobs(db, count: int, **given):
    async with db.begin() as tx:
        return [await a_job(tx, "processing", lease_over=True, **given) for _ in range(count)]


async def statuses(db):
    async with db.begin() as tx:
        rows = await tx.rows("SELECT status, count(*)::int AS n FROM jobs GROUP BY status")
    return {row["status"]: row["n"] for row in rows}


async def test_a_full_batch_goes_on_at_once(db):
    await over_jobs(db, 120)
    done = await reclaim.reclaim_pass(db, NO_GRACE)
    assert done.moved == 120
    assert await statuses(db) == {"queued": 120}


async def test_an_unexpired_lease_is_never_touched(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
    assert (await reclaim.reclaim_pass(db, NO_GRACE)).moved == 0
    async with db.begin() as tx:
        assert (await read(tx, job))["attempt_token"] == job.token


async def test_the_history_keeps_the_attempt(db):
    [job] = await over_jobs(db, 1)
    await reclaim.reclaim_pass(db, NO_GRACE)
    async with db.begin() as tx:
        row = await tx.row("SELECT * FROM job_attempts WHERE job_id = %(id)s", {"id": job.id})
    assert (row["outcome"], row["worker_id"], row["fence"], row["number"]) == ("reclaimed", "w", 1, 1)
    assert row["error_message"] == "lease expired before completion"


async def test_a_lease_that_max_run_clamped_says_so(db):
    async with db.begin() as tx:
        job = await a_job(tx, "processing", max_run_seconds=9.0, lease_left=-1)
        other = await a_job(tx, "processing", max_run_seconds=900.0, lease_over=True)
    await reclaim.reclaim_pass(db, NO_GRACE)
    async with db.begin() as tx:
        assert (await read(tx, job))["last_error"] == "max run time exceeded"
        assert (await read(tx, other))["last_error"] == "lease expired before completion"


async def test_passes_at_once_move_each_job_once(db):
    await over_jobs(db, 100)
    done = await asyncio.gather(*(reclaim.reclaim_pass(db, NO_GRACE) for _ in range(4)))
    assert sum(each.moved for each in done) == 100
    async with db.begin() as tx:
        assert await tx.row("SELECT max(reclaim_count) AS most FROM jobs") == {"most": 1}


async def test_a_completion_that_waits_behind_the_reclaim_is_refused_and_the_other_way_round(db):
    [job] = await over_jobs(db, 1)
    async with db.begin() as tx:
        rows = await tx.rows(reclaim.sql.EXPIRED, {"limit": 50})

        async def late():
            async with db.begin() as other:
                return await lease.complete(other, [Ending("complete", job.id, job.token, b"x", result="1")])

        task = asyncio.create_task(late())
        await _until_blocked(db)
        await reclaim._move(tx, rows)
    [answer] = await task
    assert isinstance(answer, LeaseLost)
    assert answer.facts["ended_by"] == "reclaimed"


async def test_a_reclaim_that_read_an_older_token_moves_nothing(db):
    [job] = await over_jobs(db, 1)
    async with db.begin() as tx:
        moved = await reclaim._move(tx, [{"id": job.id, "attempt_token": job.id}])
        assert moved == 0
        assert (await read(tx, job))["status"] == "processing"


async def _until_blocked(db):
    while True:
        async with db.begin() as tx:
            row = await tx.row(
                "SELECT count(*)::int AS n FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND datname = current_database()"
            )
        if row["n"]:
            return
        await asyncio.sleep(0.01)


# --- the outage grace ------------------------------------------------------------------------------------------------


async def test_one_grace_an_outage(db):
    await over_jobs(db, 1)
    await pretend_last_pass(db, 60)
    assert (await reclaim.reclaim_pass(db, GRACE)).moved == 0
    first = await state(db)
    assert first["in_grace"]
    # A crash loop cannot renew it: later restarts within the grace find it set.
    await pretend_last_pass(db, 60)
    assert (await reclaim.reclaim_pass(db, GRACE)).moved == 0
    assert (await state(db))["grace_until"] == first["grace_until"]
    # Once it is past the next pass reclaims, also after another outage in between, and clears it.
    async with db.begin() as tx:
        await tx.run("UPDATE loops SET grace_until = fencepost_now() - interval '1 second' WHERE name = 'reclaim'")
    await pretend_last_pass(db, 60)
    assert (await reclaim.reclaim_pass(db, GRACE)).moved == 1
    assert (await state(db))["grace_until"] is None


async def test_no_grace_beside_a_live_instance_or_without_processing_jobs_or_at_the_first_start(db):
    await over_jobs(db, 1)
    assert (await reclaim.reclaim_pass(db, GRACE)).moved == 1, "a fresh database has had no outage"
    await over_jobs(db, 1)
    await pretend_last_pass(db, 4)
    assert (await reclaim.reclaim_pass(db, GRACE)).moved == 1
    await pretend_last_pass(db, 60)
    assert (await reclaim.reclaim_pass(db, GRACE)).moved == 0
    assert (await state(db))["grace_until"] is None


async def test_passes_go_on_during_the_grace(db):
    await over_jobs(db, 1)
    await pretend_last_pass(db, 60)
    before = (await state(db))["last_pass_at"]
    await reclaim.reclaim_pass(db, GRACE)
    assert (await state(db))["last_pass_at"] > before


# --- the storm brake -------------------------------------------------------------------------------------------------


async def braked_queue(db, burst: int):
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name, reclaim_burst) VALUES ('q', %(burst)s)", {"burst": burst})


async def test_the_brake_holds_the_queue_and_no_other(db):
    await braked_queue(db, 5)
    await over_jobs(db, 20)
    await over_jobs(db, 60, queue="other")
    await over_jobs(db, 2, cancel_requested=True)
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert await statuses(db) == {"queued": 65, "processing": 15, "cancelled": 2}
    async with db.begin() as tx:
        row = await tx.row("SELECT hold_until > fencepost_now() AS held, burst_count FROM queues WHERE name = 'q'")
    assert row == {"held": True, "burst_count": 5}
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert (await statuses(db))["processing"] == 15


async def test_n_instances_do_not_allow_n_bursts(db):
    await braked_queue(db, 7)
    await over_jobs(db, 200)
    await asyncio.gather(*(reclaim.reclaim_pass(db, NO_GRACE) for _ in range(4)))
    assert await statuses(db) == {"queued": 7, "processing": 193}


async def test_a_hold_ends_by_itself_and_by_an_operator(db):
    from app.queues import ops

    await braked_queue(db, 5)
    await over_jobs(db, 20)
    await reclaim.reclaim_pass(db, NO_GRACE)
    async with db.begin() as tx:
        await ops.release_hold(tx, "q", actor="op", reason="looked at it")
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert (await statuses(db))["processing"] == 10
    async with db.begin() as tx:
        await tx.run(
            "UPDATE queues SET hold_until = fencepost_now() - interval '1 second', "
            "burst_started_at = fencepost_now() - interval '2 minutes'"
        )
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert (await statuses(db))["processing"] == 5


async def test_a_held_queue_never_fills_the_batch(db):
    await braked_queue(db, 1)
    await over_jobs(db, 150)
    await reclaim.reclaim_pass(db, NO_GRACE)
    await over_jobs(db, 3, queue="other", lease_left=-0.5)
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert (await statuses(db))["queued"] == 4


# --- rows that cannot be moved ---------------------------------------------------------------------------------------

POISON = """
CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN IF new.queue = 'poisoned' THEN RAISE EXCEPTION 'no'; END IF; RETURN new; END $$;
CREATE TRIGGER poison BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION poison()
"""


async def test_a_poisoned_row_sets_itself_aside_and_comes_back(db):
    [bad] = await over_jobs(db, 1, queue="poisoned", lease_left=-9)
    await over_jobs(db, 60)
    async with db.begin() as tx:
        await tx.run(POISON)
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert await statuses(db) == {"queued": 60, "processing": 1}
    async with db.begin() as tx:
        aside = await tx.rows("SELECT job_id, tries, error FROM reclaim_set_aside")
    assert [(row["job_id"], row["tries"]) for row in aside] == [(bad.id, 1)]
    assert "no" in aside[0]["error"]
    # Tried alone, with a back-off of at most 30 s.
    for _ in range(8):
        async with db.begin() as tx:
            await tx.run("UPDATE reclaim_set_aside SET next_try_at = fencepost_now()")
        await reclaim.reclaim_pass(db, NO_GRACE)
    async with db.begin() as tx:
        row = await tx.row(
            "SELECT tries, extract(epoch FROM next_try_at - fencepost_now())::float8 AS wait FROM reclaim_set_aside"
        )
    assert row["tries"] == 9
    assert 29 < row["wait"] <= 30
    async with db.begin() as tx:
        await tx.run("DROP TRIGGER poison ON jobs")
        await tx.run("UPDATE reclaim_set_aside SET next_try_at = fencepost_now()")
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert await statuses(db) == {"queued": 61}
    async with db.begin() as tx:
        assert await tx.rows("SELECT * FROM reclaim_set_aside") == []


async def test_a_revoked_right_sets_nothing_aside_and_says_so(db, database_url):
    import psycopg

    await over_jobs(db, 3)
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("ALTER TABLE job_attempts RENAME TO job_attempts_gone")
        with pytest.raises(Unavailable):
            await reclaim.reclaim_pass(db, NO_GRACE)
        admin.execute("ALTER TABLE job_attempts_gone RENAME TO job_attempts")
    assert (await reclaim.reclaim_pass(db, NO_GRACE)).moved == 3
    async with db.begin() as tx:
        assert await tx.rows("SELECT * FROM reclaim_set_aside") == []


async def test_a_row_locked_by_somebody_is_passed_over(db, database_url):
    import psycopg

    [locked] = await over_jobs(db, 1, lease_left=-9)
    await over_jobs(db, 2)
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", (locked.id,))
        assert (await reclaim.reclaim_pass(db, NO_GRACE)).moved == 2
    assert (await reclaim.reclaim_pass(db, NO_GRACE)).moved == 1


async def test_the_epoch_bump_after_a_restore_takes_every_job_back(db):
    async with db.begin() as tx:
        jobs = [await a_job(tx, "processing") for _ in range(3)]
    assert await epoch.bump(db, restored=True) == (1, 3)
    async with db.begin() as tx:
        [answer] = await lease.complete(tx, [Ending("complete", jobs[0].id, jobs[0].token, b"x")])
    assert isinstance(answer, LeaseLost)


SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN IF new.queue = 'slow' THEN PERFORM pg_sleep(60); END IF; RETURN new; END $$;
CREATE TRIGGER slow BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION slow()
"""


async def test_a_row_whose_move_takes_too_long_is_set_aside_too(database_url):
    db = Database(database_url, statement_timeout=0.5)
    await db.open()
    try:
        await over_jobs(db, 1, queue="slow", lease_left=-9)
        await over_jobs(db, 4)
        async with db.begin() as tx:
            await tx.run(SLOW)
        await reclaim.reclaim_pass(db, NO_GRACE)
        assert await statuses(db) == {"queued": 4, "processing": 1}
        async with db.begin() as tx:
            assert len(await tx.rows("SELECT * FROM reclaim_set_aside")) == 1
    finally:
        await db.close()


async def test_a_row_set_aside_does_not_pass_a_hold(db):
    await braked_queue(db, 1)
    [job] = await over_jobs(db, 1)
    async with db.begin() as tx:
        await tx.run(reclaim.sql.SET_ASIDE, {"id": job.id, "error": "e"})
        await tx.run("UPDATE reclaim_set_aside SET next_try_at = fencepost_now()")
        await tx.run(reclaim.sql.HOLD, {"name": "q"})
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert await statuses(db) == {"processing": 1}


async def test_an_instance_that_waited_for_another_sees_the_grace_it_gave(db):
    await over_jobs(db, 1)
    await pretend_last_pass(db, 60)
    async with db.begin() as tx:
        assert await reclaim._in_grace(tx, GRACE)

        async def second():
            async with db.begin() as other:
                return await reclaim._in_grace(other, GRACE)

        task = asyncio.create_task(second())
        await _until_blocked(db)
    assert await task


async def test_a_restore_leaves_no_locked_job_behind_unsaid(db, database_url):
    import psycopg

    async with db.begin() as tx:
        locked = await a_job(tx, "processing")
        await a_job(tx, "processing")
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", (locked.id,))
        with pytest.raises(Unavailable):
            await reclaim.take_back_all(db)
    await reclaim.take_back_all(db)
    async with db.begin() as tx:
        row = await read(tx, locked)
    assert (row["status"], row["last_error"]) == ("queued", "taken back after a restore of the database")


async def test_rows_set_aside_count_in_the_burst(db):
    await braked_queue(db, 1)
    jobs = await over_jobs(db, 3)
    async with db.begin() as tx:
        for job in jobs:
            await tx.run(reclaim.sql.SET_ASIDE, {"id": job.id, "error": "e"})
        await tx.run("UPDATE reclaim_set_aside SET next_try_at = fencepost_now()")
    await reclaim.reclaim_pass(db, NO_GRACE)
    assert await statuses(db) == {"queued": 1, "processing": 2}
