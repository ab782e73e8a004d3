"""Headers and cursors that nobody sends by mistake, against a whole service."""

import base64
import hashlib
import json

import httpx2
import pytest

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def client(serve):
    with httpx2.Client(base_url=serve(FENCEPOST_LOOPS="false").url) as client:
        yield client


def forged(position: list, filters: dict) -> str:
    bound = hashlib.sha256(json.dumps(filters, separators=(",", ":"), sort_keys=True).encode()).hexdigest()[:16]
    return base64.urlsafe_b64encode(json.dumps([bound, *position]).encode()).rstrip(b"=").decode()


def test_a_forged_position_is_refused(client):
    job = client.post("/v1/jobs", json={"queue": "q", "payload": 1}).json()["id"]
    everything = dict.fromkeys(
        ("queue", "kind", "status", "worker_id", "unique_key", "created_after", "created_before")
    )
    attempts = f"/v1/jobs/{job}/attempts"
    instant = "2026-01-01T00:00:00Z"
    assert client.get("/v1/queues", params={"cursor": forged(["p"], {})}).json()["queues"], "forged as it should be"
    assert client.get("/v1/jobs", params={"cursor": forged([instant, job], everything)}).status_code == 200
    assert client.get(attempts, params={"cursor": forged([0], {"id": job})}).status_code == 200
    for path, filters, positions in (
        ("/v1/queues", {}, (["\x00"], ["a\x00"], ["\x7f"], ["\ud800"], ["a b"], ["é"], [""], [None], [1], [["a"]])),
        (
            "/v1/jobs",
            everything,
            ([instant, "\x00"], ["\x00", job], [instant, 1], [1e300, job], [2**70, job], ["infinity", job]),
        ),
        (attempts, {"id": job}, ([2**53], [2**63], [2**70], [-2], [True], [1.5], ["1"], [None])),
    ):
        for position in positions:
            answer = client.get(path, params={"cursor": forged(position, filters)})
            assert answer.status_code == 422, (path, position, answer.text)
            assert answer.json()["errors"][0]["place"] == "query.cursor"


def test_two_idempotency_keys_are_refused(client):
    content = json.dumps({"queue": "q", "payload": 1})
    answer = client.post("/v1/jobs", content=content, headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")])
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"place": "header.Idempotency-Key", "message": "is given twice"}]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (PARENT, PARENT),
        (PARENT.upper(), None),
        (PARENT.replace("4bf9", "4bg9"), None),
        (PARENT.replace("-", "_"), None),
        ("-" * 3 + "x" * 52, None),
        (PARENT + "-00", None),
        ("", None),
    ],
)
def test_only_a_traceparent_is_kept(client, sent, kept):
    answer = client.post("/v1/jobs", json={"queue": "q", "payload": 1}, headers={"traceparent": sent})
    assert answer.status_code == 201
    assert answer.json()["traceparent"] == kept


def test_a_beat_of_a_batch_tells_the_run_deadline(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert "run_deadline_at" in schemas["HeartbeatResult"]["properties"]
