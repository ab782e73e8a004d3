"""`./fencepost`: sets up once, repairs what was interrupted, is quick and quiet afterwards.

On a small lock of its own (pip is in the environment anyway), so that no package index is asked. The real lock is
installed whenever this suite runs through `./fencepost test`, and by test_container.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.harness import ROOT, wait_for

SAY = "import os, sys; print(os.getpid(), os.getcwd(), sys.argv[1:])\n"


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "check out"
    (folder / "app").mkdir(parents=True)
    shutil.copy(ROOT / "fencepost", folder)
    (folder / "requirements.lock").write_text("# nothing\n")
    (folder / "requirements-dev.lock").write_text("# nothing\n")
    (folder / "app" / "__init__.py").touch()
    (folder / "app" / "__main__.py").write_text(SAY)
    return folder


def run(checkout, *words, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, checkout / "fencepost", *words],
        cwd=cwd or checkout,
        env={"PATH": os.environ["PATH"], "HOME": str(checkout.parent), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_first_run_sets_up_and_the_next_is_quick_and_quiet(checkout):
    first = run(checkout, "serve", "--port", "0")
    assert first.returncode == 0, first.stderr
    assert "['serve', '--port', '0']" in first.stdout
    assert "making .venv" in first.stderr
    fastest = 9.0
    for _ in range(5):
        began = time.monotonic()
        again = run(checkout, "serve")
        fastest = min(fastest, time.monotonic() - began)
        assert (again.returncode, again.stderr) == (0, "")
    assert fastest < 0.3


def test_it_becomes_the_service_from_any_folder(checkout, tmp_path):
    assert run(checkout).returncode == 0
    # A folder of the same name where the user happens to be must not be taken for ours.
    (tmp_path / "else" / "app").mkdir(parents=True)
    (tmp_path / "else" / "app" / "__init__.py").write_text("raise SystemExit('the wrong app')")
    process = subprocess.Popen(
        [sys.executable, checkout / "fencepost", "x"], cwd=tmp_path / "else", stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=60)
    assert out == f"{process.pid} {tmp_path / 'else'} ['x']\n"
    assert process.returncode == 0


def test_a_moved_checkout_goes_on_working(checkout):
    assert run(checkout).returncode == 0
    moved = checkout.rename(checkout.parent / "elsewhere")
    again = run(moved, "x")
    assert (again.returncode, again.stderr) == (0, "")
    assert "['x']" in again.stdout


def test_a_changed_lock_is_installed(checkout):
    assert run(checkout).returncode == 0
    (checkout / "requirements.lock").write_text("# changed\n")
    assert "installing" in run(checkout).stderr
    assert run(checkout).stderr == ""


def test_test_installs_the_second_lock_too(checkout):
    assert run(checkout).returncode == 0
    assert "requirements-dev.lock" in run(checkout, "test").stderr
    assert run(checkout, "test").stderr == ""
    assert run(checkout, "serve").stderr == ""


def test_two_at_once(checkout):
    command = [sys.executable, checkout / "fencepost", "x"]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=100) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], answers
    assert sum("making .venv" in errors for _, errors in answers) == 1


def test_killed_half_way_it_is_repaired(checkout):
    process = subprocess.Popen(
        [sys.executable, checkout / "fencepost"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
    )
    wait_for(lambda: (checkout / ".venv" / "pyvenv.cfg").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = run(checkout, "x")
    assert again.returncode == 0, again.stderr
    assert "begin" in again.stderr
    assert "['x']" in again.stdout
    assert run(checkout).stderr == ""


def test_an_environment_of_another_python_is_made_anew(checkout):
    assert run(checkout).returncode == 0
    (checkout / ".venv" / "fencepost-python").write_text("/usr/bin/python2.7")
    assert "another Python" in run(checkout).stderr
    assert run(checkout).stderr == ""


def test_pip_failing_is_told(checkout):
    (checkout / "requirements.lock").write_text(f"no-such-package==1 --hash=sha256:{'0' * 64}\n")
    answer = run(checkout, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0", PIP_NO_CACHE_DIR="1")
    assert answer.returncode == 1
    assert "pip could not install" in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr
    (checkout / "requirements.lock").write_text("# nothing\n")
    assert run(checkout).returncode == 0


def test_a_missing_ensurepip_names_the_package(checkout):
    python = checkout / "python-without-ensurepip"
    python.write_text(
        "#!/bin/sh\necho 'The virtual environment was not created: ensurepip is not available.'\nexit 1\n"
    )
    python.chmod(0o755)
    pretend = f"import runpy, sys; sys.executable = {str(python)!r}; runpy.run_path('fencepost', run_name='__main__')"
    answer = subprocess.run([sys.executable, "-c", pretend], cwd=checkout, capture_output=True, text=True)
    assert answer.returncode == 1
    assert f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in answer.stderr


def run_with_old_python(checkout, path):
    pretend = (
        "import runpy, sys; sys.version_info = (3, 9, 2); sys.version = '3.9.2 (x)'; sys.argv = ['fencepost', 'x'];"
        f"runpy.run_path({str(checkout / 'fencepost')!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", pretend], cwd=checkout, env={"PATH": str(path)}, capture_output=True, text=True
    )


def test_an_old_python_looks_for_a_newer_one(checkout, tmp_path):
    (tmp_path / "bin").mkdir()
    newer = tmp_path / "bin" / "python3.12"
    newer.write_text('#!/bin/sh\necho "newer: $*"\n')
    newer.chmod(0o755)
    assert run_with_old_python(checkout, tmp_path / "bin").stdout == f"newer: {checkout / 'fencepost'} x\n"


def test_without_a_newer_python_it_says_what_it_needs(checkout, tmp_path):
    answer = run_with_old_python(checkout, tmp_path)
    assert answer.returncode == 1
    assert "Python 3.11 or newer is needed; this is 3.9.2" in answer.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours_is_told(checkout):
    checkout.chmod(0o555)
    answer = run(checkout)
    checkout.chmod(0o755)
    assert answer.returncode == 1
    assert "cannot write" in answer.stderr
