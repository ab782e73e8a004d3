"""What is deleted, and what never is."""

from app.jobs.prune import prune_pass
from tests.factories import a_job

DAY = 86_400


async def left(db):
    async with db.begin() as tx:
        return {row["id"] for row in await tx.rows("SELECT id FROM jobs")}


async def prune(db):
    return (await prune_pass(db, retention=7 * DAY, failed_retention=30 * DAY)).moved


async def test_retention_by_status_and_queue(db):
    async with db.begin() as tx:
        await tx.run(
            "INSERT INTO queues (name, retention_seconds, failed_retention_seconds, paused, hold_since, hold_until) "
            "VALUES ('q', NULL, NULL, false, NULL, NULL), "
            "('short', 60, 60, true, fencepost_now(), fencepost_now() + interval '1 day')"
        )
        gone = [
            await a_job(tx, "done", finished_ago=8 * DAY),
            await a_job(tx, "failed", finished_ago=31 * DAY),
            await a_job(tx, "cancelled", finished_ago=31 * DAY),
            await a_job(tx, "done", queue="short", finished_ago=61),
            await a_job(tx, "failed", queue="short", finished_ago=61),
            await a_job(tx, "done", finished_ago=8 * DAY, created_ago=9 * DAY, idempotency_key="old"),
        ]
        kept = [
            await a_job(tx, "done", finished_ago=6 * DAY),
            await a_job(tx, "failed", finished_ago=29 * DAY),
            await a_job(tx, "done", queue="short", finished_ago=30),
            await a_job(tx, "done", queue="short", finished_ago=61, created_ago=100, idempotency_key="young"),
            await a_job(tx, "manual_review", created_ago=999 * DAY),
            await a_job(tx, "queued", created_ago=999 * DAY),
            await a_job(tx, "processing", lease_over=True, created_ago=999 * DAY),
        ]
    assert await prune(db) == len(gone)
    assert await left(db) == {job.id for job in kept}


async def test_history_and_late_results_go_with_the_job_and_not_before(db):
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name) VALUES ('q')")
        young, old = await a_job(tx, "done"), await a_job(tx, "done", finished_ago=8 * DAY)
        for job in (young, old):
            await tx.run(
                "INSERT INTO job_attempts (job_id, fence, number, worker_id, claimed_at, ended_at, outcome, "
                "token_sha256, status_after) VALUES (%(id)s, 1, 1, 'w', fencepost_now() - interval '99 days', "
                "fencepost_now() - interval '99 days', 'failed', '', 'queued')",
                {"id": job.id},
            )
    await prune(db)
    async with db.begin() as tx:
        assert [row["job_id"] for row in await tx.rows("SELECT job_id FROM job_attempts")] == [young.id]


async def test_more_than_a_batch(db):
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name) VALUES ('q')")
        await a_job(tx, "done", finished_ago=8 * DAY)
        await tx.run(
            "INSERT INTO jobs (id, queue, kind, payload, status, max_attempts, max_reclaims, available_at, finished_at)"
            " SELECT gen_random_uuid(), 'q', 'k', '1', 'done', 1, 1, fencepost_now(), "
            "fencepost_now() - interval '8 days' FROM generate_series(1, 2500)"
        )
    assert await prune(db) == 2501


async def test_finished_jobs_of_a_deleted_queue_are_pruned_as_well(db):
    async with db.begin() as tx:
        await tx.run("INSERT INTO queues (name) VALUES ('b')")
        for queue in ("a", "b", "c"):
            await a_job(tx, "done", queue=queue, finished_ago=8 * DAY)
    assert await prune(db) == 3
