"""The fenced blocks of a page: (language, text, line of the page). A `bash` block is run; what follows it in `json` is
what it prints, with `…` for what differs from run to run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.harness import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 2)
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


class Step(NamedTuple):
    command: Block
    shown: Block | None
    printed: str


def run(page: Path, seconds: float = 100, **environment: str) -> list[Step]:
    """Run the page's bash blocks in one bash, as a reader would who pastes one after the other."""
    found = blocks(page)
    steps = [
        (block, found[i + 1] if i + 1 < len(found) and found[i + 1].language == "json" else None)
        for i, block in enumerate(found)
        if block.language == "bash"
    ]
    # The bootstrap is tested elsewhere; here its command stands for the environment that the tests run in.
    command = f"{shlex.quote(sys.executable)} -P -m app "
    script = "set -uo pipefail\n" + "".join(
        f"{block.text.replace('./fencepost ', command)}\nprintf '%s\\n' '=== end'\n" for block, _ in steps
    )
    answer = subprocess.run(
        ["bash"],
        input=script,
        env={"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
    )
    assert answer.returncode == 0, f"{page.name}: {answer.stderr}"
    assert "command not found" not in answer.stderr, answer.stderr
    assert "Traceback" not in answer.stderr, answer.stderr
    outputs = answer.stdout.split("=== end\n")
    assert len(outputs) == len(steps) + 1, answer.stdout + answer.stderr
    return [Step(block, shown, output) for (block, shown), output in zip(steps, outputs, strict=False)]


def alike(shown: str, printed: str) -> bool:
    wanted, got = shown.strip().splitlines(), printed.strip().splitlines()
    return len(wanted) == len(got) and all(
        re.fullmatch(".*".join(map(re.escape, line.split("…"))), other) for line, other in zip(wanted, got, strict=True)
    )
