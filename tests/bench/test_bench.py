"""The verb `bench`: its arithmetic, its client, its floors, and a smoke run of it. No timing is asserted."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys

import psycopg
import pytest

from bench import compare, context, http1, load, rig, run, stats, workloads
from bench.floors import script
from bench.stats import Goal, Spread
from tests import harness

# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians():
    found = stats.ratios([10, 20, 90], [10, 5, 30])
    assert (found.median, found.least, found.most, found.count) == (3, 1, 4, 3)
    assert found.median != statistics.median([10, 20, 90]) / statistics.median([10, 5, 30])


def test_figures_that_are_no_pairs_have_no_ratio():
    with pytest.raises(ValueError, match="no pairs"):
        stats.ratios([1, 2], [1])
    assert math.isnan(stats.ratios([1.0], [0.0]).median)


def test_quantiles_are_values_that_were_measured():
    values = [5, 1, 4, 2, 3]
    assert [stats.quantile(values, share) for share in (0.0, 0.2, 0.5, 0.95, 1.0)] == [1, 1, 3, 5, 5]
    assert math.isnan(stats.quantile([], 0.5))


@pytest.mark.parametrize(
    ("goal", "verdicts"),
    [
        (Goal(1.3, 1.8), {1.29: "missed", 1.3: "met", 1.79: "met", 1.8: "moonshot", 9: "moonshot"}),
        (Goal(5, 3, lower_is_better=True), {5.1: "missed", 5: "met", 3.1: "met", 3: "moonshot", 0: "moonshot"}),
    ],
)
def test_a_goal_is_judged_in_its_own_direction(goal, verdicts):
    assert {value: goal.verdict(value) for value in verdicts} == verdicts


def test_sides_take_turns_in_going_first_and_the_rehearsal_does_not_count():
    order = []

    def side(name):
        return lambda: order.append(name) or compare.Figure(len(order))

    found = compare.interleave({"ours": side("o"), "floor": side("f")}, 3, lambda text: None)
    assert "".join(order) == "fo" + "of" + "fo" + "of"
    assert [figure.value for figure in found["ours"]] == [3, 6, 7]
    assert [figure.value for figure in found["floor"]] == [4, 5, 8]


def a_row(*, problems=(), judge=True):
    ours = [compare.Figure(20, tuple(problems)), compare.Figure(30)]
    return compare.row("g", "w", "1/s", ours, "f", [compare.Figure(10)] * 2, Goal(1, 2), judge=judge)


def test_an_error_in_any_round_makes_the_figure_invalid_and_is_shown():
    assert a_row().met == "moonshot"
    row = a_row(problems=["3 x 409"])
    assert row.met is None
    assert row.described()["valid"] is False
    assert row.described()["problems"] == ["ours: 3 x 409"]
    assert "INVALID" in compare.table([row])
    assert "moonshot" not in compare.table([row]).splitlines()[1]


def test_a_smoke_run_judges_nothing():
    assert a_row(judge=False).met is None


def test_what_was_acknowledged_must_be_in_the_database():
    row = a_row()
    context.kept_promise(row, 10, 10, "jobs")
    assert row.problems == []
    context.kept_promise(row, 11, 10, "jobs")
    assert "11 jobs were acknowledged" in row.problems[0]


# --- the client ------------------------------------------------------------------------------------------------------

ANSWER = b'HTTP/1.1 201 Created\r\nserver: x\r\nContent-Length: 12\r\n\r\n{"a":"\r\n\r\n"}'


@pytest.mark.parametrize("size", range(1, len(ANSWER) + 1))
def test_an_answer_may_come_in_pieces_of_any_size(size):
    answers = http1.Answers()
    stream = ANSWER + b"HTTP/1.1 409 Conflict\r\ncontent-length:0\r\n\r\n" + ANSWER
    found = []
    for first in range(0, len(stream), size):
        found += answers.feed(stream[first : first + size])
    body = ANSWER[-12:]
    assert found == [(201, body), (409, b""), (201, body)]
    assert not answers.amid


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-content-length: 2\r\n\r\n{}",
        b"nothing of the kind\r\ncontent-length: 0\r\n\r\n",
        b"x" * (http1.MAX_HEAD + 1),
    ],
    ids=["chunked", "no length", "no status line", "endless head"],
)
def test_what_cannot_be_read_is_said(answer):
    with pytest.raises(http1.Unreadable):
        http1.Answers().feed(answer)


@contextlib.asynccontextmanager
async def a_server(answer):
    """A server that answers each request by `answer(number, body)`: bytes to write, or None to close."""
    served = 0

    tasks = set()

    async def serve(reader, writer):
        nonlocal served
        tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(re.search(rb"content-length: (\d+)", head)[1])
                body = await reader.readexactly(length)
                served += 1
                written = answer(served, body)
                if written is None:
                    break
                writer.write(written)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*tasks)


def ok(body=b"{}", status=b"200 OK"):
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def asked(url, kind, **options):
    return {"name": "n", "kind": kind, "url": url, "options": options, "warm": 0.02, "window": 0.2}


async def test_answers_are_counted_and_errors_apart():
    def answer(number, body):
        return ok(status=b"409 Conflict") if number % 10 == 0 else ok()

    async with a_server(answer) as url:
        told = await load.Loads().run(asked(url, "fixed", path="/x", content={"a": 1}, connections=3))
    assert set(told["errors"]) == {"409"}
    assert told["errors"]["409"] >= told["acknowledged"] // 9 - 1
    assert 0 < told["requests"] <= told["acknowledged"]
    assert told["requests_per_second"] == pytest.approx(told["requests"] / told["seconds"])
    assert 0 < told["p50_ms"] <= told["p95_ms"] <= told["p99_ms"]


async def test_a_lost_connection_is_an_error():
    async with a_server(lambda number, body: ok() if number < 20 else None) as url:
        told = await load.Loads().run(asked(url, "fixed", path="/x", content={}, connections=2))
    assert told["errors"] == {"connection lost": 2}


async def test_an_item_that_was_not_done_is_an_error_though_the_batch_is_a_200():
    good = json.dumps({"results": [{"index": 0, "ok": True}] * 2}).encode()
    bad = json.dumps({"results": [{"ok": True}, {"ok": False, "problem": {"code": "lease-lost"}}]}).encode()
    assert workloads.all_ok(200, good, 2) == 2
    with pytest.raises(workloads.Bad, match="lease-lost"):
        workloads.all_ok(200, bad, 2)
    with pytest.raises(workloads.Bad, match="2 results of 3"):
        workloads.all_ok(200, good, 3)
    with pytest.raises(workloads.Bad, match="503"):
        workloads.all_ok(503, b"", 1)
    async with a_server(lambda number, body: ok(bad)) as url:
        told = await load.Loads().run(asked(url, "enqueue-batch", batch=2, connections=1))
    assert told["items"] == 0
    assert set(told["errors"]) == {"item: lease-lost"}


async def test_a_stock_that_runs_out_ends_the_window(monkeypatch):
    class Few(workloads.Fixed):
        left = 0

        async def prepare(self, post, need):
            self.left = 40

        def next(self, seat):
            self.left -= 1
            return self.request if self.left >= 0 else None

    monkeypatch.setitem(workloads.KINDS, "few", Few)
    async with a_server(lambda number, body: ok()) as url:
        told = await load.Loads().run({**asked(url, "few", path="/x", content={}, connections=4), "warm": 0.0})
    assert told["seconds"] < 0.13  # tried anew, and in vain
    assert told["acknowledged"] == 40 * 4
    assert told["errors"] == {}


def test_a_payload_has_200_bytes_and_a_routes_body_about_300():
    from bench.floors.models import BODY, Answer, Ask

    assert len(json.dumps(workloads.PAYLOAD, separators=(",", ":"))) == 200
    assert 290 <= len(BODY) <= 310
    assert Ask.model_validate_json(BODY).count == 17
    assert len(Answer.model_fields) == 5


# --- the floors ------------------------------------------------------------------------------------------------------

FROZEN = "3e5ea40a7166300044775759d996bf5cf24fceeb3beebe41b34bc8e7511119fa"
"""A changed floor makes all older figures incomparable. If that is what you want, write so into docs/performance.md."""


def test_the_floors_are_frozen():
    assert run.floors_digest() == FROZEN


def test_figures_without_durable_commits_are_refused(server_url):
    with psycopg.connect(server_url) as connection:
        durable = connection.execute("SHOW fsync").fetchone()[0] == "on"
    cluster = rig.Cluster(server_url, embedded=False)
    with contextlib.nullcontext() if durable else pytest.raises(rig.Trouble, match="mean nothing"):
        cluster.settings()


@pytest.fixture
def table(empty_database_url):
    return context.FloorTable(empty_database_url)


def rows_of(table, condition="true"):
    with psycopg.connect(table.url) as connection:
        return connection.execute(f"SELECT count(*) FROM jobs WHERE {condition}").fetchone()[0]


@pytest.fixture(params=["pgbench", "psycopg"])
def scripts(request):
    found = rig.Scripts()
    if request.param == "psycopg":
        found.pgbench = None
    elif found.pgbench is None:
        pytest.skip("no pgbench here")
    return found


def test_the_scripts_do_what_the_article_does(scripts, table):
    payloads = {"payload": "{}", "payloads": "{" + ",".join(["1"] * 100) + "}"}
    table.queued(20_000)
    assert scripts.run(table.url, "claim_complete_1.sql", 4, 0.1).problem == ""
    singles = rows_of(table, "status = 'done'")
    assert singles > 0
    assert rows_of(table, "status = 'done' AND attempts = 1 AND finished_at IS NOT NULL") == singles
    assert scripts.run(table.url, "claim_complete_100.sql", 2, 0.1).problem == ""
    batches = rows_of(table, "status = 'done'") - singles
    assert batches > 0
    assert batches % 100 == 0
    assert rows_of(table, "status = 'processing'") == 0

    for name, clients in (("heartbeat_1.sql", 4), ("heartbeat_100.sql", 2)):
        table.processing(4000)
        assert scripts.run(table.url, name, clients, 0.1).problem == ""
        beaten = rows_of(table, "heartbeat_at IS NOT NULL AND status = 'processing'")
        assert beaten > 0
        assert name == "heartbeat_1.sql" or beaten % 100 == 0

    for name, each in (("insert_1.sql", 1), ("insert_100.sql", 100)):
        table.empty()
        assert scripts.run(table.url, name, 2, 0.1, **payloads).problem == ""
        assert rows_of(table) > 0
        assert rows_of(table) % each == 0


@pytest.mark.parametrize("name", ["claim_complete_1.sql", "claim_complete_100.sql"])
def test_a_table_that_runs_dry_is_no_fast_run(scripts, table, name):
    table.queued(60)
    ran = scripts.run(table.url, name, 2, 0.5)
    assert any(sign in ran.problem for sign in context.DRY), ran


def test_a_password_is_on_no_command_line():
    address, secret = rig.without_password("postgresql://me:a%20secret@host:5433/name?sslmode=require")
    assert "secret" not in address
    assert {"host=host", "port=5433", "user=me", "dbname=name", "sslmode=require"} <= set(address.split())
    assert secret == {"PGPASSWORD": "a secret"}
    assert rig.without_password("postgresql://me@host/name")[1] == {}


def test_the_fallback_reads_the_scripts():
    read = script.steps((rig.FLOORS / "heartbeat_1.sql").read_text())
    assert [kind for kind, _ in read] == ["set n", "run"]
    assert "%(n)s::bigint" in read[1][1]
    assert 101 <= script.value_of(":client_id * 100 + random(1, 100)", {"client_id": 1}) <= 200
    with pytest.raises(ValueError, match="cannot read"):
        script.value_of("__import__('os')", {})
    kinds = [kind for kind, _ in script.steps((rig.FLOORS / "claim_complete_1.sql").read_text())]
    assert kinds == ["gset", "run"]


# --- the verb --------------------------------------------------------------------------------------------------------


def command(*words):
    return {
        "args": [sys.executable, "-P", "-m", "app", "bench", *map(str, words)],
        "env": {**os.environ, "PYTHONPATH": str(harness.ROOT)},
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


@pytest.mark.slow
def test_a_quick_run_tells_all_and_judges_nothing(tmp_path):
    told = tmp_path / "figures.json"
    call = command("--quick", "--only", "heartbeat,batch", "--folder", tmp_path, "--json", told)
    done = subprocess.run(**call, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(told.read_text())
    assert document["quick"] is True
    assert document["floors_sha256"] == run.floors_digest()
    assert document["machine"]["postgres"]["fsync"] == "on"
    assert document["machine"]["pgbench"]
    assert list(document["groups"]) == ["heartbeat", "batch"]
    rows = [row for group in document["groups"].values() for row in group["rows"]]
    assert len(rows) == 6
    for row in rows:
        assert row["valid"], row["problems"]
        assert row["met"] is None
        ours, floor, ratio = row["ours"], row["floor"], row["ratio"]
        assert ours["count"] == floor["count"] == ratio["count"] == document["rounds"] == len(ours["values"])
        pairs = [one / other for one, other in zip(ours["values"], floor["values"], strict=True)]
        assert ratio["median"] == pytest.approx(statistics.median(pairs))
        assert (ratio["least"], ratio["most"]) == pytest.approx((min(pairs), max(pairs)))
        assert floor["name"] in done.stdout
    judged = {row["what"]: row["goal"] for row in rows if row["goal"]}
    assert len(judged) == 4
    assert all(goal["at_least"] < goal["moonshot"] for goal in judged.values())
    assert "the figures say nothing" in done.stdout
    assert not list(tmp_path.glob("bench-*"))
    harness.nobody_left(tmp_path)


def test_ctrl_c_ends_every_process(tmp_path):
    process = subprocess.Popen(**command("--only", "heartbeat", "--folder", tmp_path))
    try:
        harness.wait_for(lambda: list(tmp_path.glob("bench-*/service-1/stdout.log")), 30)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    harness.nobody_left(tmp_path)
    assert not list(tmp_path.glob("bench-*"))


def test_an_unknown_group_is_refused_by_name():
    done = subprocess.run(**command("--only", "heartbeat,speed"), timeout=30)
    assert done.returncode == 2
    assert "'speed' is none of heartbeat, complete," in done.stderr


def test_every_group_of_the_list_has_its_file():
    for name in run.GROUPS:
        text = (harness.ROOT / "bench" / "groups" / f"{name.replace('-', '_')}.py").read_text()
        assert f'GROUP = "{name}"' in text


def test_a_spread_of_nothing_is_not_a_number_and_is_null_in_json():
    assert Spread.of([]).described() == {"median": None, "least": None, "most": None, "count": 0, "values": []}
