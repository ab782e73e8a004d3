"""Who waits for which queue, and what wakes them. No database connection is held while waiting.

A wake is a hint, never a promise: the woken waiter claims like anybody else, and sits down again when it got
nothing. Each claimable job wakes one waiter; one that got something wakes the next (a hint from another instance
does not say how many jobs there are), and one that leaves without using its wake hands it on. So a wake is never
lost with a client that went away.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any

from app.db import Database
from app.errors import TooManyWaiters, Unavailable
from app.jobs import sql

log = logging.getLogger("fencepost.waiting")

ASK_EVERY_SECONDS = 5.0
"""How often due instants are asked anew; the fallback where a hint was lost."""

ASK_WITHOUT_HINTS_SECONDS = 0.5
"""The same while there is no LISTEN connection: polling is then the only way to hear of other instances."""


ASK_WITHIN_SECONDS = 1.5
CONFIRMED_SECONDS = 1.0


class Seat:
    """One waiting claim. `woken_for` is the queue of an unused wake; `more`: there may be more than one job."""

    # One future and one timer a waiter, no task: ten thousand sit here.
    __slots__ = ("_called", "_waiting", "more", "queues", "woken_for")

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self.woken_for: str | None = None
        self.more = False
        self._called = False
        self._waiting: asyncio.Future[bool] | None = None

    def wake(self, queue: str, more: bool) -> None:
        self.woken_for, self.more = queue, more
        self.call_out()

    def call_out(self) -> None:
        self._called = True
        self._answer(called=True)

    def _answer(self, *, called: bool) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(called)

    async def wait(self, seconds: float) -> bool:
        """True when called; False when the time is over."""
        if self._called:
            return True
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = loop.call_later(seconds, lambda: self._answer(called=False))
        try:
            return await self._waiting
        finally:
            timer.cancel()
            self._waiting = None

    def sit_down_again(self) -> None:
        self.woken_for = None
        self._called = False


class Gone:
    """Whether the client of a waiting claim has gone; `set` is called when that is known."""

    __slots__ = ("_gone", "tell")

    def __init__(self) -> None:
        self._gone = False
        self.tell: Callable[[], None] | None = None

    def set(self) -> None:
        self._gone = True
        if self.tell is not None:
            self.tell()

    def is_set(self) -> bool:
        return self._gone


class WaitingRoom:
    """All waiting claims of this instance, in the order of their coming for each queue."""

    def __init__(self, max_waiters: int) -> None:
        self._max = max_waiters
        self._seats: dict[str, dict[Seat, None]] = {}
        self._count = 0
        self._by_request: dict[object, Seat] = {}
        self.first_waiter: Callable[[], None] = lambda: None
        """Called when a queue gets its first waiter: what is due there is not known yet."""
        self.closed = False

    def __len__(self) -> int:
        return self._count

    def awaited(self) -> list[str]:
        return list(self._seats)

    @contextlib.contextmanager
    def seat(self, queues: Sequence[str], request: object | None = None) -> Iterator[Seat]:
        """Take a seat. A repeat of the same request takes the place of the first, which is called out with nothing.

        Raises TooManyWaiters.
        """
        if self._count >= self._max:
            raise TooManyWaiters(f"{self._max} claims are waiting on this instance already.", max_waiters=self._max)
        seat = Seat(queues)
        if request is not None:
            first = self._by_request.pop(request, None)
            if first is not None:
                self._leave(first)
                first.queues = ()
                first.call_out()
            self._by_request[request] = seat
        self._count += 1
        for queue in seat.queues:
            if queue not in self._seats:
                self._seats[queue] = {}
                self.first_waiter()
            self._seats[queue][seat] = None
        try:
            yield seat
        finally:
            self._count -= 1
            self._leave(seat)
            if request is not None and self._by_request.get(request) is seat:
                del self._by_request[request]

    def _leave(self, seat: Seat) -> None:
        for queue in seat.queues:
            seats = self._seats.get(queue)
            if seats is not None:
                seats.pop(seat, None)
                if not seats:
                    del self._seats[queue]
        if seat.woken_for is not None:
            self.wake(seat.woken_for, more=seat.more)

    def wake(self, queue: str, count: int = 1, *, more: bool = False) -> int:
        """Wake up to `count` waiters of the queue; how many were. `more`: who gets a job wakes the next."""
        woken = 0
        for seat in self._seats.get(queue, ()):
            if woken >= count:
                break
            if seat.woken_for is None:
                seat.wake(queue, more)
                woken += 1
        return woken

    def close(self) -> None:
        """Answer everybody at once, with nothing; called when the instance is told to end."""
        self.closed = True
        for seats in list(self._seats.values()):
            for seat in list(seats):
                seat.call_out()


async def wait_for_jobs(
    room: WaitingRoom,
    queues: Sequence[str],
    seconds: float,
    attempt: Callable[[], Awaitable[Collection[str]]],
    *,
    request: object | None = None,
    gone: Gone,
    confirm: Callable[[], Awaitable[bool]],
) -> None:
    """Call `attempt` (answers the queues it got jobs of) at once and at every wake, until it got something, the time
    is over, the client is gone or the instance ends.

    Raises Unavailable where the time ends while the database is away (`confirm` says no): an empty list would be a lie.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    # The seat is taken before the first attempt: a job may come between an attempt and the sitting down.
    with room.seat(queues, request) as seat:
        gone.tell = seat.call_out
        while not gone.is_set():
            woken_for, more = seat.woken_for, seat.more
            seat.sit_down_again()
            taken: Collection[str] = ()
            try:
                taken = await attempt()
            finally:
                if not taken and woken_for is not None and (gone.is_set() or sys.exc_info()[0] is not None):
                    room.wake(woken_for, more=more)
            if taken:
                if woken_for is not None and (more or woken_for not in taken):
                    room.wake(woken_for, more=more)
                return
            left = deadline - loop.time()
            if room.closed or not seat.queues or left <= 0 or not await seat.wait(left):
                break
            if room.closed or not seat.queues:
                break
        if seat.queues and not (room.closed or gone.is_set()) and not await confirm():
            raise Unavailable("The database cannot be asked whether there are jobs.")


class DueClock:
    """The one clock of an instance: when does something fall due in an awaited queue?"""

    def __init__(self, db: Database, room: WaitingRoom) -> None:
        self._db = db
        self._room = room
        self._ask_at = 0.0
        self._earlier = asyncio.Event()
        self._answered_at = float("-inf")
        self._asking: asyncio.Task[float] | None = None
        self._healthy = True
        self.hints_live: Callable[[], bool] = lambda: False
        room.first_waiter = lambda: self.sooner(0.01)

    def sooner(self, wait: float = 0.0) -> None:
        """Something may fall due in `wait` seconds; ask then, if not earlier."""
        at = asyncio.get_running_loop().time() + wait
        if at < self._ask_at:
            self._ask_at = at
            self._earlier.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._ask_at = loop.time() + (await self._ask_together() if self._room.awaited() else ASK_EVERY_SECONDS)
            while (left := self._ask_at - loop.time()) > 0:
                self._earlier.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._earlier.wait()

    async def confirm(self) -> bool:
        """Whether the database answers and takes writes, as known for a second at most; many ask in one question."""
        if asyncio.get_running_loop().time() - self._answered_at > CONFIRMED_SECONDS:
            await self._ask_together()
        return self._healthy

    async def _ask_together(self) -> float:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> float:
        every = ASK_EVERY_SECONDS if self.hints_live() else ASK_WITHOUT_HINTS_SECONDS
        self._ask_at = asyncio.get_running_loop().time() + every
        try:
            async with self._db.begin(within=ASK_WITHIN_SECONDS) as tx:
                rows = await tx.rows(sql.NEXT_DUE, {"queues": self._room.awaited()})
                state = await tx.row(sql.TAKES_WRITES)
        except Exception as error:
            if self._healthy:
                log.warning("due instants cannot be asked: %s", error)
            self._healthy = False
            return 0.5
        self._healthy = state is not None and bool(state["writable"])
        self._answered_at = asyncio.get_running_loop().time()
        sooner = self._ask_at - asyncio.get_running_loop().time()
        return max(0.001, min([every, sooner, *(self._due(row) for row in rows)]))

    def _due(self, row: dict[str, Any]) -> float:
        wait: float = row["wait"]
        if wait <= 0:
            self._room.wake(row["queue"], more=True)
            return ASK_EVERY_SECONDS
        return wait
