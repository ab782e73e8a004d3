"""The verb `bench`: our figures and their floors, interleaved in one run, as a table and as JSON."""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from app import __version__
from bench import compare, rig
from bench.context import Bench, Size

GROUPS = (
    "heartbeat", "complete", "enqueue", "claim-complete", "batch", "alone", "pickup", "waiters", "growth", "bloat",
)  # fmt: skip
LONG = ("bloat",)
"""Run only when asked for."""


def main() -> NoReturn:
    given = arguments(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        sys.exit(run(given))
    except rig.Trouble as trouble:
        sys.exit(f"fencepost bench: {trouble}")


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda number, frame: None)
    raise SystemExit(128 + number)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fencepost bench", description=__doc__)
    parser.add_argument("--only", type=_groups, help=f"some of the groups, by commas: {', '.join(GROUPS)}")
    parser.add_argument("--all", action="store_true", help=f"the long ones too: {', '.join(LONG)}")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds; its figures say nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--database-url", help="a server to use, with the right to create databases; else a fresh one")
    parser.add_argument("--folder", type=Path, help="where the fresh one is made; default .fencepost in the checkout")
    parser.add_argument("--rounds", type=int, default=Size.rounds, help="interleaved rounds of each comparison")
    parser.add_argument("--window", type=float, default=Size.window, metavar="SECONDS", help="of one measurement")
    parser.add_argument("--rows", type=int, default=Size.rows, help="finished rows of growth (the goal: 10000000)")
    parser.add_argument("--waiters", type=int, default=Size.waiters)
    parser.add_argument("--hold", type=float, default=Size.hold_seconds, metavar="SECONDS", help="of bloat")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs of all processes")
    return parser.parse_args(given)


def _groups(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GROUPS)}")
    return [name for name in GROUPS if name in names]


def size_of(given: argparse.Namespace) -> Size:
    size = Size(
        rounds=max(1, given.rounds),
        window=given.window,
        rows=given.rows,
        waiters=given.waiters,
        hold_seconds=given.hold,
    )
    if given.quick:
        return Size(rounds=2, window=0.25, warm=0.1, quick=True, rows=20_000, waiters=min(300, size.waiters))
    return size


def run(given: argparse.Namespace) -> int:
    """0, or 1 when a figure is invalid. A goal that was missed is a result and no failure."""
    size = size_of(given)
    names = given.only or [name for name in GROUPS if given.all or name not in LONG]
    rows: list[compare.Row] = []
    spent: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(given.folder, given.keep))
        cluster = stack.enter_context(rig.cluster(given.database_url, folder))
        load = stack.enter_context(rig.load_client())
        facts = _facts(cluster, folder)
        bench = Bench(size, cluster, load, rig.Scripts(), folder, _say)
        facts["pgbench"] = bench.scripts.name
        _warn(facts, size)
        for name in names:
            _say(f"{name} …")
            began = time.monotonic()
            group = importlib.import_module(f"bench.groups.{name.replace('-', '_')}")
            rows += group.run(bench)
            spent[name] = round(time.monotonic() - began, 1)
            cluster.drop_all()
    document = described(rows, names, spent, facts, size)
    print(compare.table(rows))
    for row in rows:
        for problem in row.problems[:5]:
            print(f"INVALID {row.group}: {row.what}: {problem}")
    if size.quick:
        print("A quick run: the figures say nothing, and no goal was judged.")
    text = json.dumps(document, indent=1, allow_nan=False)
    if given.json:
        given.json.write_text(text + "\n")
    else:
        print(text)
    return 1 if any(row.problems for row in rows) else 0


def described(
    rows: list[compare.Row], names: list[str], spent: dict[str, float], facts: dict[str, Any], size: Size
) -> dict[str, Any]:
    """The JSON document."""
    return {
        "fencepost": __version__,
        "quick": size.quick,
        "rounds": size.rounds,
        "window_seconds": size.window,
        "warm_seconds": size.warm,
        "floors_sha256": floors_digest(),
        "machine": facts,
        "groups": {
            name: {"seconds": spent.get(name), "rows": [row.described() for row in rows if row.group == name]}
            for name in names
        },
    }


def floors_digest() -> str:
    """Of all files of bench/floors: runs with another digest are not comparable."""
    digest = hashlib.sha256()
    for path in sorted(each for each in rig.FLOORS.iterdir() if each.suffix in (".py", ".sql")):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _folder(given: Path | None, keep: bool) -> Any:
    base = given or rig.ROOT / ".fencepost"
    folder = base.resolve() / f"bench-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        if keep:
            _say(f"logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _facts(cluster: rig.Cluster, folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "postgres": cluster.settings(),
        "embedded": cluster.embedded,
        "load_before": round(os.getloadavg()[0], 2),
    }
    if cluster.embedded:
        facts["file_system"] = rig.file_system(folder)
        facts["sync_ms"] = round(rig.sync_milliseconds(folder), 3)
    return facts


def _warn(facts: dict[str, Any], size: Size) -> None:
    told = facts["postgres"]
    _say(
        f"{facts['cores']} cores, Python {facts['python']}, PostgreSQL {told['server_version']} with fsync, "
        f"{facts['pgbench']}; {size.rounds} rounds of {size.window:g} s"
        + (f"; an 8 kB write with fdatasync takes {facts['sync_ms']:g} ms" if "sync_ms" in facts else "")
    )
    if facts.get("file_system") in ("tmpfs", "ramfs"):
        _say("warning: the folder is in memory, where fsync costs nothing; give another --folder")
    if facts["load_before"] > 0.3 * (facts["cores"] or 1):
        _say(f"warning: the machine is not quiet, its load is {facts['load_before']:g}; the ratios suffer least")
    if facts["pgbench"] == "psycopg":
        _say("warning: there is no pgbench; its scripts are run with psycopg, which is slower and flatters our ratios")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
