"""LISTEN and NOTIFY between instances: a hint that a queue has something, sparingly, and never the truth.

Sent after the commit on a connection of its own turn, for NOTIFY in the enqueue's transaction would put every
commit in one line. Only jobs for which no waiter of this instance was woken are worth a hint; names are gathered
for a moment and go out in one statement. Lost hints cost latency only: `waiting.DueClock` asks every few seconds.
"""

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable

import psycopg

from app.db import Database, Own, Tx
from app.jobs.waiting import WaitingRoom

log = logging.getLogger("fencepost.hints")

CHANNEL = "fencepost"
SEND = "SELECT pg_notify('fencepost', %(payload)s)"
REST_SECONDS = 0.01
"""Between two statements. What is alone goes out at once; under load names are gathered for so long."""
MAX_PAYLOAD = 7_000
PING_SECONDS = 3.0
PONG_SECONDS = 2.0
LATER = "*"
"""In place of queues: something falls due later than now; ask the clock."""


class Hints:
    """`listen` and `send_gathered` are run as tasks; `note` is called for each claimable job."""

    def __init__(self, db: Database, listen_url: str | None, room: WaitingRoom, sooner: Callable[[], None]) -> None:
        self._db = db
        self._url = listen_url
        self._room = room
        self._sooner = sooner
        self._me = uuid.uuid4().hex[:12]
        self._pending: set[str] = set()
        self._some = asyncio.Event()
        self.live = False

    def note(self, queue: str) -> None:
        self._pending.add(queue)
        self._some.set()

    async def send_gathered(self) -> None:
        async with contextlib.aclosing(self._db.own()) as own:
            await self._send_gathered(own)

    async def _send_gathered(self, own: Own) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            names, self._pending = sorted(self._pending), set()
            try:
                for payload in self._payloads(names):
                    await own.run(functools.partial(Tx.run, sql=SEND, params={"payload": payload}))
                await asyncio.sleep(REST_SECONDS)
            except Exception as error:
                log.debug("a hint was not sent: %s", error)
                await asyncio.sleep(0.5)

    def _payloads(self, names: list[str]) -> list[str]:
        payloads, line = [], self._me
        for name in names:
            if len(line) + len(name) + 1 > MAX_PAYLOAD:
                payloads.append(line)
                line = self._me
            line += f" {name}"
        return [*payloads, line]

    def heard(self, payload: str) -> None:
        sender, *names = payload.split(" ")
        if sender == self._me:
            return
        for name in names:
            if name == LATER:
                self._sooner()
            else:
                self._room.wake(name, more=True)

    async def listen(self) -> None:
        """For ever: connect, listen, and check that the other side still lives; dropped packets look like silence."""
        delay = 0.1
        while self._url is not None:
            started = time.monotonic()
            try:
                await self._listen_once(self._url)
            except (psycopg.Error, OSError, TimeoutError) as error:
                if self.live:
                    log.warning("the listening connection was lost: %s", error)
            self.live = False
            self._sooner()
            delay = 0.1 if time.monotonic() - started > 10 else min(delay * 2, 2.0)
            await asyncio.sleep(delay)

    async def _listen_once(self, url: str) -> None:
        async with asyncio.timeout(5.0):
            connection = await psycopg.AsyncConnection.connect(
                url,
                autocommit=True,
                connect_timeout=3,
                prepare_threshold=None,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                application_name="fencepost listen",
            )
        try:
            async with asyncio.timeout(5.0):
                await connection.execute("LISTEN fencepost")
            self.live = True
            # What was sent while nobody listened is unknown: look once.
            self._sooner()
            while True:
                async for notification in connection.notifies(timeout=PING_SECONDS):
                    self.heard(notification.payload)
                # The first makes psycopg ask the server to stop and wait ten seconds more for a dumb one; the second
                # ends that.
                async with asyncio.timeout(PONG_SECONDS + 0.2), asyncio.timeout(PONG_SECONDS):
                    await connection.execute("SELECT 1")
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1.0):
                    await connection.close()
