"""The instances under test and what is done to them. Every choice is drawn from the seed; every fault is logged."""

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg

from tests.harness import PostgresServer, Service


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Instance:
    """A service process on a port of its own, which it keeps over restarts."""

    def __init__(self, folder: Path, database_url: str, environment: dict[str, str]) -> None:
        self.port = free_port()
        self._folder = folder
        self._environment = {"FENCEPOST_DATABASE_URL": database_url, **environment}
        self.service: Service | None = None

    def start(self) -> "Instance":
        self.service = Service(self._folder, ["--port", str(self.port)], self._environment)
        return self

    @property
    def pid(self) -> int:
        assert self.service is not None
        return self.service.process.pid

    def alive(self) -> bool:
        return self.service is not None and self.service.process.poll() is None

    def kill(self) -> None:
        if self.service is not None:
            self.service.kill()


FAULTS = {"kill": 10, "terminate": 3, "freeze": 3, "restart postgres": 2, "kill both": 1}
"""How often each is drawn, in parts."""


class Nemesis:
    def __init__(
        self,
        seed: int,
        server: PostgresServer,
        database_url: str,
        instances: list[Instance],
        say: Callable[[str], None],
    ) -> None:
        self._random = random.Random(f"{seed} nemesis")
        self._server = server
        self.url = database_url
        self._instances = instances
        self._say = say
        self._began = time.monotonic()
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self.unasked_deaths = 0
        # The kernel ends a server with the thread that started it: this one thread stays.
        self.keeper = ThreadPoolExecutor(1)

    def note(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.2f} s  {text}"
        self.log.append(line)
        self._say(line)

    async def rage(self, pause: tuple[float, float], stop: asyncio.Event) -> None:
        """Faults, one after another, until `stop`. All is up and running again when this returns."""
        while not stop.is_set():
            await self._sleep(self._random.uniform(*pause), stop)
            if stop.is_set():
                break
            fault = self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
            self.counts[fault] = self.counts.get(fault, 0) + 1
            await getattr(self, "_" + fault.replace(" ", "_"))()
            self.heal()

    def heal(self) -> None:
        for number, instance in enumerate(self._instances):
            if not instance.alive():
                self.unasked_deaths += 1
                self.note(f"instance {number} had ended by itself")
                instance.start()

    @staticmethod
    async def _sleep(seconds: float, stop: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(seconds):
                await stop.wait()
        except TimeoutError:
            pass

    async def _kill(self) -> None:
        number = self._random.randrange(len(self._instances))
        self.note(f"kill -9 instance {number}")
        self._instances[number].kill()
        await asyncio.sleep(self._random.uniform(0, 1))
        self._instances[number].start()

    async def _kill_both(self) -> None:
        self.note("kill -9 all instances")
        for instance in self._instances:
            instance.kill()
        await asyncio.sleep(self._random.uniform(0, 1))
        for instance in self._instances:
            instance.start()

    async def _freeze(self) -> None:
        number, seconds = self._random.randrange(len(self._instances)), self._random.uniform(0.5, 6)
        self.note(f"freeze instance {number} for {seconds:.1f} s")
        os.kill(self._instances[number].pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(self._instances[number].pid, signal.SIGCONT)

    async def _terminate(self) -> None:
        try:
            async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
                cursor = await connection.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                row = await cursor.fetchone()
                self.note(f"terminate {row[0] if row else 0} backends")
        except psycopg.Error as error:
            self.note(f"terminate backends: {error}")

    async def _restart_postgres(self) -> None:
        self.note("fast restart of PostgreSQL")

        def again() -> None:
            self._server.stop("fast")
            self._server.start()

        await asyncio.get_running_loop().run_in_executor(self.keeper, again)
        self.note("PostgreSQL answers again")
