"""`serve` as a process: what it prints, what it refuses, how it ends."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import psycopg
import pytest
from pydantic import ValidationError

from app import __version__, devdb, serving
from app.settings import Settings, misspelt
from tests.harness import READY, ROOT, create_database, drop_database, nobody_left, wait_for


def fenced_in(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A verb run to its end."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FENCEPOST_", "PG"))}
    return subprocess.run(
        [sys.executable, "-P", "-m", "app", *words],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def refused(*words: str, **environment: str) -> str:
    """The one line that a verb which refuses to start says."""
    answer = fenced_in(*words, **environment)
    assert answer.returncode not in (0, None)
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    lines = answer.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def alive(url: str) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/livez").status_code == 200
    return False


def test_one_line_when_ready_and_the_port_is_real(serve):
    service = serve()
    assert alive(service.url)
    assert len(service.out.read_text().splitlines()) == 1
    assert not service.url.endswith(":0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_by_a_signal_and_a_second_does_no_harm(serve, number):
    service = serve()
    service.process.send_signal(number)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(12) == 0
    assert "Traceback" not in service.log()


def test_a_signal_before_it_is_ready_ends_it_too(serve):
    service = serve(ready=False, FENCEPOST_DATABASE_URL="postgresql://nobody@127.0.0.1:1/x")
    wait_for(lambda: "waiting for the database" in service.log())
    service.process.terminate()
    assert service.process.wait(6) == 0


@pytest.mark.skipif(not (ROOT / ".venv" / "fencepost-installed").exists(), reason="the environment is made by others")
@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["openapi"]])
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.3])
def test_ctrl_c_while_it_begins_shows_no_traceback(delay, words, database_url, tmp_path):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FENCEPOST_", "PG"))}
    process = subprocess.Popen(
        [sys.executable, "-S", str(ROOT / "fencepost"), *words],
        env={**inherited, "FENCEPOST_DATABASE_URL": database_url},
        # Held back until the file's first line, since the first Python's own beginning is nobody's to mend.
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(delay)  # the moment is what is tested
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 or (out and process.returncode == 0), (out, err)
    assert "Traceback" not in err
    assert "Interrupt" not in err


def test_several_workers_end_together(serve):
    service = serve("--workers", "2")
    assert alive(service.url)
    service.process.terminate()
    assert service.process.wait(15) == 0
    nobody_left(service.out.parent)


@pytest.mark.skipif(sys.platform != "linux", reason="deaths are passed on by the Linux kernel")
def test_kill_9_of_the_parent_takes_its_workers_along(serve):
    service = serve("--workers", "2")
    service.process.kill()
    service.process.wait()
    wait_for(lambda: not alive(service.url), 10)


def test_a_port_in_use_is_told(database_url):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("serve", "--port", str(port), FENCEPOST_DATABASE_URL=database_url)
    assert f"port {port}" in line
    assert "--port" in line


def test_beyond_loopback_a_key_is_needed(database_url):
    line = refused("serve", "--host", "0.0.0.0", "--port", "0", FENCEPOST_DATABASE_URL=database_url)
    assert "FENCEPOST_ADMIN_KEY" in line


def test_beyond_loopback_with_a_key(serve):
    service = serve("--host", "0.0.0.0", FENCEPOST_ADMIN_KEY="a-long-secret-for-this-test")
    assert alive(service.url.replace("0.0.0.0", "127.0.0.1"))


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"FENCEPOST_PORT": "http"}, "FENCEPOST_PORT"),
        ({"FENCEPOST_ADMIN_KEY": ""}, "FENCEPOST_ADMIN_KEY"),
        ({"FENCEPOST_ADMIN_KEY": "short"}, "FENCEPOST_ADMIN_KEY"),
        ({"FENCEPOST_STATEMENT_TIMEOUT_SECONDS": "inf"}, "FENCEPOST_STATEMENT_TIMEOUT_SECONDS"),
        ({"FENCEPOST_STATEMENT_TIMEOUT_SECONDS": "0.0001"}, "FENCEPOST_STATEMENT_TIMEOUT_SECONDS"),
        ({"FENCEPOST_OUTAGE_GRACE_SECONDS": "1e18"}, "FENCEPOST_OUTAGE_GRACE_SECONDS"),
        ({"FENCEPOST_WORKERS": "0"}, "FENCEPOST_WORKERS"),
        ({"FENCEPOST_HOST": "no.such.host.invalid", "FENCEPOST_DATABASE_URL": "x"}, "no.such.host.invalid"),
        ({"FENCEPOST_PG_BIN": "/nonexistent"}, "FENCEPOST_PG_BIN"),
        ({"FENCEPOST_DATABASE_URL": "mysql://x", "FENCEPOST_PORT": "0"}, "FENCEPOST_DATABASE_URL"),
    ],
)
def test_a_bad_setting_is_named(environment, word):
    assert word in refused("serve", **environment)


def test_every_number_has_bounds_and_is_finite():
    for name, field in Settings.model_fields.items():
        if field.annotation in (int, float):
            for value in ("nan", "inf", "-inf", "1e18", "-1"):
                with pytest.raises(ValidationError):
                    Settings(**{name: value})


def test_a_bad_value_of_an_option_names_the_option():
    assert "--port" in refused("serve", "--port", "99999", FENCEPOST_PORT="1")


def test_an_empty_address_is_none(monkeypatch):
    for name in ("DATABASE_URL", "DIRECT_URL", "PG_BIN", "DATA_DIR"):
        monkeypatch.setenv(f"FENCEPOST_{name}", "")
    settings = Settings()
    assert (settings.database_url, settings.direct_url, settings.pg_bin) == (None, None, None)
    assert "data_dir" not in settings.model_fields_set


def test_a_misspelt_setting_is_told_with_a_guess():
    answer = fenced_in("openapi", FENCEPOST_RECLAIM_INTERVAL="99", FENCEPOST_KEY="k", FENCEPOST_TEST_SEED="1")
    assert answer.returncode == 0
    assert answer.stderr.splitlines() == [
        "fencepost: FENCEPOST_RECLAIM_INTERVAL is no setting and is ignored; did you mean "
        "FENCEPOST_RECLAIM_INTERVAL_SECONDS?"
    ]
    assert misspelt(["FENCEPOST_COLOUR", "PATH"]) == ["FENCEPOST_COLOUR is no setting and is ignored."]


def test_the_help_cuts_no_summary_and_tells_the_version():
    for words in (["--help"], ["epoch", "--help"]):
        answer = fenced_in(*words, COLUMNS="80")
        assert answer.returncode == 0
        assert "..." not in answer.stdout.replace("[ARGS]...", "").replace("COMMAND [ARGS]...", ""), answer.stdout
    assert fenced_in("--version").stdout == f"fencepost {__version__}\n"


def test_a_bad_option_is_named():
    answer = fenced_in("serve", "--prot", "1")
    assert answer.returncode == 2
    assert "--prot" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_database_that_does_not_answer_is_told_without_its_password(capsys):
    with pytest.raises(serving.CannotStart) as caught:
        serving.wait_for_database("postgresql://me:hush@127.0.0.1:1/mine", patience=0.1)
    said = str(caught.value) + capsys.readouterr().err
    assert "mine at 127.0.0.1:1" in said
    assert "hush" not in said


@pytest.mark.parametrize("name", ["FENCEPOST_DATABASE_URL", "FENCEPOST_DIRECT_URL"])
@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://fp:S3cretPw@db/x?a=1",
        "postgres//fp:S3cretPw@db/x",
        "postgresql://fp:S3cretPw%zz@db/x",
        "postgresql://fp:a@S3cretPw@db/x",
        "postgresql://fp:S3cretPw/b@db/x",
        "postgresql://fp:a/S3cretPw@db/x",
        "postgresql://fp:a@db:S3cretPw/x",
        "host=db password='S3cretPw",
    ],
)
def test_an_unreadable_address_is_refused_without_a_word_of_it(name, url, database_url):
    addresses = {"FENCEPOST_DATABASE_URL": database_url, name: url}
    for verb in (["serve", "--port", "0"], ["migrate"]):
        line = refused(*verb, **addresses)
        assert line.startswith(f"fencepost: {name} ")
        assert "postgresql://user:password@host" in line
        assert "S3cretPw" not in line


def test_the_settings_tell_no_address():
    settings = Settings(database_url="postgresql://me:hush@db/x", direct_url="postgresql://me:hush@db/x")
    assert "hush" not in repr(settings)
    with pytest.raises(ValidationError) as caught:
        Settings(port="hush")
    assert "hush" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_told_once():
    assert "/proc/x" in refused("serve", "--port", "0", "--data-dir", "/proc/x")


def test_it_waits_for_a_database_that_comes_later(postgres_server, capsys):
    server = postgres_server()
    server.stop()
    # The waiting goes to the thread: a server started by one would end with it.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(serving.wait_for_database, server.url)
        wait_for(lambda: "waiting for the database" in capsys.readouterr().err)
        server.start()
        waiting.result(10)


def test_a_left_over_pretended_clock_is_refused(database_url, serve):
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET fencepost.now = '2020-01-01T00:00:00Z'")
    line = refused("serve", "--port", "0", FENCEPOST_DATABASE_URL=database_url)
    assert "2020" in line
    assert "fencepost.now" in line
    assert alive(serve(FENCEPOST_TEST_CLOCK="true").url)


def test_two_at_once_on_an_empty_database(serve, empty_database_url):
    pair = [serve(ready=False, FENCEPOST_DATABASE_URL=empty_database_url) for _ in range(2)]
    assert all(alive(service.wait_ready().url) for service in pair)


def test_options_go_before_the_environment(serve):
    assert alive(serve("--host", "127.0.0.1", FENCEPOST_HOST="192.0.2.1").url)


def test_migrate_and_then_again(server_url):
    url = create_database(server_url)
    try:
        for _ in range(2):
            answer = fenced_in("migrate", FENCEPOST_DATABASE_URL=url)
            assert answer.returncode == 0, answer.stderr
            assert "has this build's schema" in answer.stdout
    finally:
        drop_database(server_url, url)


def test_a_database_of_a_later_build_is_refused_unless_it_serves_us(database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'later'")
        answer = fenced_in("migrate", FENCEPOST_DATABASE_URL=database_url)
        assert answer.returncode == 0, answer.stderr
        connection.execute("DELETE FROM schema_compatibility")
    assert "later" in refused("migrate", FENCEPOST_DATABASE_URL=database_url)


def test_openapi_is_printed_without_a_database():
    answer = fenced_in("openapi")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("{")


def limits(soft: int, hard: int):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def said_of_files(soft: int, hard: int, *expected: int, **environment: str) -> str:
    """What `room_for_waiters` writes in a process of these limits; it prints the waiters and the new limit."""
    code = (
        "import resource; from app.serving import room_for_waiters; from app.settings import Settings; "
        "print(room_for_waiters(Settings()), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), **environment},
        preexec_fn=limits(soft, hard),
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    assert tuple(map(int, answer.stdout.split())) == (*expected, hard)
    return answer.stderr


def test_open_files_are_allowed_up_to_the_hard_limit():
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert said_of_files(512, hard, 1000, hard, FENCEPOST_MAX_WAITERS="1000") == ""


def test_fewer_claims_wait_where_the_hard_limit_is_low():
    said = said_of_files(512, 1024, 758, 1024)
    assert len(said.splitlines()) == 1
    assert "ulimit -n" in said
    assert "FENCEPOST_MAX_WAITERS=10000" in said
    assert "758 claims" in said


class TestEmbedded:
    """With the database of its own; two services on one folder."""

    def start(self, serve, folder):
        return serve("--data-dir", str(folder), FENCEPOST_DATABASE_URL=None)

    def test_sigterm_ends_the_database_too(self, serve, tmp_path):
        service = self.start(serve, tmp_path / "data")
        assert alive(service.url)
        assert service.stop() == 0
        nobody_left(tmp_path / "data")

    def test_another_one_serves_on_when_the_owner_is_killed(self, serve, tmp_path):
        folder = tmp_path / "data"
        owner, attached = self.start(serve, folder), self.start(serve, folder)
        url = devdb.url_of(folder)

        def born():
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url) as connection:
                return connection.execute("SELECT pg_postmaster_start_time()").fetchone()

        before = born()
        os.kill(owner.process.pid, signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda: born() not in (None, before))
        assert time.monotonic() - began < 3
        wait_for(lambda: httpx2.get(f"{attached.url}/readyz").status_code == 200)
        assert attached.stop() == 0
        nobody_left(folder)


def test_the_ready_line_says_where_the_data_is(serve, tmp_path):
    service = serve("--data-dir", str(tmp_path / "data"), FENCEPOST_DATABASE_URL=None)
    line = service.out.read_text()
    assert READY.match(line)
    assert str(tmp_path / "data") in line


def test_bind_prefers_loopback_facts():
    listener, loopback = serving.bind("localhost", 0)
    listener.close()
    assert loopback
    listener, loopback = serving.bind("0.0.0.0", 0)
    listener.close()
    assert not loopback


def test_a_password_is_in_no_description():
    assert "hush" not in serving.named("postgresql://me:hush@db.internal/mine")
    settings = Settings(database_url="postgresql://me:hush@db.internal/mine")
    assert "hush" not in serving._described(settings)


def test_counters_of_several_processes_are_summed(serve):
    service = serve("--workers", "2")
    for n in range(40):
        # A connection each, so that both processes get some.
        httpx2.post(f"{service.url}/v1/jobs", json={"queue": "q", "payload": n}).raise_for_status()
    for _ in range(5):
        assert 'fencepost_enqueues_total{queue="q"} 40.0' in httpx2.get(f"{service.url}/metrics").text
