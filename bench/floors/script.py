"""Where there is no pgbench: run one of its scripts with psycopg, from two processes, a connection a thread.

It knows what the scripts beside it use: `\\set name expression` with random(), `\\gset`, and :variables, which are sent
as parameters of a prepared statement. Slower than pgbench, so a ratio against it flatters; the table says which ran.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

_VARIABLE = re.compile(r"(?<!:):([a-z_]+)")
_STEPS = re.compile(r"^\\set (?P<name>\w+) (?P<value>.*)$|(?P<sql>[^\\;]+?)\s*(?:(?P<gset>\\gset)$|;)", re.MULTILINE)


def steps(script: str) -> list[tuple[str, str]]:
    """("set n", expression), ("gset" or "run", statement with %(name)s) in their order."""
    text = re.sub(r"^--.*\n", "", script, flags=re.MULTILINE)
    found = []
    for step in _STEPS.finditer(text):
        if step["name"]:
            found.append((f"set {step['name']}", step["value"]))
        else:
            found.append(("gset" if step["gset"] else "run", _VARIABLE.sub(r"%(\1)s", step["sql"].strip())))
    return found


def value_of(expression: str, variables: dict[str, Any]) -> int:
    said = _VARIABLE.sub(lambda name: str(variables[name[1]]), expression)
    if not re.fullmatch(r"[0-9a-z(),+* ]+", said):
        raise ValueError(f"cannot read the expression {expression!r}")
    return int(eval(said, {"__builtins__": {}}, {"random": random.randint}))


class Client(threading.Thread):
    """One connection in a closed loop until `until` (time.monotonic)."""

    def __init__(self, url: str, script: list[tuple[str, str]], variables: dict[str, Any], until: float) -> None:
        super().__init__(daemon=True)
        self.connection = psycopg.connect(url, autocommit=True, prepare_threshold=0)
        self.script, self.variables, self.until = script, variables, until
        self.done, self.problem = 0, ""

    def run(self) -> None:
        try:
            while time.monotonic() < self.until:
                for kind, text in self.script:
                    if kind.startswith("set "):
                        self.variables[kind[4:]] = value_of(text, self.variables)
                        continue
                    cursor = self.connection.execute(text.encode(), self.variables)
                    if kind == "gset":
                        row, columns = cursor.fetchone(), cursor.description or ()
                        if row is None:
                            raise LookupError("no row: the table ran dry")
                        self.variables |= {column.name: value for column, value in zip(columns, row, strict=True)}
                self.done += 1
        except (psycopg.Error, LookupError) as error:
            self.problem = str(error)


def work(given: argparse.Namespace, first: int) -> dict[str, Any]:
    """The clients of one process."""
    variables = dict(each.split("=", 1) for each in given.define)
    script = steps(given.script.read_text())
    until = time.monotonic() + given.seconds
    clients = [
        Client(given.url, script, {**variables, "client_id": number}, until)
        for number in range(first, given.clients, 2)
    ]
    began = time.monotonic()
    for client in clients:
        client.until = began + given.seconds
        client.start()
    for client in clients:
        client.join()
    seconds = time.monotonic() - began
    problems = [client.problem for client in clients if client.problem]
    return {"rate": sum(client.done for client in clients) / seconds, "problems": problems}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--define", action="append", default=[])
    parser.add_argument("--half", type=int)
    given = parser.parse_args()
    if given.half is not None:
        print(json.dumps(work(given, given.half)))
        return
    # Two processes, as pgbench would have two threads.
    command = [sys.executable, "-P", "-m", "bench.floors.script", *sys.argv[1:], "--half"]
    halves = [subprocess.Popen([*command, str(half)], stdout=subprocess.PIPE, text=True) for half in (0, 1)]
    told = [json.loads(half.communicate()[0]) for half in halves]
    problems = [problem for half in told for problem in half["problems"]]
    print(json.dumps({"rate": sum(half["rate"] for half in told), "problems": problems}))


if __name__ == "__main__":
    main()
