"""The rules of the article, and what the specification adds: is it called at all, once, and at the right time?"""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from app.errors import Unavailable
from app.schedules import ops
from app.schedules import tick as tick_module
from app.schedules.tasks import Runs, Task
from app.schedules.tick import Ticker
from tests.factories import a_job
from tests.harness import wait_for, wait_until
from tests.schedules.clock import START, Clock, change, definition, jobs, ledger, put, read, rows, started, ticker

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


# --- the article -----------------------------------------------------------------------------------------------------


async def test_a_restart_keeps_a_future_time(db, clock):
    """読み: 未来の時刻がある → その時刻で予約する."""
    await put(db, every_seconds=86400)
    first = (await read(db))["next_run_at"]
    for _ in range(10):
        await started(db).tick()  # another process each time
        clock.pass_(5)
    assert (await read(db))["next_run_at"] == first == START + seconds(60)


async def test_restarts_during_the_grace_keep_the_time_first_set(db, clock):
    await put(db, cron="0 12 * * *")
    await started(db).tick()
    clock.pass_(86400 + 600)  # away over the slot of the next day
    await started(db).tick()
    graced = await read(db)
    assert graced["grace_for"] == START + DAY
    assert graced["next_run_at"] == clock.now + seconds(60), "stored before waiting"
    for _ in range(5):
        clock.pass_(11)  # each longer than an outage needs to be
        await started(db).tick()
        assert (await read(db))["next_run_at"] == graced["next_run_at"]
    clock.pass_(6)
    await started(db).tick()
    assert await jobs(db) == [START + DAY]
    assert (await read(db))["grace_for"] is None


async def test_a_slot_gets_one_grace_though_restarts_last_longer_than_it(db, clock):
    await put(db, cron="0 12 * * *")
    await started(db).tick()
    clock.pass_(86400 + 600)
    await started(db).tick()
    clock.pass_(120)  # away again, over the end of the grace
    await started(db).tick()
    assert await jobs(db) == [START + DAY]


@pytest.mark.parametrize(("up", "down"), [(50, 20), (55, 6), (6, 1)])
async def test_no_loop_of_restarts_starves_a_schedule(db, clock, up, down):
    """No schedule waits longer than its period, one grace and one down time."""
    await put(db, "long", every_seconds=1200)
    await put(db, "short", every_seconds=90)
    fired: dict[str, list[datetime]] = {"long": [clock.now], "short": [clock.now]}
    step = 5 if up > 10 else 3
    seen: set[tuple[str, datetime]] = set()
    while clock.now < START + 2 * HOUR:
        one = started(db)
        for _ in range(up // step):
            await one.tick()
            clock.pass_(step)
        clock.pass_(down)
        for row in await rows(db, "SELECT schedule, slot_at FROM jobs"):
            if (row["schedule"], row["slot_at"]) not in seen:
                seen.add((row["schedule"], row["slot_at"]))
                fired[row["schedule"]].append(clock.now)
    for name, period in (("long", 1200), ("short", 90)):
        gaps = [b - a for a, b in zip(fired[name], fired[name][1:], strict=False)]
        assert len(gaps) >= 3
        assert max(gaps) <= seconds(period + 60 + down + up + step)  # seen at the end of an up time


async def test_nothing_is_adopted_beside_a_live_instance(db, clock):
    await put(db, cron="0 12 * * *")
    await started(db).tick()
    clock.set(START + DAY - seconds(1))
    await started(db).tick()  # the live one
    clock.pass_(3)
    await started(db).tick()  # one that starts beside it
    assert await jobs(db) == [START + DAY]
    assert await ledger(db) == [("fired", START + DAY, 1)]


async def test_a_live_instance_that_cannot_tell_of_its_passes_gives_no_grace(db, clock, database_url):
    """Somebody else may hold the row that tells of passes, as one who was frozen in it did."""
    await put(db, every_seconds=60)
    one = started(db)
    await one.tick()
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM loops WHERE name = 'schedule' FOR UPDATE")
        for minute in (1, 2):
            clock.set(START + seconds(60 * minute))
            done = await one.tick()
            assert (done.moved, done.at) == (1, clock.now)
    assert await jobs(db) == [START + seconds(60), START + seconds(120)]


async def test_an_instance_that_is_frozen_while_it_tells_of_its_pass_holds_no_lock(db, database_url):
    """Without BEGIN and COMMIT there is nothing in between: the statement ends by itself."""
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(0.5); RETURN new; END $$"
        )
        admin.execute("CREATE TRIGGER slowly BEFORE UPDATE ON loops FOR EACH ROW EXECUTE FUNCTION slowly()")
        asleep = "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"

        async def telling():
            return bool(admin.execute(asleep).fetchall())

        pass_ = asyncio.create_task(started(db).tick())
        await wait_until(telling)
        # The process is frozen from here: nothing in it goes on while this waits without an await.
        wait_for(lambda: not admin.execute(asleep).fetchall())
        admin.execute("SELECT FROM loops WHERE name = 'schedule' FOR UPDATE NOWAIT")
        await pass_


async def test_the_time_is_advanced_before_the_body(db, clock):
    """期限はジョブ本体より先に進める."""
    seen = []

    async def body():
        seen.append((await read(db))["next_run_at"])

    one = ticker(db, {"prune": Task(body)})
    await put(db, task="prune", every_seconds=60)
    clock.pass_(60)
    await one.tick()
    await one.runs.idle()
    assert seen == [START + seconds(120)]


async def test_lateness_is_not_replayed_but_jumps_to_the_future_of_the_original_grid(db, clock):
    await put(db, every_seconds=60)
    clock.pass_(60 + 10 * 60 + 17)
    await ticker(db).tick()
    assert await jobs(db) == [START + seconds(660)], "one run, of the latest slot"
    assert await ledger(db) == [("collapsed", START + seconds(600), 10), ("fired", START + seconds(660), 1)]
    assert (await read(db))["next_run_at"] == START + seconds(720)


async def test_unreadable_state_does_not_stop_the_start_and_own_tasks_run(db, clock, database_url, monkeypatch):
    monkeypatch.setattr(tick_module, "FROM_CODE_GRACE", 0.0)
    called = []

    async def body():
        called.append(1)

    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("ALTER TABLE schedules RENAME TO schedules_gone")
        one = ticker(db, {"prune": Task(body)})
        for _ in range(3):
            with pytest.raises((psycopg.Error, Unavailable)):
                await one.tick()
            await one.runs.idle()
        assert called == [1], "at most once a period"
        admin.execute("ALTER TABLE schedules_gone RENAME TO schedules")
    await put(db, every_seconds=60)
    clock.pass_(60)
    await one.tick()
    assert len(await jobs(db)) == 1


REFUSES = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF old.name = 'bad' AND new.next_run_at IS DISTINCT FROM old.next_run_at THEN {how} END IF; RETURN new; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON schedules FOR EACH ROW EXECUTE FUNCTION refuse()
"""


@pytest.mark.parametrize("how", ["RAISE EXCEPTION 'no';", "RETURN NULL;"])
async def test_a_refused_advance_still_runs_the_body_each_period_and_never_twice(db, clock, database_url, how):
    """記録の更新に失敗しても処理本体が実行されること."""
    await put(db, "bad", every_seconds=60)
    await put(db, "good", every_seconds=60)
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(REFUSES.format(how=how))
        one, other = ticker(db), ticker(db)
        for at in (60, 61, 119, 120, 121, 180, 190):
            clock.set(START + seconds(at))
            for aside in (*one._aside.values(), *other._aside.values()):
                aside.next_try = 0.0
            await one.tick()
            await other.tick()
        expected = [START + seconds(60 * n) for n in (1, 2, 3)]
        assert await jobs(db, "bad") == expected
        assert await jobs(db, "good") == expected
        assert "cannot be advanced" in (await read(db, "bad"))["error"]
        admin.execute("DROP TRIGGER refuse ON schedules")
    clock.set(START + seconds(240))
    await ticker(db).tick()
    assert (await read(db, "bad"))["error"] is None
    assert await jobs(db, "bad") == [*expected, START + seconds(240)]


async def test_without_the_right_to_update_schedules_each_slot_still_fires_once(db, clock, database_url):
    """A right revoked by mistake, on the whole table."""
    from app.db import Database

    await put(db, every_seconds=60)
    await put(db, "other", every_seconds=60)
    role = f"limited_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN")
        admin.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        admin.execute(f"REVOKE UPDATE ON schedules FROM {role}")
        limited = Database(psycopg.conninfo.make_conninfo(database_url, user=role), pool_size=2)
        await limited.open()
        try:
            together = Clock(db, limited)
            one = started(limited)
            for at in (60, 61, 120, 121, 180):
                together.set(START + seconds(at))
                for aside in one._aside.values():
                    aside.next_try = 0.0
                await one.tick()
            for name in ("s", "other"):
                assert await jobs(db, name) == [START + seconds(60 * n) for n in (1, 2, 3)]
        finally:
            await limited.close()
            admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("overlap", ["skip", "allow"])
async def test_the_ledger_stays_true_while_an_advance_is_refused_and_after(db, clock, database_url, overlap):
    """Counted from what the ledger has, not from the time that is stuck."""
    await put(db, "bad", every_seconds=60, overlap=overlap)
    clock.pass_(60)
    one = ticker(db)
    await one.tick()
    clock.pass_(60)
    await one.tick()
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(REFUSES.format(how="RAISE EXCEPTION 'no';"))
        for minute in (3, 4, 4.5, 7, 8):  # two of them while nobody looked
            clock.set(START + seconds(60 * minute))
            for aside in one._aside.values():
                aside.next_try = 0.0
            await one.tick()
        before = await read(db, "bad")
        admin.execute("DROP TRIGGER refuse ON schedules")
    clock.pass_(1)
    await ticker(db).tick()
    healed = await read(db, "bad")
    assert (healed["next_run_at"], healed["error"]) == (START + seconds(540), None)
    assert healed["last_fired_at"] == before["last_fired_at"], "that pass fired nothing"
    clock.set(START + seconds(540))
    await ticker(db).tick()
    counts: dict[str, int] = {}
    for outcome, _, count in await ledger(db, "bad"):
        counts[outcome] = counts.get(outcome, 0) + count
    if overlap == "skip":
        assert counts == {"fired": 1, "skipped_overlap": 8}
    else:
        assert counts == {"fired": 7, "collapsed": 2}
        assert (await read(db, "bad"))["worst_lateness_seconds"] == 0.0


async def test_a_task_whose_slot_cannot_be_written_runs_once_a_period_and_process(db, clock, database_url):
    called = []

    async def body():
        called.append(1)

    one = ticker(db, {"prune": Task(body)})
    await put(db, task="prune", every_seconds=3600)
    clock.pass_(60)
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("ALTER TABLE schedule_slots ADD CONSTRAINT no CHECK (schedule <> 's')")
        for _ in range(3):
            await one.tick()
            await one.runs.idle()
        assert called == [1], "at most once a period"
        assert "cannot be fired" in (await read(db))["error"]
        # The next tries come from the rows set aside; a shorter period makes the next run due.
        one.runs._unrecorded["prune"] -= 3601
        for aside in one._aside.values():
            aside.next_try = 0.0
        await one.tick()
        await one.runs.idle()
    assert called == [1, 1], "and again in the next"


# --- races -----------------------------------------------------------------------------------------------------------


async def test_tickers_at_once_fire_each_slot_once_and_none_complains(db, clock, database_url):
    from app.db import Database

    others = [Database(database_url, pool_size=2, statement_timeout=10.0) for _ in range(3)]
    for other in others:
        await other.open()
    together = Clock(db, *others)
    try:
        for number in range(40):
            await put(db, f"s{number}", every_seconds=60)
        for _ in range(8):
            together.pass_(60)
            passes = await asyncio.gather(*(ticker(each).tick() for each in (db, *others)))
            assert sum(each.moved for each in passes) == 40
    finally:
        for other in others:
            await other.close()
    found = await rows(db, "SELECT count(*)::int AS n, count(DISTINCT (schedule, slot_at))::int AS d FROM jobs")
    assert found == [{"n": 320, "d": 320}]


async def test_an_edit_that_comes_between_read_and_advance_wins(db, clock, caplog):
    await put(db, every_seconds=60)
    clock.pass_(60)
    async with db.begin() as tx:
        locked = await tx.rows(tick_module.sql.LOCK, {"name": "s", "tolerance": 5.0})
        assert len(locked) == 1
        assert (await ticker(db).tick()).moved == 0, "a locked row is passed over"
        assert not caplog.records, "and not waited for"
        await tx.run(
            tick_module.sql.PAUSE, {"name": "s", "actor": "a", "reason": None, "edition": locked[0]["edition"]}
        )
    assert (await ticker(db).tick()).moved == 0
    assert await jobs(db) == []


@pytest.mark.parametrize("blocked", [1, 40])
async def test_firings_that_wait_for_a_lock_delay_the_others_by_a_second_at_most(db, clock, database_url, blocked):
    for number in range(blocked):
        await put(db, f"blocked{number}", queue="locked", every_seconds=60)
    clock.pass_(0.001)  # so that the others come after them
    for number in range(20):
        await put(db, f"free{number}", every_seconds=60)
    clock.pass_(60)
    loop = asyncio.get_running_loop()
    with psycopg.connect(database_url) as other:
        other.execute("INSERT INTO queues (name) VALUES ('locked')")  # not committed: an enqueue there waits
        began = loop.time()
        one = ticker(db)
        moved = (await one.tick()).moved
        assert moved == 20
        assert loop.time() - began < 2.0
        clock.pass_(60)
        for aside in one._aside.values():
            aside.next_try = 0.0
        began = loop.time()
        assert (await one.tick()).moved == 20, "those that wait are not tried together with the others again"
        assert loop.time() - began < 2.0
    assert (await ticker(db).tick()).moved == blocked


SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF {which} THEN PERFORM pg_sleep(20); END IF; RETURN new; END $$;
CREATE TRIGGER slow BEFORE {when} FOR EACH ROW EXECUTE FUNCTION slow()
"""


@pytest.mark.parametrize(
    ("which", "when"),
    [
        ("new.name = 'bad'", "UPDATE ON schedules"),
        ("new.schedule = 'bad'", "INSERT ON jobs"),
        ("new.schedule = 'bad'", "INSERT ON schedule_slots"),
    ],
)
async def test_a_row_that_runs_into_the_time_out_stops_no_other(db, clock, database_url, which, when):
    await put(db, "bad", every_seconds=60)
    for number in range(5):
        await put(db, f"good{number}", every_seconds=60)
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(SLOW.format(which=which, when=when))
        one = ticker(db)
        loop = asyncio.get_running_loop()
        for minute in (1, 2, 3):
            clock.set(START + seconds(60 * minute))
            began = loop.time()
            await one.tick()
            assert loop.time() - began < 6.0
            for number in range(5):
                assert len(await jobs(db, f"good{number}")) == minute
        admin.execute("DROP TRIGGER slow ON " + when.split(" ON ")[1])
    await ticker(db).tick()
    assert START + seconds(180) in await jobs(db, "bad")


# --- what is stored wrongly ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NULL", "'infinity'", "'-infinity'", "'20000-01-01'"])
async def test_a_time_that_cannot_be_is_soon_and_marked(db, clock, value):
    await put(db, cron="0 12 * * *")
    await put(db, "other", every_seconds=60)
    await change(db, f"UPDATE schedules SET next_run_at = {value} WHERE name = 's'")
    assert (await read(db))["overdue"]
    await ticker(db).tick()
    row = await read(db)
    assert row["next_run_at"] == clock.now + seconds(60)
    assert "next_run_at was" in row["error"]
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db)) == 1
    assert len(await jobs(db, "other")) == 1
    row = await read(db)
    assert (row["error"], row["next_run_at"]) == (None, START + DAY)


@pytest.mark.parametrize(
    "damage",
    ["timezone = 'Mars/Olympus'", "cron = 'every day'", "cron = NULL, every_seconds = 0"],
)
async def test_a_broken_schedule_is_marked_and_stops_no_other(db, clock, damage):
    await put(db, cron="* * * * *", timezone="Europe/Berlin")
    await put(db, "other", every_seconds=60)
    await change(db, f"UPDATE schedules SET {damage} WHERE name = 's'")
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db, "other")) == 1
    row = await read(db)
    assert "cannot be read" in row["error"]
    async with db.begin() as tx:
        assert [each["schedule"] for each in (await ops.trouble(tx, tolerance=5.0))["broken"]] == ["s"]
    with pytest.raises(ops.ScheduleBroken):
        ops.preview(row, 3)
    await put(db, every_seconds=60)
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db)) == 1
    assert (await read(db))["error"] is None


@pytest.mark.parametrize("value", ["'infinity'", "'-infinity'", "'20000-01-01'"])
@pytest.mark.parametrize(
    "column", ["last_fired_at", "created_at", "updated_at", "paused_since", "anchor_at", "grace_for"]
)
async def test_an_instant_that_python_cannot_hold_stops_nothing(db, clock, column, value):
    await put(db, every_seconds=60, overlap="skip")
    await put(db, "other", every_seconds=60)
    await change(db, f"UPDATE schedules SET {column} = {value} WHERE name = 's'")
    await read(db)
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db, "other")) == 1
    await change(db, f"UPDATE schedule_slots SET fired_at = {value}, slot_at = {value} WHERE schedule = 's'")
    await change(db, f"UPDATE jobs SET slot_at = {value} WHERE schedule = 's'")
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db, "other")) == 2
    async with db.begin() as tx:
        await ops.page(tx, after="", limit=10, tolerance=5.0)
        await ops.trouble(tx, tolerance=5.0)
        await ops.slots(tx, "s", before=None, limit=10)
        await ops.pause(tx, "s", actor="a", reason=None, tolerance=5.0)
        await ops.resume(tx, "s", actor="a", reason=None, tolerance=5.0)
    await put(db, cron="* * * * *")
    async with db.begin() as tx:
        await ops.delete(tx, "s", if_match=None, actor="a")


async def test_the_same_put_mends_a_row_whose_cadence_cannot_be_read(db, clock):
    await put(db, every_seconds=60)
    await change(db, "UPDATE schedules SET anchor_at = NULL")
    row = await put(db, every_seconds=60)
    assert row["next_run_at"] == row["anchor_at"] == clock.now + seconds(60)


async def test_an_endless_grace_of_a_damaged_row_is_a_day(db, clock):
    await put(db, every_seconds=60)
    await change(db, "UPDATE schedules SET startup_grace_seconds = 'infinity', next_run_at = NULL")
    await ticker(db).tick()
    assert (await read(db))["next_run_at"] == clock.now + DAY


async def test_more_broken_schedules_than_a_batch_holds_stop_no_other(db, clock):
    await change(
        db,
        "INSERT INTO schedules (name, edition, queue, kind, payload, priority, every_seconds, anchor_at, next_run_at, "
        "startup_grace_seconds, overlap, backoff_base_seconds, backoff_cap_seconds, enabled) "
        "SELECT 'broken' || n, gen_random_uuid(), 'q', 'q', 'null', 4, 0, fencepost_now(), fencepost_now(), 60, "
        "'allow', 2, 300, true FROM generate_series(1, 450) n",
    )
    await put(db, every_seconds=60)
    clock.pass_(60)
    async with asyncio.timeout(60):
        await ticker(db).tick()
    assert await jobs(db) == [START + seconds(60)]
    found = await rows(db, "SELECT count(*)::int AS n FROM schedules WHERE error IS NOT NULL")
    assert found == [{"n": 450}]


@pytest.mark.parametrize("cadence", [{"every_seconds": 60}, {"cron": "* * * * *"}])
@pytest.mark.parametrize("value", ["NULL", "'infinity'", "'-infinity'"])
@pytest.mark.parametrize("how", ["RAISE EXCEPTION 'no';", "RETURN NULL;"])
async def test_a_time_that_cannot_be_repaired_fires_each_slot_once(db, clock, database_url, value, how, cadence):
    for name in ("bad", *(f"damaged{n}" for n in range(5)), "good"):
        await put(db, name, **cadence)
    await put(db, "late", every_seconds=86400)
    await change(db, f"UPDATE schedules SET next_run_at = {value} WHERE name ~ '^(bad|damaged)'")
    one = started(db)
    await one.tick()
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(REFUSES.format(how=how))
        await change(db, f"UPDATE schedules SET next_run_at = {value} WHERE name ~ '^damaged'")
        admin.execute(
            f"ALTER TABLE schedules DISABLE TRIGGER USER; UPDATE schedules SET next_run_at = {value} "
            "WHERE name = 'bad'; ALTER TABLE schedules ENABLE TRIGGER USER"
        )
        clock.set(START + seconds(119))  # away for a while, so that graces are given as well
        for at in (119, 120, 121, 179, 180, 181, 240):
            clock.set(START + seconds(at))
            for aside in one._aside.values():
                aside.next_try = 0.0
            await one.tick()
        assert await jobs(db, "bad") == [START + seconds(60 * n) for n in (1, 2, 3, 4)]
        for name in ("good", *(f"damaged{n}" for n in range(5))):
            row = await read(db, name)
            assert not row["overdue"], name
            assert await jobs(db, name), name
        assert [row["slot_at"] for row in await rows(db, "SELECT slot_at FROM jobs WHERE schedule = 'late'")] == [
            START + seconds(60)
        ]
        assert (await read(db, "bad"))["overdue"]
        async with db.begin() as tx:
            found = await ops.trouble(tx, tolerance=5.0)
        assert [each["schedule"] for each in found["overdue"]] == ["bad"]
        gauges = await rows(db, tick_module.sql.GAUGES, limit=500)
        assert [row["name"] for row in gauges if row["late"]] == ["bad"]
    admin.close()


# --- overlap, pause, edit, fire --------------------------------------------------------------------------------------


async def finish(db, **where):
    await change(
        db,
        "UPDATE jobs SET status = 'done', finished_at = fencepost_now(), attempt_token = NULL, reserved_by = NULL, "
        "reserved_at = NULL, lease_expires_at = NULL, lease_granted_seconds = NULL",
    )


async def test_overlap_skip_keeps_one_unfinished_run_and_notes_skips_in_a_row_once(db, clock):
    await put(db, every_seconds=60, overlap="skip")
    for _ in range(4):
        clock.pass_(60)
        await ticker(db).tick()
    assert len(await jobs(db)) == 1
    assert await ledger(db) == [("fired", START + seconds(60), 1), ("skipped_overlap", START + seconds(240), 3)]
    row = await read(db)
    assert row["blocked_by"] is not None
    async with db.begin() as tx:
        assert (await ops.trouble(tx, tolerance=5.0))["blocked"][0]["job_id"] == row["blocked_by"]
    await finish(db)
    assert (await read(db))["blocked_by"] is None
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db)) == 2


@pytest.mark.parametrize(
    ("status", "policy", "blocks"),
    [
        ("queued", "auto", True),
        ("processing", "auto", True),
        ("manual_review", "manual", True),
        ("manual_review", "auto", False),
        ("done", "auto", False),
        ("failed", "auto", False),
        ("cancelled", "auto", False),
    ],
)
async def test_what_counts_as_unfinished(db, clock, status, policy, blocks):
    await put(db, every_seconds=60, overlap="skip")
    async with db.begin() as tx:
        made = await a_job(tx, status, recovery_policy=policy)
        await tx.run("UPDATE jobs SET schedule = 's' WHERE id = %(id)s", {"id": made.id})
    clock.pass_(60)
    await ticker(db).tick()
    assert [row[0] for row in await ledger(db)] == ["skipped_overlap" if blocks else "fired"]


async def test_resume_goes_on_with_the_next_slot_and_notes_the_paused_ones_once(db, clock):
    await put(db, every_seconds=60)
    async with db.begin() as tx:
        await ops.pause(tx, "s", actor="anna", reason="quiet", tolerance=5.0)
    clock.pass_(600)
    await ticker(db).tick()
    row = await read(db)
    assert (row["overdue"], row["grace_for"], row["paused_by"], row["paused_reason"]) == (False, None, "anna", "quiet")
    await put(db, every_seconds=60)  # a deploy
    assert not (await read(db))["enabled"], "a deploy's PUT never wakes what an operator paused"
    clock.pass_(30)
    async with db.begin() as tx:
        row = await ops.resume(tx, "s", actor="anna", reason=None, tolerance=5.0)
    assert row["next_run_at"] == START + seconds(660)
    await ticker(db).tick()
    assert await jobs(db) == []
    assert await ledger(db) == [("skipped_paused", START + seconds(600), 10)]


async def test_what_was_owed_before_a_pause_is_still_owed_after_it(db, clock):
    """A slot in its grace after an outage, and one that was due and not yet fired."""
    await put(db, cron="0 12 * * *")
    await put(db, "quick", every_seconds=60)
    await started(db).tick()
    clock.pass_(86400 + 10)
    await started(db).tick()
    graced = await read(db)
    assert graced["grace_for"] == START + DAY
    await put(db, "late", every_seconds=60)
    clock.pass_(60)  # due, and nobody has looked yet
    for name in ("s", "quick", "late"):
        async with db.begin() as tx:
            await ops.pause(tx, name, actor="a", reason=None, tolerance=5.0)
    clock.pass_(1)
    for name in ("s", "quick", "late"):
        async with db.begin() as tx:
            await ops.resume(tx, name, actor="a", reason=None, tolerance=5.0)
    row = await read(db)
    assert (row["grace_for"], row["next_run_at"]) == (graced["grace_for"], graced["next_run_at"])
    await ticker(db).tick()
    assert await jobs(db) == [START + DAY]
    assert len(await jobs(db, "late")) == len(await jobs(db, "quick")) == 1
    assert "skipped_paused" not in [outcome for outcome, _, _ in await ledger(db)]


async def test_resume_of_one_that_is_not_paused_takes_no_slot_away(db, clock):
    await put(db, every_seconds=60)
    clock.pass_(60)
    async with db.begin() as tx:
        await ops.resume(tx, "s", actor="anna", reason=None, tolerance=5.0)
    await put(db, every_seconds=60, enabled=True)
    await ticker(db).tick()
    assert await ledger(db) == [("fired", START + seconds(60), 1)]


async def test_edits(db, clock):
    made = await put(db, every_seconds=3600)
    clock.pass_(30)
    assert await put(db, every_seconds=3600) | {"now": 0} == made | {"now": 0}, "the same again changes nothing"
    edited = await put(db, every_seconds=3600, payload='{"a": 1}', startup_grace_seconds=5.0, overlap="skip")
    assert edited["next_run_at"] == made["next_run_at"]
    assert edited["edition"] != made["edition"]
    spaced = await put(db, every_seconds=3600, payload='{ "a":1 }', startup_grace_seconds=5.0, overlap="skip")
    assert spaced["edition"] == edited["edition"], "white space is no edit"
    quicker = await put(db, every_seconds=20)
    assert quicker["next_run_at"] == quicker["anchor_at"] == clock.now + seconds(20)
    assert (await put(db, cron="0 13 * * *"))["next_run_at"] == START + HOUR
    found = await rows(db, "SELECT action FROM audit WHERE target = 's'")
    assert len(found) == 4


async def test_if_match(db, clock):
    made = await put(db, every_seconds=60)
    await put(db, every_seconds=60, payload="1")
    with pytest.raises(ops.PreconditionFailed):
        async with db.begin() as tx:
            await ops.put(
                tx,
                "s",
                definition(every_seconds=90),
                enabled=None,
                if_match=frozenset({str(made["edition"])}),
                actor="a",
                tolerance=5.0,
            )
    with pytest.raises(ops.PreconditionFailed):
        async with db.begin() as tx:
            await ops.delete(tx, "s", if_match=frozenset({str(made["edition"])}), actor="a")


async def fire(db, **given):
    async with db.begin() as tx:
        asked = {"actor": "a", "reason": None, "force": False, "key": None, "digest": None, **given}
        return await ops.fire(tx, "s", **asked)


async def test_fire_runs_now_also_while_paused_and_leaves_the_grid(db, clock):
    made = await put(db, every_seconds=3600, overlap="skip", enabled=False)
    _, job, _ = await fire(db)
    assert (job["schedule"], job["slot_at"]) == ("s", None)
    assert (await read(db))["next_run_at"] == made["next_run_at"]
    with pytest.raises(ops.Overlap) as refused:
        await fire(db)
    assert refused.value.facts["job_id"] == str(job["id"])
    await fire(db, force=True)
    assert len(await jobs(db)) == 2


async def test_fire_at_the_very_instant_of_a_slot_does_not_take_its_place(db, clock):
    await put(db, every_seconds=60)
    clock.pass_(60)
    await fire(db)
    await ticker(db).tick()
    assert sorted(await jobs(db), key=str) == sorted([None, START + seconds(60)], key=str)


async def test_fire_with_a_key_is_repeatable_also_while_its_run_is_unfinished(db, clock):
    await put(db, every_seconds=60, overlap="skip")
    _, first, new = await fire(db, key="k", digest=b"1")
    _, second, again = await fire(db, key="k", digest=b"1")
    assert (first["id"], new, again) == (second["id"], True, False)
    with pytest.raises(ops.IdempotencyMismatch):
        await fire(db, key="k", digest=b"2")
    await change(db, "DELETE FROM schedule_slots")
    slot, third, again = await fire(db, key="k", digest=b"1", force=True)
    assert (slot, third["id"], again) == (None, first["id"], False), "the job itself remembers"
    async with db.begin() as tx:
        await ops.delete(tx, "s", if_match=None, actor="a")
    clock.pass_(1)
    await put(db, every_seconds=60, queue="other")
    _, anew, new = await fire(db, key="k", digest=b"1")
    assert (anew["queue"], new) == ("other", True), "a schedule made anew has keys of its own"


@pytest.mark.parametrize("damage", ["priority = 99", "payload = NULL", "max_attempts = -1", "recovery_policy = 'zzz'"])
async def test_fire_of_a_damaged_target_is_refused_as_broken(db, clock, damage):
    await put(db, every_seconds=60)
    await put(db, "other", every_seconds=60)
    await change(db, f"UPDATE schedules SET {damage} WHERE name = 's'")
    with pytest.raises(ops.ScheduleBroken):
        await fire(db)
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db, "other")) == 1


async def test_a_schedule_made_anew_under_an_old_name_does_not_run_an_old_slot_again(db, clock):
    await put(db, cron="* * * * *")
    clock.pass_(60)
    await ticker(db).tick()
    async with db.begin() as tx:
        await ops.delete(tx, "s", if_match=None, actor="a")
    await put(db, cron="* * * * *")
    await change(db, "UPDATE schedules SET next_run_at = %(at)s", at=clock.now)
    await ticker(db).tick()
    assert await jobs(db) == [START + seconds(60)]
    assert (await read(db))["next_run_at"] == START + seconds(120)


async def test_a_job_that_outlived_its_row_of_the_ledger_is_not_made_again(db, clock):
    await put(db, cron="* * * * *")
    clock.pass_(60)
    await ticker(db).tick()
    await change(db, "DELETE FROM schedule_slots")
    await change(db, "UPDATE schedules SET next_run_at = %(at)s", at=clock.now)
    await ticker(db).tick()
    assert await jobs(db) == [START + seconds(60)]
    row = await read(db)
    assert (row["next_run_at"], row["error"]) == (START + seconds(120), None)


async def test_a_live_job_with_the_unique_key_of_a_schedule_stands_for_its_run(db, clock):
    await put(db, every_seconds=60, unique_key="one")
    async with db.begin() as tx:
        made = await a_job(tx, "queued", unique_key="one")
    clock.pass_(60)
    await ticker(db).tick()
    for _ in range(2):
        clock.pass_(60)
        await ticker(db).tick()
    assert await ledger(db) == [("skipped_overlap", START + seconds(180), 3)], "skips in a row are one row"
    assert await rows(db, "SELECT job_id FROM schedule_slots") == [{"job_id": made.id}]
    row = await read(db)
    assert (row["last_fired_at"], row["blocked_by"]) == (None, made.id)
    async with db.begin() as tx:
        assert (await ops.trouble(tx, tolerance=5.0))["blocked"][0]["job_id"] == made.id
    await change(db, "DELETE FROM jobs")
    clock.pass_(60)
    await ticker(db).tick()
    assert len(await jobs(db)) == 1


async def test_a_key_that_was_taken_meanwhile_makes_no_run(db, clock, monkeypatch):
    """Between the look at the holders and the insert; the insert decides."""
    await put(db, every_seconds=60, unique_key="one")
    async with db.begin() as tx:
        await a_job(tx, "queued", unique_key="one")
    monkeypatch.setattr(
        tick_module.sql,
        "KEY_HELD",
        "SELECT NULL AS name FROM unnest(%(names)s::text[], %(queues)s::text[], %(keys)s::text[]) WHERE false",
    )
    clock.pass_(60)
    assert (await ticker(db).tick()).moved == 0
    assert await ledger(db) == [("skipped_overlap", START + seconds(60), 1)]


async def test_nobody_is_called_blocked_who_is_paused_or_may_overlap(db, clock):
    await put(db, every_seconds=60, overlap="skip")
    for _ in range(3):
        clock.pass_(60)
        await ticker(db).tick()
    assert (await read(db))["blocked_by"] is not None
    await put(db, every_seconds=60, overlap="allow")
    assert (await read(db))["blocked_by"] is None
    await put(db, every_seconds=60, overlap="skip", enabled=False)
    assert (await read(db))["blocked_by"] is None


# --- maintenance runs ------------------------------------------------------------------------------------------------


async def test_a_run_whose_process_vanished_is_interrupted_and_its_end_is_not_written_over(db, clock):
    release = asyncio.Event()

    async def body():
        await release.wait()

    one = ticker(db, {"prune": Task(body)})
    await put(db, task="prune", every_seconds=60, overlap="skip")
    clock.pass_(60)
    await one.tick()
    clock.pass_(59)
    await ticker(db).tick()
    assert await ledger(db) == [("fired", START + seconds(60), 1)], "it still has its lease"
    clock.pass_(2)
    await ticker(db).tick()
    assert (await ledger(db))[0] == ("interrupted", START + seconds(60), 1)
    release.set()
    await one.runs.idle()
    assert (await ledger(db))[0] == ("interrupted", START + seconds(60), 1)


async def test_a_failed_task_says_so_and_one_fired_by_hand_is_taken_by_a_tick(db, clock):
    async def body():
        raise ValueError("disk full")

    one = ticker(db, {"prune": Task(body)})
    await put(db, task="prune", every_seconds=3600)
    await fire(db)
    await one.tick()
    await one.runs.idle()
    found = await rows(db, "SELECT outcome, reason, manual, ended_at IS NOT NULL AS ended FROM schedule_slots")
    assert found == [{"outcome": "failed", "reason": "ValueError: disk full", "manual": True, "ended": True}]


async def test_a_long_run_renews_its_lease(db, clock):
    release = asyncio.Event()

    async def body():
        await release.wait()

    one = Ticker(db, Runs(db, {"prune": Task(body)}, lease=0.3), 1.0)
    await put(db, task="prune", every_seconds=60)
    clock.pass_(60)
    await one.tick()
    clock.pass_(10)

    async def renewed():
        [row] = await rows(db, "SELECT lease_expires_at > fencepost_now() AS lives FROM schedule_slots")
        return row["lives"]

    await wait_until(renewed, 5)
    release.set()
    await one.runs.idle()


async def test_edits_during_a_run_are_not_undone_by_its_end(db, clock):
    """B40."""
    release = asyncio.Event()

    async def body():
        await release.wait()

    one = ticker(db, {"prune": Task(body)})
    await put(db, task="prune", every_seconds=60)
    await put(db, "deleted", task="prune", every_seconds=60)
    clock.pass_(60)
    await one.tick()
    edited = await put(db, task="prune", cron="0 3 * * *", enabled=False)
    async with db.begin() as tx:
        await ops.delete(tx, "deleted", if_match=None, actor="a")
    release.set()
    await one.runs.idle()
    row = await read(db)
    assert (row["enabled"], row["cron"], row["edition"]) == (False, "0 3 * * *", edited["edition"])
    with pytest.raises(ops.ScheduleNotFound):
        await read(db, "deleted")
    ended = await rows(db, "SELECT count(*)::int AS n FROM schedule_slots WHERE ended_at IS NOT NULL")
    assert ended == [{"n": 2}], "both runs ended their rows of the ledger"
    clock.pass_(86400)
    await one.tick()
    assert len(await ledger(db)) == 1


# --- the ledger ------------------------------------------------------------------------------------------------------


async def test_the_ledger_keeps_thirty_days_within_a_hundred_and_ten_thousand_rows(db, clock):
    from app.schedules.tasks import prune_ledger

    await change(
        db,
        "INSERT INTO schedule_slots (id, schedule, slot_at, first_slot_at, outcome, fired_at, lateness_seconds) "
        "SELECT gen_random_uuid(), i.name, t, t, 'fired', t, 0 "
        "FROM (VALUES ('daily', 1), ('quick', 60), ('rapid', 400)) AS i(name, each), "
        "generate_series(1, greatest(300, 31 * i.each)) n, "
        "LATERAL (SELECT fencepost_now() - n * interval '1 day' / i.each AS t) x",
    )
    await prune_ledger(db)
    found = await rows(db, "SELECT schedule, count(*)::int AS n FROM schedule_slots GROUP BY schedule")
    assert {row["schedule"]: row["n"] for row in found} == {"daily": 100, "quick": 1799, "rapid": 10_000}


@pytest.mark.parametrize("back", [2 * DAY, 400 * DAY, START - datetime(1970, 1, 1, tzinfo=UTC)])
@pytest.mark.parametrize("cadence", [{"cron": "* * * * *"}, {"every_seconds": 60}])
async def test_b29_far_back_is_one_run_and_the_grid_stays(db, clock, back, cadence):
    await put(db, **cadence)
    clock.pass_(125)
    await change(db, "UPDATE schedules SET next_run_at = fencepost_now() - %(back)s", back=back)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await ticker(db).tick()
    assert loop.time() - began < 1.0
    assert await jobs(db) == [START + seconds(120)]
    assert (await read(db))["next_run_at"] == START + seconds(180)
