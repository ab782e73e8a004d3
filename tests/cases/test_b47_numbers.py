"""B47: a number is refused or comes back as it was sent; no stored one ever breaks a read, a list or a claim."""

import json
import sys

import pytest

from tests.cases.support import books, new_queue

NO_JSON = ["NaN", "Infinity", "-Infinity", "nan", "+1", "01", "1.", ".5", "0x10", "1_000", "1e", "--1", "１"]
TOO_MUCH = [
    "1e400",
    "-1e400",
    "1e5000",
    "1e140000",
    "1" * 5000,
    "-" + "9" * 4301,
    "1e309",
    "[1e400]",
    '{"a":{"b":-1e999}}',
]
KEPT = [
    "9007199254740993",
    "9223372036854775808",
    "18446744073709551616",
    "-9223372036854775809",
    "1" * 4300,
    "0.1",
    "1.0",
    "1",
    "-0",
    "-0.0",
    "1E5",
    "1e-5000",
    "5e-324",
    "1.7976931348623157e308",
    "0.10000000000000000000000000000000000001",
    "3.141592653589793238462643383279",
    "null",
    "false",
    '""',
    "[]",
    "{}",
]
DOUBLE = '{"a":1,"a":2}'


def read(raw):
    """Texts of numbers as they stand, by a parser that is strict and exact."""
    return json.loads(raw, parse_float=lambda t: ("number", t), parse_int=lambda t: ("number", t))


def test_kept_numbers_through_the_whole_life_of_a_job(pair):
    queue = new_queue("number")
    for value in KEPT:
        body = b'{"queue":"%s","payload":{"v":%s}}' % (queue.encode(), value.encode())
        pair.a.call("POST", "/v1/jobs", raw=body, expect=201)
    batch = ",".join(f'{{"queue":"{queue}","payload":{{"v":{value}}}}}' for value in KEPT)
    pair.b.call("POST", "/v1/jobs/batch", raw=f'{{"jobs":[{batch}]}}'.encode(), expect=200)

    for _ in range(2):
        claimed = pair.b.call("POST", "/v1/jobs/claim", {"worker_id": "w", "queues": [queue], "max_jobs": len(KEPT)})
        jobs = read(claimed.raw)["jobs"]
        assert [job["payload"] for job in jobs] == [read(f'{{"v":{value}}}') for value in KEPT]
        for number, (job, value) in enumerate(zip(jobs, KEPT, strict=True)):
            token = f'"attempt_token":"{job["attempt_token"]}"'
            beat = f'{{{token},"worker_id":"w","progress":{value if len(value) < 4000 else 0}}}'
            pair.each(number).call("POST", f"/v1/jobs/{job['id']}/heartbeat", raw=beat.encode(), expect=200)
            done = f'{{{token},"result":{value}}}'.encode()
            for _ in range(2):
                pair.each(number).call("POST", f"/v1/jobs/{job['id']}/complete", raw=done, expect=200)
            got = pair.a.call("GET", f"/v1/jobs/{job['id']}", expect=200).raw
            assert f'"payload":{{"v":{value}}}'.encode() in got
            assert f'"result":{value}'.encode() in got
    listed = read(pair.a.call("GET", f"/v1/jobs?queue={queue}&limit=500", expect=200).raw)["jobs"]
    assert sorted(map(repr, (job["payload"]["v"] for job in listed))) == sorted(2 * [repr(read(v)) for v in KEPT])
    books(pair.a, pair.sql, queue, 2 * len(KEPT))


@pytest.mark.parametrize("value", NO_JSON + TOO_MUCH, ids=lambda value: value[:12])
def test_what_cannot_be_read_back_is_refused_and_spends_nothing(pair, value):
    queue = new_queue("number")
    pair.a.enqueued(queue)
    job = pair.a.claim_one(queue, worker="w", lease=60)
    token = f'"attempt_token":"{job["attempt_token"]}"'
    calls = [
        ("/v1/jobs", f'{{"queue":"{queue}","payload":{value}}}', "body.payload"),
        ("/v1/jobs", f'{{"queue":"{queue}","payload":{{"a":[{value}]}}}}', "body.payload"),
        ("/v1/jobs/batch", f'{{"jobs":[{{"queue":"{queue}","payload":{value}}}]}}', "body.jobs[0].payload"),
        (f"/v1/jobs/{job['id']}/complete", f'{{{token},"result":{value}}}', "body.result"),
        (
            "/v1/jobs/complete",
            f'{{"items":[{{"id":"{job["id"]}",{token},"result":[{value}]}}]}}',
            "body.items[0].result",
        ),
        (f"/v1/jobs/{job['id']}/heartbeat", f'{{{token},"worker_id":"w","progress":{value}}}', "body.progress"),
    ]
    for number, (path, body, place) in enumerate(calls):
        reply = pair.each(number).call("POST", path, raw=body.encode())
        assert reply.status == 422, (path, reply.body)
        if value in TOO_MUCH:
            assert reply.code == "invalid-input"
            assert reply.body["errors"][0]["place"].startswith(place), reply.body
        assert len(reply.raw) < 4000
    assert pair.b.call("GET", f"/v1/jobs?queue={queue}", expect=200).body["jobs"][0]["id"] == job["id"]
    assert pair.a.complete(job).status == 200
    books(pair.a, pair.sql, queue, 1)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e400", "1e140000", "1" * 5000, "1.5", '"3"', "true", "-1", "[]", "9" * 400]
)
@pytest.mark.parametrize(
    "field",
    ["priority", "max_attempts", "max_reclaims", "lease_seconds", "max_run_seconds", "delay_seconds", "available_at"],
)
def test_in_the_fields_of_a_job(pair, field, value):
    if value == "1.5" and field.endswith("_seconds"):
        return  # a duration may have a fraction
    body = f'{{"queue":"number","payload":1,"{field}":{value}}}'
    reply = pair.a.call("POST", "/v1/jobs", raw=body.encode(), expect=422)
    if reply.code == "invalid-input":
        assert field in reply.body["errors"][0]["place"]


@pytest.mark.parametrize(
    "value", ["NaN", "1e400", "1" * 5000, "-1", "0", "501", "1000000000", "1.0", "", "%31", " 1", "1e2"]
)
def test_in_a_query(pair, value):
    for path in ("/v1/jobs", "/v1/queues"):
        reply = pair.a.call("GET", f"{path}?limit={value}")
        assert reply.status in ((200,) if value == "%31" else (422,)), (path, reply.body)


def test_other_numbers_of_calls(pair):
    queue = new_queue("number")
    [job_id] = pair.a.enqueued(queue)
    for value in ("NaN", "1e400", "1" * 5000, "-1", "1.5", "9007199254740992", "true"):
        for verb, field in (("cancel", "expected_fence"), ("requeue", "expected_fence"), ("requeue", "extra_attempts")):
            pair.a.call("POST", f"/v1/jobs/{job_id}/{verb}", raw=f'{{"{field}":{value}}}'.encode(), expect=422)
        for field in ("max_jobs", "wait_seconds", "lease_seconds"):
            if (field, value) not in (("wait_seconds", "1.5"), ("lease_seconds", "1.5")):
                body = f'{{"worker_id":"w","queues":["{queue}"],"{field}":{value}}}'
                pair.a.call("POST", "/v1/jobs/claim", raw=body.encode(), expect=422)
        pair.a.call("PUT", f"/v1/queues/{queue}", raw=f'{{"max_processing":{value}}}'.encode(), expect=422)
    assert pair.b.get(job_id)["status"] == "queued"


def test_keys_that_stand_twice(pair):
    """In a payload: refused or kept as sent. In the envelope it would be two meanings."""
    queue = new_queue("twice")
    reply = pair.a.call("POST", "/v1/jobs", raw=f'{{"queue":"{queue}","payload":{DOUBLE}}}'.encode())
    assert reply.status in (201, 422)
    if reply.status == 201:
        claimed = pair.b.call("POST", "/v1/jobs/claim", {"worker_id": "w", "queues": [queue]}, expect=200)
        assert b'"payload":' + DOUBLE.encode() in claimed.raw
    envelope = f'{{"queue":"{queue}","queue":"other","payload":1}}'
    assert pair.a.call("POST", "/v1/jobs", raw=envelope.encode()).status in (201, 422)


@pytest.mark.parametrize(("depth", "taken"), [(64, True), (65, False), (1000, False), (100_000, False)])
@pytest.mark.parametrize("pattern", ["[]", "{}"])
def test_depth_is_counted_from_the_payloads_own_root(pair, depth, taken, pattern):
    queue = new_queue("deep")
    opened = "[" * depth if pattern == "[]" else '{"a":' * (depth - 1) + "{"
    value = opened + ("]" if pattern == "[]" else "}") * depth
    single = pair.a.call("POST", "/v1/jobs", raw=f'{{"queue":"{queue}","payload":{value}}}'.encode())
    batch = pair.a.call("POST", "/v1/jobs/batch", raw=f'{{"jobs":[{{"queue":"{queue}","payload":{value}}}]}}'.encode())
    assert (single.status, batch.status) == ((201, 200) if taken else (422, 422))
    if taken:
        assert sys.getrecursionlimit() > depth
        claimed = pair.b.call("POST", "/v1/jobs/claim", {"worker_id": "w", "queues": [queue]}, expect=200)
        assert b'"payload":' + value.encode() in claimed.raw


def test_numbers_as_sent_decide_whether_content_is_the_same(pair):
    queue = new_queue("same")

    def send(payload, api):
        return api.call(
            "POST",
            "/v1/jobs",
            raw=f'{{"queue":"{queue}","payload":{payload}}}'.encode(),
            headers={"idempotency-key": "k"},
        )

    assert send('{"a":1,"b":[9007199254740993]}', pair.a).status == 201
    assert send('{ "b": [9007199254740993], "a": 1 }', pair.b).status == 200
    for other in (
        '{"a":1.0,"b":[9007199254740993]}',
        '{"a":1,"b":[9007199254740992]}',
        '{"a":1,"b":[9007199254740993.0]}',
    ):
        assert send(other, pair.b).code == "idempotency-mismatch", other
