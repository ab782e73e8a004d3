"""Lanes: company without a price. Each call gets its own answer, error and 409; what is odd goes alone."""

import asyncio
import os
import socket
import uuid

import psycopg
import pytest
from psycopg import errors as pg

from app.db import NotConnected, PartlyDone, array
from app.errors import OutcomeUnknown, Unavailable
from app.jobs import lease
from app.jobs.model import Ending
from app.lanes import Beside, Lane
from tests.factories import a_job
from tests.harness import wait_until

ECHO = "SELECT n, pg_backend_pid() AS pid FROM unnest(%(items)s::int[]) AS i(n)"


class Gate:
    """A gathered operation that waits at a gate, so that company comes together behind it."""

    def __init__(self, operation):
        self.operation = operation
        self.open = asyncio.Event()
        self.sizes: list[int] = []

    async def __call__(self, tx, items):
        self.sizes.append(len(items))
        await self.open.wait()
        return await self.operation(tx, items)


async def echo(tx, items):
    rows = await tx.rows(ECHO, {"items": array(items)})
    return [row["n"] for row in rows]


async def together(lane, gate, items):
    """A first call is under way and waits at the gate; the others come meanwhile, then it opens."""
    calls = [asyncio.ensure_future(lane(item)) for item in items[:1]]

    async def under_way():
        return bool(gate.sizes)

    await wait_until(under_way)
    calls += [asyncio.ensure_future(lane(item)) for item in items[1:]]
    await asyncio.sleep(0)
    gate.open.set()
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
def lane_of(db):
    made = []

    def make(operation, **given):
        gate = Gate(operation)
        lane = Lane(db, "test", gate, operation, **given)
        made.append(lane)
        return lane, gate

    yield make
    for lane in made:
        assert not lane._waiting


# --- the mechanism ---------------------------------------------------------------------------------------------------


async def test_what_comes_while_a_statement_runs_is_the_next_one(lane_of):
    lane, gate = lane_of(echo)
    assert await together(lane, gate, list(range(50))) == list(range(50))
    assert gate.sizes == [1, 49]
    await lane.close()


async def test_a_caller_alone_goes_in_the_next_turn(lane_of):
    lane, gate = lane_of(echo)
    call = asyncio.ensure_future(lane(7))
    for _ in range(3):
        await asyncio.sleep(0)
    assert lane._runner is not None
    assert not lane._waiting, "it has left; nobody waits for company"
    gate.open.set()
    assert await call == 7
    await lane.close()


async def test_keys_stay_apart_and_none_starves(lane_of):
    lane, gate = lane_of(echo, key=lambda item: item % 2)
    assert await together(lane, gate, [0, 1, 2, 3, 4, 5]) == [0, 1, 2, 3, 4, 5]
    assert gate.sizes == [1, 3, 2], "the odd ones came first after the first even one had left"
    await lane.close()


async def test_weights_bound_a_statement(lane_of):
    lane, gate = lane_of(echo, weight=lambda item: item, most_weight=100)
    assert await together(lane, gate, [1, 60, 30, 30, 500, 1]) == [1, 60, 30, 30, 500, 1]
    assert gate.sizes == [1, 2, 1, 1, 1], "what is too heavy for any company goes alone"
    await lane.close()


async def test_a_cancelled_caller_is_left_out_and_harms_nobody(lane_of):
    lane, gate = lane_of(echo)
    first = asyncio.ensure_future(lane(0))

    async def under_way():
        return bool(gate.sizes)

    await wait_until(under_way)
    others = [asyncio.ensure_future(lane(n)) for n in (1, 2, 3)]
    await asyncio.sleep(0)
    others[1].cancel()
    gate.open.set()
    assert [await first, await others[0], await others[2]] == [0, 1, 3]
    assert gate.sizes == [1, 2]
    await lane.close()


async def test_the_outcome_of_one_cancelled_under_way_is_handed_back(lane_of):
    lost = []

    async def hand_back(item, outcome):
        lost.append((item, outcome))

    lane, gate = lane_of(echo, lost=hand_back)
    call = asyncio.ensure_future(lane(5))

    async def under_way():
        return bool(gate.sizes)

    await wait_until(under_way)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    gate.open.set()
    assert await lane(6) == 6
    assert lost == [(5, 5)]
    await lane.close()


# --- what cannot be had in company -----------------------------------------------------------------------------------


async def test_a_poisoned_item_fails_alone(lane_of):
    async def divide(tx, items):
        rows = await tx.rows("SELECT 10 / n AS q FROM unnest(%(items)s::int[]) AS i(n)", {"items": array(items)})
        return [row["q"] for row in rows]

    lane, gate = lane_of(divide)
    answers = await together(lane, gate, [1, 2, 0, 5, 0, 10])
    assert [answers[i] for i in (0, 1, 3, 5)] == [10, 5, 2, 1]
    assert [type(answers[i]) for i in (2, 4)] == [pg.DivisionByZero] * 2
    gate.open.set()
    assert await lane(5) == 2, "the lane goes on"
    await lane.close()


async def test_a_deadlock_goes_beside_and_is_tried_again(lane_of):
    left = [3]

    async def unlucky(tx, items):
        left[0] -= 1
        if left[0] >= 0:
            await tx.run("DO $$ BEGIN RAISE EXCEPTION 'x' USING errcode = '40P01'; END $$")
        return list(items)

    lane, gate = lane_of(unlucky)
    gate.open.set()
    assert await lane(1) == 1
    await lane.close()


async def test_a_statement_after_the_first_is_repeated_only_where_it_may_be(lane_of, db):
    async def two_steps(tx, items):
        await tx.row("SELECT 1 AS one")
        if len(items) > 1:
            await tx.row("SELECT 1 / 0 AS never")
        return list(items)

    lane, gate = lane_of(two_steps, repeatable=True)
    assert await together(lane, gate, [1, 2, 3]) == [1, 2, 3]
    await lane.close()
    lane, gate = lane_of(two_steps)
    answers = await together(lane, gate, [1, 2, 3])
    assert (answers[0], [type(each) for each in answers[1:]]) == (1, [OutcomeUnknown] * 2)
    await lane.close()


async def test_what_asks_for_a_transaction_gets_one_for_all(db):
    seen = []

    async def gathered(tx, items):
        raise Beside

    async def alone(tx, items):
        seen.append(len(items))
        row = await tx.row(
            "SELECT count(*)::int AS n FROM pg_locks WHERE locktype = 'virtualxid' AND pid = pg_backend_pid()"
        )
        return [row["n"]] * len(items)

    lane = Lane(db, "test", gathered, alone)
    assert await asyncio.gather(*[lane(n) for n in range(5)]) == [True] * 5
    assert seen == [5]
    await lane.close()


# --- connections -----------------------------------------------------------------------------------------------------


async def pid_of(tx, items):
    row = await tx.row("SELECT pg_backend_pid() AS pid")
    return [row["pid"]] * len(items)


def end_backend(database_url, pid):
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", [pid])


async def test_a_connection_that_died_unseen_is_replaced_unnoticed(db, database_url):
    lane = Lane(db, "test", pid_of)
    first = await lane(1)
    await asyncio.to_thread(end_backend, database_url, first)

    async def gone():
        async with db.begin() as tx:
            return await tx.row(
                "SELECT 1 AS one WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %(p)s)", {"p": first}
            )

    await wait_until(gone)
    assert await lane(1) != first
    await lane.close()


async def test_a_backend_ended_under_a_statement_did_nothing_and_the_call_goes_beside(db, database_url):
    started = asyncio.Event()

    async def slow(tx, items):
        row = await tx.row("SELECT pg_backend_pid() AS pid")
        pids.append(row["pid"])
        started.set()
        await tx.row("SELECT pg_sleep(%(s)s)", {"s": 30 if len(pids) == 1 else 0})
        return list(items)

    pids: list[int] = []
    lane = Lane(db, "test", slow, repeatable=True)
    call = asyncio.ensure_future(lane(1))
    await started.wait()
    await asyncio.to_thread(end_backend, database_url, pids[0])
    assert await call == 1
    assert len(set(pids)) == 2
    await lane.close()


async def test_a_connection_cut_under_a_statement_is_an_unknown_outcome(db):
    started = asyncio.Event()

    async def slow(tx, items):
        started.set()
        await tx.row("SELECT pg_sleep(%(s)s)", {"s": 30 if items == [1] else 0})
        return list(items)

    lane = Lane(db, "test", slow)
    call = asyncio.ensure_future(lane(1))
    await started.wait()
    await asyncio.sleep(0)
    with socket.socket(fileno=os.dup(lane._own._connection.fileno())) as cut:
        cut.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OutcomeUnknown):
        await call
    assert await lane(2) == 2, "the lane has a new connection"
    await lane.close()


async def test_a_database_that_is_away_refuses_all_who_wait(postgres_server):
    from app.db import Database

    server = postgres_server()
    db = Database(server.url, pool_size=2)
    lane = Lane(db, "test", echo)
    await db.open()
    assert await lane(1) == 1
    await asyncio.to_thread(server.stop)
    answers = await asyncio.gather(*[lane(n) for n in range(20)], return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in answers), answers
    assert any(isinstance(each, NotConnected) for each in answers)
    await asyncio.to_thread(server.start)

    async def back():
        try:
            return await lane(3) == 3
        except Unavailable:
            return False

    await wait_until(back)
    await lane.close()
    await db.close()


async def test_calls_at_the_end_are_answered(lane_of):
    lane, gate = lane_of(echo)
    under_way = asyncio.ensure_future(lane(1))

    async def begun():
        return bool(gate.sizes)

    await wait_until(begun)
    waiting = asyncio.ensure_future(lane(2))
    await asyncio.sleep(0)
    await lane.close()
    with pytest.raises(OutcomeUnknown):
        await under_way
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await lane(3)


async def test_own_tells_a_part_that_is_committed_from_one_that_is_not(db):
    own = db.own()

    async def second_fails(tx):
        await tx.row("SELECT 1 AS one")
        await tx.row("SELECT 1 / 0 AS never")

    async def first_fails(tx):
        await tx.row("SELECT 1 / 0 AS never")

    with pytest.raises(PartlyDone):
        await own.run(second_fails)
    with pytest.raises(pg.DivisionByZero):
        await own.run(first_fails)
    db._begin = "BEGIN; SET LOCAL lock_timeout = '1s'"
    with pytest.raises(pg.DivisionByZero):
        await own.run(second_fails)
    assert (await own.run(lambda tx: tx.row("SELECT 1 AS one")))["one"] == 1
    await own.aclose()


# --- the service's lanes ---------------------------------------------------------------------------------------------


def gated(lane):
    """The service's own lane, held at a gate from now on."""
    gate = Gate(lane._gathered)
    lane._gathered = gate
    return gate


async def processing(client, count, **given):
    async with client.app.state.service.db.begin() as tx:
        return [await a_job(tx, "processing", **given) for _ in range(count)]


async def in_company(client, lane, calls):
    """The calls after the first one in one statement."""
    gate = gated(lane)
    first = asyncio.ensure_future(calls[0]())

    async def under_way():
        return bool(gate.sizes)

    await wait_until(under_way)
    others = [asyncio.ensure_future(call()) for call in calls[1:]]

    async def all_wait():
        return sum(len(waiting) for waiting in lane._waiting.values()) == len(others)

    await wait_until(all_wait)
    gate.open.set()
    return await asyncio.gather(first, *others)


def beat(client, job, **more):
    body = {"attempt_token": str(job.token), "worker_id": job.worker, **more}
    return lambda: client.post(f"/v1/jobs/{job.id}/heartbeat", json=body)


def complete(client, job, token=None, **more):
    body = {"attempt_token": str(token or job.token), **more}
    return lambda: client.post(f"/v1/jobs/{job.id}/complete", json=body)


async def test_heartbeats_of_one_job_in_one_gather_get_the_longest_lease(client):
    service = client.app.state.service
    first, job = await processing(client, 2)
    leases = (10, 500, 20, 300, 40)
    answers = await in_company(
        client, service.heartbeats, [beat(client, first), *(beat(client, job, lease_seconds=n) for n in leases)]
    )
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.json()["lease_expires_at"] for answer in answers[1:]}) == 1
    async with service.db.begin() as tx:
        row = await tx.row(
            "SELECT extract(epoch FROM lease_expires_at - fencepost_now())::float8 AS left FROM jobs WHERE id = %(id)s",
            {"id": job.id},
        )
    assert row["left"] > 400


async def test_endings_of_one_job_in_one_gather_are_judged_one_after_the_other(client):
    service = client.app.state.service
    first, job, other = await processing(client, 3)
    answers = await in_company(
        client,
        service.endings,
        [
            complete(client, first),
            complete(client, job, result={"a": 1}),
            complete(client, job, result={"a": 1}),
            complete(client, job, result={"a": 2}),
            complete(client, other, token=uuid.uuid4()),
            complete(client, other),
        ],
    )
    assert [answer.status_code for answer in answers] == [200, 200, 200, 409, 409, 200]
    assert [answers[n].json()["code"] for n in (3, 4)] == ["attempt-ended", "lease-lost"]
    assert answers[1].json()["fence"] == answers[2].json()["fence"]
    assert (await client.get(f"/v1/jobs/{job.id}")).json()["result"] == {"a": 1}


async def test_a_job_that_postgresql_refuses_fails_alone(client, database_url):
    service = client.app.state.service
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("ALTER TABLE jobs ADD CONSTRAINT no CHECK (kind <> 'poison')")
    enqueue = [
        (lambda kind=kind: client.post("/v1/jobs", json={"queue": "q", "kind": kind, "payload": kind}))
        for kind in ("a", "b", "poison", "c")
    ]
    answers = await in_company(client, service.enqueues, enqueue)
    assert [answer.status_code for answer in answers][:2] == [201, 201]
    assert answers[3].status_code == 201
    assert answers[2].status_code >= 400
    assert [job["kind"] for job in (await client.get("/v1/jobs?queue=q")).json()["jobs"]].count("poison") == 0
    assert len((await client.get("/v1/jobs?queue=q")).json()["jobs"]) == 3


async def test_keys_in_one_gather_are_each_callers_own(client):
    service = client.app.state.service

    def enqueue(payload, key=None, **more):
        headers = {"idempotency-key": key} if key else {}
        return lambda: client.post("/v1/jobs", json={"queue": "q", "payload": payload, **more}, headers=headers)

    answers = await in_company(
        client,
        service.enqueues,
        [
            enqueue(0),
            enqueue(1, "k"),
            enqueue(1, "k"),
            enqueue(2, "k"),
            enqueue(3, unique_key="u"),
            enqueue(4, unique_key="u"),
            enqueue(5, unique_key="u", on_conflict="reject"),
        ],
    )
    assert [answer.status_code for answer in answers] == [201, 201, 200, 422, 201, 200, 409]
    assert answers[1].json()["id"] == answers[2].json()["id"]
    assert answers[4].json()["id"] == answers[5].json()["id"] == answers[6].json()["holder_id"]


async def test_a_row_that_is_held_delays_its_own_call_only(client, database_url):
    service = client.app.state.service
    first, held, *free = await processing(client, 6)
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", [held.id])
        slow = asyncio.ensure_future(
            in_company(
                client,
                service.endings,
                [complete(client, first), complete(client, held), *(complete(client, job) for job in free)],
            )
        )

        async def ended():
            async with service.db.begin() as tx:
                row = await tx.row("SELECT count(*)::int AS n FROM jobs WHERE status = 'done'")
            return row["n"] == 5

        await wait_until(ended, 5)
        assert not slow.done()
        other.rollback()
        assert [answer.status_code for answer in await slow][1] in (200, 503)
    assert (await complete(client, held)()).status_code == 200


async def test_claims_in_one_gather_get_different_jobs_and_a_limit_holds(client):
    service = client.app.state.service
    await client.put("/v1/queues/narrow", json={"max_processing": 3})
    for queue in ("wide", "narrow"):
        await client.post("/v1/jobs/batch", json={"jobs": [{"queue": queue, "payload": n} for n in range(10)]})

    def claim(queue, most=1):
        body = {"worker_id": "w", "queues": [queue], "max_jobs": most}
        return lambda: client.post("/v1/jobs/claim", json=body)

    calls = [claim("wide"), *[claim("wide", 2) for _ in range(4)], *[claim("narrow") for _ in range(6)]]
    answers = await in_company(client, service.claims, calls)
    jobs = [job for answer in answers for job in answer.json()["jobs"]]
    assert len({job["id"] for job in jobs}) == len(jobs)
    assert sum(job["queue"] == "wide" for job in jobs) == 9
    assert sum(job["queue"] == "narrow" for job in jobs) == 3
    assert [job["payload"] for job in jobs if job["queue"] == "wide"] == list(range(9)), "first come, first served"
    assert len({job["attempt_token"] for job in jobs}) == len(jobs)


async def test_the_jobs_of_a_cancelled_claim_go_back_uncounted(client):
    service = client.app.state.service
    await client.post("/v1/jobs", json={"queue": "q", "payload": 1})
    gate = gated(service.claims)
    wish = lease.Wish(("q",), lease.ClaimCall("w", 1))
    call = asyncio.ensure_future(service.claims(wish))

    async def under_way():
        return bool(gate.sizes)

    await wait_until(under_way)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    gate.open.set()

    async def back():
        [job] = (await client.get("/v1/jobs?queue=q")).json()["jobs"]
        return (job["status"], job["attempts"], job["fence"]) == ("queued", 0, 1)

    await wait_until(back)


async def test_an_ending_whose_late_result_cannot_be_kept_spoils_no_other(client, database_url):
    """The second statement of a gather fails; endings may be repeated, so all are judged again, each alone."""
    service = client.app.state.service
    first, late, good = await processing(client, 3)
    async with service.db.begin() as tx:
        await tx.run(
            "UPDATE jobs SET lease_expires_at = fencepost_now() - interval '1 s' WHERE id = %(id)s", {"id": late.id}
        )
        from app.jobs import sql

        await tx.run(sql.RECLAIM, {"ids": [late.id], "tokens": [late.token], "even_unexpired": True})
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("ALTER TABLE late_results ADD CONSTRAINT no CHECK (false) NOT VALID")
    answers = await in_company(
        client, service.endings, [complete(client, first), complete(client, late, result=1), complete(client, good)]
    )
    assert [answers[0].status_code, answers[2].status_code] == [200, 200]
    assert answers[1].status_code >= 400
    assert (await client.get(f"/v1/jobs/{good.id}")).json()["status"] == "done"


async def test_endings_are_repeatable_after_an_unknown_outcome(db):
    """What a caller does after 503 `outcome-unknown`: the same call again tells."""
    async with db.begin() as tx:
        job = await a_job(tx, "processing")
    ending = Ending("complete", job.id, job.token, b"1")
    own = db.own()
    [once] = await own.run(lambda tx: lease.end(tx, [ending]))
    [again] = await own.run(lambda tx: lease.end(tx, [ending]))
    assert (once["status"], once["fence"]) == (again["status"], again["fence"])
    await own.aclose()
