# ruff: noqa: E501
"""Bad input by the table: each case is answered by one problem document that names the place, never by a 5xx."""

import itertools
import json
import time

import pytest

from app.web.problems import PROBLEMS, RequestTimeout, headers_of
from tests.web.stand_in import TOKEN, KeyedRing, client_of, make_app

GOOD = {"queue": "q", "payload": {"a": 1}}

NOT_INTEGERS = [
    '"10"',
    "true",
    "1.5",
    "1.0",
    "null",
    "[]",
    "{}",
    "1e2",
    "1e400",
    "9" * 400,
    "9" * 4300,
    "NaN",
    "0",
    "101",
    "-1",
]
NOT_SECONDS = [
    '"10"',
    "true",
    "null",
    "[]",
    "{}",
    "-1",
    "-0.001",
    "1e400",
    "1e300",
    "9" * 400,
    "NaN",
    "Infinity",
    "31622401",
]
NOT_NAMES = [
    '""',
    '" a"',
    '"a b"',
    '".a"',
    '"-a"',
    '"é"',
    '"a/b"',
    f'"{"a" * 101}"',
    '"a\\n"',
    '"a\\u0000"',
    "1",
    "null",
    "[]",
    "{}",
    '"../x"',
    '"a%"',
    '"\\ud800"',
    '"a\\u2028"',
    '"a;b"',
    "true",
]
NOT_KEYS = [
    '""',
    '" a"',
    '"a "',
    '"\\ta"',
    '"a\\u0000"',
    '"a\\u0007b"',
    '"\\u0085"',
    '"a\\u00a0"',
    '"\\u2003a"',
    f'"{"k" * 201}"',
    "1",
    "[]",
    "{}",
    "true",
    '"\\ud800"',
    '"a\\nb"',
    '"\\u007f"',
    '"\\u3000x"',
]
NOT_INSTANTS = [
    "0",
    "1767225600",
    "1.5",
    "true",
    "[]",
    "{}",
    '""',
    '"now"',
    '"2026-01-01"',
    '"2026-01-01T00:00:00"',
    '"2026-01-01 00:00:00Z"',
    '"2026-01-01T00:00Z"',
    '"2026-01-01T24:00:00Z"',
    '"2026-02-30T00:00:00Z"',
    '"2026-13-01T00:00:00Z"',
    '"2026-01-01T00:60:00Z"',
    '"2026-01-01T00:00:60Z"',
    '"2026-01-01T00:00:00+24:00"',
    '"2026-01-01T00:00:00+01:60"',
    '"2026-01-01T00:00:00+0100"',
    '"2026-01-01T00:00:00+01"',
    '"0000-01-01T00:00:00Z"',
    '"0001-01-01T00:00:00+14:00"',
    '"9999-12-31T23:59:59-14:00"',
    '"10000-01-01T00:00:00Z"',
    '"2026-W01-1T00:00:00Z"',
    '"2026-01-01T00:00:00z "',
    '"2026-01-01T00:00:00 UTC"',
    '"+2026-01-01T00:00:00Z"',
    '"٢٠٢٦-01-01T00:00:00Z"',
    '"2026-01-01T00:00:00.Z"',
    '"2026-01-01T00:00:00,5Z"',
    '"1767225600"',
    '"infinity"',
    '"2026-01-01T00:00:00Z\\u0000"',
]
NOT_IDS = [
    "1",
    "true",
    "[]",
    "{}",
    '""',
    '"x"',
    '"0190a5b27c417b3e9d525f7f3d9d2c11"',
    f'"{{{TOKEN}}}"',
    f'"urn:uuid:{TOKEN}"',
    f'"{TOKEN} "',
    f'"{TOKEN[:-1]}g"',
    f'"{TOKEN}0"',
    '"\\u0000"',
    '"0190a5b2-7c41-7b3e-9d52-5f7f3d9d2c1\\uff11"',
]
NOT_BOOLS = ["0", "1", '"true"', '"false"', "null", "[]", "{}"]
NOT_POLICIES = ['"AUTO"', '"other"', "null", "1", "true", "[]", '""']
NOT_LISTS = ['"a"', "{}", "1", "true", '["a","b","c","d"]', '["a",1]', "[null]", '["a b"]', "[[]]", '["\\u0000"]']
NOT_PROGRESS = ['"' + "x" * 4096 + '"', "[" + "1," * 2048 + "1]", '"\\u0000"', '{"a":NaN}', "[" * 65 + "]" * 65]
NOT_PAYLOADS = [
    "NaN",
    "[Infinity]",
    "1e400",
    "9" * 4301,
    '"\\u0000"',
    '"\\udead"',
    "[" * 65 + "]" * 65,
    '"' + "x" * 262_144 + '"',
    '"' + "é" * 131_072 + '"',
]

FIELDS = {
    "count": NOT_INTEGERS,
    "delay": NOT_SECONDS,
    "queue": NOT_NAMES,
    "key": NOT_KEYS,
    "at": NOT_INSTANTS,
    "token": NOT_IDS,
    "flag": NOT_BOOLS,
    "policy": NOT_POLICIES,
    "names": NOT_LISTS,
    "progress": NOT_PROGRESS,
    "payload": NOT_PAYLOADS,
}
CASES = [(field, text) for field, texts in FIELDS.items() for text in texts]


@pytest.fixture(scope="module")
def app():
    return make_app()


@pytest.fixture
async def client(app):
    async with client_of(app) as client:
        yield client


def body_with(field: str, text: str) -> bytes:
    members = {name: json.dumps(value) for name, value in GOOD.items() if name != field}
    return ("{" + ",".join(f'"{name}":{value}' for name, value in {**members, field: text}.items()) + "}").encode()


def is_problem(response, status: int, code: str) -> dict:
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    document = response.json()
    assert {"type", "title", "status", "detail", "code"} <= document.keys()
    assert document["code"] == code
    assert document["status"] == status
    assert document["type"] == f"/docs#problem-{code}"
    assert all(isinstance(document[word], str) for word in ("type", "title", "detail", "code"))
    return document


@pytest.mark.parametrize(("field", "text"), CASES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CASES)])
async def test_a_bad_value_is_named(client, field, text):
    response = await client.post("/v1/things", content=body_with(field, text))
    document = is_problem(response, 422, "invalid-input")
    assert any(error["place"].startswith(f"body.{field}") for error in document["errors"])
    assert len(response.content) < 2_000


@pytest.mark.parametrize(("field", "text"), CASES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CASES)])
async def test_a_bad_item_is_named_by_its_index(client, field, text):
    good = json.dumps(GOOD).encode()
    content = b'{"jobs":[' + b",".join([good, body_with(field, text), good, body_with(field, text)]) + b"]}"
    document = is_problem(await client.post("/v1/things/batch", content=content), 422, "invalid-input")
    for index in (1, 3):
        assert any(error["place"].startswith(f"body.jobs[{index}].{field}") for error in document["errors"])
    assert not any(error["place"].startswith(("body.jobs[0]", "body.jobs[2]")) for error in document["errors"])


GOOD_VALUES = {
    "count": ["1", "100"],
    "delay": ["0", "0.5", "31622400", "1e-300", "1E2", "-0.0"],
    "queue": ['"a"', '"A.b_c-9"', f'"{"a" * 100}"'],
    "key": ['"a b"', '"é漢字"', f'"{"k" * 200}"', '"\U0001f600"', '"a\\"b"', '"\\u00e9"', '"\u200b"'],
    "at": [
        '"2026-01-01T00:00:00Z"',
        '"2026-01-01t00:00:00z"',
        '"2026-01-01T00:00:00.123456789+14:00"',
        '"2026-01-01T00:00:00-00:00"',
        "null",
    ],
    "token": [f'"{TOKEN}"', f'"{TOKEN.upper()}"', "null"],
    "flag": ["true", "false"],
    "names": ["[]", '["a"]', "null"],
    "payload": [
        "null",
        "1",
        '""',
        "[" * 64 + "]" * 64,
        '"' + "x" * 262_142 + '"',
        '{"a":1,"a":2}',
        "9" * 4300,
        '"\\\\u0000"',
    ],
    "progress": ['"' + "x" * 4094 + '"', "null"],
}


@pytest.mark.parametrize(("field", "text"), [(f, t) for f, ts in GOOD_VALUES.items() for t in ts])
async def test_the_edge_of_what_is_taken(client, field, text):
    response = await client.post("/v1/things", content=body_with(field, text))
    assert response.status_code == 200, response.text


BODIES = [
    (b"", 422, "invalid-input"),
    (b"null", 422, "invalid-input"),
    (b" null ", 422, "invalid-input"),
    (b"[]", 422, "invalid-input"),
    (b"1", 422, "invalid-input"),
    (b'"x"', 422, "invalid-input"),
    (b"{}", 422, "invalid-input"),
    (b"{", 422, "not-json"),
    (b"queue=a&payload=1", 422, "not-json"),
    (b"\xff\xfe{\x00}\x00", 422, "not-json"),
    (b"\xef\xbb\xbf{}", 422, "not-json"),
    (b"[" * 100_000, 422, "invalid-input"),
    (b'{"a":' * 100_000, 422, "invalid-input"),
    (b'{"payload":' + b"[" * 100_000, 422, "invalid-input"),
    (b'{"queue":"q","payload":1,"paylod":2}', 422, "invalid-input"),
    (b'{"queue":"q","payload":1,"__proto__":2}', 422, "invalid-input"),
    (b'{"queue":"q","payload":1,"queue":"q"}', 422, "invalid-input"),
    (b'{"queue":"q","payload":1,"\\u0000":"q"}', 422, "invalid-input"),
    (b'{"queue":"q","payload":1,"\\ud800":"q"}', 422, "invalid-input"),
    (b'{"queue":"q","payload":1,"' + b"x" * 100_000 + b'":"q"}', 422, "invalid-input"),
    (b'{"queue":"q","payload":1,"attempt_token":1,"fence":2,"status":3}', 422, "invalid-input"),
    (b" " * (1 << 20) + b"{}", 413, "too-large"),
]


@pytest.mark.parametrize(("content", "status", "code"), BODIES, ids=range(len(BODIES)))
async def test_bad_bodies(client, content, status, code):
    document = is_problem(await client.post("/v1/things", content=content), status, code)
    assert len(json.dumps(document)) < 2_000


async def test_an_unknown_member_is_named_with_a_guess(client):
    document = is_problem(
        await client.post("/v1/things", content=b'{"queue":"q","payload":1,"coutn":2}'), 422, "invalid-input"
    )
    assert document["errors"] == [{"place": "body.coutn", "message": "unknown member; did you mean count?"}]


async def test_many_unknown_members_are_answered_at_once(client):
    members = ",".join(f'"cuont{i}":1' for i in range(45))
    item = '{"queue":"q","payload":1,' + members + "}"
    begun = time.process_time()
    response = await client.post("/v1/things/batch", content='{"jobs":[' + ",".join([item] * 1000) + "]}")
    assert time.process_time() - begun < 3
    errors = is_problem(response, 422, "invalid-input")["errors"]
    assert len(errors) == 1000
    assert sum("did you mean" in error["message"] for error in errors) == 10


async def test_a_raw_member_too_long_is_refused_by_its_size(client):
    content = b'{"queue":"q","payload":[' + b"[]," * 100_000 + b"NaN]}"
    document = is_problem(await client.post("/v1/things", content=content), 422, "invalid-input")
    assert document["errors"] == [{"place": "body.payload", "message": "300005 bytes of JSON; at most 262144"}]


async def test_secrets_are_not_echoed(client):
    content = b'{"queue":"sekret value","payload":1,"key":" sekret","token":"sekret","count":"sekret"}'
    response = await client.post("/v1/things", content=content)
    is_problem(response, 422, "invalid-input")
    assert "sekret" not in response.text


TYPES = [
    ("", 200), ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON", 200),
    ("application/x-www-form-urlencoded", 200), ("text/plain", 415), ("application/xml", 415),
    ("multipart/form-data; boundary=x", 415), ("application/json; charset=utf-16", 415),
    ("application/json; charset=latin-1", 415), ("text/json", 415), ("*/*", 415), ("json", 415),
    ("application/octet-stream", 415), ("application/problem+json", 415), ("application/json, text/plain", 415),
]  # fmt: skip


@pytest.mark.parametrize(("media", "status"), TYPES)
async def test_content_types(client, media, status):
    headers = {"content-type": media} if media else {}
    response = await client.post("/v1/things", content=json.dumps(GOOD).encode(), headers=headers)
    if status == 200:
        assert response.status_code == 200
    else:
        is_problem(response, 415, "unsupported-media-type")


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "gzip, identity", "x"])
async def test_an_encoded_body_is_refused(client, encoding):
    response = await client.post("/v1/things", content=b"\x1f\x8b" + b"0" * 100, headers={"content-encoding": encoding})
    is_problem(response, 415, "unsupported-media-type")


QUERIES = [
    ("stauts=failed", "query.stauts"), ("status=failed", "query.status"), ("status=", "query.status"),
    ("limit=0", "query.limit"), ("limit=501", "query.limit"), ("limit=-1", "query.limit"),
    ("limit=1000000000", "query.limit"), ("limit=1.0", "query.limit"), ("limit=1e2", "query.limit"),
    ("limit= 1", "query.limit"), ("limit=%2B1", "query.limit"), ("limit=1_0", "query.limit"), ("limit=01", "query.limit"),
    ("limit=", "query.limit"), ("limit=x", "query.limit"), ("limit=" + "9" * 5000, "query.limit"),
    ("limit=1&limit=2", "query.limit"), ("limit=%D9%A1", "query.limit"), ("limit=true", "query.limit"),
    ("wait=31", "query.wait"), ("wait=-1", "query.wait"), ("wait=nan", "query.wait"), ("wait=inf", "query.wait"),
    ("wait=1e400", "query.wait"), ("wait=1e999", "query.wait"), ("wait=0x1", "query.wait"), ("wait=", "query.wait"),
    ("queue=%00", "query.queue"), ("queue=a%20b", "query.queue"), ("queue=", "query.queue"),
    ("queue=a&queue=b", "query.queue"), ("queue=%FF", "query"), ("queue=%ED%A0%80", "query"), ("queue[]=a", "query"),
    ("queue=%0A", "query.queue"), ("queue=a'--", "query.queue"), ("key=%00", "query.key"), ("key=%0D%0Ax", "query.key"),
    ("key=%20a", "query.key"), ("key=", "query.key"), ("key=" + "k" * 201, "query.key"),
    ("after=0", "query.after"), ("after=2026-01-01", "query.after"), ("after=2026-01-01T00:00:00", "query.after"),
    ("after=2026-01-01T00:00:00+01:00", "query.after"), ("after=", "query.after"), ("after=now", "query.after"),
    ("verbose=1", "query.verbose"), ("verbose=yes", "query.verbose"), ("verbose=TRUE", "query.verbose"),
    ("__class__=x", "query"), ("%00=1", "query"), ("Limit=1", "query.Limit"), ("=1", "query"),
    ("&".join(f"a{i}=1" for i in range(60)), "query"), ("a" * 5_000 + "=1", "query"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "place"), QUERIES, ids=range(len(QUERIES)))
async def test_bad_queries(client, query, place):
    response = await client.get(f"/v1/things?{query}")
    document = is_problem(response, 422, "invalid-input")
    assert any(error["place"].startswith(place) for error in document["errors"])
    assert len(response.content) < 2_000


@pytest.mark.parametrize(
    "query", ["", "limit=1", "status=queued&status=done", "wait=0.5", "wait=3e1", "verbose", "verbose=false", "key=%C3%A9",
              "after=2026-01-01T00:00:00%2B01:00", "queue=a&limit=500"]
)  # fmt: skip
async def test_good_queries(client, query):
    assert (await client.get(f"/v1/things?{query}")).status_code == 200


@pytest.mark.parametrize("query", ["x=1", "stauts=failed", "verbose=maybe"])
@pytest.mark.parametrize(
    "route", [("GET", "/livez"), ("GET", "/readyz"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs"),
              ("GET", f"/v1/things/{TOKEN}"), ("POST", "/v1/queues/q/pause"), ("POST", f"/v1/things/{TOKEN}/cancel")]
)  # fmt: skip
async def test_unknown_parameters_are_refused_on_every_door(client, route, query):
    is_problem(await client.request(route[0], f"{route[1]}?{query}"), 422, "invalid-input")


PATHS = [
    "/", "/v1", "/v1/", "/v1/nope", "/v1/things/", f"/v1/things/{TOKEN}/", "/v1//things", "/V1/things", "/docs/",
    "/docs/x", "/openapi.json/", "/livez/", "/redoc", "/favicon.ico", "/v1/things/a/b/c", "/v1/things/%2e%2e/x",
    "/v1/things/batch/", "/.env", "/v1/queues//pause", "/v1/queues/a%2Fb/pause", "/" + "a" * 5_000,
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_unknown_paths(client, method, path):
    response = await client.request(method, path)
    is_problem(response, 404, "not-found")
    assert "location" not in response.headers


@pytest.mark.parametrize("text", ["x", "1", TOKEN[:-1], TOKEN + "0", "%00", "%E2%80%8B", "{id}", "null", "-1", "%27"])
async def test_bad_ids_in_the_path(client, text):
    document = is_problem(await client.get(f"/v1/things/{text}"), 422, "invalid-input")
    assert document["errors"][0]["place"] == "path.id"


@pytest.mark.parametrize("text", ["%20", ".a", "a%20b", "%C3%A9", "%00", "a" * 101, "-", "a%0A"])
async def test_bad_names_in_the_path(client, text):
    document = is_problem(await client.post(f"/v1/queues/{text}/pause"), 422, "invalid-input")
    assert document["errors"][0]["place"] == "path.name"


METHODS = [
    ("/v1/things", {"GET", "HEAD", "POST"}),
    ("/v1/things/batch", {"POST"}),
    (f"/v1/things/{TOKEN}", {"GET", "HEAD"}),
    ("/livez", {"GET", "HEAD"}),
    ("/docs", {"GET", "HEAD"}),
]


@pytest.mark.parametrize(("path", "allowed"), METHODS)
@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "QUERY", "BREW"]
)
async def test_methods(client, path, allowed, method):
    response = await client.request(method, path)
    if method in allowed:
        assert response.status_code != 405
    else:
        assert response.status_code == 405
        if method != "HEAD":
            is_problem(response, 405, "method-not-allowed")
        assert set(response.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", ["/v1/things", "/livez", "/readyz", "/metrics", "/docs", "/openapi.json"])
async def test_head_is_get_without_a_body(client, path):
    get, head = await client.get(path), await client.head(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    if path != "/metrics":
        assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("content", [b"", b"null", b"{}", b' {"count":1} ', b'{"reason":null}'])
async def test_an_operator_needs_no_body(client, content):
    response = await client.post(f"/v1/things/{TOKEN}/cancel", content=content)
    assert response.json()["echo"] == {"reason": None, "count": 1}


@pytest.mark.parametrize("content", [b"[]", b'{"reasn":1}', b"x", b'{"count":0}'])
async def test_an_operators_bad_body_is_refused_all_the_same(client, content):
    assert (await client.post(f"/v1/things/{TOKEN}/cancel", content=content)).status_code == 422


async def test_a_door_without_a_body_refuses_members(client):
    assert (await client.post("/v1/queues/q/pause")).status_code == 204
    assert (await client.post("/v1/queues/q/pause", content=b"{}")).status_code == 204
    is_problem(await client.post("/v1/queues/q/pause", content=b'{"force":true}'), 422, "invalid-input")


REPORTS = [
    b'"a\\u0000b"', b'"\\ud800"', b'"\xff"', b"NaN", b"1e400", b"[1,2]", b'{"a":1}', b"true", b"1", b'"' + b"x" * 100_000 + b'"',
    "\"é漢\U0001f600\"".encode() * 1, b'"line\nline"', b"-Infinity", b"[" * 200 + b"]" * 200, b'""', b"null",
]  # fmt: skip


@pytest.mark.parametrize("text", REPORTS, ids=range(len(REPORTS)))
@pytest.mark.parametrize("member", [b"error_message", b"error_type"])
async def test_a_worker_can_always_report(client, member, text):
    content = b'{"attempt_token":"%s","%s":%s}' % (TOKEN.encode(), member, text)
    response = await client.post(f"/v1/things/{TOKEN}/fail", content=content)
    assert response.status_code == 200, response.text[:300]
    kept = response.json()["echo"][member.decode()]
    if kept is not None:
        assert len(kept.encode()) <= 16 * 1024
        assert "\x00" not in kept
        if member == b"error_type":
            assert len(kept) <= 200


async def test_a_batch_of_nothing(client):
    assert (await client.post("/v1/things/batch", content=b'{"jobs":[]}')).status_code == 200


@pytest.mark.parametrize("count", [1000, 1001])
async def test_the_size_of_a_batch(client, count):
    response = await client.post("/v1/things/batch", json={"jobs": [GOOD] * count})
    if count <= 1000:
        assert response.json()["echo"]["count"] == count
    else:
        is_problem(response, 422, "invalid-input")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("path", "limit"), [("/v1/things", 1 << 20), ("/v1/things/batch", 16 << 20)])
async def test_the_size_of_a_body(client, path, limit, chunked):
    async def chunks(size):
        for _ in range(size // 65536):
            yield b" " * 65536
        yield b" " * (size % 65536)

    for size in (limit, limit + 1):
        content = chunks(size) if chunked else b" " * size
        response = await client.post(path, content=content)
        if size == limit:
            is_problem(response, 422, "invalid-input")
        else:
            assert is_problem(response, 413, "too-large")["limit"] == limit


@pytest.mark.parametrize("path", ["/v1/things", f"/v1/things/{TOKEN}", "/livez"])
@pytest.mark.parametrize(
    ("content", "media"), [(b"{", "application/json"), (b"x", "text/plain"), (b"[1]", ""), (b" " * 2_000_000, "")]
)
async def test_the_body_of_a_get_is_not_judged(client, path, content, media):
    response = await client.request("GET", path, content=content, headers={"content-type": media})
    assert response.status_code == 200


def test_a_call_that_timed_out_may_be_repeated():
    assert headers_of(RequestTimeout("late"))["retry-after"] == "1"


async def test_a_fault_of_ours_tells_nothing_inner(client):
    response = await client.post("/v1/things", json={**GOOD, "queue": "boom"})
    document = is_problem(response, 500, "internal")
    assert "secret" not in response.text
    assert document["incident"]


async def test_a_refusal_carries_its_facts(client):
    document = is_problem(await client.post("/v1/things", json={**GOOD, "queue": "lost"}), 409, "lease-lost")
    assert document["fence"] == 7
    assert document["retryable"] is False
    assert document["status"] == 409, "a fact never hides a member of the standard"


async def test_raw_json_and_instants_go_out_as_they_should(client):
    content = (
        b'{"queue":"q","payload":{"b":1.0, "a":1E5,"n":9007199254740993},"at":"2026-01-01T01:00:00.1234567+01:00"}'
    )
    response = await client.post("/v1/things", content=content)
    assert b'"payload":{"b":1.0, "a":1E5,"n":9007199254740993}' in response.content
    assert response.json()["echo"]["at"] == "2026-01-01T00:00:00.123456Z"


def test_every_code_of_the_service_has_a_status():
    from app import errors

    refusals = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Refusal)]
    codes = {kind.code for kind in refusals if kind is not errors.Refusal}
    assert codes <= PROBLEMS.keys()


OPERATIONS = [
    ("POST", "/v1/things", "enqueue"), ("POST", "/v1/things/batch", "enqueue"), ("GET", "/v1/things", "read"),
    ("GET", f"/v1/things/{TOKEN}", "read"), ("POST", f"/v1/things/{TOKEN}/fail", "work"),
    ("POST", f"/v1/things/{TOKEN}/cancel", "operate"), ("POST", "/v1/queues/q/pause", "operate"),
    ("GET", "/metrics", "read"), ("GET", "/readyz?verbose", "read"),
    ("GET", "/livez", None), ("GET", "/readyz", None), ("GET", "/docs", None), ("GET", "/openapi.json", None),
]  # fmt: skip
IDENTITIES = [
    None,
    "Bearer wrong",
    "Basic eDp5",
    "Bearer",
    "",
    *(f"Bearer {s}" for s in ("enqueue", "work", "read", "operate", "admin")),
]


@pytest.mark.parametrize(("operation", "identity"), list(itertools.product(OPERATIONS, IDENTITIES)))
async def test_scopes(operation, identity):
    method, path, scope = operation
    headers = {} if identity is None else {"authorization": identity}
    async with client_of(make_app(KeyedRing())) as client:
        response = await client.request(method, path, headers=headers)
    given = (identity or "").removeprefix("Bearer ")
    if scope is None or given in (scope, "admin"):
        assert response.status_code not in (401, 403)
    elif given in ("enqueue", "work", "read", "operate"):
        assert is_problem(response, 403, "scope-missing")["scope"] == scope
    else:
        is_problem(response, 401, "key-rejected")
        assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("name", ["api_key", "access_token", "token", "key", "Authorization", "API_KEY"])
async def test_a_key_in_the_url_is_never_taken(name):
    async with client_of(make_app(KeyedRing())) as client:
        response = await client.get(f"/v1/things?{name}=read")
    is_problem(response, 401, "key-rejected")
    assert "URL" in response.json()["detail"]
