"""The load client: a process of its own that does what it is told, one JSON line after the other on stdin.

Lean on purpose, since it shares the cores with what it measures: raw sockets under uvloop, requests made beforehand,
answers cut out without a parser for headers, no task and no future a call. The same code drives the floors and us.

Commands (each is answered by one line, {"error": …} when it failed):
    run      a workload for a window after a warm-up; see `Loads.run`
    pickup   enqueue to a waiting claim's answer, many times
    hold     let N claims wait until `let-go`
    paced    so many jobs a second through enqueue, claim, complete
"""

import asyncio
import contextlib
import gc
import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
import uvloop

from bench import http1
from bench.stats import quantile
from bench.workloads import KINDS, LONG_LEASE, PAYLOAD, Bad, Workload

TOO_MANY_ERRORS = 1000
DRAIN_SECONDS = 30.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; nan where the system does not tell."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return float("nan")


def machine_busy() -> tuple[float, float]:
    """Busy and whole seconds of all cores since the start of the machine."""
    with contextlib.suppress(OSError):
        fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / TICKS, sum(fields) / TICKS
    return float("nan"), float("nan")


class Connection(asyncio.Protocol):
    """A keep-alive connection of which one call at a time is awaited: for what is not timed by the thousand."""

    def __init__(self) -> None:
        self.answers = http1.Answers()
        self.waiter: asyncio.Future[tuple[int, bytes]] | None = None
        self.at = 0.0
        """When its last answer came (perf_counter)."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            found = self.answers.feed(data)
        except http1.Unreadable as problem:
            self._fail(problem)
            self.transport.abort()
            return
        for answer in found:
            self.at = time.perf_counter()
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the server closed the connection"))

    def _fail(self, problem: Exception) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(problem)

    def send(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.waiter


class Target:
    """A server: where it is, and a few connections for preparing."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.host = f"{self.address[0]}:{self.address[1]}"

    async def connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, *self.address)
        return connection

    def request(self, path: str, content: Any) -> bytes:
        return http1.request(path, orjson.dumps(content), self.host)

    @contextlib.asynccontextmanager
    async def posting(self) -> Any:
        connection = await self.connect()

        async def post(path: str, content: Any) -> Any:
            status, body = await connection.send(self.request(path, content))
            if not 200 <= status < 300:
                raise RuntimeError(f"{path} answered {status}: {body[:300]!r}")
            return orjson.loads(body)

        try:
            yield post
        finally:
            connection.transport.close()


class Seat(asyncio.Protocol):
    """One connection of a run: it sends its next request as soon as its answer is there."""

    __slots__ = ("answers", "drive", "idle", "memory", "number", "sent", "transport")

    def __init__(self, drive: "Drive", number: int) -> None:
        self.drive, self.number = drive, number
        self.answers = http1.Answers()
        self.memory: Any = None
        self.idle = True
        self.sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        request = self.drive.workload.next(self) if self.drive.going else None
        if request is None:
            self.rest()
            return
        self.idle = False
        self.sent = time.perf_counter()
        self.transport.write(request)

    def rest(self) -> None:
        self.idle = True
        self.drive.rests()

    def data_received(self, data: bytes) -> None:
        drive = self.drive
        try:
            found = self.answers.feed(data)
        except http1.Unreadable as problem:
            drive.fault(str(problem))
            self.transport.abort()
            return
        for status, body in found:
            now = time.perf_counter()
            try:
                items = drive.workload.judge(self, status, body)
            except Bad as problem:
                drive.fault(str(problem))
            else:
                drive.workload.done += items
                drive.samples.append((now, now - self.sent, items))
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.idle:
            self.drive.fault("connection lost")
            self.rest()


class Drive:
    """One run of a workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.samples: list[tuple[float, float, int]] = []
        """(when answered, latency, items), in seconds."""
        self.errors: Counter[str] = Counter()
        self.going = True
        self.dry_at: float | None = None
        self.seats: list[Seat] = []
        self.quiet = asyncio.Event()

    def fault(self, label: str) -> None:
        self.errors[label] += 1
        if self.errors.total() >= TOO_MANY_ERRORS:
            self.going = False

    def rests(self) -> None:
        if self.going and self.dry_at is None:
            self.dry_at = time.perf_counter()
        if all(seat.idle for seat in self.seats):
            self.quiet.set()


class Loads:
    def __init__(self) -> None:
        self.kept: dict[str, Workload] = {}
        self.held: list[Connection] = []
        self.waiting: list[asyncio.Future[tuple[int, bytes]]] = []

    async def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """`name` of the kept workload, `kind`, `url`, `options`, `warm` and `window` in seconds, `pid` of the server.

        An empty stock ends the window early; when that leaves less than two thirds of it, it is done anew with more.
        """
        target = Target(ask["url"])
        workload = self.kept.get(ask["name"])
        if workload is None:
            workload = self.kept[ask["name"]] = KINDS[ask["kind"]](target.host, ask.get("options", {}))
            workload.guess = ask.get("guess", workload.guess)
        for _ in range(4):
            need = int(workload.guess * (ask["warm"] + ask["window"])) + 200 * workload.connections
            async with target.posting() as post:
                await workload.prepare(post, need)
            told = await self._window(target, workload, ask)
            workload.guess = max(workload.guess * 0.7, told["items_per_second"] * 1.3)
            if told["seconds"] > ask["window"] * 0.66 or told["errors"]:
                break
            workload.guess *= 2
        return told

    async def _window(self, target: Target, workload: Workload, ask: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        drive = Drive(workload)
        made = [
            loop.create_connection(lambda number=number: Seat(drive, number), *target.address)  # type: ignore[misc]
            for number in range(workload.connections)
        ]
        drive.seats = [seat for _, seat in await asyncio.gather(*made)]
        marks: list[tuple[float, float, float, tuple[float, float]]] = []
        ended = asyncio.Event()

        def mark() -> None:
            server = cpu_seconds(ask["pid"]) if ask.get("pid") else float("nan")
            marks.append((time.perf_counter(), time.process_time(), server, machine_busy()))

        def end() -> None:
            mark()
            drive.going = False
            ended.set()

        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for seat in drive.seats:
                seat.send()
            loop.call_later(ask["warm"], mark)
            loop.call_later(ask["warm"] + ask["window"], end)
            async with asyncio.timeout(ask["warm"] + ask["window"] + DRAIN_SECONDS):
                await ended.wait()
                while not all(seat.idle for seat in drive.seats):
                    drive.quiet.clear()
                    await drive.quiet.wait()
        except TimeoutError:
            drive.fault("no answer")
        finally:
            gc.enable()
            gc.unfreeze()
            for seat in drive.seats:
                seat.idle = True  # a connection that is lost from here on is no fault
                seat.transport.abort()
        await asyncio.sleep(0)
        return self._told(drive, marks)

    def _told(self, drive: Drive, marks: list[tuple[float, float, float, tuple[float, float]]]) -> dict[str, Any]:
        (began, own, server, busy), (ended, own_after, server_after, busy_after) = marks
        dry = drive.dry_at is not None and drive.dry_at < ended
        if dry and drive.dry_at is not None:
            ended = max(began, drive.dry_at)
        inside = [sample for sample in drive.samples if began <= sample[0] < ended]
        latencies = [latency * 1000 for _, latency, _ in inside]
        seconds, requests = max(ended - began, 1e-9), len(inside)
        items = sum(sample[2] for sample in inside)
        told = {
            "requests": requests,
            "items": items,
            "seconds": seconds,
            "requests_per_second": requests / seconds,
            "items_per_second": items / seconds,
            "p50_ms": quantile(latencies, 0.5),
            "p95_ms": quantile(latencies, 0.95),
            "p99_ms": quantile(latencies, 0.99),
            "errors": dict(drive.errors),
            "acknowledged": drive.workload.done,
        }
        if not dry:
            told["client_busy"] = (own_after - own) / seconds
            told["server_busy"] = (server_after - server) / seconds
            told["machine_busy"] = (busy_after[0] - busy[0]) / max(busy_after[1] - busy[1], 1e-9)
            told["server_cpu_ms"] = (server_after - server) * 1000 / requests if requests else float("nan")
        return told

    async def pickup(self, ask: dict[str, Any]) -> dict[str, Any]:
        """A claim waits at `url`; after a pause a job is enqueued at `enqueue_url`. From its sending to the claim's
        answer, `count` times, in ms.
        """
        waiter_at, producer_at = Target(ask["url"]), Target(ask["enqueue_url"])
        waiter, producer = await waiter_at.connect(), await producer_at.connect()
        ender = await waiter_at.connect()
        claim = waiter_at.request(
            "/v1/jobs/claim",
            {"worker_id": "bench", "queues": ["pickup"], "wait_seconds": 30, "lease_seconds": LONG_LEASE},
        )
        job = producer_at.request("/v1/jobs", {"queue": "pickup", "payload": PAYLOAD})
        latencies: list[float] = []
        errors: Counter[str] = Counter()
        for number in range(ask["count"]):
            waiting = waiter.send(claim)
            # Not in step with any period of the service.
            await asyncio.sleep(ask["pause"] * (1 + (number * 0.381966) % 1))
            sent = time.perf_counter()
            status, _ = await producer.send(job)
            if status != 201:
                errors[f"enqueue {status}"] += 1
            status, body = await asyncio.wait_for(waiting, 60)
            jobs = orjson.loads(body).get("jobs", []) if status == 200 else []
            if len(jobs) != 1:
                errors[f"claim {status} with {len(jobs)} jobs"] += 1
                continue
            latencies.append((waiter.at - sent) * 1000)
            end = ender.send(
                waiter_at.request(f"/v1/jobs/{jobs[0]['id']}/complete", {"attempt_token": jobs[0]["attempt_token"]})
            )
            status, _ = await end
            if status != 200:
                errors[f"complete {status}"] += 1
        for connection in (waiter, producer, ender):
            connection.transport.close()
        told = {f"p{share}_ms": quantile(latencies, share / 100) for share in (50, 95, 99)}
        return {**told, "max_ms": max(latencies, default=float("nan")), "count": len(latencies), "errors": dict(errors)}

    async def hold(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Open `count` connections and let a call wait on each: `path`, `contents` in turn. Answers when all wait."""
        target = Target(ask["url"])
        requests = [target.request(ask["path"], content) for content in ask["contents"]]
        began = time.perf_counter()
        at_once = asyncio.Semaphore(100)

        async def one(number: int) -> None:
            async with at_once:
                connection = await target.connect()
                self.held.append(connection)
                self.waiting.append(connection.send(requests[number % len(requests)]))
                await asyncio.sleep(0.01)

        await asyncio.gather(*[one(number) for number in range(ask["count"])])
        await asyncio.sleep(ask.get("settle", 1.0))
        return {"seconds": time.perf_counter() - began, **self._held()}

    def _held(self) -> dict[str, Any]:
        answers: Counter[str] = Counter()
        for future in self.waiting:
            if future.done():
                answers[f"lost: {future.exception()}" if future.exception() else str(future.result()[0])] += 1
        return {"waiting": sum(not future.done() for future in self.waiting), "answered": dict(answers)}

    async def let_go(self, ask: dict[str, Any]) -> dict[str, Any]:
        told = self._held()
        for future in self.waiting:
            future.cancel()
        for connection in self.held:
            connection.transport.abort()
        self.held, self.waiting = [], []
        await asyncio.sleep(0.1)
        return told

    async def paced(self, ask: dict[str, Any]) -> dict[str, Any]:
        """`rate` jobs a second for `seconds` through enqueue, claim and complete on up to 32 connections; the latencies
        of the claims in ms, each with the second in which it was sent. An open loop: a slow answer delays no other.
        """
        target = Target(ask["url"])
        free: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(32):
            free.put_nowait(await target.connect())
        enqueue = target.request("/v1/jobs", {"queue": "paced", "payload": PAYLOAD})
        claim = target.request("/v1/jobs/claim", {"worker_id": "bench", "queues": ["paced"], "lease_seconds": 600})
        claims: list[tuple[float, float]] = []
        errors: Counter[str] = Counter()
        began = time.perf_counter()

        async def one() -> None:
            connection = await free.get()
            try:
                status, _ = await connection.send(enqueue)
                errors[f"enqueue {status}"] += status != 201
                sent = time.perf_counter()
                status, body = await connection.send(claim)
                claims.append((sent - began, (connection.at - sent) * 1000))
                if status != 200:
                    errors[f"claim {status}"] += 1
                    return
                for job in orjson.loads(body)["jobs"]:
                    end = {"attempt_token": job["attempt_token"]}
                    status, _ = await connection.send(target.request(f"/v1/jobs/{job['id']}/complete", end))
                    errors[f"complete {status}"] += status != 200
            except (OSError, http1.Unreadable) as problem:
                errors[str(problem)] += 1
            finally:
                free.put_nowait(connection)

        running: set[asyncio.Task[None]] = set()
        for number in range(int(ask["rate"] * ask["seconds"])):
            await asyncio.sleep(max(0.0, began + number / ask["rate"] - time.perf_counter()))
            task = asyncio.create_task(one())
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running, timeout=DRAIN_SECONDS)
        took = time.perf_counter() - began
        return {"claims": claims, "errors": {k: n for k, n in errors.items() if n}, "seconds": took}


async def serve() -> None:
    loads, loop = Loads(), asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        ask = json.loads(line)
        try:
            answer = await getattr(loads, ask["do"].replace("-", "_"))(ask)
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(answer), flush=True)


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    uvloop.run(serve())


if __name__ == "__main__":
    main()
