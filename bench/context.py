"""What a group of measurements is given: the service, the floors, and the sides to compare."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from bench import compare, rig
from bench.compare import Figure, Row, Side
from bench.stats import Goal
from bench.workloads import PAYLOAD


@dataclass(frozen=True)
class Size:
    rounds: int = 9
    window: float = 2.0
    """Seconds of a measurement."""
    warm: float = 0.4
    """Seconds before it that do not count."""
    quick: bool = False
    rows: int = 1_000_000
    """Finished rows of `growth`."""
    waiters: int = 10_000
    hold_seconds: float = 180.0
    """How long `bloat` holds its transaction."""


DETAILS = ("p50_ms", "p95_ms", "p99_ms", "server_cpu_ms", "server_busy", "client_busy", "machine_busy")
DRY = ("expected one row", "division by zero", "ran dry")


@dataclass(frozen=True, slots=True)
class Product:
    """A running service and its own database."""

    server: rig.Server
    database_url: str

    def count(self, condition: str = "true") -> int:
        """Jobs in the database."""
        with psycopg.connect(self.database_url) as connection:
            row = connection.execute(f"SELECT count(*) FROM jobs WHERE {condition}".encode()).fetchone()
        return int(row[0]) if row else 0


class FloorTable:
    """The article's table in a database of its own, made anew before each run so that the floor is at its best."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._run((rig.FLOORS / "schema.sql").read_text())

    def empty(self) -> None:
        self._run("TRUNCATE jobs RESTART IDENTITY", "VACUUM ANALYZE jobs")

    def queued(self, rows: int) -> None:
        self._fill(rows, "queued", "NULL, NULL, NULL, NULL")

    def processing(self, rows: int) -> None:
        """Jobs 1 … rows; the token of job n is n."""
        columns = "lpad(to_hex(n), 32, '0')::uuid, 'worker', now(), now() + interval '12 hours'"
        self._fill(rows, "processing", columns)

    def _fill(self, rows: int, status: str, attempt: str) -> None:
        import orjson

        payload = orjson.dumps(PAYLOAD).decode()
        insert = f"""
            INSERT INTO jobs (id, queue, payload, status, attempt_token, reserved_by, reserved_at, lease_expires_at)
            SELECT n, 'bench', '{payload}', '{status}', {attempt} FROM generate_series(1, {rows}) n"""
        self._run("TRUNCATE jobs", insert, "VACUUM ANALYZE jobs")

    def _run(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@dataclass
class Bench:
    size: Size
    cluster: rig.Cluster
    load: rig.LoadClient
    scripts: rig.Scripts
    folder: Path
    say: Callable[[str], None]
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By the name of a side of ours: items answered with a 2xx in all its runs."""
    started: int = 0

    @contextlib.contextmanager
    def product(self, database_url: str | None = None, **environment: str) -> Iterator[Product]:
        """The service as `./fencepost serve` starts it, one process, loops on, on a fresh database if none is given."""
        url = database_url or self.cluster.create()
        self.started += 1
        settings = {"FENCEPOST_DATABASE_URL": url, **environment}
        folder = self.folder / f"service-{self.started}"
        with rig.serving("app", "serve", "--port", "0", folder=folder, settings=settings) as server:
            yield Product(server, url)

    @contextlib.contextmanager
    def floor(self, name: str) -> Iterator[rig.Server]:
        """One of the floors' applications, by its file's name."""
        self.started += 1
        with rig.serving("bench.floors.serve", name, folder=self.folder / f"floor-{self.started}") as server:
            yield server

    def table(self) -> FloorTable:
        return FloorTable(self.cluster.create())

    # --- sides -------------------------------------------------------------------------------------------------------

    def http(
        self, server: rig.Server, name: str, kind: str, *, items: bool = False, guess: float = 4000.0, **options: object
    ) -> Side:
        """A workload over HTTP: requests a second, or items a second. `guess`: items a second that may be reached."""

        def run() -> Figure:
            told = self.load.ask(
                "run",
                name=f"{name} {server.url}",
                kind=kind,
                url=server.url,
                pid=server.pid,
                warm=self.size.warm,
                window=self.size.window,
                guess=guess,
                options=options,
            )
            self.acknowledged[name] = told["acknowledged"]
            problems = [f"{count} x {label}" for label, count in told["errors"].items()]
            if told["seconds"] < self.size.window * 0.5:
                problems.append(f"ran dry after {told['seconds']:.2f} s")
            details = {each: told[each] for each in DETAILS if told.get(each) is not None}
            return Figure(told["items_per_second" if items else "requests_per_second"], tuple(problems), details)

        return run

    def route(self, server: rig.Server) -> Side:
        """The POST of a floor's route over 64 connections."""
        from bench.floors.models import BODY

        return self.http(server, "route", "fixed", path="/route", text=BODY.decode())

    def script(
        self,
        table: FloorTable,
        script: str,
        *,
        clients: int,
        jobs: int = 1,
        prepare: Callable[[int], None],
        guess: float = 8000.0,
        variables: Mapping[str, str] | None = None,
    ) -> Side:
        """A script of the floors: jobs a second, of which a transaction has `jobs`. `prepare` is told how many jobs
        the run may need, `guess` a second for the first.
        """
        expected = guess

        def run() -> Figure:
            nonlocal expected
            for _ in range(4):
                prepare(int(expected * (self.size.window + 0.5)) + 20 * clients * jobs)
                ran = self.scripts.run(table.url, script, clients, self.size.window, **(variables or {}))
                if not any(sign in ran.problem for sign in DRY):
                    break
                expected *= 2
            expected = max(expected * 0.7, ran.rate * jobs * 1.5)
            return Figure(ran.rate * jobs, (ran.problem,) if ran.problem else ())

        return run

    # --- rows --------------------------------------------------------------------------------------------------------

    def interleave(self, sides: Mapping[str, Side]) -> dict[str, list[Figure]]:
        return compare.interleave(sides, self.size.rounds, self.say, rehearse=not self.size.quick)

    def row(
        self,
        group: str,
        what: str,
        unit: str,
        found: Mapping[str, list[Figure]],
        floor: str,
        goal: Goal | None = None,
        ours: str = "ours",
    ) -> Row:
        return compare.row(group, what, unit, found[ours], floor, found[floor], goal, judge=not self.size.quick)


def kept_promise(row: Row, acknowledged: int, found: int, what: str) -> None:
    """A 2xx means committed: what was acknowledged must be in the database."""
    if acknowledged != found:
        row.problems.append(f"{acknowledged} {what} were acknowledged, and the database has {found}")
