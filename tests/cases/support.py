"""What the cases share: a client that judges every answer, raw sockets, the books of a queue, moments moved by SQL.

The service is a black box here: real processes over real sockets. SQL stands beside it only to move time, to put
obstacles in its way and to look at what it keeps.
"""

import contextlib
import json
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psycopg
from psycopg.rows import dict_row

QUICK = {
    "FENCEPOST_RECLAIM_INTERVAL_SECONDS": "0.05",
    "FENCEPOST_OUTAGE_GRACE_SECONDS": "0",
    "FENCEPOST_PRUNE_INTERVAL_SECONDS": "0.2",
}
PATIENCE = 15.0
LIVE = ("queued", "processing", "manual_review")
ENDED = ("done", "failed", "cancelled")


def strictly(raw: bytes) -> Any:
    """What a strict parser reads; it knows no NaN and no Infinity and takes no integer over 4 300 digits."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(raw.decode("utf-8"), parse_constant=refuse)


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any
    raw: bytes
    headers: httpx2.Headers

    @property
    def code(self) -> str | None:
        return self.body.get("code") if isinstance(self.body, dict) else None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class Api:
    """One instance. Every answer is judged: strict JSON, problems in their one shape, no 5xx but an allowed 503."""

    def __init__(self, url: str, *, may_be_away: bool = False) -> None:
        self.url = url
        self.may_be_away = may_be_away
        self.address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))
        limits = httpx2.Limits(max_connections=200, max_keepalive_connections=200)
        self.http = httpx2.Client(base_url=url, timeout=40.0, limits=limits, trust_env=False)
        self.sockets: list[socket.socket] = []

    def close(self) -> None:
        self.http.close()
        self.drop_sockets()

    def drop_sockets(self) -> None:
        """Close what a case left open."""
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        expect: int | Iterable[int] | None = None,
    ) -> Reply:
        content = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        sent = dict(headers or {})
        if content is not None:
            sent.setdefault("content-type", "application/json")
        answer = self.http.request(method, path, content=content, headers=sent)
        reply = self.judge(answer.status_code, answer.content, answer.headers)
        if expect is not None:
            allowed = {expect} if isinstance(expect, int) else set(expect)
            assert reply.status in allowed, (method, path, reply.status, reply.raw[:500])
        return reply

    def judge(self, status: int, raw: bytes, headers: httpx2.Headers) -> Reply:
        kind = headers.get("content-type", "").split(";")[0]
        body = strictly(raw) if raw and "json" in kind else None
        reply = Reply(status, body, raw, headers)
        if status >= 400:
            assert kind == "application/problem+json", (status, kind, raw[:300])
            assert body["status"] == status, raw[:300]
            assert body["code"], raw[:300]
        if status >= 500:
            assert status == 503, raw[:500]
            assert self.may_be_away or body["code"] == "too-many-waiters", raw[:500]
        if status in (429, 503):
            assert int(headers["retry-after"]) >= 1
        return reply

    # --- the verbs of the cases --------------------------------------------------------------------------------------

    def enqueue(self, queue: str, payload: Any = None, *, key: str | None = None, **fields: Any) -> Reply:
        headers = {"idempotency-key": key} if key is not None else {}
        body = {"queue": queue, "payload": payload if payload is not None else {"n": 1}, **fields}
        return self.call("POST", "/v1/jobs", body, headers=headers)

    def enqueued(self, queue: str, count: int = 1, **fields: Any) -> list[str]:
        """The ids of so many new jobs."""
        jobs = [{"queue": queue, "payload": {"n": n}, **fields} for n in range(count)]
        results = self.call("POST", "/v1/jobs/batch", {"jobs": jobs}, expect=200).body["results"]
        assert all(result["ok"] for result in results)
        return [result["id"] for result in results]

    def claim(
        self, queue: str | Sequence[str], count: int = 1, *, worker: str = "w", lease: float | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        queues = [queue] if isinstance(queue, str) else list(queue)
        body = {"worker_id": worker, "queues": queues, "max_jobs": count, **more}
        if lease is not None:
            body["lease_seconds"] = lease
        return self.call("POST", "/v1/jobs/claim", body, expect=200).body["jobs"]

    def claim_one(self, queue: str, **how: Any) -> dict[str, Any]:
        jobs = self.claim(queue, **how)
        assert len(jobs) == 1, jobs
        return jobs[0]

    def end(self, verb: str, job: dict[str, Any], **fields: Any) -> Reply:
        """`verb`: heartbeat, complete, fail or release, with the token of a claimed job."""
        if verb == "heartbeat":
            fields.setdefault("worker_id", job["reserved_by"])
        body = {"attempt_token": job["attempt_token"], **fields}
        return self.call("POST", f"/v1/jobs/{job['id']}/{verb}", body)

    def end_many(self, verb: str, jobs: Sequence[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
        items = []
        for job in jobs:
            item = {"id": job["id"], "attempt_token": job["attempt_token"], **fields}
            if verb == "heartbeat":
                item.setdefault("worker_id", job["reserved_by"])
            items.append(item)
        results = self.call("POST", f"/v1/jobs/{verb}", {"items": items}, expect=200).body["results"]
        assert [result["index"] for result in results] == list(range(len(jobs)))
        return results

    def complete(self, job: dict[str, Any], **fields: Any) -> Reply:
        return self.end("complete", job, **fields)

    def fail(self, job: dict[str, Any], **fields: Any) -> Reply:
        return self.end("fail", job, **fields)

    def heartbeat(self, job: dict[str, Any], **fields: Any) -> Reply:
        return self.end("heartbeat", job, **fields)

    def operate(self, verb: str, job_id: str, **fields: Any) -> Reply:
        return self.call("POST", f"/v1/jobs/{job_id}/{verb}", fields or None)

    def get(self, job_id: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/jobs/{job_id}", expect=200).body

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        return self.call("GET", f"/v1/jobs/{job_id}/attempts", expect=200).body["attempts"]

    def counts(self, queue: str) -> dict[str, int]:
        return self.call("GET", f"/v1/queues/{queue}", expect=200).body["counts"]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of a metric with these labels; 0 where there is none."""
        text = self.http.get("/metrics").text
        total = 0.0
        for line in text.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            series, _, value = line.rpartition(" ")
            found, _, rest = series.partition("{")
            if found == name and all(f'{label}="{wanted}"' in rest for label, wanted in labels.items()):
                total += float(value)
        return total

    # --- raw sockets -------------------------------------------------------------------------------------------------

    def connect(self, seconds: float = 30.0) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=seconds)
        self.sockets.append(sock)
        return sock

    def request_bytes(self, method: str, path: str, body: bytes = b"", headers: Iterable[str] = ()) -> bytes:
        head = [f"{method} {path} HTTP/1.1", f"Host: {self.address[0]}:{self.address[1]}"]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join([*head, *headers]) + "\r\n\r\n").encode("latin-1") + body

    def send_raw(self, method: str, path: str, body: Any) -> socket.socket:
        """The request sent whole, nothing read."""
        sock = self.connect()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sock.sendall(self.request_bytes(method, path, raw))
        return sock


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer with a Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        if not more:
            raise ConnectionError("closed before the end of the head")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
    )
    while len(body) < length:
        more = sock.recv(65536)
        if not more:
            raise ConnectionError("closed before the end of the body")
        body += more
    return int(head.split(b" ", 2)[1]), body


def reset(sock: socket.socket) -> None:
    """Close with an RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def new_queue(word: str = "q") -> str:
    return f"{word}-{uuid.uuid4().hex[:10]}"


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run all at the same moment, each in a thread of its own; their answers in order. Raises what a call raises."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(run, call) for call in calls]]


# --- beside the service ----------------------------------------------------------------------------------------------


class Sql:
    """A connection beside the service, in autocommit."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, statement: str, *params: Any, options: str = "") -> list[dict[str, Any]]:
        with psycopg.connect(self.url, autocommit=True, row_factory=dict_row, options=options) as connection:
            cursor = connection.execute(statement, params or None)
            return cursor.fetchall() if cursor.description else []

    @contextlib.contextmanager
    def open_transaction(self, statement: str, *params: Any):
        """A transaction that has run the statement and stays open until the block ends; then it is rolled back."""
        with psycopg.connect(self.url) as connection:
            connection.execute(statement, params or None)
            yield connection
            connection.rollback()

    def lapse(self, *job_ids: str) -> None:
        """The leases of these jobs ran out a second ago. They were claimed earlier by as much, too."""
        self(
            "UPDATE jobs SET lease_expires_at = fencepost_now() - interval '1 second' "
            "WHERE id = ANY(%s::uuid[]) AND status = 'processing'",
            list(job_ids),
        )


def wait_for_status(api: Api, job_id: str, *statuses: str, seconds: float = PATIENCE) -> dict[str, Any]:
    return wait_for_job(api, job_id, lambda job: job["status"] in statuses, seconds)


def wait_for_job(
    api: Api, job_id: str, fact: Callable[[dict[str, Any]], bool], seconds: float = PATIENCE
) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not fact(job := api.get(job_id)):
        assert time.monotonic() < deadline, job
        time.sleep(0.01)
    return job


def passes(sql: Sql, count: int = 3, loop: str = "reclaim", seconds: float = PATIENCE) -> None:
    """Return when the loop has passed so many times since now."""
    deadline = time.monotonic() + seconds
    seen: set[Any] = set()
    while len(seen) <= count:
        seen.add(sql("SELECT last_pass_at FROM loops WHERE name = %s", loop)[0]["last_pass_at"])
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)


def books(api: Api, sql: Sql, queue: str, expected: int) -> dict[str, int]:
    """The rules that hold after every case; the counts by status. `expected`: how many jobs the queue was given."""
    counts = api.counts(queue)
    assert sum(counts.values()) == expected, counts
    rows = sql(
        "SELECT j.*, (SELECT count(*) FROM job_attempts a WHERE a.job_id = j.id AND a.outcome = 'done') AS done_kept, "
        "(SELECT max(a.fence) FROM job_attempts a WHERE a.job_id = j.id) AS last_fence, "
        "(SELECT count(*) - count(DISTINCT a.token_sha256) FROM job_attempts a WHERE a.job_id = j.id) AS twice, "
        "(SELECT count(*) FROM job_attempts a WHERE a.job_id = j.id AND a.token_sha256 = j.done_token_sha256) AS both "
        "FROM jobs j WHERE j.queue = %s",
        queue,
    )
    assert len(rows) == expected
    found = {status: sum(row["status"] == status for row in rows) for status in counts}
    assert found == counts
    tokens = [row["attempt_token"] for row in rows if row["attempt_token"] is not None]
    assert len(tokens) == len(set(tokens)) == counts["processing"]
    for row in rows:
        assert (row["finished_at"] is not None) == (row["status"] in ENDED), row
        assert row["twice"] == 0, row
        assert row["both"] == 0, row
        assert row["last_fence"] is None or row["last_fence"] <= row["fence"], row
        assert (row["done_token_sha256"] is None) or row["status"] == "done", row
    return counts
