"""One black-box run: PostgreSQL, instances, producers, workers, nemesis; then quiet, read-out, verdict."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.migrations import upgrade
from tests import harness
from tests.reliability.checker import check
from tests.reliability.history import Violation, figures
from tests.reliability.nemesis import Instance, Nemesis
from tests.reliability.wire import NoAnswer, Wire
from tests.reliability.workload import Producer, Recorder, Size, Worker, nothing_left, read_out

SAFE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
QUIET_SECONDS = 90.0


@dataclass
class Outcome:
    violations: list[Violation]
    figures: dict[str, Any]
    faults: list[str] = field(default_factory=list)


def run(
    seed: int,
    size: Size,
    *,
    pause: tuple[float, float],
    safe: bool = True,
    environment: dict[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """`pause`: seconds between faults; `safe`: PostgreSQL with fsync; `environment`: of the instances."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-soak-"))
    server = harness.PostgresServer(folder / "postgres", SAFE if safe else None)
    instances: list[Instance] = []
    try:
        # From the nemesis's own thread: the kernel ends a server with the thread that started it.
        url = server.url
        nemesis = Nemesis(seed, server, "", instances, say)
        nemesis.keeper.submit(server.start).result()
        try:
            url = nemesis.url = harness.create_database(server.url)
            upgrade(url)
            instances += [Instance(folder / f"instance-{number}", url, environment or {}) for number in range(2)]
            return asyncio.run(_run(seed, size, pause, url, instances, nemesis, say))
        finally:
            for instance in instances:
                instance.kill()
            nemesis.keeper.submit(server.stop, "immediate").result()
            nemesis.keeper.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(
    seed: int,
    size: Size,
    pause: tuple[float, float],
    url: str,
    instances: list[Instance],
    nemesis: Nemesis,
    say: Callable[[str], None],
) -> Outcome:
    for instance in instances:
        instance.start()
    for instance in instances:
        await ready(instance)
    began = time.monotonic()
    recorder = Recorder(instances, seed)
    over, calm = asyncio.Event(), asyncio.Event()
    workers = [asyncio.create_task(Worker(recorder, number, size, over).run()) for number in range(size.workers)]
    half = size.jobs // 2
    producers = [Producer(recorder, 0, size, range(half)), Producer(recorder, 1, size, range(half, size.jobs))]
    raging = asyncio.create_task(nemesis.rage(pause, calm))
    await asyncio.gather(*(producer.run() for producer in producers))
    produced = time.monotonic() - began
    calm.set()
    await raging
    say(f"all enqueued after {produced:.1f} s; quiet from now on")
    # What is not done by then is told by the checker.
    with contextlib.suppress(AssertionError):
        await harness.wait_until(lambda: nothing_left(url), QUIET_SECONDS, every=0.2)
    worked = time.monotonic() - began
    over.set()
    await asyncio.gather(*workers)
    nemesis.heal()
    wire = Wire(instances[0].port)
    await ready(instances[0])
    read, told = await read_out(url, wire, say)
    wire.close()
    checking = time.monotonic()
    violations = [*check(recorder.events, read), *told]
    violations += [Violation("I23", "answer", f"without a code: {where}") for where in recorder.shapeless]
    violations += [Violation("F1", "instance", "ended by itself")] * nemesis.unasked_deaths
    return Outcome(
        violations,
        {
            "seed": seed,
            "seconds": round(worked, 1),
            "check_seconds": round(time.monotonic() - checking, 2),
            "faults": nemesis.counts,
            **figures(recorder.events, read, recorder.faulty),
            "stale_accepted": sum(violation.rule == "I3" for violation in violations),
            "violations": len(violations),
        },
        nemesis.log,
    )


async def ready(instance: Instance, seconds: float = 30.0) -> None:
    wire = Wire(instance.port)

    async def answers() -> bool:
        try:
            return (await wire.ask("GET", "/readyz", seconds=2))[0] == 200
        except NoAnswer:
            return False

    await harness.wait_until(answers, seconds, every=0.05)
    wire.close()
