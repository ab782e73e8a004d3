"""The demo as a user runs it: it holds, it ends in time, and nothing stays behind, however it ends."""

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, own_processes, wait_for


class Demo:
    def __init__(self, tmp: Path, **how) -> None:
        self.tmp = tmp
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FENCEPOST_", "PG"))}
        self.out = tmp.parent / f"{tmp.name}.log"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "app", "demo"],
                env={**inherited, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp), **how.pop("env", {})},
                cwd=tmp,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **how,
            )

    def said(self) -> str:
        return self.out.read_text()

    def left(self) -> list:
        """Its processes (the service's data folder and the workers' notes lie in its folder) and its files."""
        return [*own_processes(f"{self.tmp}/fencepost-demo-"), *self.tmp.iterdir()]


@pytest.fixture
def demo(tmp_path_factory):
    made: list[Demo] = []

    def start(**how) -> Demo:
        tmp = tmp_path_factory.mktemp("demo")
        made.append(Demo(tmp, **how))
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.mark.slow
def test_the_whole_story_holds_in_under_a_minute_and_leaves_nothing(demo):
    began = time.monotonic()
    # An environment for another service must not lead it there; a proxy is not for this machine's own service.
    run = demo(env={"FENCEPOST_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x", "http_proxy": "http://127.0.0.1:1"})
    assert run.process.wait(100) == 0, run.said()
    assert time.monotonic() - began < 60
    said = run.said()
    assert "NOT TRUE" not in said
    assert len(re.findall(r" s  true ", said)) == int(re.search(r"All (\d+) promises", said)[1]) >= 12
    for word in ("kill -9", "409 lease-lost", "manual_review", "curl -X POST http://127.0.0.1:", "fence 2"):
        assert word in said, word
    assert "\x1b" not in said  # colours only on a terminal
    assert run.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_the_middle_it_leaves_nothing(demo, number):
    run = demo()
    wait_for(lambda: "workers ben and cleo" in run.said(), 60)
    run.process.send_signal(number)
    run.process.send_signal(number)
    assert run.process.wait(30) == 130
    assert "Traceback" not in run.said()
    assert run.left() == []


@pytest.mark.slow
def test_interrupted_before_the_service_is_ready(demo):
    run = demo()
    wait_for(lambda: "starting a service" in run.said(), 60)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) == 130
    assert "Traceback" not in run.said()
    assert run.left() == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="deaths are passed on by the Linux kernel")
def test_killed_with_9_it_leaves_no_process(demo):
    run = demo()
    wait_for(lambda: "workers ben and cleo" in run.said(), 60)
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not list(own_processes(f"{run.tmp}/fencepost-demo-")), 30)


def test_unknown_words_are_refused(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "app", "demo", "--fast"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2
    assert "--fast" in answer.stderr
    assert answer.stdout == ""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account; the other tests run as a user")
def test_as_an_ordinary_user_too(demo, tmp_path_factory):
    nobody = pwd.getpwnam("nobody")
    walk = [Path(sys.executable), *Path(sys.executable).parents, *Path(sys.executable).resolve().parents, *ROOT.parents]
    if not all(path.stat().st_mode & 0o001 for path in {*walk, ROOT}):
        pytest.skip("the account nobody cannot enter this checkout or its Python")
    folder = Path("/tmp") / f"fencepost-demo-user-{os.getpid()}"
    folder.mkdir(mode=0o777)
    try:
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        run = Demo(folder, user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=[], env={"HOME": str(folder)})
        assert run.process.wait(100) == 0, run.said()
        assert run.left() == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
