"""What a sick database means to a caller: refusals within the deadline, dead connections replaced, nothing hidden."""

import asyncio
import os
import signal
import sys
import time

import psycopg
import pytest

from app.db import Database
from app.errors import OutcomeUnknown, Unavailable


async def backend(tx) -> int:
    return (await tx.row("SELECT pg_backend_pid() AS pid"))["pid"]


async def test_connections_that_died_unseen_are_replaced_without_the_caller_noticing(db, database_url):
    async def hold(ready, go):
        async with db.begin() as tx:
            ready.set()
            await go.wait()
            return await backend(tx)

    go = asyncio.Event()
    readies = [asyncio.Event() for _ in range(5)]
    tasks = [asyncio.create_task(hold(ready, go)) for ready in readies]
    for ready in readies:
        await ready.wait()
    go.set()
    pids = await asyncio.gather(*tasks)
    with psycopg.connect(database_url, autocommit=True) as admin:
        for pid in pids:
            admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
    for _ in range(5):
        async with db.begin() as tx:
            assert await backend(tx) not in pids


async def test_a_connection_lost_before_the_commit_is_unavailable(db, database_url):
    with pytest.raises(Unavailable):
        async with db.begin() as tx:
            pid = await backend(tx)
            with psycopg.connect(database_url, autocommit=True) as admin:
                admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
            await tx.row("SELECT 1 AS one")


async def test_a_connection_lost_in_the_commit_is_an_unknown_outcome(db, database_url):
    with pytest.raises(OutcomeUnknown):
        async with db.begin() as tx:
            pid = await backend(tx)
            with psycopg.connect(database_url, autocommit=True) as admin:
                admin.execute("SELECT pg_terminate_backend(%s)", (pid,))


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may stop the server's process here")
@pytest.mark.parametrize("when", ["statement", "commit"])
async def test_a_frozen_server_process_is_given_up_at_the_deadline(database_url, when):
    db = Database(database_url, pool_size=2, statement_timeout=0.5)
    db._answer_within = 1.0
    await db.open()
    pid = 0
    try:
        begun = time.monotonic()
        with pytest.raises(Unavailable if when == "statement" else OutcomeUnknown):
            async with db.begin() as tx:
                pid = await backend(tx)
                os.kill(pid, signal.SIGSTOP)
                if when == "statement":
                    await tx.row("SELECT 1 AS one")
        assert time.monotonic() - begun < 4
        async with db.begin() as tx:
            assert await backend(tx) != pid
    finally:
        os.kill(pid, signal.SIGCONT)
        await db.close()


async def test_facts_are_told_after_the_commit_and_only_then(db):
    heard = []
    db.hearers.append(lambda fact, facts: heard.append((fact, facts)))
    with pytest.raises(ZeroDivisionError):
        async with db.begin() as tx:
            tx.tell("lost", n=1)
            raise ZeroDivisionError
    async with db.begin() as tx:
        tx.tell("kept", n=2)
        assert heard == []
    assert heard == [("kept", {"n": 2})]


async def test_an_error_that_the_statement_deserves_passes_through(db):
    with pytest.raises(psycopg.errors.DivisionByZero):
        async with db.begin() as tx:
            await tx.row("SELECT 1 / 0")
    async with db.begin() as tx:
        assert await tx.row("SELECT 1 AS one") == {"one": 1}
