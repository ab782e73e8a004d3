"""Lanes: what waits together goes as one statement, and nobody can tell by its answer.

Most tests hold a lane's operation up at a gate, so that what comes meanwhile is gathered for certain; the statements
are the real ones on a real PostgreSQL.
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter

import psycopg
import pytest
import pytest_asyncio

from app.db import Database, NotConnected, PartlyDone
from app.errors import AttemptEnded, IdempotencyMismatch, LeaseLost, OutcomeUnknown, Unavailable, UniqueKeyHeld
from app.jobs import intake, lease
from app.jobs.lease import Wish
from app.jobs.model import Beat, ClaimCall, Ending, NewJob
from app.lanes import MOST_CALLS, Beside, Lane
from app.migrations import upgrade
from tests.factories import a_job, read
from tests.harness import wait_for, wait_until


class Watched:
    """The gathered operation of a lane: what it was given and how many statements it took, with a gate before it."""

    def __init__(self, operation):
        self.operation = operation
        self.gathers = []
        self.statements = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, tx, items):
        self.gathers.append(list(items))
        self.entered.set()
        await self.gate.wait()
        outcomes = await self.operation(tx, items)
        self.statements.append(tx.answered)
        return outcomes

    @property
    def sizes(self):
        return [len(items) for items in self.gathers]


def watch(lane):
    watched = lane._gathered = Watched(lane._gathered)
    return watched


def watch_beside(lane):
    """What goes beside the lane, one list of items for each transaction."""
    seen, alone = [], lane._alone

    async def look(tx, items):
        seen.append(list(items))
        return await alone(tx, items)

    lane._alone = look
    return seen


def waiting(lane):
    return sum(len(calls) for calls in lane._waiting.values())


@contextlib.asynccontextmanager
async def one_under_way(lane, watched, first):
    """A statement of the lane is under way within the block: yields its task."""
    watched.entered.clear()
    watched.gate.clear()
    task = asyncio.ensure_future(first)
    try:
        await watched.entered.wait()
        yield task
    finally:
        watched.gate.set()


async def in_one_gather(lane, first, calls):
    """All outcomes, exceptions among them: of `first`, and of the calls, which came while it was under way."""
    watched = watch(lane)
    tasks = []
    try:
        async with one_under_way(lane, watched, first) as before:
            for number, call in enumerate(calls, 1):
                tasks.append(asyncio.ensure_future(call))
                await wait_until(lambda number=number: _true(waiting(lane) == number), 5, every=0)
        outcomes = await asyncio.gather(before, *tasks, return_exceptions=True)
    finally:
        lane._gathered = watched.operation
    assert watched.sizes == [1, len(tasks)]
    return outcomes[0], outcomes[1:]


async def _true(fact):
    return fact


def pid_of(lane):
    return lane._own._connection.info.backend_pid


@pytest_asyncio.fixture
async def service(client):
    return client.app.state.service


@pytest_asyncio.fixture
async def lane_on(db):
    """A factory of lanes on the test's database: `lane_on(operation, repeatable=True)`."""
    lanes = []

    def make(operation, alone=None, *, on=db, **how):
        lanes.append(Lane(on, "test", operation, alone, **how))
        return lanes[-1]

    yield make
    for lane in lanes:
        await lane.close()


@pytest.fixture
def admin(database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


async def echo(tx, items):
    await tx.row("SELECT 1 AS one")
    return [("echo", item) for item in items]


async def jobs_of(db, count, status="processing", **given):
    async with db.begin() as tx:
        return [await a_job(tx, status, **given) for _ in range(count)]


async def row_of(db, job):
    async with db.begin() as tx:
        return await read(tx, job)


def beat(job, seconds=30.0, **how):
    return Beat(job.id, how.get("token", job.token), how.get("worker", job.worker), seconds, how.get("progress"))


def ending(job, verb="complete", digest=b"x", **how):
    return Ending(verb, job.id, how.pop("token", job.token), digest, **how)


async def post(client, path, body, **headers):
    answer = await client.post(path, json=body, headers=headers)
    return answer.status_code, answer.json()


# --- gathering --------------------------------------------------------------------------------------------------------


async def test_calls_that_come_while_a_statement_runs_go_as_one(service):
    made = await jobs_of(service.db, 60)
    watched = watch(service.heartbeats)
    async with one_under_way(service.heartbeats, watched, service.heartbeats(beat(made[0]))) as first:
        others = [asyncio.create_task(service.heartbeats(beat(job, 500.0))) for job in made[1:]]
        await wait_until(lambda: _true(waiting(service.heartbeats) == 59), every=0)
    answers = await asyncio.gather(first, *others)
    assert watched.sizes == [1, 59]
    assert watched.statements == [1, 1]
    assert [answer["id"] for answer in answers] == [job.id for job in made]


async def test_single_calls_over_http_are_gathered_too(client, service):
    made = await jobs_of(service.db, 40)
    watched = watch(service.endings)

    def complete(job):
        body = {"attempt_token": str(job.token), "result": str(job.id)}
        return post(client, f"/v1/jobs/{job.id}/complete", body)

    async with one_under_way(service.endings, watched, complete(made[0])) as first:
        others = [asyncio.create_task(complete(job)) for job in made[1:]]
        await wait_until(lambda: _true(waiting(service.endings) == 39), every=0)
    answers = await asyncio.gather(first, *others)
    assert watched.sizes == [1, 39]
    assert watched.statements == [1, 1]
    for job, (status, body) in zip(made, answers, strict=True):
        assert (status, body["id"], body["status"]) == (200, str(job.id), "done")
        assert (await row_of(service.db, job))["result"] == str(job.id)


async def test_a_lone_caller_is_sent_in_the_first_turn_of_the_event_loop(lane_on):
    watched = Watched(echo)
    lane = lane_on(watched)
    await lane("warm")
    watched.entered.clear()
    task = asyncio.create_task(lane("alone"))
    await asyncio.sleep(0)  # the caller runs
    assert not watched.entered.is_set()
    await asyncio.sleep(0)  # and in the next turn the statement goes out
    assert watched.entered.is_set()
    assert await task == ("echo", "alone")


async def test_what_one_turn_brings_goes_together(lane_on):
    watched = Watched(echo)
    lane = lane_on(watched)
    assert await asyncio.gather(*(lane(n) for n in range(20))) == [("echo", n) for n in range(20)]
    assert watched.sizes == [20]


async def test_a_statement_takes_no_more_than_it_may(lane_on):
    watched = Watched(echo)
    lane = lane_on(watched, weight=lambda item: item, most_weight=10)
    assert await asyncio.gather(*(lane(n) for n in (4, 4, 4, 25, 1, 9, 1))) == [
        ("echo", n) for n in (4, 4, 4, 25, 1, 9, 1)
    ]
    assert watched.gathers == [[4, 4], [4], [25], [1, 9], [1]]
    watched.gathers.clear()
    await asyncio.gather(*(lane(0) for _ in range(MOST_CALLS + 7)))
    assert watched.sizes == [MOST_CALLS, 7]


async def test_only_the_same_kind_goes_together_and_none_has_to_wait_for_all_of_another(lane_on):
    watched = Watched(echo)
    lane = lane_on(watched, key=lambda item: item[0], weight=lambda item: 1, most_weight=3)
    await asyncio.gather(*(lane(item) for item in ["a1", "b1", "a2", "a3", "a4", "b2", "a5"]))
    assert watched.gathers == [["a1", "a2", "a3"], ["b1", "b2"], ["a4", "a5"]]


async def test_claims_of_the_same_queues_are_dealt_to_their_callers(client, service):
    await jobs_of(service.db, 30, "queued", queue="q")
    await jobs_of(service.db, 5, "queued", queue="r")

    def claim(worker, count, *queues):
        body = {"worker_id": worker, "queues": list(queues), "max_jobs": count, "lease_seconds": 10 + count}
        return post(client, "/v1/jobs/claim", body)

    watched = watch(service.claims)
    async with one_under_way(service.claims, watched, claim("first", 1, "q")) as first:
        calls = [claim(f"w{n}", n % 3 + 1, "q") for n in range(9)]
        calls += [claim("r", 9, "r"), claim("both", 2, "r", "q")]
        tasks = [asyncio.create_task(call) for call in calls]
        await wait_until(lambda: _true(waiting(service.claims) == 11), every=0)
    answers = await asyncio.gather(first, *tasks)
    assert {status for status, _ in answers} == {200}
    taken = [job for _, body in answers for job in body["jobs"]]
    assert len({job["id"] for job in taken}) == len({job["attempt_token"] for job in taken}) == len(taken)
    for number, (_, body) in enumerate(answers[1:10]):
        assert {(job["reserved_by"], job["queue"]) for job in body["jobs"]} == {(f"w{number}", "q")}
        assert len(body["jobs"]) == number % 3 + 1
    assert [len(body["jobs"]) for _, body in answers[10:]] == [5, 2]
    assert watched.sizes == [1, 9, 1, 1]


# --- each its own answer ----------------------------------------------------------------------------------------------


async def test_each_has_its_own_answer_and_its_own_refusal(client, service):
    good, other, cancelled, ended = await jobs_of(service.db, 4)
    async with service.db.begin() as tx:
        [done] = await lease.complete(tx, [ending(ended)])
        await intake.cancel(tx, cancelled.id, actor="op", reason=None, force=True, expected_fence=None)
    assert done["status"] == "done"

    def call(job, token=None, worker="w"):
        body = {"attempt_token": str(token or job.token), "worker_id": worker, "lease_seconds": 100}
        return post(client, f"/v1/jobs/{job.id}/heartbeat", body)

    class Nobody:
        id, token = uuid.uuid4(), uuid.uuid4()

    calls = [call(good), call(good, uuid.uuid4()), call(good, worker="v"), call(cancelled), call(ended), call(Nobody)]
    first, answers = await in_one_gather(service.heartbeats, call(other), calls)
    assert first[0] == 200
    assert [(status, body.get("code")) for status, body in answers] == [
        (200, None),
        (409, "lease-lost"),
        (409, "worker-mismatch"),
        (409, "lease-lost"),
        (409, "attempt-ended"),
        (404, "job-not-found"),
    ]
    assert [body.get("ended_by") for _, body in answers[1:4:2]] == [None, "cancelled"]
    assert {body["job_id"] for _, body in answers[1:5]} == {str(job.id) for job in (good, cancelled, ended)}


async def test_keys_held_by_others_and_by_ones_own_company(client, service):
    def enqueue(payload, key=None, **fields):
        headers = {"idempotency-key": key} if key else {}
        return post(client, "/v1/jobs", {"queue": "q", "payload": payload, **fields}, **headers)

    held = await enqueue(0, unique_key="held")
    kept = await enqueue(1, key="kept")
    _, answers = await in_one_gather(
        service.enqueues,
        enqueue("first"),
        [
            enqueue(2, unique_key="held"),
            enqueue(3, unique_key="held", on_conflict="reject"),
            enqueue(1, key="kept"),
            enqueue("other", key="kept"),
            enqueue(4, key="mine"),
            enqueue(4, key="mine"),
            enqueue(5, key="mine"),
            enqueue(6, unique_key="u"),
            enqueue(7, unique_key="u", on_conflict="reject"),
            enqueue(8, unique_key="u"),
            enqueue(9),
        ],
    )
    told = [(status, body.get("code")) for status, body in answers]
    assert told == [
        (200, None),
        (409, "unique-key-held"),
        (200, None),
        (422, "idempotency-mismatch"),
        (201, None),
        (200, None),
        (422, "idempotency-mismatch"),
        (201, None),
        (409, "unique-key-held"),
        (200, None),
        (201, None),
    ]
    bodies = [body for _, body in answers]
    assert bodies[0]["id"] == bodies[1]["holder_id"] == held[1]["id"]
    assert bodies[2]["id"] == bodies[3]["holder_id"] == kept[1]["id"]
    assert bodies[4]["id"] == bodies[5]["id"] == bodies[6]["holder_id"]
    assert bodies[7]["id"] == bodies[8]["holder_id"] == bodies[9]["id"]
    assert (bodies[4]["payload"], bodies[5]["payload"], bodies[7]["payload"], bodies[9]["payload"]) == (4, 4, 6, 6)


REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF {when} THEN RAISE EXCEPTION 'refused for the test' USING ERRCODE = '{state}'; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE {event} ON jobs FOR EACH ROW EXECUTE FUNCTION refuse();
"""


def failed_with(outcome, state):
    return isinstance(outcome, psycopg.Error) and outcome.sqlstate == state


@pytest.mark.parametrize("state", ["23514", "22003", "P0001"])
async def test_a_job_that_the_database_refuses_spoils_no_other(service, admin, state):
    admin.execute(REFUSE.format(when="NEW.kind = 'poison'", event="INSERT", state=state))
    items = [NewJob("q", str(n), kind="poison" if n == 7 else "k") for n in range(20)]
    beside = watch_beside(service.enqueues)
    _, outcomes = await in_one_gather(
        service.enqueues, service.enqueues(NewJob("q", "0")), [service.enqueues(item) for item in items]
    )
    assert failed_with(outcomes.pop(7), state)
    assert [outcome["payload"] for outcome in outcomes] == [str(n) for n in range(20) if n != 7]
    assert admin.execute("SELECT count(*) FROM jobs").fetchone() == (20,)
    assert [len(items) for items in beside] == [1] * 20
    # The lane itself goes on.
    watched = watch(service.enqueues)
    assert (await service.enqueues(NewJob("q", '"after"')))["payload"] == '"after"'
    assert watched.statements == [1]


@pytest.mark.parametrize("verb", ["heartbeat", "complete", "fail", "release"])
async def test_a_row_that_cannot_be_moved_spoils_no_other(service, admin, verb):
    made = await jobs_of(service.db, 12)
    admin.execute(REFUSE.format(when=f"NEW.id = '{made[5].id}'", event="UPDATE", state="23514"))
    lane = service.heartbeats if verb == "heartbeat" else service.endings
    item = beat if verb == "heartbeat" else lambda job: ending(job, verb)
    _, outcomes = await in_one_gather(lane, lane(item(made[0])), [lane(item(job)) for job in made[1:]])
    assert failed_with(outcomes.pop(4), "23514")
    assert [outcome["id"] for outcome in outcomes] == [job.id for n, job in enumerate(made) if n not in (0, 5)]
    assert (await row_of(service.db, made[5]))["status"] == "processing"


async def test_a_sick_database_refuses_all_and_nobody_is_sent_alone(service, admin):
    beside = watch_beside(service.enqueues)
    admin.execute("ALTER TABLE jobs RENAME COLUMN payload TO load")
    outcomes = await asyncio.gather(*(service.enqueues(NewJob("q", str(n))) for n in range(9)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 9
    assert beside == []
    admin.execute("ALTER TABLE jobs RENAME COLUMN load TO payload")
    assert (await service.enqueues(NewJob("q", "1")))["payload"] == "1"


# --- equal ids in one gather ------------------------------------------------------------------------------------------

WRITES = """
CREATE TABLE writes (id uuid);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO writes VALUES (NEW.id); RETURN NEW; END $$;
CREATE TRIGGER note AFTER UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION note();
"""


async def test_five_heartbeats_of_one_job_end_at_the_longest(service, admin):
    job, other = await jobs_of(service.db, 2)
    admin.execute(WRITES)
    calls = [service.heartbeats(beat(job, seconds)) for seconds in (5.0, 70.0, None, 600.0, 3.0)]
    _, outcomes = await in_one_gather(service.heartbeats, service.heartbeats(beat(other)), calls)
    after = await row_of(service.db, job)
    assert {outcome["lease_expires_at"] for outcome in outcomes} == {after["lease_expires_at"]}
    assert (after["lease_expires_at"] - outcomes[0]["server_time"]).total_seconds() == 600
    assert admin.execute("SELECT count(*) FROM writes WHERE id = %s", [job.id]).fetchone() == (1,)


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
async def test_equal_endings_are_written_once_and_another_is_refused(service, admin, verb):
    job, other = await jobs_of(service.db, 2)
    admin.execute(WRITES)
    how = {"result": '"mine"'} if verb == "complete" else {"delay_seconds": 5.0}
    calls = [
        service.endings(ending(job, verb, b"mine", **how)),
        service.endings(ending(job, verb, b"mine", **how)),
        service.endings(ending(job, verb, b"theirs", **how)),
        service.endings(ending(job, verb, b"mine", token=uuid.uuid4(), **how)),
    ]
    _, (first, again, different, stranger) = await in_one_gather(
        service.endings, service.endings(ending(other, verb)), calls
    )
    assert first == again
    assert first["status"] == ("done" if verb == "complete" else "queued")
    assert isinstance(different, AttemptEnded)
    assert isinstance(stranger, LeaseLost)
    assert admin.execute("SELECT count(*) FROM writes WHERE id = %s", [job.id]).fetchone() == (1,)
    if verb == "complete":
        assert (await row_of(service.db, job))["result"] == "mine"


async def test_two_verbs_for_one_attempt_the_first_one_counts(client, service):
    job, other = await jobs_of(service.db, 2)

    def end(of, verb):
        return post(client, f"/v1/jobs/{of.id}/{verb}", {"attempt_token": str(of.token)})

    watched = watch(service.endings)
    async with one_under_way(service.endings, watched, end(other, "fail")) as first:
        calls = []
        for verb in ("complete", "fail", "release", "complete"):
            calls.append(asyncio.create_task(end(job, verb)))
            await wait_until(lambda: _true(waiting(service.endings) == len(calls)), every=0)
    answers = await asyncio.gather(first, *calls)
    assert [status for status, _ in answers] == [200, 200, 409, 409, 200]
    assert [body["code"] for _, body in answers[2:4]] == ["attempt-ended"] * 2
    assert answers[1] == answers[4]


# --- locks, limits, deadlocks -----------------------------------------------------------------------------------------


async def test_a_locked_row_delays_its_own_call_alone(service, admin):
    made = await jobs_of(service.db, 20)
    locked, others = made[3], [job for job in made if job is not made[3]]
    await service.heartbeats(beat(others[0]))
    ended = []
    with psycopg.connect(service.db.url) as holder:
        holder.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", [locked.id])
        tasks = {}
        for job in made:
            tasks[job] = asyncio.create_task(service.heartbeats(beat(job, 500.0)))
            tasks[job].add_done_callback(lambda _, job=job: ended.append(job))
        began = time.monotonic()
        answers = await asyncio.gather(*(tasks[job] for job in others))
        assert [answer["id"] for answer in answers] == [job.id for job in others]
        # Not at the end of the statement's time, which is five seconds.
        assert time.monotonic() - began < 3
        # The lane goes on while the row is still locked and its call waits beside.
        watched = watch(service.heartbeats)
        await service.heartbeats(beat(others[0]))
        assert watched.statements == [1]
        with pytest.raises(Unavailable):
            await tasks[locked]
        assert ended[-1] is locked
        holder.rollback()
    assert (await service.heartbeats(beat(locked)))["id"] == locked.id


async def test_a_limited_queue_goes_beside_and_keeps_its_limit_while_others_stay(client, client_for, service, admin):
    admin.execute("INSERT INTO queues (name, max_processing) VALUES ('narrow', 3)")
    await jobs_of(service.db, 30, "queued", queue="narrow")
    await jobs_of(service.db, 30, "queued", queue="wide")
    most = []

    async def look():
        while True:
            async with service.db.begin() as tx:
                row = await tx.row("SELECT count(*) FROM jobs WHERE status = 'processing' AND queue = 'narrow'")
            most.append(row["count"])

    def claim(at, number, *queues, **more):
        body = {"worker_id": f"w{number}", "queues": list(queues), "lease_seconds": 600, **more}
        return post(at, "/v1/jobs/claim", body)

    async with client_for() as second:
        beside = [watch_beside(lane) for lane in (service.claims, second.app.state.service.claims)]
        looking = asyncio.create_task(look())
        held = []
        for _ in range(4):
            calls = [claim((client, second)[n % 2], n, "narrow") for n in range(8)]
            calls += [claim((client, second)[n % 2], n, "wide") for n in range(5)]
            calls += [claim(client, "id", "narrow", request_id=str(uuid.uuid4())), claim(second, "b", "narrow", "wide")]
            answers = await asyncio.gather(*calls)
            assert {status for status, _ in answers} == {200}
            got = [job for _, body in answers for job in body["jobs"]]
            assert sum(len(body["jobs"]) for _, body in answers[8:13]) == 5
            held += [job for job in got if job["queue"] == "narrow"]
            assert len(held) == 3
            for job in held:
                done = {"attempt_token": job["attempt_token"]}
                assert (await post(client, f"/v1/jobs/{job['id']}/complete", done))[0] == 200
            held.clear()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    assert max(most) <= 3
    gone_beside = [wish for seen in beside for wishes in seen for wish in wishes]
    assert gone_beside
    assert all("narrow" in wish.queues for wish in gone_beside)
    # Together, not each alone.
    assert max(len(wishes) for seen in beside for wishes in seen) > 1


AGAIN = """
CREATE SEQUENCE tries;
CREATE FUNCTION clash() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.{column} = '{value}' AND nextval('tries') <= {times} THEN
        RAISE EXCEPTION 'a clash for the test' USING ERRCODE = '{state}';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER clash BEFORE {event} ON jobs FOR EACH ROW EXECUTE FUNCTION clash();
"""


@pytest.mark.parametrize("state", ["40P01", "40001"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_deadlock_is_tried_again(service, admin, state, times):
    """In the lane, and twice more alone: so often it may clash, and nobody hears of it."""
    admin.execute(AGAIN.format(column="kind", value="clash", times=times, event="INSERT", state=state))
    items = [NewJob("q", str(n), kind="clash" if n == 2 else "k") for n in range(6)]
    outcomes = await asyncio.gather(*(service.enqueues(item) for item in items))
    assert [outcome["payload"] for outcome in outcomes] == [str(n) for n in range(6)]
    assert admin.execute("SELECT count(*) FROM jobs").fetchone() == (6,)


async def test_a_deadlock_without_end_is_a_refusal_of_that_call(service, admin):
    made = await jobs_of(service.db, 4)
    admin.execute(AGAIN.format(column="id", value=made[1].id, times=99, event="UPDATE", state="40P01"))
    outcomes = await asyncio.gather(*(service.endings(ending(job)) for job in made), return_exceptions=True)
    assert isinstance(outcomes.pop(1), Unavailable)
    assert [outcome["status"] for outcome in outcomes] == ["done"] * 3


# --- a connection lost ------------------------------------------------------------------------------------------------


class Proxy:
    """A wire between Database and PostgreSQL that can be cut, or go dumb, at a chosen moment."""

    def __init__(self, url):
        self.to = psycopg.conninfo.conninfo_to_dict(url)
        self.lose = None
        """The next `call` or `answer` to lose, and the connection with it; the first that has `mark` in it."""
        self.mark = b""
        self.dumb = False
        """No answer comes through; those held back come later."""
        self.ends = []

    async def __aenter__(self):
        self._server = await asyncio.get_running_loop().create_server(lambda: Front(self), "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        who = f"{self.to['user']}:{self.to.get('password', '')}"
        self.url = f"postgresql://{who}@127.0.0.1:{port}/{self.to['dbname']}?sslmode=disable&gssencmode=disable"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for end in self.ends:
            end.transport.abort()
        await wait_until(lambda: _true(all(end.lost for end in self.ends)), 5, every=0)

    def speak(self):
        self.dumb = False
        for end in self.ends:
            end.flush()


class End(asyncio.Protocol):
    def __init__(self, proxy, gives, peer=None):
        self.proxy, self.gives, self.peer = proxy, gives, peer
        self.held, self.lost = [], False

    def connection_made(self, transport):
        self.transport = transport
        self.proxy.ends.append(self)

    def data_received(self, data):
        if self.proxy.lose == self.gives and self.proxy.mark in data:
            self.proxy.lose = None
            self.transport.abort()
            return
        self.held.append(data)
        self.flush()

    def flush(self):
        if self.peer is not None and not (self.proxy.dumb and self.gives == "answer"):
            for data in self.held:
                self.peer.transport.write(data)
            self.held.clear()

    def connection_lost(self, _):
        self.lost = True
        if self.peer is not None:
            self.peer.transport.abort()


class Front(End):
    """The end that Database sees; it makes the other."""

    def __init__(self, proxy):
        super().__init__(proxy, "call")

    def connection_made(self, transport):
        super().connection_made(transport)
        self.connecting = asyncio.ensure_future(self.connect())

    async def connect(self):
        loop, to = asyncio.get_running_loop(), self.proxy.to
        host, port = str(to.get("host", "127.0.0.1")), str(to.get("port", 5432))

        def back():
            return End(self.proxy, "answer", self)

        if host.startswith("/"):
            _, self.peer = await loop.create_unix_connection(back, f"{host}/.s.PGSQL.{port}")
        else:
            _, self.peer = await loop.create_connection(back, host, int(port))
        self.flush()
        if self.lost:
            self.peer.transport.abort()


@contextlib.asynccontextmanager
async def through_proxy(url, **how):
    """(proxy, a Database behind it)."""
    async with Proxy(url) as proxy:
        db = Database(proxy.url, pool_size=3, **how)
        await db.open()
        await db._pool.wait()
        try:
            yield proxy, db
        finally:
            proxy.speak()
            await db.close()


async def test_a_connection_that_died_while_idle_is_replaced_unnoticed(service, admin):
    [job] = await jobs_of(service.db, 1)
    await service.heartbeats(beat(job))
    pid = pid_of(service.heartbeats)
    admin.execute("SELECT pg_terminate_backend(%s)", [pid])
    wait_for(lambda: not admin.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).fetchall())
    beside = watch_beside(service.heartbeats)
    assert (await service.heartbeats(beat(job)))["id"] == job.id
    assert pid_of(service.heartbeats) != pid
    assert beside == []


async def test_a_backend_ended_in_its_statement_did_nothing_and_the_calls_go_again(service, admin):
    """The server itself says that it ended the statement, so each call is sent once more and is done once."""
    admin.execute(WRITES)
    admin.execute(
        """
        CREATE SEQUENCE times;
        CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('times') = 3 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
            RETURN NEW;
        END $$;
        """
    )
    made = await jobs_of(service.db, 6)
    await service.endings(ending(made[0]))
    pid = pid_of(service.endings)
    admin.execute("CREATE TRIGGER leave BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION leave()")
    outcomes = await asyncio.gather(*(service.endings(ending(job)) for job in made[1:]))
    assert [outcome["status"] for outcome in outcomes] == ["done"] * 5
    assert admin.execute("SELECT count(*), count(DISTINCT id) FROM writes").fetchone() == (6, 6)
    assert (await service.endings(ending(made[0])))["status"] == "done"
    assert pid_of(service.endings) != pid


@pytest.mark.parametrize("lost", ["call", "answer"])
async def test_a_wire_that_breaks_under_a_statement_is_an_unknown_outcome_and_nothing_is_sent_twice(
    database_url, lane_on, admin, lost
):
    async with through_proxy(database_url) as (proxy, db):
        lane = lane_on(intake.enqueue, on=db)
        await lane(NewJob("q", "0"))
        beside = watch_beside(lane)
        proxy.lose = lost
        outcomes = await asyncio.gather(*(lane(NewJob("q", str(n))) for n in (1, 2)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 2
        assert beside == []
        assert (await lane(NewJob("q", "3")))["payload"] == "3"
        await lane.close()
    there = [payload for (payload,) in admin.execute("SELECT payload FROM jobs ORDER BY payload::text").fetchall()]
    assert there == ([0, 3] if lost == "call" else [0, 1, 2, 3])


async def test_a_call_whose_wire_broke_is_a_503_that_says_so(client_for, database_url):
    async with Proxy(database_url) as proxy, client_for(database_url=proxy.url) as client:

        def enqueue(payload):
            return post(client, "/v1/jobs", {"queue": "q", "payload": payload})

        assert (await enqueue("before"))[0] == 201
        proxy.lose, proxy.mark = "call", b"the lost one"
        answers = await asyncio.gather(enqueue("the lost one"), enqueue("its company"))
        assert [(status, body["code"]) for status, body in answers] == [(503, "outcome-unknown")] * 2
        assert proxy.lose is None
        assert (await enqueue("after"))[0] == 201


async def test_a_dumb_server_is_given_up_soon_after_the_statements_time(database_url, lane_on):
    async with through_proxy(database_url, statement_timeout=0.3) as (proxy, db):
        db._answer_within = 0.6
        lane = lane_on(intake.enqueue, on=db)
        await lane(NewJob("q", "0"))
        proxy.dumb = True
        began = time.monotonic()
        first = asyncio.gather(*(lane(NewJob("q", "1")) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in await first] == [OutcomeUnknown] * 3
        # The next finds that it cannot connect: nothing was done, and that is said, in time too.
        with pytest.raises(Unavailable):
            await lane(NewJob("q", "2"))
        assert time.monotonic() - began < 8
        proxy.speak()
        assert (await lane(NewJob("q", "3")))["payload"] == "3"
        await lane.close()


async def test_when_nobody_answers_those_who_wait_are_refused_by_one_attempt(database_url, lane_on):
    """Not one after another, each after an attempt of two seconds of its own."""
    async with through_proxy(database_url) as (proxy, db):
        lane = lane_on(echo, on=db, key=lambda item: item)
        proxy.dumb = True
        before = len(proxy.ends)
        outcomes = await asyncio.gather(*(lane(n) for n in range(6)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NotConnected] * 6
        assert [end.gives for end in proxy.ends[before:]].count("call") == 1
        proxy.speak()
        assert await lane(7) == ("echo", 7)
        await lane.close()


async def test_a_backend_ended_in_its_commit_is_an_unknown_outcome_and_the_job_is_there_once(postgres_server, lane_on):
    """It waits for a standby that never comes, its commit already written, and is ended there."""
    server = postgres_server(synchronous_commit="local")
    url = server.create_database()
    upgrade(url)
    server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    server.stop()
    server.start()
    server.execute(f"ALTER DATABASE {psycopg.conninfo.conninfo_to_dict(url)['dbname']} SET synchronous_commit = on")
    db = Database(url, pool_size=2, statement_timeout=2.0)
    await db.open()
    try:
        lane = lane_on(intake.enqueue, on=db)
        tasks = [asyncio.create_task(lane(NewJob("q", str(n)))) for n in range(3)]
        waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname <> 'postgres'"
        # The statement's time-out ends the first such wait with a warning only: it is committed.
        [(pid,)] = await wait_until(lambda: asyncio.to_thread(server.execute, waits), 10)
        server.execute("SELECT pg_terminate_backend(%s)", [pid])
        # Whatever is sent now does not wait any more.
        server.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
        server.execute("SELECT pg_reload_conf()")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 3
        assert server.execute("SELECT count(*) FROM jobs", url=url) == [(3,)]
        await lane.close()
    finally:
        await db.close()


async def test_a_database_that_is_away_refuses_everybody_quickly(postgres_server, client_for):
    server = postgres_server(synchronous_commit="on", full_page_writes="on")
    url = server.create_database()
    upgrade(url)
    async with client_for(database_url=url) as client:
        service = client.app.state.service

        def enqueue():
            return post(client, "/v1/jobs", {"queue": "q", "payload": 1})

        assert (await enqueue())[0] == 201
        watched = watch(service.enqueues)
        async with one_under_way(service.enqueues, watched, enqueue()) as first:
            tasks = [asyncio.create_task(enqueue()) for _ in range(30)]
            await wait_until(lambda: _true(waiting(service.enqueues) == 30), every=0)
            await asyncio.to_thread(server.stop, "immediate")
        began = time.monotonic()
        answers = await asyncio.gather(first, *tasks)
        assert time.monotonic() - began < 5
        assert {status for status, _ in answers} == {503}
        assert {body["code"] for _, body in answers} <= {"unavailable", "outcome-unknown"}
        # Those that only waited are told that nothing was done.
        assert {body["code"] for _, body in answers[1:]} == {"unavailable"}
        for path, body in (
            ("/v1/jobs/claim", {"worker_id": "w", "queues": ["q"]}),
            (f"/v1/jobs/{uuid.uuid4()}/complete", {"attempt_token": str(uuid.uuid4())}),
            (f"/v1/jobs/{uuid.uuid4()}/heartbeat", {"attempt_token": str(uuid.uuid4()), "worker_id": "w"}),
        ):
            status, answer = await post(client, path, body)
            assert (status, answer["code"]) == (503, "unavailable")
        server.start()

        async def back():
            return (await enqueue())[0] == 201

        await wait_until(back, 20, every=0.1)


# --- a statement that fails after another had gone in -----------------------------------------------------------------

BOOK = "CREATE TABLE book (n int)"


async def half(tx, items):
    await tx.run("INSERT INTO book SELECT unnest(%(n)s::int[])", {"n": list(items)})
    await tx.row("SELECT 1 / 0")


async def test_half_done_and_not_repeatable_is_an_unknown_outcome(lane_on, admin):
    admin.execute(BOOK)
    lane = lane_on(half)
    outcomes = await asyncio.gather(*(lane(n) for n in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 3
    assert admin.execute("SELECT count(*) FROM book").fetchone() == (3,)


async def test_half_done_and_repeatable_is_sent_again_each_alone(lane_on, admin):
    admin.execute(BOOK)

    async def whole(tx, items):
        assert len(items) == 1
        return [f"again {items[0]}"]

    lane = lane_on(half, whole, repeatable=True)
    assert await asyncio.gather(*(lane(n) for n in range(3))) == ["again 0", "again 1", "again 2"]


async def test_facts_of_what_went_in_are_told_though_the_rest_failed(db, admin):
    admin.execute(BOOK)
    heard = []
    db.hearers.append(lambda fact, facts: heard.append(fact))

    async def act(tx):
        await tx.run("INSERT INTO book VALUES (1)")
        tx.tell("written")
        await tx.row("SELECT 1 / 0")

    own = db.own()
    with pytest.raises(PartlyDone):
        await own.run(act)
    await own.aclose()
    assert heard == ["written"]


async def test_what_asks_to_go_beside_goes_together_and_each_alone_when_that_fails(lane_on):
    seen = []

    async def never(tx, items):
        raise Beside

    async def together(tx, items):
        seen.append(list(items))
        if len(items) > 1:
            await tx.row("SELECT 1 / 0")
        return [item * 10 for item in items]

    lane = lane_on(never, together)
    assert await asyncio.gather(*(lane(n) for n in range(4))) == [0, 10, 20, 30]
    assert seen[0] == [0, 1, 2, 3]
    assert sorted(seen[1:]) == [[0], [1], [2], [3]]


# --- callers that leave -----------------------------------------------------------------------------------------------


async def test_a_cancelled_caller_does_not_cancel_the_others(service):
    made = await jobs_of(service.db, 6)
    watched = watch(service.endings)
    async with one_under_way(service.endings, watched, service.endings(ending(made[0]))) as first:
        tasks = [asyncio.create_task(service.endings(ending(job))) for job in made[1:]]
        await wait_until(lambda: _true(waiting(service.endings) == 5), every=0)
        first.cancel()
        tasks[2].cancel()
        await asyncio.gather(first, tasks[2], return_exceptions=True)
    left = [task for task in tasks if task is not tasks[2]]
    assert [outcome["status"] for outcome in await asyncio.gather(*left)] == ["done"] * 4
    # The one under way went in with its statement, the one that waited was taken out.
    assert watched.sizes == [1, 4]
    statuses = [(await row_of(service.db, job))["status"] for job in made]
    assert statuses == ["done", "done", "done", "processing", "done", "done"]


@pytest.mark.parametrize("limited", [False, True])
async def test_the_jobs_of_a_cancelled_claim_go_back_uncounted(service, admin, limited):
    """In the lane and, for a queue with a limit, beside it."""
    if limited:
        admin.execute("INSERT INTO queues (name, max_processing) VALUES ('q', 50)")
    made = await jobs_of(service.db, 6, "queued")
    watched = watch(service.claims)

    def claim(worker):
        return service.claims(Wish(("q",), ClaimCall(worker, 2, 60.0)))

    async with one_under_way(service.claims, watched, claim("leaves")) as first:
        tasks = [asyncio.create_task(claim(worker)) for worker in ("stays", "stays too")]
        await wait_until(lambda: _true(waiting(service.claims) == 2), every=0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    grants = await asyncio.gather(*tasks)
    assert [len(grant.jobs) for grant in grants] == [2, 2]

    async def all_back():
        rows = [await row_of(service.db, job) for job in made]
        return Counter(row["status"] for row in rows) == {"processing": 4, "queued": 2} and rows

    for row in await wait_until(all_back, 5):
        assert row["attempts"] == (row["status"] == "processing")
        assert (row["release_count"], row["reclaim_count"]) == (0, 0)
        assert row["reserved_by"] != "leaves"


# --- the end of an instance -------------------------------------------------------------------------------------------


async def test_every_call_is_answered_when_the_lane_closes(lane_on, service):
    watched = Watched(echo)
    lane = lane_on(watched)
    async with one_under_way(lane, watched, lane("under way")) as first:
        tasks = [asyncio.create_task(lane(n)) for n in range(5)]
        await wait_until(lambda: _true(waiting(lane) == 5), every=0)
        await lane.close()
    outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown, *[Unavailable] * 5]
    with pytest.raises(Unavailable):
        await lane("late")


async def test_calls_beside_the_lane_are_answered_when_it_closes(lane_on, admin):
    entered = asyncio.Event()

    async def never(tx, items):
        raise Beside

    async def long(tx, items):
        entered.set()
        await asyncio.Event().wait()

    lane = lane_on(never, long, key=lambda item: item)
    tasks = [asyncio.create_task(lane(n)) for n in range(6)]
    await entered.wait()
    await wait_until(lambda: _true(len(lane._beside) == 6), every=0)
    await asyncio.sleep(0)
    await lane.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert {type(outcome) for outcome in outcomes} <= {OutcomeUnknown, Unavailable}


async def test_calls_under_way_when_the_instance_ends_get_an_answer(client_for):
    async with client_for() as client:
        service = client.app.state.service
        lanes = (service.enqueues, service.claims, service.heartbeats, service.endings)
        watches = [watch(lane) for lane in lanes]
        for watched in watches:
            watched.gate.clear()
        one, token = str(uuid.uuid4()), str(uuid.uuid4())
        calls = {
            "/v1/jobs": {"queue": "q", "payload": 1},
            "/v1/jobs/claim": {"worker_id": "w", "queues": ["q"]},
            f"/v1/jobs/{one}/heartbeat": {"attempt_token": token, "worker_id": "w"},
            f"/v1/jobs/{one}/complete": {"attempt_token": token},
        }
        tasks = [asyncio.create_task(post(client, path, body)) for path, body in calls.items() for _ in range(3)]
        for watched in watches:
            await watched.entered.wait()
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert {(status, body["code"]) for status, body in answers} <= {(503, "outcome-unknown"), (503, "unavailable")}


# --- order, and what does not take the lane ---------------------------------------------------------------------------


async def test_calls_are_served_in_the_order_of_their_coming(service):
    """One caller's jobs, enqueued one after another and gathered, are claimed in that order."""
    first, outcomes = await in_one_gather(
        service.enqueues,
        service.enqueues(NewJob("q", "0")),
        [service.enqueues(NewJob("q", str(n), idempotency_key=f"k{97 - n}" if n % 2 else None)) for n in range(1, 30)],
    )
    assert first["payload"] == "0"
    assert [outcome["payload"] for outcome in outcomes] == [str(n) for n in range(1, 30)]
    grant = await service.claims(Wish(("q",), ClaimCall("w", 30)))
    assert [job["payload"] for job in grant.jobs] == [str(n) for n in range(30)]


async def test_an_enqueue_for_a_later_instant_and_all_batches_take_the_pool(client, service):
    watches = [watch(lane) for lane in (service.enqueues, service.claims, service.heartbeats, service.endings)]
    status, job = await post(client, "/v1/jobs", {"queue": "q", "payload": 1, "available_at": "2026-01-01T00:00:00Z"})
    assert (status, job["status"]) == (201, "queued")
    status, body = await post(client, "/v1/jobs", {"queue": "q", "payload": 1, "available_at": "9000-01-01T00:00:00Z"})
    assert (status, body["code"]) == (422, "invalid-input")
    await post(client, "/v1/jobs/batch", {"jobs": [{"queue": "q", "payload": 2}]})
    claim = {"worker_id": "w", "queues": ["q"], "max_jobs": 2, "request_id": str(uuid.uuid4())}
    _, got = await post(client, "/v1/jobs/claim", claim)
    assert len(got["jobs"]) == 2
    items = [{"id": job["id"], "attempt_token": job["attempt_token"]} for job in got["jobs"]]
    assert (await post(client, "/v1/jobs/heartbeat", {"items": [{**i, "worker_id": "w"} for i in items]}))[0] == 200
    assert (await post(client, "/v1/jobs/complete", {"items": items}))[0] == 200
    assert [watched.sizes for watched in watches] == [[]] * 4


async def test_refusals_by_name_are_the_same_in_the_lane_and_alone(service):
    """A refusal is an outcome, not an error that sends its company beside."""
    beside = watch_beside(service.enqueues)
    await service.enqueues(NewJob("q", "1", unique_key="u", idempotency_key="k", content_sha256=b"1"))
    reject = NewJob("q", "2", unique_key="u", reject_conflict=True)
    mismatch = NewJob("q", "2", idempotency_key="k", content_sha256=b"2")
    kinds = [type(await service.enqueues(item)) for item in (reject, mismatch)]
    assert kinds == [UniqueKeyHeld, IdempotencyMismatch]
    assert beside == []


async def test_own_tells_a_part_that_is_committed_from_one_that_is_not(db):
    own = db.own()

    async def second_fails(tx):
        await tx.row("SELECT 1 AS one")
        await tx.row("SELECT 1 / 0 AS never")

    async def first_fails(tx):
        await tx.row("SELECT 1 / 0 AS never")

    with pytest.raises(PartlyDone):
        await own.run(second_fails)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await own.run(first_fails)
    db._begin = "BEGIN; SET LOCAL lock_timeout = '1s'"
    with pytest.raises(psycopg.errors.DivisionByZero):
        await own.run(second_fails)
    assert (await own.run(lambda tx: tx.row("SELECT 1 AS one")))["one"] == 1
    await own.aclose()
