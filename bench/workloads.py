"""What the connections of the load client call, over and over: each workload prepares its requests beforehand.

A workload is kept over the rounds of a comparison, with the jobs that are left. It is told how many items the coming
run may use, prepares as many outside of the timed window, and hands out ready requests inside of it.
"""

import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson

from bench import http1

PAYLOAD = orjson.loads(
    b'{"order":48151,"shop":"shop-17.example","kind":"thumbnail","sizes":[120,480,1200],"urgent":false,"share":0.62,'
    b'"note":"resize the three pictures and put them beside the originals, then tell them soon"}'
)
"""200 bytes as it is sent."""

LONG_LEASE = 40_000.0
"""Seconds: nothing that was prepared may be taken back while the others are measured."""
MANY = 1000
"""Jobs of a batch while preparing."""

Post = Callable[[str, Any], Awaitable[Any]]
"""(path, content) -> the answer's content; raises on anything but a 2xx."""


class Bad(Exception):
    """An answer that counts as an error; the text is its label."""


class Seat(Protocol):
    """A connection of the load client; a workload may keep what it needs in `memory`."""

    number: int
    memory: Any


class Workload:
    connections = 64
    guess = 4000.0
    """Items a second that the first run may reach; afterwards what was seen."""
    counts = "requests"

    def __init__(self, host: str, options: dict[str, Any]) -> None:
        self.host = host
        self.options = options
        self.connections = int(options.get("connections", self.connections))
        self.done = 0
        """Items that were acknowledged in all, in the window or not."""

    async def prepare(self, post: Post, need: int) -> None:
        """Make ready for `need` items."""

    def next(self, seat: Seat) -> bytes | None:
        """The next request of this connection; None when there is nothing left to do."""
        raise NotImplementedError

    def judge(self, seat: Seat, status: int, body: bytes) -> int:
        """How many items the answer acknowledges. Raises Bad."""
        if not 200 <= status < 300:
            raise Bad(str(status))
        return 1

    def made(self, path: str, content: Any) -> bytes:
        return http1.request(path, orjson.dumps(content), self.host)


class Fixed(Workload):
    """The same request each time. Options: path, content (JSON) or text."""

    def __init__(self, host: str, options: dict[str, Any]) -> None:
        super().__init__(host, options)
        text = options.get("text")
        body = text.encode() if text is not None else orjson.dumps(options["content"])
        self.request = http1.request(options["path"], body, host)

    def next(self, seat: Seat) -> bytes | None:
        return self.request


class Enqueue(Workload):
    """One job of 200 bytes a call."""

    counts = "jobs"

    async def prepare(self, post: Post, need: int) -> None:
        self.request = self.made("/v1/jobs", {"queue": "bench", "payload": PAYLOAD})

    def next(self, seat: Seat) -> bytes | None:
        return self.request


def all_ok(status: int, body: bytes, expected: int) -> int:
    """How many results of a batch's answer, all of which must be ok."""
    if not 200 <= status < 300:
        raise Bad(str(status))
    results = orjson.loads(body)["results"]
    for result in results:
        if not result["ok"]:
            raise Bad(f"item: {result['problem']['code']}")
    if len(results) != expected:
        raise Bad(f"{len(results)} results of {expected}")
    return len(results)


class EnqueueBatch(Workload):
    """Jobs of 200 bytes in batches. Options: batch."""

    connections = 4
    counts = "jobs"

    async def prepare(self, post: Post, need: int) -> None:
        self.batch = self.options.get("batch", 500)
        self.request = self.made("/v1/jobs/batch", {"jobs": [{"queue": "bench", "payload": PAYLOAD}] * self.batch})

    def next(self, seat: Seat) -> bytes | None:
        return self.request

    def judge(self, seat: Seat, status: int, body: bytes) -> int:
        return all_ok(status, body, self.batch)


class Stocked(Workload):
    """What uses up jobs of the queue `bench`: keeps count of those that wait there and those that it holds."""

    def __init__(self, host: str, options: dict[str, Any]) -> None:
        super().__init__(host, options)
        self.queued = 0

    async def stock(self, post: Post, need: int) -> None:
        while self.queued < need:
            batch = {"jobs": [{"queue": "bench", "payload": PAYLOAD}] * MANY}
            results = (await post("/v1/jobs/batch", batch))["results"]
            self.queued += sum(result["ok"] for result in results)

    async def take(self, post: Post, need: int) -> list[dict[str, Any]]:
        """So many claimed jobs."""
        await self.stock(post, need)
        taken: list[dict[str, Any]] = []
        while len(taken) < need:
            claim = {"worker_id": "bench", "queues": ["bench"], "max_jobs": 100, "lease_seconds": LONG_LEASE}
            jobs = (await post("/v1/jobs/claim", claim))["jobs"]
            if not jobs:
                raise RuntimeError("a claim found nothing where jobs were enqueued")
            self.queued -= len(jobs)
            taken += jobs
        return taken


class Heartbeat(Stocked):
    """Heartbeats of single attempts; each connection has 16 of its own."""

    counts = "heartbeats"

    async def prepare(self, post: Post, need: int) -> None:
        if hasattr(self, "requests"):
            return
        jobs = await self.take(post, 16 * self.connections)
        asks = [
            self.made(
                f"/v1/jobs/{job['id']}/heartbeat",
                {"attempt_token": job["attempt_token"], "worker_id": "bench", "lease_seconds": LONG_LEASE},
            )
            for job in jobs
        ]
        self.requests = [itertools.cycle(asks[number :: self.connections]) for number in range(self.connections)]

    def next(self, seat: Seat) -> bytes | None:
        return next(self.requests[seat.number])


class HeartbeatBatch(Stocked):
    """Heartbeats of 100 attempts a call; each connection has 1000 of its own."""

    connections = 4
    counts = "heartbeats"
    batch = 100

    async def prepare(self, post: Post, need: int) -> None:
        if hasattr(self, "requests"):
            return
        jobs = await self.take(post, 1000 * self.connections)
        items = [
            {
                "id": job["id"],
                "attempt_token": job["attempt_token"],
                "worker_id": "bench",
                "lease_seconds": LONG_LEASE,
            }
            for job in jobs
        ]
        asks = [
            self.made("/v1/jobs/heartbeat", {"items": items[first : first + self.batch]})
            for first in range(0, 1000 * self.connections, self.batch)
        ]
        self.requests = [itertools.cycle(asks[number :: self.connections]) for number in range(self.connections)]

    def next(self, seat: Seat) -> bytes | None:
        return next(self.requests[seat.number])

    def judge(self, seat: Seat, status: int, body: bytes) -> int:
        return all_ok(status, body, self.batch)


class Complete(Stocked):
    """Completes of single attempts, claimed beforehand."""

    counts = "completes"

    def __init__(self, host: str, options: dict[str, Any]) -> None:
        super().__init__(host, options)
        self.requests: deque[bytes] = deque()

    async def prepare(self, post: Post, need: int) -> None:
        for job in await self.take(post, max(0, need - len(self.requests))):
            complete = {"attempt_token": job["attempt_token"], "result": {"ok": True}}
            self.requests.append(self.made(f"/v1/jobs/{job['id']}/complete", complete))

    def next(self, seat: Seat) -> bytes | None:
        return self.requests.popleft() if self.requests else None


class ClaimComplete(Stocked):
    """Claim, complete, claim, … on each connection. Options: batch (jobs a claim; above 1 by the batch route)."""

    counts = "jobs"

    async def prepare(self, post: Post, need: int) -> None:
        self.batch = self.options.get("batch", 1)
        await self.stock(post, need)
        self.claims: list[bytes] = []
        for number in range(self.connections):
            claim = {"worker_id": f"bench-{number}", "queues": ["bench"], "max_jobs": self.batch}
            self.claims.append(self.made("/v1/jobs/claim", {**claim, "lease_seconds": LONG_LEASE}))

    def next(self, seat: Seat) -> bytes | None:
        jobs = seat.memory
        if jobs is None:
            return self.claims[seat.number]
        if not jobs:
            seat.memory = None
            return None  # the queue is empty
        if self.batch > 1:
            items = [{"id": job["id"], "attempt_token": job["attempt_token"]} for job in jobs]
            return self.made("/v1/jobs/complete", {"items": items})
        [job] = jobs
        return self.made(f"/v1/jobs/{job['id']}/complete", {"attempt_token": job["attempt_token"]})

    def judge(self, seat: Seat, status: int, body: bytes) -> int:
        jobs, seat.memory = seat.memory, None
        if not 200 <= status < 300:
            raise Bad(str(status))
        if jobs is None:
            seat.memory = orjson.loads(body)["jobs"]
            self.queued -= len(seat.memory)
            return 0
        return all_ok(status, body, len(jobs)) if self.batch > 1 else 1


KINDS: dict[str, type[Workload]] = {
    "fixed": Fixed,
    "enqueue": Enqueue,
    "enqueue-batch": EnqueueBatch,
    "heartbeat": Heartbeat,
    "heartbeat-batch": HeartbeatBatch,
    "complete": Complete,
    "claim-complete": ClaimComplete,
}
