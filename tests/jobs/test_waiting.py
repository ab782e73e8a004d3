"""The waiting room: a wake is never lost, nobody is woken for nothing, and hints cross instances."""

import asyncio

import pytest

from app.db import Database
from app.errors import TooManyWaiters, Unavailable
from app.jobs import intake
from app.jobs.hints import Hints
from app.jobs.model import NewJob
from app.jobs.waiting import DueClock, Gone, WaitingRoom, wait_for_jobs
from tests.harness import wait_until


class Shelf:
    """Stands for the table: how many jobs a queue has, and how often somebody looked."""

    def __init__(self) -> None:
        self.jobs: dict[str, int] = {}
        self.looks = 0

    def taker(self, queues):
        async def attempt():
            self.looks += 1
            await asyncio.sleep(0)
            for queue in queues:
                if self.jobs.get(queue, 0):
                    self.jobs[queue] -= 1
                    return {queue}
            return set()

        return attempt


async def healthy():
    return True


def sit(room, shelf, queues, seconds=30.0, gone=None, request=None, confirm=healthy):
    gone = gone or Gone()
    waiting = wait_for_jobs(room, queues, seconds, shelf.taker(queues), gone=gone, request=request, confirm=confirm)
    return asyncio.ensure_future(waiting)


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_job_wakes_one_waiter_and_costs_one_look(db):
    room, shelf = WaitingRoom(100), Shelf()
    waiters = [sit(room, shelf, ["q"]) for _ in range(20)]
    others = [sit(room, shelf, ["other"]) for _ in range(20)]
    await settled()
    assert shelf.looks == 40
    shelf.jobs["q"] = 5
    assert room.wake("q", 5) == 5
    await settled()
    assert sum(w.done() for w in waiters) == 5
    assert not any(o.done() for o in others)
    assert shelf.looks == 45
    room.close()
    await asyncio.wait_for(asyncio.gather(*waiters, *others), 2)


async def test_a_hint_without_a_number_serves_all_jobs(db):
    room, shelf = WaitingRoom(100), Shelf()
    waiters = [sit(room, shelf, ["q"]) for _ in range(10)]
    await settled()
    shelf.jobs["q"] = 7
    room.wake("q", more=True)
    for _ in range(20):
        await settled()
    assert sum(w.done() for w in waiters) == 7
    room.close()
    await asyncio.gather(*waiters)


async def test_a_wake_of_a_client_that_is_gone_is_handed_on(db):
    room, shelf, gone = WaitingRoom(100), Shelf(), Gone()
    dead, alive = sit(room, shelf, ["q"], gone=gone), sit(room, shelf, ["q"])
    await settled()
    shelf.jobs["q"] = 1
    room.wake("q")
    gone.set()
    await asyncio.wait_for(alive, 2)
    await asyncio.wait_for(dead, 2)
    assert shelf.jobs["q"] == 0


async def test_a_wake_is_handed_on_when_the_attempt_fails_or_its_client_leaves_meanwhile(db):
    for leave in (True, False):
        room, shelf, gone = WaitingRoom(100), Shelf(), Gone()

        async def attempt(leave=leave, gone=gone, shelf=shelf):
            shelf.looks += 1
            if shelf.looks > 1:
                if not leave:
                    raise Unavailable("no")
                gone.set()
            return set()

        dead = asyncio.ensure_future(wait_for_jobs(room, ["q"], 30.0, attempt, gone=gone, confirm=healthy))
        await settled()
        other = Shelf()
        alive = sit(room, other, ["q"])
        await settled()
        other.jobs["q"] = 1
        room.wake("q")
        await asyncio.wait_for(alive, 2)
        await asyncio.gather(dead, return_exceptions=True)


async def test_the_clock_confirms_what_it_knows_for_a_second(db, database_url):
    clock = DueClock(db, WaitingRoom(1))
    assert await clock.confirm()
    async with db.begin() as tx:
        await tx.run(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', "
            "current_database()); END $$"
        )
    clock._answered_at = float("-inf")
    fresh = Database(database_url, pool_size=1)
    await fresh.open()
    clock._db = fresh
    assert not await clock.confirm()
    await fresh.close()


async def test_a_wake_spent_on_who_took_from_another_queue_is_handed_on(db):
    room, shelf = WaitingRoom(100), Shelf()
    both, only = sit(room, shelf, ["a", "b"]), sit(room, shelf, ["b"])
    await settled()
    shelf.jobs |= {"a": 1, "b": 1}
    room.wake("b")
    await asyncio.wait_for(asyncio.gather(both, only), 2)
    assert shelf.jobs == {"a": 0, "b": 0}


async def test_a_job_between_the_look_and_the_sitting_down_is_not_missed(db):
    room, shelf = WaitingRoom(100), Shelf()

    async def attempt():
        if shelf.looks == 0:
            shelf.looks += 1
            room.wake("q")
            return set()
        return {"q"}

    await asyncio.wait_for(wait_for_jobs(room, ["q"], 30.0, attempt, gone=Gone(), confirm=healthy), 2)


async def test_the_room_has_a_cap_and_seats_are_given_back(db):
    room, shelf, gone = WaitingRoom(2), Shelf(), Gone()
    seated = [sit(room, shelf, ["q"], gone=gone) for _ in range(2)]
    await settled()
    with pytest.raises(TooManyWaiters):
        await sit(room, shelf, ["q"])
    gone.set()
    await asyncio.gather(*seated)
    assert len(room) == 0
    assert room.awaited() == []


async def test_a_repeat_takes_the_place_of_the_first(db):
    room, shelf = WaitingRoom(10), Shelf()
    first = sit(room, shelf, ["q"], request="r")
    await settled()
    second = sit(room, shelf, ["q"], request="r")
    await asyncio.wait_for(first, 2)
    assert not second.done()
    shelf.jobs["q"] = 1
    room.wake("q")
    await asyncio.wait_for(second, 2)


async def test_time_over_while_the_database_is_away_is_a_refusal_not_an_empty_list(db):
    room, shelf = WaitingRoom(10), Shelf()

    async def sick():
        return False

    with pytest.raises(Unavailable):
        await sit(room, shelf, ["q"], seconds=0.01, confirm=sick)


async def test_the_clock_wakes_at_the_due_instant(db):
    room, shelf = WaitingRoom(10), Shelf()
    clock = DueClock(db, room)
    running = asyncio.create_task(clock.run())
    async with db.begin() as tx:
        await intake.enqueue(tx, [NewJob("q", "1", delay_seconds=0.3)])
    waiter = sit(room, shelf, ["q"])
    await settled()
    shelf.jobs["q"] = 1
    assert not waiter.done()
    await asyncio.wait_for(waiter, 5)
    running.cancel()


async def test_hints_cross_instances_and_ignore_their_own(db):
    rooms = [WaitingRoom(10), WaitingRoom(10)]
    shelf = Shelf()
    hints = [Hints(db, db.url, room, lambda wait=0.0: None) for room in rooms]
    tasks = [asyncio.create_task(job) for hint in hints for job in (hint.listen(), hint.send_gathered())]

    async def all_listen():
        return all(hint.live for hint in hints)

    await wait_until(all_listen)
    here, there = sit(rooms[0], shelf, ["q"]), sit(rooms[1], shelf, ["q"])
    await settled()
    shelf.jobs["q"] = 1
    hints[0].note("q")
    await asyncio.wait_for(there, 5)
    assert not here.done()
    rooms[0].close()
    await here
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_hints_fit_into_a_payload():
    hints = Hints.__new__(Hints)
    hints._me = "m" * 12
    names = [f"{n:04d}" + "x" * 96 for n in range(500)]
    payloads = Hints._payloads(hints, names)
    assert max(map(len, payloads)) < 8000
    assert [name for payload in payloads for name in payload.split(" ")[1:]] == names
