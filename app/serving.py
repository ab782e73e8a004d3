"""Run the service: database first, then its schema, then the door. It ends with one line on stderr, not a traceback.

What must hold here: the port is bound before the database is touched (a busy port is told at once) but listens only
when all is ready; nothing listens beyond loopback without a key; a second SIGTERM does no harm.
"""

import asyncio
import gc
import ipaddress
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import psycopg
import sqlalchemy.exc
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from app import devdb
from app.keys.ops import check_admin_key
from app.main import create_app
from app.migrations import SchemaAhead, upgrade
from app.settings import Settings
from app.telemetry import configure_logs
from app.web.wire import BoundedHttp

START_PATIENCE = 30.0
"""Seconds that a database which does not answer is waited for at start."""


EXAMPLE = "postgresql://user:password@host:5432/name"

MANY_FILES = 65536
"""Open files that are allowed where the system lets us: beyond the waiting claims, workers keep connections open."""
MORE_FILES = 256
"""Open files beside the waiting claims and the pool: other calls, logs, libraries."""

early: list[int] = []
"""Signals that came between our readiness for them and uvicorn's."""


class CannotStart(Exception):
    """Why, in one line, and what to do about it. `told`: the line is on stderr already."""

    told = False


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises CannotStart."""
    _on_signals(leave)
    configure_logs()
    if settings.admin_key is not None:
        try:
            check_admin_key(settings.admin_key.get_secret_value())
        except ValueError as problem:
            raise CannotStart(str(problem)) from None
    listener, loopback = bind(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    with database(settings) as settings:
        check_clock(settings)
        if not loopback:
            check_key(settings)
        settings = settings.model_copy(update={"port": port, "max_waiters": room_for_waiters(settings)})
        try:
            listener.listen(2048)
        except OSError as error:
            raise CannotStart(f"port {port} is in use: {error.strerror}.") from None
        where = f"[{host}]" if ":" in host else host
        line = f"fencepost: ready on http://{where}:{port} (docs at /docs, {_described(settings)})"

        def announce() -> None:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        # uvicorn raises the signal again when it is done; from now on it only means that we are ending. What comes
        # before uvicorn listens for signals is given to it then.
        _on_signals(lambda number, frame: early.append(number))
        if settings.workers > 1:
            _run_many(settings, listener, announce)
        else:
            _Server(_configuration(settings, lambda: application(settings)), announce).run(sockets=[listener])


def bind(host: str, port: int) -> tuple[socket.socket, bool]:
    """A bound socket that does not listen yet, and whether it is loopback's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise CannotStart(f"--host {host} is no address of this machine: {error.strerror}.") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.set_inheritable(True)
    try:
        listener.bind(address)
    except OSError as error:
        raise CannotStart(f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port.") from None
    return listener, ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback


@contextmanager
def database(settings: Settings) -> Iterator[Settings]:
    """The settings with a `database_url` that answers and has this build's schema; the embedded one while inside."""
    keeper = None
    if settings.database_url is None:
        try:
            keeper = devdb.Keeper(settings.data_dir, settings.pg_bin)
            keeper.start()
        except devdb.NoDatabase as problem:
            if keeper is not None:
                keeper.stop()
            refusal = CannotStart(str(problem))
            # The keeper's thread has written what its process said.
            refusal.told = keeper is not None and keeper.complaint == str(problem)
            raise refusal from None
        settings = settings.model_copy(update={"database_url": keeper.url})
    try:
        for name in ("database_url", "direct_url"):
            check_address(f"FENCEPOST_{name.upper()}", getattr(settings, name))
        url = settings.direct_url or settings.database_url or ""
        wait_for_database(url)
        if settings.database_url not in (None, url):
            wait_for_database(settings.database_url or "")
        try:
            upgrade(url)
        except SchemaAhead as problem:
            raise CannotStart(str(problem)) from None
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            raise CannotStart(f"cannot migrate the database {named(url)}: {_first_line(error, url)}") from None
        yield settings
    finally:
        if keeper is not None:
            keeper.stop()


def check_address(name: str, url: str | None) -> None:
    """Raises CannotStart when it cannot be read as an address, or would be read otherwise than it was meant.

    What libpq says about such a text repeats it, password and all; so nothing of it is told.
    """
    if url is None:
        return
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        raise CannotStart(
            f"{name} is no PostgreSQL address; wanted is the form {EXAMPLE} (postgresql:// or postgres://, no driver's "
            "name; special characters of a password percent-encoded)."
        ) from None
    host, port = str(parts.get("host") or ""), str(parts.get("port") or "")
    # A bare @ or / in a password moves a part of it into the host, the port or the name, which messages show.
    misread = "://" in url and "@" in host + str(parts.get("dbname") or "")
    if misread or not all(each == "" or (each.isascii() and each.isdigit()) for each in port.split(",")):
        raise CannotStart(
            f"{name} cannot be read: is there an @, / or : in the password? Percent-encode it (%40, %2F, %3A). "
            f"Wanted is the form {EXAMPLE}."
        )


def wait_for_database(url: str, patience: float = START_PATIENCE) -> None:
    """Return when it answers; raise CannotStart when it does not within `patience` seconds."""
    deadline, told = time.monotonic() + patience, False
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError as error:
            if time.monotonic() > deadline:
                raise CannotStart(f"the database {named(url)} does not answer: {_first_line(error, url)}") from None
            if not told:
                told = True
                sys.stderr.write(f"fencepost: waiting for the database {named(url)}: {_first_line(error, url)}\n")
            time.sleep(min(0.5, patience))
        except psycopg.Error:
            raise CannotStart(f"the database's address cannot be used; wanted is the form {EXAMPLE}.") from None


def check_clock(settings: Settings) -> None:
    """A pretended clock left over from a test would stop all leases."""
    with psycopg.connect(settings.database_url or "", prepare_threshold=None) as connection:
        row = connection.execute("SELECT current_setting('fencepost.now', true)").fetchone()
    if row and row[0] and not settings.test_clock:
        raise CannotStart(
            f"the database pretends that it is {row[0]}: fencepost.now is set for it or for our role. "
            "ALTER DATABASE (or ROLE) ... RESET fencepost.now, or set FENCEPOST_TEST_CLOCK=true in a test."
        )


def check_key(settings: Settings) -> None:
    """Beyond loopback a key is always asked, so there must be one."""
    if settings.admin_key is not None:
        return
    with psycopg.connect(settings.database_url or "", prepare_threshold=None) as connection:
        row = connection.execute("SELECT EXISTS (SELECT FROM api_keys)").fetchone()
    if not (row and row[0]):
        raise CannotStart(
            f"--host {settings.host} is reachable by others and there is no API key yet. Set FENCEPOST_ADMIN_KEY to a "
            "long secret (it becomes the first key, of scope admin), or listen on 127.0.0.1."
        )


def room_for_waiters(settings: Settings) -> int:
    """How many claims may wait at once: each holds an open file, and an instance without a free one answers nobody.

    Raises the limit of open files first, which the worker processes inherit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_waiters + max(MORE_FILES, settings.max_waiters // 4) + settings.pool_size
    wanted = max(needed, MANY_FILES)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a limit beside this one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return settings.max_waiters
    room = max(0, min(settings.max_waiters, soft - settings.pool_size - max(MORE_FILES, soft // 4)))
    sys.stderr.write(
        f"fencepost: only {soft} open files are allowed (ulimit -n), and FENCEPOST_MAX_WAITERS={settings.max_waiters} "
        f"needs {needed}; at most {room} claims wait at once here. Raise the hard limit, or lower the setting.\n"
    )
    return room


def application(settings: Settings) -> Any:
    """The application, told of the end as soon as the signal comes: uvicorn itself tells it only when the last call
    has been answered, and a long-poll would hold that up. It is told by `app.state.drain()`, if it has one.
    """
    app = create_app(settings)
    _settle_memory()
    drain: Callable[[], None] | None = getattr(app.state, "drain", None)
    if drain is not None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            _chain(number, lambda: loop.call_soon_threadsafe(drain))
    return app


def _settle_memory() -> None:
    """The collector need not look again and again at what was made at the start and stays for good: 100 000 objects,
    measured as pauses of 60 ms and a tenth of the processor under load. Calls make few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def worker() -> Any:
    """The application in one of several processes, which end with their parent."""
    devdb.follow(os.getppid(), signal.SIGTERM)
    configure_logs()
    return application(Settings())


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for number in early:
            signal.raise_signal(number)
        if self.started and not self.should_exit:
            self.announce()


class _Workers(Multiprocess):
    announce: Callable[[], None]

    def init_processes(self) -> None:
        super().init_processes()
        self.signal_queue.extend(early)
        while not self.should_exit.is_set():
            self.handle_signals()
            if all(process.is_ready(timeout=1) for process in self.processes):
                self.announce()
                return
            if any(process.exitcode is not None for process in self.processes):
                return
            time.sleep(0.05)


def _run_many(settings: Settings, listener: socket.socket, announce: Callable[[], None]) -> None:
    # A worker builds its settings from the environment.
    values = {"HOST": settings.host, "PORT": settings.port, "DATABASE_URL": settings.database_url}
    values["MAX_WAITERS"] = settings.max_waiters
    os.environ.update({f"FENCEPOST_{name}": str(value) for name, value in values.items()})
    with tempfile.TemporaryDirectory(prefix="fencepost-metrics-") as folder:
        # The processes count into files here, so that any of them answers `/metrics` for all.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        workers = _Workers(_configuration(settings, "app.serving:worker"), sockets=[listener])
        workers.announce = announce
        workers.run()
    if any(process.exitcode == STARTUP_FAILURE for process in workers.processes):
        raise CannotStart("a worker process failed to start; see above.")


def _configuration(settings: Settings, factory: str | Callable[[], Any]) -> uvicorn.Config:
    return uvicorn.Config(
        factory,
        factory=True,
        lifespan="on",
        workers=settings.workers,
        http=BoundedHttp,
        ws="none",
        backlog=2048,
        timeout_keep_alive=75,
        # The rest of the grace is for the end of the lifespan and of the embedded database.
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_seconds * 0.8)),
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
        log_level="warning",
    )


def _chain(number: signal.Signals, then: Callable[[], object]) -> None:
    before = signal.getsignal(number)

    def both(got: int, frame: FrameType | None) -> None:
        then()
        if callable(before):
            before(got, frame)

    signal.signal(number, both)


def _on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """A signal's handler: end now, by way of what must be ended first."""
    _on_signals(lambda number, frame: None)
    raise SystemExit(130 if number == signal.SIGINT else 0)


def named(url: str) -> str:
    """An address without its password, for messages."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        return "(unreadable address)"
    return f"{parts.get('dbname', '')} at {parts.get('host', 'localhost')}:{parts.get('port', 5432)}"


def _described(settings: Settings) -> str:
    url = settings.database_url or ""
    if url == devdb.url_of(settings.data_dir):
        return f"data in {settings.data_dir.resolve()}"
    return f"database {named(url)}"


def _first_line(error: BaseException, url: str) -> str:
    """What went wrong, in one line, without the address and its password should the text hold them."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].replace(url, "…")
    with suppress(psycopg.Error):
        password = str(psycopg.conninfo.conninfo_to_dict(url).get("password") or "")
        if len(password) > 3 and password != "postgres":  # noqa: S105 - a word of many messages, and no secret
            line = line.replace(password, "…")
    return line
