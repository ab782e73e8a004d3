"""B42: what PostgreSQL cannot store in a text: refused with its place or kept as sent, never a 500, and a worker can
always report its failure on the same token."""

import json

import pytest

from tests.cases.support import books, new_queue

NUL = rb"\u0000"
BAD = {
    "in a value": rb'{"a":"x\u0000y"}',
    "in a key": rb'{"x\u0000y":1}',
    "deep in lists": rb'[[["\u0000"]]]',
    "alone": rb'"\u0000"',
    "after a backslash": rb'"\\\u0000"',
    "lone high surrogate": rb'{"a":"\ud800"}',
    "lone low surrogate": rb'{"a":"\udc00x"}',
    "surrogates reversed": rb'"\udc00\ud800"',
    "surrogate in a key": rb'{"\ud800":1}',
    "a raw NUL": b'"a\x00b"',
    "no UTF-8": b'"\xff\xfe"',
    "an overlong NUL": b'"\xc0\x80"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
}
GOOD = {
    "the letters": rb'{"a":"\\u0000"}',
    "the letters in a key": rb'{"\\u0000":["\\\\u0000"]}',
    "a pair": rb'"\ud83d\ude00"',
    "the letters of a surrogate": rb'"\\ud800"',
    "other control characters": rb'"\u0001\u001f\n"',
    "white space": b'{ "a" :\t[ 1 , 2 ]\r\n}',
    "not normalised": '"é é ﷺ \u2028 \U0010ffff"'.encode(),
}
TOKEN = b'"attempt_token":"%s"'


def refused(reply, *places):
    assert reply.status in (400, 422), reply.body
    assert reply.code in ("invalid-input", "not-json"), reply.body
    if reply.code == "invalid-input":
        named = [error["place"] for error in reply.body["errors"]]
        assert any(place in name for place in places for name in named), (places, named)
    else:
        assert reply.body["position"] >= 0


def bodies(queue, job, value):
    """(path, body, place) of each field that keeps JSON as sent, in single calls and in batches."""
    q, token = b'"queue":"%s"' % queue.encode(), TOKEN % job["attempt_token"].encode()
    job_id = job["id"].encode()
    return [
        ("/v1/jobs", b'{%s,"payload":%s}' % (q, value), "payload"),
        ("/v1/jobs/batch", b'{"jobs":[{%s,"payload":1},{%s,"payload":%s}]}' % (q, q, value), "jobs[1].payload"),
        (f"/v1/jobs/{job['id']}/complete", b'{%s,"result":%s}' % (token, value), "result"),
        ("/v1/jobs/complete", b'{"items":[{"id":"%s",%s,"result":%s}]}' % (job_id, token, value), "items[0].result"),
        (f"/v1/jobs/{job['id']}/heartbeat", b'{%s,"worker_id":"w","progress":%s}' % (token, value), "progress"),
        (
            "/v1/jobs/heartbeat",
            b'{"items":[{"id":"%s",%s,"worker_id":"w","progress":%s}]}' % (job_id, token, value),
            "items[0].progress",
        ),
        (f"/v1/jobs/{job['id']}/resolve", b'{"outcome":"done","result":%s}' % value, "result"),
    ]


@pytest.fixture
def held(pair):
    queue = new_queue("nul")
    pair.a.enqueued(queue)
    return pair.a.claim_one(queue, worker="w", lease=60)


@pytest.mark.parametrize("what", BAD)
def test_json_that_cannot_be_kept_is_refused_everywhere(pair, held, what):
    queue = held["queue"]
    for number, (path, body, place) in enumerate(bodies(queue, held, BAD[what])):
        refused(pair.each(number).call("POST", path, raw=body), place)
    assert pair.a.get(held["id"])["lease_expires_at"] == held["lease_expires_at"]
    books(pair.a, pair.sql, queue, 1)
    # The same token, the same text, as a failure: taken.
    body = b'{%s,"error_type":%s,"error_message":%s}'
    text = BAD[what] if BAD[what].startswith(b'"') else json.dumps(BAD[what].decode()).encode()
    reply = pair.b.call(
        "POST", f"/v1/jobs/{held['id']}/fail", raw=body % (TOKEN % held["attempt_token"].encode(), text, text)
    )
    assert (reply.status, reply.body["status"]) == (200, "queued"), reply.body
    [attempt] = pair.a.attempts(held["id"])
    assert attempt["outcome"] == "failed"
    assert attempt["error_message"]
    pair.a.call("GET", f"/v1/jobs?queue={queue}", expect=200)


@pytest.mark.parametrize("what", GOOD)
def test_harmless_text_is_kept_to_the_byte(pair, what):
    queue, value = new_queue("kept"), GOOD[what]
    job_id = pair.a.call(
        "POST", "/v1/jobs", raw=b'{"queue":"%s","payload":%s}' % (queue.encode(), value), expect=201
    ).body["id"]
    raw = pair.b.call("POST", "/v1/jobs/claim", {"worker_id": "w", "queues": [queue]}, expect=200)
    assert b'"payload":' + value in raw.raw
    [job] = raw.body["jobs"]
    calls = bodies(queue, job, value)
    for number in (4, 5, 2):
        pair.a.call("POST", calls[number][0], raw=calls[number][1], expect=200)
    for path in (f"/v1/jobs/{job_id}", f"/v1/jobs?queue={queue}"):
        found = pair.a.call("GET", path, expect=200).raw
        for member in (b"payload", b"result", b"progress"):
            assert b'"%s":%s' % (member, value) in found, (path, member)


@pytest.mark.parametrize("bad", [r"\u0000", r"\ud800", r"a\u0000b"])
def test_text_fields(pair, held, bad):
    """Names, keys and worker ids: refused with the place."""
    queue, text = held["queue"], f'"{bad}"'
    token = f'"attempt_token":"{held["attempt_token"]}"'
    calls = [
        ("/v1/jobs", f'{{"queue":"{queue}","payload":1,"unique_key":{text}}}', "unique_key"),
        ("/v1/jobs", f'{{"queue":{text},"payload":1}}', "queue"),
        ("/v1/jobs", f'{{"queue":"{queue}","payload":1,"kind":{text}}}', "kind"),
        ("/v1/jobs", f'{{"queue":"{queue}","payload":1,{text}:1}}', ""),
        (
            "/v1/jobs/batch",
            f'{{"jobs":[{{"queue":"{queue}","payload":1,"idempotency_key":{text}}}]}}',
            "idempotency_key",
        ),
        ("/v1/jobs/claim", f'{{"worker_id":{text},"queues":["{queue}"]}}', "worker_id"),
        ("/v1/jobs/claim", f'{{"worker_id":"w","queues":[{text}]}}', "queues[0]"),
        (f"/v1/jobs/{held['id']}/heartbeat", f'{{{token},"worker_id":{text}}}', "worker_id"),
        (f"/v1/jobs/{held['id']}/complete", f'{{"attempt_token":{text}}}', "attempt_token"),
        ("/v1/jobs/complete", f'{{"items":[{{"id":{text},{token}}}]}}', "id"),
    ]
    for number, (path, body, place) in enumerate(calls):
        refused(pair.each(number).call("POST", path, raw=body.encode()), place)
    owner = pair.a.call("PUT", f"/v1/queues/{queue}", raw=f'{{"owner":{text}}}'.encode())
    refused(owner, "owner")
    books(pair.a, pair.sql, queue, 1)
    assert pair.b.complete(held).status == 200


@pytest.mark.parametrize("verb", ["fail", "release"])
def test_a_worker_can_always_report(pair, verb):
    fields = {"fail": ("error_type", "error_message"), "release": ("reason",)}[verb]
    texts = [
        rb'"x\u0000y"',
        rb'"\ud800"',
        b'"a\x00b\x01"',
        b'"\xff"',
        b'"' + b"x" * 40_000 + rb'\u0000"',
        rb'"\\u0000"',
    ]
    if verb == "fail":
        texts += [b"NaN", b'{"a":[1,NaN,"\\u0000"]}', b"1e400", b"[null]", b"true"]
    queue = new_queue("report")
    pair.a.enqueued(queue, len(texts) * 2, max_attempts=100, backoff={"base_seconds": 0})
    jobs = pair.a.claim(queue, len(texts) * 2, worker="w", lease=60)
    for number, text in enumerate(texts):
        alone, batched = jobs[number * 2], jobs[number * 2 + 1]
        # A type of an error is a text; only the message may be anything.
        said = {name: text if name != "error_type" or text.startswith(b'"') else b'"E"' for name in fields}
        rest = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in said.items())
        reply = pair.a.call(
            "POST", f"/v1/jobs/{alone['id']}/{verb}", raw=b"{%s,%s}" % (TOKEN % alone["attempt_token"].encode(), rest)
        )
        assert reply.status == 200, (text, reply.body)
        item = b'{"id":"%s",%s,%s}' % (batched["id"].encode(), TOKEN % batched["attempt_token"].encode(), rest)
        reply = pair.b.call("POST", f"/v1/jobs/{verb}", raw=b'{"items":[%s]}' % item)
        assert reply.status == 200, (text, reply.body)
        assert reply.body["results"][0]["ok"], (text, reply.body)
        for job in (alone, batched):
            [attempt] = pair.a.attempts(job["id"])
            assert attempt["error_message"]
            assert "\x00" not in attempt["error_message"]
            assert len(attempt["error_message"].encode()) <= 16 * 1024
    kept = [pair.a.attempts(jobs[n * 2]["id"])[0]["error_message"] for n in range(len(texts))]
    assert kept[5] == "\\u0000"
    assert pair.a.call("GET", f"/v1/jobs?queue={queue}", expect=200)
    books(pair.a, pair.sql, queue, len(jobs))


@pytest.mark.parametrize("verb", ["cancel", "requeue"])
def test_an_operators_reason(pair, verb):
    queue = new_queue("reason")
    [job_id] = pair.a.enqueued(queue)
    if verb == "requeue":
        pair.a.operate("cancel", job_id)
    reply = pair.a.call("POST", f"/v1/jobs/{job_id}/{verb}", raw=rb'{"reason":"x\u0000y"}')
    assert reply.status in (200, 422), reply.body
    pair.a.call("POST", f"/v1/queues/{queue}/pause", raw=rb'{"reason":"x\u0000y"}', expect=(200, 422))
    pair.a.call("GET", f"/v1/queues/{queue}", expect=200)


@pytest.mark.parametrize(
    "name", ["q", "queue", "kind", "status", "worker_id", "unique_key", "cursor", "limit", "created_after"]
)
@pytest.mark.parametrize("value", ["%00", "a%00b", "%ED%A0%80", "%FF", "%", "%zz"])
def test_in_a_query(pair, name, value):
    reply = pair.a.call("GET", f"/v1/jobs?{name}={value}")
    # A lone % may be read as the text it is; no place where it is allowed can fail.
    assert reply.status in ((200, 422) if name in ("worker_id", "unique_key") and "%00" not in value else (422,))
    if reply.status == 422:
        # Bytes that are no UTF-8 are no text to be told apart by parameter.
        refused(reply, name, *(["query"] if "%00" not in value else []))


@pytest.mark.parametrize(
    "path", ["/v1/jobs/%00", "/v1/queues/%00", "/v1/queues/a%00b", "/v1/queues/%FF", "/v1/%00", "/%00"]
)
def test_in_a_path(pair, path):
    for method, suffix in (("GET", ""), ("PUT", ""), ("DELETE", ""), ("POST", "/cancel"), ("POST", "/pause")):
        reply = pair.a.call(method, path + suffix)
        assert reply.status in (404, 405, 422), (method, path, reply.body)


def test_in_the_key_of_a_header(pair):
    queue = new_queue("header")
    body = b'{"queue":"%s","payload":1}' % queue.encode()
    for value in (b"a\x01b", b"a\x7fb", b"\xff\xfe", b"a\x00b", b"k" * 201):
        sock = pair.a.connect(5)
        head = pair.a.request_bytes("POST", "/v1/jobs", body, ["Idempotency-Key: @"])
        sock.sendall(head.replace(b"@", value))
        status = int(sock.recv(65536).split(b" ", 2)[1])
        assert status in (400, 422), (value, status)
        sock.close()
    kept = pair.a.call("POST", "/v1/jobs", raw=body, headers={"idempotency-key": "schlüssel".encode()}, expect=201)
    assert kept.body["idempotency_key"] == "schlüssel"
    books(pair.a, pair.sql, queue, 1)


def test_one_bad_item_names_its_index_and_nothing_is_done(pair):
    queue = new_queue("index")
    good = b'{"queue":"%s","payload":1}' % queue.encode()
    bad = b'{"queue":"%s","payload":"\\u0000"}' % queue.encode()
    reply = pair.a.call("POST", "/v1/jobs/batch", raw=b'{"jobs":[%s]}' % b",".join([good, bad, good, bad]))
    assert reply.status == 422
    assert [error["place"] for error in reply.body["errors"]] == ["body.jobs[1].payload", "body.jobs[3].payload"]
    assert pair.a.call("GET", f"/v1/jobs?queue={queue}").body["jobs"] == []
