"""The verb `soak`: the whole of the reliability figures, by hand or at night. About 15 minutes on two cores."""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.reliability import blackbox, claimtime, latency, mixed
from tests.reliability.workload import Size
from tests.schedules import processes

PARTS = ("kills", "mixed", "reclaim", "claim", "schedules")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fencepost soak", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be given more than once")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=120.0, help="over which the jobs are enqueued")
    parser.add_argument("--seed", type=int, help="draw the same run again (its calls differ by the machine's timing)")
    parser.add_argument("--finished", type=int, default=1_000_000, help="finished rows beside which claims are timed")
    parser.add_argument("--expiries", type=int, default=600)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    found: dict[str, Any] = {"seed": seed}
    parts, good = given.part or PARTS, True
    if "kills" in parts:
        good &= _kills(seed, given, found)
    if "mixed" in parts:
        outcome = mixed.run(seed, jobs=given.jobs, seconds=given.seconds, say=_say)
        found["mixed"] = outcome.figures
        for violation in outcome.violations[:50]:
            print(violation)
        good &= not outcome.violations
    if "reclaim" in parts:
        found["reclaim"] = latency.run(seed, given.expiries, say=_say)
        good &= all(part["p99_seconds"] <= part["goal_seconds"] for part in found["reclaim"].values())
    if "claim" in parts:
        found["claim"] = claimtime.run(given.finished, say=_say)
    if "schedules" in parts:
        found["schedules"] = processes.run(seed, say=_say)
        good &= not found["schedules"]["violations"]
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    return 0 if good else 1


def _kills(seed: int, given: argparse.Namespace, found: dict[str, Any]) -> bool:
    began = time.monotonic()
    size = Size(given.jobs, workers=16, produce_seconds=given.seconds, lease_seconds=4, fault_share=0.01)
    outcome = blackbox.run(seed, size, pause=(0.5, 3.0), say=_say)
    figures = found["kills"] = outcome.figures
    figures["fault_log"] = outcome.faults
    for violation in outcome.violations[:50]:
        print(violation)
    print(
        f"jobs lost {figures['jobs_lost']} of {figures['jobs_acknowledged']}, completed twice "
        f"{figures['completed_twice']}, stale tokens accepted {figures['stale_accepted']}, extra executions "
        f"{figures['extra_executions']}, 5xx other than 503 {figures['internal_errors']}; "
        f"{len(outcome.violations)} violations; {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return not outcome.violations


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
