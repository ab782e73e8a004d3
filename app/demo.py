"""`./fencepost demo`: a told story on real input, in which every promise is checked.

A service of its own (embedded database in a temporary folder, a free port), the files of this checkout as work, and
real worker processes (`examples/checksum_worker.py`) over HTTP, two of which are killed with -9 in the middle of a
job. It leaves nothing behind: no process, no folder, whatever ends it (kill -9 of itself: no process, on Linux).
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import httpx2

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "examples" / "checksum_worker.py"
KINDS = {".py", ".md", ".toml", ".ini", ".lock", ".yaml", ".mako", ""}
SKIPPED = {".git", ".venv", ".fencepost", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
MOST_FILES = 150

LEASE = 3.0
"""Seconds: short, so that the story is. The service's default is 30."""
RECLAIM_INTERVAL = 0.25
PACE = 14.0
"""Worker-seconds that all the small jobs together are made to take, so that there is something to see."""
SLOW = 4.0
"""Seconds of the jobs whose worker is killed: longer than a lease, so only heartbeats carry it through."""
PATIENCE = 30.0
FIRST_TIME = 10.0
"""Seconds to the first time of the schedule, in which the service is restarted twice."""

T = TypeVar("T")


class Broken(Exception):
    """The story cannot go on, or something promised did not hold."""


def run(arguments: list[str]) -> int:
    """0 only if every promise was seen to hold."""
    parser = argparse.ArgumentParser(prog="fencepost demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.parse_args(arguments)
    if not WORKER.exists():
        sys.stderr.write(f"fencepost: the demo's worker is not here ({WORKER}); run the demo in a checkout.\n")
        return 1
    told = Told()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Python ignores what is raised in the callbacks around a fork, so it waits for the fork's end.
        told.interrupted = True
        if not told.forking:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with Stage(told) as stage:
            Story(told, stage).play()
        if stage.folder.exists():
            raise Broken(f"{stage.folder} could not be removed")
    except KeyboardInterrupt:
        told.line("Interrupted; everything that was started has been ended.")
        return 130
    except Broken as broken:
        told.event(f"FAILED    {broken}", "31;1")
        told.line("The demo did NOT see all that it promises. Please report the lines above.")
        return 1
    except BrokenPipeError:
        # Nobody reads any more (`| head`): the interpreter must not fail over it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    told.line("")
    told.line(f"All {told.checked} promises were checked and held, in {told.elapsed():.0f} s. Nothing was left behind.")
    told.line("Next: ./fencepost serve, then the tour in README.md.")
    return 0


class Told:
    """What is printed: plain lines with the seconds since the start; colours and a moving line on a terminal only."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.checked = 0
        self.interrupted = self.forking = False
        self._terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._colours = self._terminal and not os.environ.get("NO_COLOR")
        self._moving = False
        self._last: tuple[str, float] = ("", 0.0)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours else text

    def _write(self, text: str) -> None:
        sys.stdout.write(("\r\x1b[K" if self._moving else "") + text)
        sys.stdout.flush()
        self._moving = False

    def line(self, text: str = "") -> None:
        self._write(text + "\n")

    def chapter(self, text: str) -> None:
        self.line()
        self.line(self._paint(text, "1"))

    def event(self, text: str, code: str = "0") -> None:
        self._write(f"{self.elapsed():6.1f} s  {self._paint(text, code) if code != '0' else text}\n")

    def why(self, text: str) -> None:
        for line in text.split("\n"):
            self._write(f"          {self._paint(line, '2')}\n")

    def check(self, held: bool, text: str) -> None:
        if not held:
            self.event(f"NOT TRUE  {text}", "31;1")
            raise Broken(text)
        self.checked += 1
        self.event(f"true      {text}", "32")

    def progress(self, done: int, total: int, text: str) -> None:
        filled = round(24 * done / max(total, 1))
        line = f"[{'#' * filled}{'.' * (24 - filled)}] {done}/{total} files  {text}"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            self._write(f"{self.elapsed():6.1f} s  {line}"[: columns - 1])
            self._moving = True
        elif line != self._last[0] and time.monotonic() - self._last[1] > 1.0:
            self.event(line)
            self._last = (line, time.monotonic())


class Stage:
    """The temporary folder, the service and the workers; on the way out all of it goes."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.folder = Path(tempfile.mkdtemp(prefix="fencepost-demo-"))
        self.files = self.folder / "files"
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""
        # The environment's proxies are not for a service on this machine.
        self.http = httpx2.Client(timeout=10.0, trust_env=False)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave half of it behind.
        interrupts = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.http.close()
            for name, child in self.children.items():
                if child.poll() is None and name != "service":
                    child.kill()
                    child.wait()
            service = self.children.get("service")
            if service is not None:
                if service.poll() is None:
                    service.terminate()
                try:
                    service.wait(15)
                except subprocess.TimeoutExpired:
                    service.kill()
                    service.wait()
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            for number, handler in interrupts.items():
                signal.signal(number, handler)

    def start(self, name: str, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """A process in a session of its own (Ctrl-C is ours to pass on), which dies when we do."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FENCEPOST_", "PG"))}
        self.told.forking = True
        try:
            with self.out(name).open("ab") as out, (self.folder / f"{name}.err").open("ab") as err:
                child = self.children[name] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**inherited, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    preexec_fn=lambda: _die_with_parent(signal.SIGTERM if name == "service" else signal.SIGKILL),
                )
        finally:
            self.told.forking = False
        if self.told.interrupted:
            raise KeyboardInterrupt
        return child

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def serve(self) -> None:
        before = self.out("service").stat().st_size if self.out("service").exists() else 0
        service = self.start(
            "service",
            [sys.executable, "-P", "-m", "app", "serve", "--port", "0", "--data-dir", str(self.folder / "data")],
            PYTHONPATH=str(ROOT),
            FENCEPOST_RECLAIM_INTERVAL_SECONDS=str(RECLAIM_INTERVAL),
            # This service has no outage to be lenient about; on a machine that stands still it would have one.
            FENCEPOST_OUTAGE_GRACE_SECONDS="1",
        )

        def ready() -> str | None:
            if service.poll() is not None:
                words = (self.folder / "service.err").read_text(errors="replace").strip().splitlines()[-3:]
                raise Broken("the service did not start: " + " / ".join(words))
            found = re.search(r"ready on (http://\S+)", self.out("service").read_text()[before:])
            return found[1] if found else None

        self.url = self.wait("the service is ready", ready, 90.0)

    def restart(self, *, gently: bool) -> None:
        """The service ends, by SIGTERM or by kill -9, and another is started on its data."""
        service = self.children["service"]
        (service.terminate if gently else service.kill)()
        service.wait(30)
        self.serve()

    def worker(self, name: str, *queues: str, life: str = "", once: bool = False) -> int:
        """Start a worker; `life` keeps the logs of a name's processes apart. Its pid."""
        command = [sys.executable, str(WORKER), "--url", self.url, "--worker-id", name, "--root", str(self.files)]
        command += ["--lease-seconds", str(LEASE), "--wait-seconds", "1", "--notes", str(self.notes(name))]
        command += [word for queue in queues for word in ("--queue", queue)]
        return self.start(name + life, [*command, "--once"] if once else command).pid

    def notes(self, name: str) -> Path:
        return self.folder / f"{name}.notes"

    def events(self, name: str) -> Iterator[dict[str, Any]]:
        for line in self.out(name).read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)

    def kill9(self, name: str) -> None:
        child = self.children[name]
        child.kill()
        child.wait()

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        answer = self.http.request(method, self.url + path, content=None if body is None else json.dumps(body))
        return answer.status_code, answer.json()

    def get(self, path: str) -> dict[str, Any]:
        status, content = self.call("GET", path)
        if status != 200:
            raise Broken(f"GET {path} answered {status}: {content.get('detail')}")
        return content

    def job(self, job_id: str) -> dict[str, Any]:
        return self.get(f"/v1/jobs/{job_id}")

    def wait(
        self, what: str, fact: Callable[[], T | None], seconds: float = PATIENCE, meanwhile: Callable[[], object] = bool
    ) -> T:
        """The first truthy answer of `fact`."""
        deadline = time.monotonic() + seconds
        while not (found := fact()):
            if time.monotonic() > deadline:
                raise Broken(f"not within {seconds:.0f} s: {what}")
            meanwhile()
            time.sleep(0.1)
        return found


def _die_with_parent(death: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(death))


class Story:
    def __init__(self, told: Told, stage: Stage) -> None:
        self.told, self.stage = told, stage
        # Copies: somebody may be at work in the checkout meanwhile.
        self.files = copy_source_files(stage.files)
        self.expected = {path: hashlib.sha256((stage.files / path).read_bytes()).hexdigest() for path in self.files}
        self.small: list[str] = []
        self.slow = self.manual = ""

    def play(self) -> None:
        told, stage = self.told, self.stage
        told.line(self.told._paint("Fencepost demo", "1") + ": real work, two workers killed with -9, nothing lost.")
        told.chapter("1. A service of its own, and work for it")
        told.event("starting a service with an empty database in a temporary folder ...")
        stage.serve()
        told.event(f"it answers on {stage.url}")
        self.enqueue()
        self.start_and_kill()
        self.taken_back()
        self.stale()
        self.by_hand()
        self.reckoning()
        self.restarts()
        told.chapter("8. Clearing up")
        told.event("ending the workers, the service and its database ...")

    def enqueue(self) -> None:
        slow, manual, *others = sorted(self.files, key=lambda path: -(self.stage.files / path).stat().st_size)
        pace = PACE / max(len(others), 1)
        self.slow = self.enqueued({"queue": "checksums", "payload": {"path": slow, "seconds": SLOW}, "priority": 9})
        self.manual = self.enqueued(
            {
                "queue": "announcements",
                "payload": {"path": manual, "seconds": SLOW},
                "recovery_policy": "manual",
            }
        )
        self.others = [
            {"queue": "checksums", "payload": {"path": path, "seconds": pace}, "unique_key": path} for path in others
        ]
        self.told.event(f"{len(self.files)} files of this checkout: one job each, its SHA-256 to be computed")

    def enqueued(self, job: dict[str, Any]) -> str:
        status, content = self.stage.call("POST", "/v1/jobs", job)
        if status != 201:
            raise Broken(f"an enqueue answered {status}: {content.get('detail')}")
        return str(content["id"])

    def start_and_kill(self) -> None:
        told, stage = self.told, self.stage
        told.chapter("2. Workers, and a kill -9 in mid-job")
        pid_ada, pid_dan = stage.worker("ada", "checksums"), stage.worker("dan", "announcements")
        for name, pid, job_id in (("ada", pid_ada, self.slow), ("dan", pid_dan, self.manual)):
            path = self.held(name, job_id)["payload"]["path"]
            told.event(
                f"worker {name} (pid {pid}) claimed {path}: fence 1, lease {LEASE:g} s, a token only {name} knows"
            )
        status, content = stage.call("POST", "/v1/jobs/batch", {"jobs": self.others})
        if status != 200:
            raise Broken(f"the batch answered {status}: {content.get('detail')}")
        self.small = [result["id"] for result in content["results"]]
        pids = [stage.worker(name, "announcements", "checksums") for name in ("ben", "cleo")]
        told.event(f"workers ben and cleo (pids {pids[0]}, {pids[1]}) start on the other {len(self.small)}")
        for name, job_id in (("ada", self.slow), ("dan", self.manual)):
            stage.wait(f"{name} sends a heartbeat", lambda j=job_id: stage.job(j)["heartbeat_at"], meanwhile=self.show)  # type: ignore[misc]
        shutil.copy(stage.notes("ada"), stage.folder / "ada.kept")
        half = stage.job(self.slow)["progress"]
        for name in ("ada", "dan"):
            stage.kill9(name)
        self.killed_at = time.monotonic()
        told.event(f"kill -9 of ada, {half['bytes']} of {half['of']} bytes into the job, and of dan", "33;1")
        told.why("Nobody can tell the service. It only sees that no heartbeat comes any more.")

    def held(self, name: str, job_id: str) -> dict[str, Any]:
        def fact() -> dict[str, Any] | None:
            job = self.stage.job(job_id)
            return job if job["reserved_by"] == name else None

        job = self.stage.wait(f"{name} claims its job", fact)
        if job["fence"] != 1:
            raise Broken(f"the first claim of {job_id} has fence {job['fence']}")
        return job

    def taken_back(self) -> None:
        told, stage = self.told, self.stage
        told.chapter("3. The lease runs out")
        attempt = stage.wait("ada's job is taken back", lambda: self.reclaimed(self.slow), meanwhile=self.show)
        told.event(f"taken back {time.monotonic() - self.killed_at:.1f} s after the kill: {attempt['error_message']}")

        def taken() -> dict[str, Any] | None:
            job = stage.job(self.slow)
            return job if job["status"] == "processing" else None

        job = stage.wait("another worker takes ada's job", taken, meanwhile=self.show)
        told.event(f"{job['reserved_by']} claimed it: attempt {job['attempts']}, fence {job['fence']}, a new token")
        told.check(job["reserved_by"] in ("ben", "cleo"), "another worker took over the job of the killed one")
        told.check(job["fence"] == 2 and job["attempts"] == 2, "the fence grew: 1 was ada's for ever, 2 is the heir's")
        self.heir = job["reserved_by"]

    def reclaimed(self, job_id: str) -> dict[str, Any] | None:
        attempts = self.stage.get(f"/v1/jobs/{job_id}/attempts")["attempts"]
        return next((attempt for attempt in attempts if attempt["outcome"] == "reclaimed"), None)

    def stale(self) -> None:
        told, stage = self.told, self.stage
        told.chapter("4. The dead worker's twin comes back")
        shutil.move(stage.folder / "ada.kept", stage.notes("ada"))
        token = json.loads(stage.notes("ada").read_text())["attempt_token"]
        pid = stage.worker("ada", "checksums", life="-twin", once=True)
        told.event(f"ada is started again (pid {pid}): same name, her notes with the old token; she goes on")
        # Whatever she claims after that is honest work; only her old attempt is over.
        lost = stage.wait(
            "the twin is told", lambda: next((e for e in stage.events("ada-twin") if e["event"] == "lost"), None)
        )
        told.event(f"her heartbeat: {lost['problem']['status']} {lost['problem']['code']}, {lost['problem']['detail']}")
        told.check(lost["problem"]["code"] == "lease-lost", "the twin's heartbeat is refused, and she drops the work")
        path = f"/v1/jobs/{self.slow}/complete"
        status, problem = stage.call("POST", path, {"attempt_token": token, "result": {"sha256": "0" * 64}})
        told.event(f"a ruder twin sends a (wrong) result at once: {status} {problem.get('code')}")
        told.check(
            status == 409 and problem.get("code") == "lease-lost" and problem.get("ended_by") == "reclaimed",
            "a late completion is refused with 409 lease-lost, and says why: reclaimed",
        )
        job = stage.job(self.slow)
        told.check(
            job["result"] is None or job["result"]["sha256"] == self.expected[job["payload"]["path"]],
            f"{self.heir}'s attempt was not touched by it",
        )
        told.why(
            "Safe because the token is compared in the one statement that moves the job: no token, no row, no move."
        )

    def by_hand(self) -> None:
        told, stage = self.told, self.stage
        told.chapter("5. A job that must not be repeated blindly")

        def waits() -> dict[str, Any] | None:
            job = stage.job(self.manual)
            return job if job["status"] == "manual_review" else None

        job = stage.wait("the manual job waits for a person", waits, meanwhile=self.show)
        told.event(f"dan's job has recovery_policy manual: its status is {job['status']} ({job['last_error']})")
        told.why("Nobody knows whether dan did it before he died, so no machine decides.")
        status, claimed = stage.call("POST", "/v1/jobs/claim", {"worker_id": "eve", "queues": ["announcements"]})
        told.check(status == 200 and claimed["jobs"] == [], "a worker that asks for its queue does not get it")
        told.event(f"a person looked and decides:  curl -X POST {stage.url}/v1/jobs/{self.manual}/requeue", "36")
        status, content = stage.call("POST", f"/v1/jobs/{self.manual}/requeue")
        told.check(status == 200 and content["status"] == "queued", "one call without a body puts it back in its queue")

    def show(self) -> None:
        done, total = self.count("done"), len(self.files)
        processing = self.count("processing")
        self.told.progress(done, total, f"{processing} in work")

    def count(self, status: str) -> int:
        queues = self.stage.get("/v1/queues")["queues"]
        return sum(int(queue["counts"][status]) for queue in queues)

    def reckoning(self) -> None:
        told, stage = self.told, self.stage
        total = len(self.files)
        told.chapter("6. The reckoning")
        stage.wait("every job is done", lambda: self.count("done") == total, meanwhile=self.show)
        told.event(f"{total} jobs are done")
        jobs = [stage.job(self.slow), stage.job(self.manual)]
        cursor = ""
        while True:
            page = stage.get(f"/v1/jobs?queue=checksums&limit=100{cursor}")
            jobs += [job for job in page["jobs"] if job["id"] != self.slow]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        told.check(
            {job["payload"]["path"]: job["result"]["sha256"] for job in jobs} == self.expected,
            f"all {total} checksums are the real ones, computed here again",
        )
        told.check(len(jobs) == total == 2 + len(self.small), "as many jobs as files: none lost, none made twice")
        told.check(
            sum(job["attempts"] for job in jobs) == total + 2 and sum(job["reclaim_count"] for job in jobs) == 2,
            f"{total + 2} attempts for {total} jobs: exactly the two killed ones were run again",
        )
        metrics = stage.http.get(stage.url + "/metrics").text
        told.check(_sum(metrics, "fencepost_completions_total") == total, f"{total} completions: none counted twice")
        told.check(
            _sum(metrics, "fencepost_stale_refusals_total") == 2, "2 calls with a dead token, 2 refusals, 0 accepted"
        )

    def restarts(self) -> None:
        told, stage = self.told, self.stage
        told.chapter("7. A schedule that no restart moves")
        body = {"every_seconds": 3600, "startup_grace_seconds": FIRST_TIME, "queue": "reports", "payload": {}}
        status, schedule = stage.call("PUT", "/v1/schedules/hourly-report", body)
        if status != 201:
            raise Broken(f"the schedule was answered {status}: {schedule.get('detail')}")
        planned = schedule["next_run_at"]
        told.event(f"hourly-report is planned for {planned}")
        stage.restart(gently=True)
        told.event("the service was stopped and started: as a deploy does")
        stage.restart(gently=False)
        told.event("the service was killed with -9, with its database, and started again")

        def fired() -> list[dict[str, Any]]:
            return list(stage.get("/v1/schedules/hourly-report/slots")["slots"])

        stage.wait("the schedule fires", fired, 2 * PATIENCE)
        slots, jobs = fired(), stage.get("/v1/jobs?queue=reports")["jobs"]
        told.check([slot["slot_at"] for slot in slots] == [planned], "it fired the slot that was planned, and no other")
        told.check([job["slot_at"] for job in jobs] == [planned], "one job came of it: none lost, none made twice")


def _sum(metrics: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if re.match(rf"{name}[{{ ]", line))


def copy_source_files(target: Path) -> list[str]:
    """The checkout's own files, by their paths below it; found by walking, since git may not be there."""
    found: list[str] = []
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix in KINDS and path.is_file() and not path.is_symlink() and len(found) < MOST_FILES:
                copy = target / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    shutil.copyfile(path, copy)
                    found.append(str(path.relative_to(ROOT)))
    return found
