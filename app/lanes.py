"""Lanes: calls of a kind that wait at the same time go to PostgreSQL as one statement.

While a lane's statement runs, whatever comes is gathered; then it goes out as the next one, on the lane's own
connection. Nobody waits for others to come: a caller who is alone is sent at once. A statement for sixty calls costs
little more than one for one (specification 7).

A lane is a shortcut and decides nothing. Operations take many items anyway and give each its own outcome; what
cannot be had in company goes beside the lane, each call alone, in a transaction of the pool, as if there were no
lane: a value that PostgreSQL refuses, a row that somebody holds locked, a deadlock.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

import psycopg

from app import telemetry
from app.db import Database, NotConnected, PartlyDone, Tx, unavailable
from app.errors import OutcomeUnknown, Refusal, Unavailable

log = logging.getLogger("fencepost.lanes")

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

MOST_CALLS = 500
MOST_WEIGHT = 4 * 1024 * 1024
BESIDE_AT_ONCE = 2
"""Transactions of the pool that the calls beside one lane may take, so that some locked rows never take them all."""

OPTIONS = {
    "lock_timeout": "200ms",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
"""Of a lane's session. Its statements look at rows by key, always. A generic plan that was made while a table was
empty would otherwise read it whole, until somebody analyses it; planning anew each time costs as much as the work."""

_SICK = ("25", "42", "53", "58")
"""Classes of SQLSTATE that would refuse each call alone as well: read-only, rights, resources, the system."""


class Beside(Exception):
    """Raised by a gathered operation that has done nothing and needs a transaction: its calls go beside the lane, still
    together."""


class Lane(Generic[Item, Outcome]):
    """Call it with an item for the outcome of that item.

    `gathered` gets many items; each of its statements may be a transaction of its own, so the first one must be all
    that it changes, or `repeatable` must be true: then the calls can be sent again. `alone` is the same as a whole,
    for the pool (`generic_plan`: see Database.begin). Items are gathered with others of the same `key`, up to
    MOST_CALLS or `most_weight`. `lost` gets the outcome of a caller who was cancelled meanwhile.
    """

    def __init__(
        self,
        db: Database,
        name: str,
        gathered: Callable[[Tx, Sequence[Item]], Awaitable[Sequence[Outcome]]],
        alone: Callable[[Tx, Sequence[Item]], Awaitable[Sequence[Outcome]]] | None = None,
        *,
        key: Callable[[Item], Hashable] = lambda item: None,
        weight: Callable[[Item], int] = lambda item: 1,
        most_weight: int = MOST_WEIGHT,
        repeatable: bool = False,
        generic_plan: bool = False,
        lost: Callable[[Item, Outcome], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self._db = db
        self._own = db.own(**OPTIONS)
        self._gathered = gathered
        self._alone = alone or gathered
        self._key = key
        self._weight = weight
        self._most_weight = most_weight
        self._repeatable = repeatable
        self._generic_plan = generic_plan
        self._lost = lost
        self._waiting: dict[Hashable, deque[_Call[Item, Outcome]]] = {}
        self._runner: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._returns: set[asyncio.Task[None]] = set()
        self._beside_at_once = asyncio.Semaphore(BESIDE_AT_ONCE)
        self._closed = False

    async def __call__(self, item: Item) -> Outcome:
        """Raises what the operation raises for this item, Unavailable (nothing was done) and OutcomeUnknown."""
        if self._closed:
            raise Unavailable("This instance is shutting down.")
        loop = asyncio.get_running_loop()
        call: _Call[Item, Outcome] = _Call(item, loop.create_future())
        self._waiting.setdefault(self._key(item), deque()).append(call)
        if self._runner is None:
            # It begins in the next turn of the event loop, with all that this turn brings.
            self._runner = loop.create_task(self._run(), name=f"lane {self.name}")
        try:
            return await call.outcome
        except asyncio.CancelledError:
            outcome = call.outcome
            if outcome.done() and not outcome.cancelled() and outcome.exception() is None:
                # Answered and cancelled in one turn: nobody will see it.
                self._hand_back(item, outcome.result())
            raise

    async def close(self) -> None:
        """End; calls under way get no outcome, those that wait are refused, what nobody took is handed back."""
        self._closed = True
        tasks = [*self._beside, *([self._runner] if self._runner is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._refuse_waiting(Unavailable("This instance is shutting down."))
        await asyncio.gather(*self._returns)
        await self._own.aclose()

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._serve(self._next())
        finally:
            self._runner = None

    def _next(self) -> list["_Call[Item, Outcome]"]:
        """Those of the key that waits longest, in the order of their coming; what is too much goes to the end."""
        key, waiting = next(iter(self._waiting.items()))
        calls: list[_Call[Item, Outcome]] = []
        weight = 0
        while waiting and len(calls) < MOST_CALLS:
            weight += self._weight(waiting[0].item)
            if calls and weight > self._most_weight:
                break
            call = waiting.popleft()
            if not call.outcome.done():
                calls.append(call)
        del self._waiting[key]
        if waiting:
            self._waiting[key] = waiting
        return calls

    async def _serve(self, calls: list["_Call[Item, Outcome]"]) -> None:
        if not calls:
            return
        telemetry.observe_gathered(self.name, len(calls))
        try:
            outcomes = await self._own.run(lambda tx: self._gathered(tx, [call.item for call in calls]))
        except NotConnected as refusal:
            self._refuse(calls, refusal)
            self._refuse_waiting(refusal)
        except OutcomeUnknown as refusal:
            self._refuse(calls, refusal)
        except PartlyDone as error:
            if isinstance(error.__cause__, Beside):
                self._go_beside(calls, None)
            elif self._repeatable:
                self._go_beside(calls, error.__cause__)
            else:
                self._refuse(calls, OutcomeUnknown("A statement failed after another had gone in."))
        except Beside:
            self._go_beside(calls, None)
        except Exception as error:
            sick = unavailable(error) if _sick(error) else None
            if sick is not None:
                self._refuse(calls, sick)
            else:
                self._go_beside(calls, error)
        except BaseException:
            self._refuse(calls, OutcomeUnknown("This instance ended before the outcome was known."))
            raise
        else:
            self._answer(calls, outcomes)

    def _answer(self, calls: Sequence["_Call[Item, Outcome]"], outcomes: Sequence[Outcome]) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            if not call.outcome.done():
                call.outcome.set_result(outcome)
            else:
                self._hand_back(call.item, outcome)

    def _hand_back(self, item: Item, outcome: Outcome) -> None:
        """In a task of its own: it holds nobody up, and nobody pays for its failure."""
        if self._lost is not None:
            task = asyncio.create_task(self._handed_back(self._lost, item, outcome), name=f"back of lane {self.name}")
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _handed_back(
        self, lost: Callable[[Item, Outcome], Awaitable[None]], item: Item, outcome: Outcome
    ) -> None:
        try:
            await lost(item, outcome)
        except Exception as error:
            log.warning("lane %s: what nobody waits for could not be handed back: %s", self.name, error)

    @staticmethod
    def _refuse(calls: Sequence["_Call[Item, Outcome]"], refusal: Exception) -> None:
        for call in calls:
            if not call.outcome.done():
                call.outcome.set_exception(refusal)

    def _refuse_unanswered(self, calls: Sequence["_Call[Item, Outcome]"], task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            self._refuse(calls, OutcomeUnknown("This instance ended before the outcome was known."))

    def _refuse_waiting(self, refusal: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for calls in waiting.values():
            self._refuse(calls, refusal)

    # --- beside the lane ----------------------------------------------------------------------------------------------

    def _go_beside(self, calls: list["_Call[Item, Outcome]"], cause: BaseException | None) -> None:
        """Without a cause together, else each alone."""
        if cause is not None:
            log.debug("%d calls of lane %s go each alone: %s", len(calls), self.name, cause)
        for part in [calls] if cause is None else [[call] for call in calls]:
            task = asyncio.create_task(self._serve_beside(part), name=f"beside lane {self.name}")
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)
            # One that was ended, perhaps before it began.
            task.add_done_callback(functools.partial(self._refuse_unanswered, part))

    async def _serve_beside(self, calls: list["_Call[Item, Outcome]"]) -> None:
        try:
            async with self._beside_at_once:
                items = [call.item for call in calls]
                outcomes = await self._db.again(lambda tx: self._alone(tx, items), generic_plan=self._generic_plan)
        except Exception as error:
            if len(calls) > 1 and not isinstance(error, (Unavailable, OutcomeUnknown)):
                self._go_beside(calls, error)
            else:
                self._refuse(calls, error)
        else:
            self._answer(calls, outcomes)


class _Call(Generic[Item, Outcome]):
    __slots__ = ("item", "outcome")

    def __init__(self, item: Item, outcome: "asyncio.Future[Outcome]") -> None:
        self.item = item
        self.outcome = outcome


def _sick(error: Exception) -> bool:
    cause = error.__cause__ if isinstance(error, Refusal) else error
    return isinstance(cause, psycopg.Error) and (cause.sqlstate or "")[:2] in _SICK
