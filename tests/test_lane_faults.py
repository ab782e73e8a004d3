"""What lanes must bear: a give-back that fails, an end at a bad moment, an error of ours after the statement."""

import asyncio
import contextlib

import psycopg
import pytest
import pytest_asyncio

from app.db import PartlyDone
from app.errors import OutcomeUnknown, Unavailable
from app.jobs import sql
from app.jobs.lease import Wish
from app.jobs.model import ClaimCall, NewJob
from app.lanes import Lane
from tests.factories import a_job, read
from tests.harness import wait_until

SOON = 5
"""Seconds in which a call must be answered that waits for nothing any more."""


@pytest_asyncio.fixture
async def lane_on(db):
    lanes = []

    def make(*operations, **how):
        lanes.append(Lane(db, "test", *operations, **how))
        return lanes[-1]

    yield make
    for lane in lanes:
        await lane.close()


async def echo(tx, items):
    await tx.row("SELECT 1 AS one")
    return list(items)


async def test_a_give_back_that_fails_costs_nobody_else_the_answer(lane_on):
    """The first caller leaves; what was got for it cannot be given back; the others come behind it in its gather."""
    entered, gate = asyncio.Event(), asyncio.Event()

    async def operation(tx, items):
        entered.set()
        await gate.wait()
        return await echo(tx, items)

    async def lost(item, outcome):
        raise OutcomeUnknown("the database is away")

    lane = lane_on(operation, lost=lost)
    tasks = [asyncio.create_task(lane(number)) for number in range(4)]
    await entered.wait()
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    later = asyncio.create_task(lane(9))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks[1:], later), SOON) == [1, 2, 3, 9]


async def test_a_give_back_that_takes_long_holds_nobody_up(lane_on):
    entered, gate, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def operation(tx, items):
        entered.set()
        await gate.wait()
        return await echo(tx, items)

    async def lost(item, outcome):
        await done.wait()

    lane = lane_on(operation, lost=lost)
    tasks = [asyncio.create_task(lane(number)) for number in range(3)]
    await entered.wait()
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    gate.set()
    try:
        assert await asyncio.wait_for(asyncio.gather(*tasks[1:]), SOON) == [1, 2]
    finally:
        done.set()


async def test_a_claim_cancelled_in_the_moment_of_its_answer_goes_back_too(client):
    """Its outcome is set and it has not run since: nobody will ever see those jobs."""
    service = client.app.state.service
    async with service.db.begin() as tx:
        made = [await a_job(tx) for _ in range(2)]
    tasks = []

    async def claim(worker, then=lambda: None):
        grant = await service.claims(Wish(("q",), ClaimCall(worker, 1, 600.0)))
        then()
        return grant

    # Both are answered in one turn; the first that wakes up cancels the second.
    tasks += [asyncio.create_task(claim("one", lambda: tasks[1].cancel())), asyncio.create_task(claim("two"))]
    one, two = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(one.jobs) == 1
    assert isinstance(two, asyncio.CancelledError)

    async def back():
        async with service.db.begin() as tx:
            rows = [await read(tx, job) for job in made]
        return sorted((row["status"], row["attempts"]) for row in rows) == [("processing", 1), ("queued", 0)]

    await wait_until(back, SOON)


async def test_calls_that_were_about_to_go_beside_when_the_lane_closes_are_answered(lane_on):
    """Their tasks are there and have not run yet."""
    closing = []

    async def refused(tx, items):
        # Wakes up after this turn and before the tasks that this error makes.
        closing.append(asyncio.ensure_future(lane.close()))
        raise psycopg.errors.CheckViolation

    lane = lane_on(refused)
    tasks = [asyncio.create_task(lane(number)) for number in range(2)]
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SOON)
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    await asyncio.gather(*closing)


async def test_an_error_of_ours_after_the_statement_went_in_sends_nothing_twice(lane_on, database_url):
    """Without BEGIN and COMMIT the first statement is committed when it has an answer, whatever comes then."""
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("CREATE TABLE book (n int)")

        async def operation(tx, items):
            await tx.run("INSERT INTO book SELECT unnest(%(n)s::int[])", {"n": list(items)})
            raise ZeroDivisionError

        lane = lane_on(operation)
        outcomes = await asyncio.gather(*(lane(n) for n in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 3
        assert admin.execute("SELECT count(*) FROM book").fetchone() == (3,)


async def test_own_tells_an_error_of_ours_after_a_committed_statement_apart(db):
    async def act(tx):
        await tx.row("SELECT 1 AS one")
        raise ZeroDivisionError

    async with contextlib.aclosing(db.own()) as own:
        with pytest.raises(PartlyDone):
            await own.run(act)


async def test_a_holder_that_comes_and_goes_is_the_bad_luck_of_its_own_call(client, monkeypatch):
    """The holder of a key is never found, as when it is gone each time; what its company inserted is committed."""
    service = client.app.state.service
    await client.post("/v1/jobs", json={"queue": "q", "payload": 0, "unique_key": "held"})
    monkeypatch.setattr(sql, "HOLDERS", f"SELECT * FROM ({sql.HOLDERS}) h WHERE false")
    jobs = [NewJob("q", "1"), NewJob("q", "2", unique_key="held"), NewJob("q", "3")]
    outcomes = await asyncio.gather(*[service.enqueues(job) for job in jobs], return_exceptions=True)
    assert [outcomes[n]["payload"] for n in (0, 2)] == ["1", "3"]
    assert type(outcomes[1]) is Unavailable
    answer = await client.post("/v1/jobs", json={"queue": "q", "payload": 2, "unique_key": "held"})
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    batch = {"jobs": [{"queue": "q", "payload": 4}, {"queue": "q", "payload": 5, "unique_key": "held"}]}
    assert (await client.post("/v1/jobs/batch", json=batch)).status_code == 503
    found = (await client.get("/v1/jobs?queue=q")).json()["jobs"]
    assert sorted(job["payload"] for job in found) == [0, 1, 3], "of a batch in one transaction nothing is left"
