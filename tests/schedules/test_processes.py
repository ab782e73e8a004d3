"""Real processes on one database: several instances at once, kill -9, and a run in which edits are made (B32, B40)."""

import asyncio
import re
import time

import httpx2
import psycopg
import pytest

from tests.harness import wait_for, wait_until
from tests.schedules.checker import Up, check
from tests.schedules.processes import book, make_overdue, plans_made, wait_for_passes

QUICK = {"every_seconds": 1, "queue": "q", "overlap": "allow", "startup_grace_seconds": 1}


def query(url, statement, *params):
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement, params)
        return cursor.fetchall() if cursor.description else []


def put(service, name, body):
    answer = httpx2.put(f"{service.url}/v1/schedules/{name}", json=body)
    assert answer.status_code in (200, 201), answer.text


def no_doubles(url):
    [[fired, distinct]] = query(url, "SELECT count(*), count(DISTINCT (schedule, slot_at)) FROM jobs")
    assert fired == distinct
    return fired


@pytest.mark.slow
def test_b32_three_instances_fire_each_slot_once_and_the_losers_are_silent(serve, database_url):
    services = [serve(ready=False) for _ in range(3)]
    for service in services:
        service.wait_ready()
    for number in range(20):
        put(services[number % 3], f"s{number}", QUICK)
    began = time.monotonic()
    wait_for(lambda: query(database_url, "SELECT count(*) FROM jobs")[0][0] >= 160, 30)
    lasted = time.monotonic() - began
    fired = no_doubles(database_url)
    assert fired <= 20 * (lasted + 2)
    [[collapsed]] = query(database_url, "SELECT count(*) FROM schedule_slots WHERE outcome <> 'fired'")
    assert collapsed == 0
    for service in services:
        assert '"level": "error"' not in service.log()
        assert '"level": "warning"' not in service.log()


@pytest.mark.slow
@pytest.mark.parametrize("outage", [True, False])
def test_b32_instances_that_start_at_once_with_overdue_schedules(serve, database_url, outage):
    """After an outage each slot gets one grace, whoever gives it; beside a live one it is fired at once."""
    first = serve()
    for number in range(20):
        put(first, f"s{number}", {"every_seconds": 3600, "queue": "q"})
    first.kill()
    make_overdue(database_url, outage=outage)
    services = [serve(ready=False) for _ in range(3)]
    for service in services:
        service.wait_ready()
    times = "SELECT name, grace_for, next_run_at FROM schedules WHERE task IS NULL AND grace_for IS NOT NULL ORDER BY 1"
    if outage:
        graced = wait_for(lambda: len(found := query(database_url, times)) == 20 and found)
        wait_for_passes(database_url, 4)
        assert query(database_url, times) == graced
        assert query(database_url, "SELECT count(*) FROM jobs") == [(0,)]
        query(database_url, "UPDATE schedules SET next_run_at = now() WHERE task IS NULL")  # the grace is over
    wait_for(lambda: query(database_url, "SELECT count(*) FROM jobs")[0][0] >= 20, 30)
    wait_for_passes(database_url, 4)
    assert no_doubles(database_url) == 20
    ledger = "SELECT count(*), count(DISTINCT schedule), sum(count), min(outcome), max(outcome) FROM schedule_slots"
    assert query(database_url, f"{ledger} WHERE task IS NULL") == [(20, 20, 20, "fired", "fired")]
    logs = "".join(service.log() for service in services)
    assert sum(map(int, re.findall(r"adopt: (\d+),", logs))) == (20 if outage else 0)
    assert '"level": "error"' not in logs


async def test_the_judge_of_long_runs_reckons_the_grid_itself(client, database_url):
    """A service that moves anchor and time at each start must not look as if nothing had been due."""
    await client.put("/v1/schedules/s", json={"every_seconds": 20, "queue": "q"})
    [plan] = plans_made(database_url)
    [[anchor]] = query(database_url, "SELECT extract(epoch FROM anchor_at)::float8 FROM schedules WHERE name = 's'")
    assert plan.first == pytest.approx(anchor, abs=1e-4)
    moved = "now() + interval '1 day'"
    query(database_url, f"UPDATE schedules SET anchor_at = {moved}, next_run_at = {moved} WHERE name = 's'")
    seen = book(database_url, [plan], [Up(plan.since, plan.since, plan.since + 90, plan.since + 90)], [])
    seen.until = plan.since + 90
    assert any("had not run" in text for text in check(seen)[1])


@pytest.mark.slow
def test_kill_9_and_restarts_neither_starve_nor_double(serve, database_url):
    """Up about two seconds, down at once, half of the ends by kill -9; schedules of every second and of every five."""
    service = serve()
    put(service, "each", QUICK)
    put(service, "five", {**QUICK, "every_seconds": 5})
    for number in range(5):
        had = query(database_url, "SELECT count(*) FROM jobs")[0][0]
        wait_for(lambda had=had: query(database_url, "SELECT count(*) FROM jobs")[0][0] > had + 1, 20)
        if number % 2:
            service.kill()
        else:
            service.stop()
        service = serve()
    no_doubles(database_url)
    gaps = query(
        database_url,
        "SELECT schedule, max(extract(epoch FROM gap)) FROM (SELECT schedule, created_at - lag(created_at) OVER "
        "(PARTITION BY schedule ORDER BY created_at) AS gap FROM jobs) g GROUP BY schedule",
    )
    assert {name for name, _ in gaps} == {"each", "five"}
    assert max(float(gap) for _, gap in gaps) < 5 + 15, "its period and one down time, on a busy machine"
    [[covered, planned]] = query(
        database_url,
        "SELECT sum(count), round(extract(epoch FROM max(slot_at) - min(first_slot_at))) + 1 FROM schedule_slots "
        "WHERE schedule = 'each' AND NOT manual",
    )
    assert covered == planned, "each slot of the grid is in the ledger, fired or collapsed"


async def test_b40_edits_while_a_task_is_held_by_a_lock(client_for, database_url):
    async with client_for(loops=True, schedule_interval_seconds=0.1, prune_interval_seconds=3600.0) as client:
        with psycopg.connect(database_url) as blocker:
            await client.put("/v1/schedules/gone", json={"every_seconds": 3600, "task": "prune"})

            async def pruned_once():
                return blocker.execute("SELECT last_pass_at FROM loops WHERE name = 'prune'").fetchone()[0]

            await wait_until(pruned_once)
            blocker.commit()
            blocker.execute("LOCK TABLE claim_requests IN ACCESS EXCLUSIVE MODE")
            assert (await client.post("/v1/schedules/fencepost-prune/fire")).status_code == 202
            assert (await client.post("/v1/schedules/gone/fire")).status_code == 202

            def held():
                return (
                    len(
                        query(
                            database_url,
                            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND "
                            "datname = current_database()",
                        )
                    )
                    >= 1
                )

            await wait_until(lambda: asyncio.to_thread(held))
            edit = {"cron": "0 3 * * *", "task": "prune", "enabled": False}
            edited = await client.put("/v1/schedules/fencepost-prune", json=edit)
            assert edited.status_code == 200
            assert (await client.delete("/v1/schedules/gone")).status_code == 204
            blocker.rollback()
        for name in ("fencepost-prune", "gone"):

            async def ended(name=name):
                return (await client.get(f"/v1/schedules/{name}/slots")).json()["slots"][0]["ended_at"]

            await wait_until(ended)
        after = (await client.get("/v1/schedules/fencepost-prune")).json()
        assert (after["enabled"], after["cron"], after["every_seconds"]) == (False, "0 3 * * *", None)
        assert (await client.get("/v1/schedules/gone")).status_code == 404


async def test_pause_stops_firing_within_one_tick(client_for):
    async with client_for(loops=True) as client:
        await client.put("/v1/schedules/s", json=QUICK)

        async def fired():
            return (await client.get("/v1/schedules/s/slots")).json()["slots"]

        await wait_until(fired)
        paused_at = (await client.post("/v1/schedules/s/pause")).json()["paused_since"]
        await asyncio.sleep(2.1)  # there is no fact to wait for: that nothing happens
        slots = (await client.get("/v1/schedules/s/slots")).json()["slots"]
        assert all(slot["fired_at"] <= paused_at for slot in slots)
