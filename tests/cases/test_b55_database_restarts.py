"""B55: the database restarts, dies, freezes or drops one connection: 503 meanwhile, and everything works again soon."""

# ruff: noqa: B023 (the calls have run before their loop goes on)

import contextlib
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import httpx2
import pytest

from tests.cases.support import Api, Sql, books, read_answer
from tests.harness import wait_for

SURE = {"synchronous_commit": "on", "full_page_writes": "on"}
STORM = {"FENCEPOST_STATEMENT_TIMEOUT_SECONDS": "2"}
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"


@pytest.fixture
def away(postgres_server, instance):
    """(server, two instances that may answer 503, SQL) on a private server."""
    server = postgres_server(**SURE)
    url = server.create_database()
    apis = [instance(away=True, FENCEPOST_DATABASE_URL=url, **STORM) for _ in range(2)]
    return server, apis, Sql(url)


class Load:
    """A producer and worker that repeats what got no answer, as a good client does; it keeps what was promised."""

    def __init__(self, api: Api, name: str) -> None:
        self.api = Api(api.url, may_be_away=True)
        self.name = name
        self.promised: set[str] = set()
        self.done: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def until_answered(self, call):
        while True:
            with contextlib.suppress(httpx2.TransportError):
                reply = call()
                if reply.status != 503:
                    return reply
            if self.stopped.wait(0.05):
                return None

    def _run(self) -> None:
        try:
            number = 0
            while not self.stopped.is_set():
                number += 1
                key = f"{self.name}-{number}"
                reply = self.until_answered(lambda key=key: self.api.enqueue("load", number, key=key))
                if reply is None:
                    return
                assert reply.status in (200, 201), reply.body
                self.promised.add(reply.body["id"])
                request = {
                    "worker_id": self.name,
                    "queues": ["load"],
                    "lease_seconds": 60,
                    "request_id": str(uuid.uuid4()),
                }
                reply = self.until_answered(lambda request=request: self.api.call("POST", "/v1/jobs/claim", request))
                if reply is None:
                    return
                assert reply.status == 200, reply.body
                for job in reply.body["jobs"]:
                    ended = self.until_answered(lambda job=job: self.api.complete(job, result=number))
                    if ended is None:
                        return
                    # Ours for a minute: a repeat of a done whose answer was lost is a 200 as well.
                    assert (ended.status, ended.body.get("status")) == (200, "done"), ended.body
                    self.done[job["id"]] = number
        except BaseException as error:
            self.errors.append(error)

    def does_more(self, count: int, seconds: float) -> None:
        before = len(self.done)
        wait_for(lambda: self.errors or len(self.done) >= before + count, seconds)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join(30)
        self.api.close()
        assert not self.errors, self.errors


def all_refused(api):
    """No 2xx without a commit, no empty list, and the two kinds of health."""
    wait_for(lambda: api.call("GET", "/readyz").status == 503, 5, 0.05)
    assert api.call("GET", "/livez").status == 200
    for number, (method, path, body) in enumerate(
        [
            ("POST", "/v1/jobs", {"queue": "q", "payload": 1}),
            ("POST", "/v1/jobs/claim", {"worker_id": "w", "queues": ["q"]}),
            ("POST", "/v1/jobs/claim", {"worker_id": "w", "queues": ["q"], "wait_seconds": 0.5}),
            ("POST", f"/v1/jobs/{uuid.uuid4()}/complete", {"attempt_token": str(uuid.uuid4())}),
            ("GET", "/v1/jobs", None),
        ]
    ):
        reply = api.call(method, path, body)
        assert (reply.status, reply.code) in ((503, "unavailable"), (503, "outcome-unknown")), (number, reply.body)
    # The counters alone; or, where it has been unknown for long whether a key must be asked, a refusal.
    assert api.http.get("/metrics").status_code in (200, 503)


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def whole_again(apis, sql, seconds=10.0):
    """Within ten seconds: ready, reclaim, and the wake-up of a poll by a job enqueued at the other instance."""
    deadline = time.monotonic() + seconds
    left = lambda: max(0.5, deadline - time.monotonic())  # noqa: E731
    for api in apis:
        wait_for(lambda api=api: api.call("GET", "/readyz").status == 200, left(), 0.05)
    queue = f"after-{uuid.uuid4().hex[:6]}"

    def lapsed():
        reply = apis[0].enqueue(queue)
        if not reply.ok:
            return None
        got = apis[1].call("POST", "/v1/jobs/claim", {"worker_id": "w", "queues": [queue], "lease_seconds": 60})
        return got.body["jobs"][0]["id"] if got.ok and got.body["jobs"] else None

    job_id = wait_for(lapsed, left())
    sql.lapse(job_id)
    wait_for(lambda: apis[0].get(job_id)["status"] == "queued", left())
    wait_for(lambda: all(woken(apis[n], apis[1 - n]) < 0.5 for n in range(2)), left())


def woken(waiting, enqueuing):
    """Seconds between an enqueue at one instance and the answer of a poll at another."""
    queue = f"wake-{uuid.uuid4().hex[:6]}"
    body = {"worker_id": "w", "queues": [queue], "wait_seconds": 8, "lease_seconds": 60}
    sock = waiting.send_raw("POST", "/v1/jobs/claim", body)
    time.sleep(0.1)  # so that it waits; one that has not come so far finds the job at once
    began = time.monotonic()
    if not enqueuing.enqueue(queue).ok:
        return 99.0
    status, answer = read_answer(sock)
    return time.monotonic() - began if status == 200 and b"attempt_token" in answer else 99.0


def test_restarts_under_load(away):
    """Fast, immediate, and kill -9 of the server, with both instances under load."""
    server, apis, sql = away
    with Load(apis[0], "one") as one, Load(apis[1], "two") as two:
        for how in ("fast", "immediate", "kill"):
            one.does_more(20, 15)
            server.kill9() if how == "kill" else server.stop(how)
            for api in apis:
                all_refused(api)
            server.start()
            whole_again(apis, sql)
            two.does_more(5, 10)
    promised = one.promised | two.promised
    done = {**one.done, **two.done}
    rows = {
        str(row["id"]): row for row in sql("SELECT id, status, result::text AS result FROM jobs WHERE queue = 'load'")
    }
    assert promised <= set(rows)
    for job_id, result in done.items():
        assert rows[job_id]["status"] == "done", rows[job_id]
        assert rows[job_id]["result"] == str(result)
    # One more than was promised can be there for each call whose answer we stopped waiting for.
    assert len(rows) - len(promised) <= 2
    books(apis[0], sql, "load", len(rows))
    # And at rest again: no loop spins. Both instances have passes of 50 ms, which cost little.
    pids = [api.service.process.pid for api in apis]
    before = [cpu_seconds(pid) for pid in pids]
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 1.5, 5, 0.1)
    spent = [(cpu_seconds(pid) - past) / (time.monotonic() - began) for pid, past in zip(pids, before, strict=True)]
    assert max(spent) < 0.6, spent


def test_the_listening_connection_lost_or_dumb(away):
    """Terminated, and then frozen (packets that go nowhere): wake-ups between instances come back within 10 s."""
    _, apis, sql = away
    wait_for(lambda: len(sql(BACKENDS, "fencepost listen")) == 2, 10)
    whole_again(apis, sql)
    sql(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) b", "fencepost listen")
    whole_again(apis, sql)
    wait_for(lambda: len(sql(BACKENDS, "fencepost listen")) == 2, 10)
    frozen = [row["pid"] for row in sql(BACKENDS, "fencepost listen")]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        whole_again(apis, sql, 10)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    whole_again(apis, sql)


def test_a_frozen_server(away):
    """The server and all its backends stand still: refusals in time, not calls that hang; and then they go on."""
    server, apis, sql = away
    frozen = [server.process.pid, *[row["pid"] for row in sql(BACKENDS, "fencepost%")]]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for api in apis:
            wait_for(lambda api=api: api.call("GET", "/readyz").status == 503, 5, 0.05)
            assert time.monotonic() - began < 5.5
            assert api.call("GET", "/livez").status == 200
        for api in apis:
            began = time.monotonic()
            assert api.enqueue("q").status == 503
            assert time.monotonic() - began < 10
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    whole_again(apis, sql)


def test_polls_that_wait_through_a_restart(away):
    """They are served after it, or refused; none is told an empty list while nothing could be asked."""
    server, apis, sql = away
    body = {"worker_id": "w", "queues": ["q"], "lease_seconds": 60}
    long = apis[0].send_raw("POST", "/v1/jobs/claim", {**body, "wait_seconds": 25})
    short = apis[0].send_raw("POST", "/v1/jobs/claim", {**body, "queues": ["other"], "wait_seconds": 3})
    wait_for(lambda: apis[0].metric("fencepost_waiters") == 2, 5, 0.05)
    server.stop("immediate")
    wait_for(lambda: apis[0].call("GET", "/readyz").status == 503, 5, 0.05)
    assert read_answer(short)[0] == 503
    server.start()
    whole_again(apis, sql)
    assert apis[1].enqueue("q").status == 201
    status, answer = read_answer(long)
    assert status == 503 or (status == 200 and b"attempt_token" in answer)
    wait_for(lambda: apis[0].counts("q")["processing"] + apis[0].counts("q")["queued"] == 1, 5)


def test_a_grace_for_the_workers_that_could_not_be_heard(postgres_server, instance):
    """An outage longer than 5 s, with a grace of 5: no lapse is taken before it is over, all are 10 s after it."""
    server = postgres_server(**SURE)
    url = server.create_database()
    api = instance(away=True, FENCEPOST_DATABASE_URL=url, FENCEPOST_OUTAGE_GRACE_SECONDS="5")
    sql = Sql(url)
    api.enqueued("q", 2)
    alive, dead = api.claim("q", 2, lease=1)
    server.stop("fast")
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 6, 10, 0.1)
    server.start()
    wait_for(lambda: api.call("GET", "/readyz").status == 200, 10, 0.05)
    wait_for(lambda: sql("SELECT grace_until FROM loops WHERE name = 'reclaim'")[0]["grace_until"], 10)
    back = time.monotonic()
    # The lapse was long ago, and the worker still gets through.
    assert api.heartbeat(alive, lease_seconds=60).status == 200
    assert api.get(dead["id"])["status"] == "processing"
    wait_for(lambda: api.get(dead["id"])["status"] == "queued", 15)
    assert 3 < time.monotonic() - back < 15
    assert api.complete(alive).status == 200
    assert api.get(dead["id"])["reclaim_count"] == 1
    books(api, sql, "q", 2)
