"""Behind pgbouncer in transaction mode: no prepared statements, no session state; wake-ups by polling or DIRECT_URL."""

import asyncio
import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psycopg
import pytest

from app.db import Database
from app.errors import AttemptEnded, OutcomeUnknown
from app.jobs import intake, lease
from app.jobs.model import Beat, ClaimCall, Ending, NewJob
from app.lanes import Lane
from app.migrations import upgrade
from tests.factories import a_job, read
from tests.harness import wait_for, wait_until

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")

pytestmark = pytest.mark.skipif(
    PGBOUNCER is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)"
)


@contextlib.contextmanager
def pooler(database_url, log):
    """The URL of a database through a pgbouncer with few server connections."""
    target = psycopg.conninfo.conninfo_to_dict(database_url)
    host, folder = str(target["host"]), Path(tempfile.mkdtemp(prefix="fencepost-pooler-"))
    by_socket = host.startswith("/")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "users.txt").write_text(f'"{target["user"]}" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
{target["dbname"]} = host={"/proc/self/cwd" if by_socket else host} port={target.get("port", 5432)}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users.txt
pool_mode = transaction
default_pool_size = 4
max_client_conn = 200
"""
    )
    command = [str(PGBOUNCER), str(folder / "pgbouncer.ini")]
    if os.geteuid() == 0:
        # It refuses to run as root. The server's socket lies in a folder of its user's, perhaps below one that only
        # root may enter: hence by the working directory.
        uid = Path(host).stat().st_uid if by_socket else pwd.getpwnam("nobody").pw_uid
        for path in (folder, *folder.iterdir()):
            os.chown(path, uid, -1)
        command = ["setpriv", "--reuid", str(uid), "--clear-groups", *command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=host if by_socket else "/")
    url = f"postgresql://{target['user']}@127.0.0.1:{port}/{target['dbname']}"

    def answers():
        assert process.poll() is None, log.read_text()
        try:
            psycopg.connect(url, prepare_threshold=None, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        wait_for(answers)
        yield url
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


@pytest.fixture
def pooled(database_url, tmp_path):
    """The test's database through a pgbouncer."""
    with pooler(database_url, tmp_path / "pgbouncer.log") as url:
        yield url


def enqueue_claim_complete(service, number: int) -> int:
    done = 0
    with httpx2.Client(base_url=service.url, timeout=60) as client:
        for n in range(25):
            key = {"Idempotency-Key": uuid.uuid4().hex}
            client.post("/v1/jobs", json={"queue": "q", "payload": [number, n]}, headers=key).raise_for_status()
            claim = {"worker_id": f"w{number}", "queues": ["q"], "max_jobs": 2, "wait_seconds": 1}
            for job in client.post("/v1/jobs/claim", json=claim).raise_for_status().json()["jobs"]:
                body = {"attempt_token": job["attempt_token"], "worker_id": f"w{number}"}
                client.post(f"/v1/jobs/{job['id']}/heartbeat", json=body).raise_for_status()
                end = {"attempt_token": job["attempt_token"], "result": n}
                client.post(f"/v1/jobs/{job['id']}/complete", json=end).raise_for_status()
                done += 1
    return done


@pytest.mark.parametrize("direct", [False, True])
def test_the_whole_life_behind_a_pooler(serve, pooled, database_url, direct):
    environment = {"FENCEPOST_DATABASE_URL": pooled, "FENCEPOST_PREPARED_STATEMENTS": "false"}
    if direct:
        environment["FENCEPOST_DIRECT_URL"] = database_url
    one, two = serve(**environment), serve(**environment)
    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda n: enqueue_claim_complete([one, two][n % 2], n), range(8)))
    with httpx2.Client(base_url=one.url) as client:
        left = client.post("/v1/jobs/claim", json={"worker_id": "w", "queues": ["q"], "max_jobs": 100}).json()["jobs"]
    assert sum(done) + len(left) == 200
    with psycopg.connect(database_url) as connection:
        counts = dict(connection.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall())
    assert counts == {"done": sum(done)} | ({"processing": len(left)} if left else {})


def test_a_waiter_on_another_instance_is_woken_without_a_listening_connection(serve, pooled):
    environment = {"FENCEPOST_DATABASE_URL": pooled, "FENCEPOST_PREPARED_STATEMENTS": "false"}
    one, two = serve(**environment), serve(**environment)

    def wait():
        claim = {"worker_id": "w", "queues": ["q"], "wait_seconds": 20}
        begun = time.monotonic()
        jobs = httpx2.post(f"{one.url}/v1/jobs/claim", json=claim, timeout=60).json()["jobs"]
        return jobs, time.monotonic() - begun

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        wait_for(lambda: "fencepost_waiters 1.0" in httpx2.get(f"{one.url}/metrics").text, every=0.1)
        httpx2.post(f"{two.url}/v1/jobs", json={"queue": "q", "payload": 1}).raise_for_status()
        jobs, seconds = waiting.result()
    assert len(jobs) == 1
    assert seconds < 15, "woken by polling, not by the end of its time"


async def test_lanes_behind_a_pooler(pooled, database_url):
    """Gathered, each with its own answer; a poisoned job alone; nothing of a statement that failed stays."""
    db = Database(pooled, pool_size=3, prepared=False)
    await db.open()
    gathered = []

    async def heartbeat(tx, beats):
        gathered.append(len(beats))
        return await lease.heartbeat(tx, beats)

    lanes = [Lane(db, "enqueue", intake.enqueue), Lane(db, "beat", heartbeat), Lane(db, "end", lease.end)]
    enqueue, beat, end = lanes
    admin = psycopg.connect(database_url, autocommit=True)
    try:
        admin.execute(
            """
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION 'refused for the test' USING ERRCODE = '23514'; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON jobs FOR EACH ROW WHEN (NEW.kind = 'poison')
            EXECUTE FUNCTION refuse();
            """
        )
        kinds = ["k", "k", "poison", "k"]
        jobs = [NewJob("q", str(n), kind=kind, unique_key=f"u{n % 2}") for n, kind in enumerate(kinds)]
        first, second, poisoned, again = await asyncio.gather(*map(enqueue, jobs), return_exceptions=True)
        assert isinstance(poisoned, psycopg.errors.CheckViolation)
        assert (first["deduplicated"], second["deduplicated"], again["deduplicated"]) == (False, False, True)
        assert again["id"] == second["id"]

        async with db.begin() as tx:
            made = [await a_job(tx, "processing") for _ in range(20)]
        answers = await asyncio.gather(*(beat(Beat(job.id, job.token, "w", 500.0)) for job in made))
        assert [answer["id"] for answer in answers] == [job.id for job in made]
        assert gathered == [20]
        # All connections of the pooler die. Whoever is the first to find that may be refused, and comes again.
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

        async def ended():
            with contextlib.suppress(Exception):
                return await end(Ending("complete", made[0].id, made[0].token, b"x"))

        first = await ended() or await ended()
        assert first["status"] == "done"
        same, other = (
            Ending("complete", made[0].id, made[0].token, b"x"),
            Ending("fail", made[0].id, made[0].token, b""),
        )
        assert await end(same) == first
        assert isinstance(await end(other), AttemptEnded)
        grants = await lease.claim_once(db, ["q"], ClaimCall("w", 9))
        assert len(grants.jobs) == 2
        async with db.begin() as tx:
            assert (await read(tx, made[0]))["status"] == "done"
    finally:
        admin.close()
        for lane in lanes:
            await lane.close()
        await db.close()


@pytest.mark.parametrize("prepared", [False, True])
async def test_what_the_pooler_says_of_a_lost_server_is_no_word_of_the_server(postgres_server, tmp_path, prepared):
    """A backend is ended while it waits for its standby, its commit already written. The pooler then makes an error of
    its own (08P01), which must not be read as "nothing was done": the job would be enqueued a second time."""
    server = postgres_server(synchronous_commit="local")
    url = server.create_database()
    upgrade(url)
    server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    server.stop()
    server.start()
    server.execute(f"ALTER DATABASE {psycopg.conninfo.conninfo_to_dict(url)['dbname']} SET synchronous_commit = on")
    with pooler(url, tmp_path / "pgbouncer.log") as pooled_url:
        db = Database(pooled_url, pool_size=2, statement_timeout=2.0, prepared=False)
        await db.open()
        lane = Lane(db, "enqueue", intake.enqueue)
        if prepared:
            db._begin = "BEGIN"  # each statement a transaction, as through a pooler of sessions
        try:
            task = asyncio.create_task(lane(NewJob("q", "1")))
            waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            [(pid,)] = await wait_until(lambda: asyncio.to_thread(server.execute, waits), 10)
            server.execute("SELECT pg_terminate_backend(%s)", [pid])
            # Whatever is sent now does not wait any more.
            server.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            server.execute("SELECT pg_reload_conf()")
            [outcome] = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(outcome, OutcomeUnknown), outcome
            assert server.execute("SELECT count(*) FROM jobs", url=url) == [(1,)]
        finally:
            await lane.close()
            await db.close()
