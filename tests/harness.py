"""What the fixtures are made of: private PostgreSQL servers, real service processes, the service in this process."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import psycopg
from psycopg import sql

from app import devdb

ROOT = Path(__file__).resolve().parents[1]


def wait_for(fact, seconds: float = 30.0, every: float = 0.01):
    """The first truthy answer of `fact()`; fails with its last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := fact()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s; the last answer was {answer!r}")
        time.sleep(every)
    return answer


async def wait_until(fact, seconds: float = 30.0, every: float = 0.01):
    """As `wait_for`, with `fact` a coroutine function."""
    deadline = time.monotonic() + seconds
    while not (answer := await fact()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s; the last answer was {answer!r}")
        await asyncio.sleep(every)
    return answer


class PostgresServer:
    """A PostgreSQL on its own data folder, ours alone. Safe against nothing but a process's death."""

    def __init__(self, data_dir: Path, settings: dict[str, str] | None = None) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.cluster = devdb.Cluster(data_dir, devdb.find_binaries(None), {**devdb.UNSAFE, **(settings or {})})
        self.cluster.make("--no-sync")
        self.url = self.cluster.url
        self.log = data_dir / "postgres.log"

    @property
    def process(self) -> subprocess.Popen:
        assert self.cluster.process is not None
        return self.cluster.process

    def start(self) -> "PostgresServer":
        def up() -> bool:
            if self.cluster.process is None or self.cluster.process.poll() is not None:
                # After kill9 the children may still hold the shared memory for a moment: then it ends, and again.
                with self.log.open("ab") as log:
                    self.cluster.start(log)
            return devdb.answers(self.url)

        wait_for(up)
        return self

    def stop(self, mode: str = "fast") -> None:
        """`mode` as pg_ctl names it: smart, fast, immediate."""
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        self.cluster.stop(signals[mode])

    def kill9(self) -> None:
        """Kill the postmaster; its children see that and leave by themselves."""
        self.process.kill()
        self.process.wait()

    def execute(self, statement: str, params=None, url: str | None = None) -> list[tuple]:
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, params)
            return cursor.fetchall() if cursor.description else []

    def create_database(self, template: str | None = None) -> str:
        """A fresh database; returns its URL."""
        return create_database(self.url, template)


def create_database(server_url: str, template: str | None = None) -> str:
    name = f"fp_{uuid.uuid4().hex[:16]}"
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template:
        statement += sql.SQL(" TEMPLATE {} STRATEGY file_copy").format(sql.Identifier(template))
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(statement)
    return url_of_database(server_url, name)


def drop_database(server_url: str, url: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(str(name))))


def url_of_database(server_url: str, name: str) -> str:
    """The same server, another database. In the shape of a URL, since a service gets it by its environment."""
    return re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", rf"\1/{name}", server_url)


READY = re.compile(r"fencepost: ready on (?P<url>http://\S+)")


class Service:
    """A real service process, started as a user would start it."""

    def __init__(self, folder: Path, arguments: list[str], environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "stdout.log", folder / "stderr.log"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FENCEPOST_", "PG"))}
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "app", "serve", *arguments],
                cwd=folder,
                env={**inherited, "PYTHONPATH": str(ROOT), **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.url = ""

    def wait_ready(self, seconds: float = 60.0) -> "Service":
        def ready():
            if self.process.poll() is not None:
                raise AssertionError(f"the service ended with {self.process.returncode}:\n{self.log()}")
            return READY.search(self.out.read_text())

        self.url = wait_for(ready, seconds)["url"]
        return self

    def log(self) -> str:
        """All that it wrote so far, stdout first."""
        return self.out.read_text() + self.err.read_text()

    def kill(self) -> None:
        """kill -9, with its uvicorn workers if it has any (they are in its session)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, seconds: float = 20.0) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the service did not end within {seconds} s:\n{self.log()}") from None
        return self.process.returncode


@contextlib.asynccontextmanager
async def in_process(**settings) -> AsyncIterator[httpx2.AsyncClient]:
    """The service in this process with its lifespan run; the client has it as `.app`."""
    from app.main import create_app
    from app.settings import Settings

    app = create_app(Settings(**settings))
    async with lifespan(app):
        transport = httpx2.ASGITransport(app=app, client=("127.0.0.1", 50000))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
            client.app = app
            yield client


@contextlib.asynccontextmanager
async def lifespan(app) -> AsyncIterator[None]:
    # In a task of its own: pytest may end a fixture in another task than began it, which cancel scopes do not bear.
    up, down = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with app.router.lifespan_context(app):
            up.set()
            await down.wait()

    task = asyncio.create_task(live())
    waiting = asyncio.create_task(up.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        if not task.done():
            yield
    finally:
        down.set()
        await task


def own_processes(mark: str) -> Iterator[tuple[int, str]]:
    """(pid, command line) of every process whose command line or working folder holds `mark`. Linux only."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line and (mark in line or mark in str((folder / "cwd").readlink())):
                    yield int(folder.name), line


def nobody_left(mark: str | Path) -> None:
    """Wait until no process of `mark` is left. A moment is allowed: Python's own helper of the worker processes ends
    when the pipe to its parent closes, that is after its parent.
    """
    wait_for(lambda: not list(own_processes(str(mark))), 10)
