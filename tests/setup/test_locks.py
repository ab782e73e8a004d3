"""The lock files: every package by hash, no address, nothing of pyproject.toml forgotten."""

import re
import tomllib

import pytest

from tests.harness import ROOT

LOCKS = ["requirements.lock", "requirements-dev.lock"]


def locked(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", LOCKS)
def test_it_holds_no_address(name):
    text = (ROOT / name).read_text()
    for word in ("://", "--index", "--extra-index", "--find-links", " @ "):
        assert word not in text


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_a_hash(name):
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())
    assert len(entries) > 20
    for entry in entries:
        assert re.match(r"[a-z0-9._-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry


def test_every_dependency_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirements, name in [
        (project["project"]["dependencies"], "requirements.lock"),
        (project["dependency-groups"]["dev"], "requirements-dev.lock"),
    ]:
        for requirement in requirements:
            package = re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower()
            assert package in locked(name), requirement


def test_both_locks_agree():
    runtime, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert {name: runtime[name] for name in runtime.keys() & dev.keys()} == {
        name: dev[name] for name in runtime.keys() & dev.keys()
    }
