"""Dockerfile and compose.yaml, without an engine: their steps in a clean folder, in the order in which they stand.

Tried here: the copies through .dockerignore, the install from the hashed lock into a fresh environment, the start of
ENTRYPOINT and CMD with the image's environment and without write access (as far as the account allows), HEALTHCHECK,
SIGTERM, and the commands of compose.yaml's services. Not tried: the base image, its Python's version, USER's account
inside the image, cgroups and the read-only mount itself.
"""

import fnmatch
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.harness import READY, ROOT, create_database, drop_database

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the dev lock")


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def last(word: str) -> str:
    return [rest for name, rest in instructions() if name == word][-1]


def sent_to_the_engine(path: Path) -> bool:
    """Whether .dockerignore lets it through (the last rule that matches decides)."""
    relative, sent = path.relative_to(ROOT).as_posix(), True
    for rule in (ROOT / ".dockerignore").read_text().split():
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = relative.split("/")
        anywhere = any(fnmatch.fnmatch(part, pattern) for part in parts)
        if anywhere if rule.startswith("**/") else (fnmatch.fnmatch(parts[0], pattern)):
            sent = rule.startswith("!")
    return sent


def ignore_unsent(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not sent_to_the_engine(Path(folder) / name)}


@pytest.fixture(scope="module")
def image():
    """The image's file system in a folder: (folder, a function that maps an absolute path of the image into it)."""
    root = Path(tempfile.mkdtemp(prefix="fencepost-image-"))  # not pytest's, which other accounts cannot enter
    root.chmod(0o755)

    def inside(path: str) -> Path:
        return root / path.lstrip("/")

    def mapped(command: str) -> str:
        return re.sub(r"(?<![\w.-])/(venv|build|fencepost|data)\b", lambda found: str(root / found[1]), command)

    where = root
    for name, rest in instructions():
        if name == "WORKDIR":
            where = inside(rest)
            where.mkdir(parents=True, exist_ok=True)
        elif name == "COPY" and not rest.startswith("--from"):
            source, target = ROOT / rest.split()[0], inside(rest.split()[1])
            assert sent_to_the_engine(source), source
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignore_unsent)
            else:
                shutil.copy(source, target)
        elif name == "RUN" and re.match(r"groupadd|install ", rest):
            continue  # accounts and owners are the engine's
        elif name == "RUN":
            command = re.sub(r"^python ", f"{sys.executable} ", mapped(rest))
            done = subprocess.run(command, shell=True, cwd=where, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
    inside("/data").mkdir(mode=0o700)
    yield root, mapped
    shutil.rmtree(root)


def image_environment(mapped) -> dict[str, str]:
    given = dict(pair.split("=", 1) for pair in last("ENV").split())
    return {name: mapped(value) for name, value in given.items()}


def start(image, *words: str, user=None, group=None, **environment: str) -> subprocess.Popen:
    _, mapped = image
    command = [*json.loads(last("ENTRYPOINT")), *(words or json.loads(last("CMD")))]
    environment = {**image_environment(mapped), **environment}
    return subprocess.Popen(
        [shutil.which(command[0], path=environment["PATH"]), *command[1:]],
        cwd=mapped(last("WORKDIR")),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=user,
        group=group,
        extra_groups=None if user is None else [],
    )


def files_below(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_image_serves_on_the_copied_files_alone(image, database_url, tmp_path):
    root, mapped = image
    before = files_below(root)
    service = start(
        image,
        FENCEPOST_DATABASE_URL=database_url,
        FENCEPOST_ADMIN_KEY="a-long-secret-for-this-test",
        FENCEPOST_PORT="0",
    )
    try:
        line = service.stdout.readline()
        assert READY.match(line), line + service.stderr.read()
        port = READY.match(line)["url"].rsplit(":", 1)[1]
        check = json.loads(last("HEALTHCHECK").split(" CMD ", 1)[1])
        python = shutil.which(check[0], path=image_environment(mapped)["PATH"])
        healthy = subprocess.run([python, *check[1:]], env={"FENCEPOST_PORT": port}, capture_output=True, text=True)
        assert healthy.returncode == 0, healthy.stderr
        sick = subprocess.run([python, *check[1:]], env={"FENCEPOST_PORT": "1"}, capture_output=True)
        assert sick.returncode != 0
    finally:
        service.terminate()
        service.communicate(timeout=20)
    assert service.returncode == 0
    # It wrote nothing into its own file system, so that may be read-only.
    assert files_below(root) == before


def test_without_a_key_it_does_not_listen_beyond_loopback(image, database_url):
    service = start(image, FENCEPOST_DATABASE_URL=database_url, FENCEPOST_PORT="0")
    _, errors = service.communicate(timeout=60)
    assert service.returncode != 0
    assert "FENCEPOST_ADMIN_KEY" in errors


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_as_an_account_that_owns_data_alone_it_keeps_its_own_database(image):
    """`nobody` stands for USER, which has no name here."""
    root, mapped = image
    python = Path(mapped("/venv/bin/python"))
    if not all(path.stat().st_mode & stat.S_IXOTH for path in [python.resolve(), *python.resolve().parents]):
        pytest.skip(f"only root may run {python.resolve()}")
    nobody = pwd.getpwnam("nobody")
    data = Path(mapped("/data"))
    os.chown(data, nobody.pw_uid, nobody.pw_gid)
    before = {path: when for path, when in files_below(root).items() if data not in Path(path).parents}
    key = {"FENCEPOST_ADMIN_KEY": "a-long-secret-for-this-test", "FENCEPOST_PORT": "0"}
    service = start(image, user=nobody.pw_uid, group=nobody.pw_gid, **key)
    try:
        line = service.stdout.readline()
        assert READY.match(line), line + service.stderr.read()
        assert str(data) in line
    finally:
        service.terminate()
        service.communicate(timeout=20)
    assert service.returncode == 0
    assert before == {path: when for path, when in files_below(root).items() if data not in Path(path).parents}


def test_the_image_is_not_roots(image):
    assert last("USER") == "10001:10001"
    assert last("STOPSIGNAL") == "SIGTERM"
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    # What the account needs to write lies in /data, which it owns.
    assert any(name == "RUN" and "--owner=10001" in rest and rest.endswith("/data") for name, rest in instructions())


def test_nothing_else_is_sent_to_the_engine():
    sent = {path.name for path in ROOT.iterdir() if sent_to_the_engine(path)}
    assert sent == {"app", "alembic", "alembic.ini", "requirements.lock"}


class TestCompose:
    def services(self) -> dict:
        return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]

    def test_its_steps_run_in_order(self, image, server_url):
        """migrate to its end, then two replicas at once on the same database."""
        services = self.services()
        assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
        assert services["fencepost"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
        url = create_database(server_url)
        given = {"FENCEPOST_DATABASE_URL": url, "FENCEPOST_ADMIN_KEY": "a-long-secret-for-this-test"}
        assert set(given) == set(services["fencepost"]["environment"])
        replicas = []
        try:
            migration = start(image, *services["migrate"]["command"], **given)
            _, errors = migration.communicate(timeout=60)
            assert migration.returncode == 0, errors
            command, number = services["fencepost"]["command"], services["fencepost"]["deploy"]["replicas"]
            replicas += [start(image, *command, FENCEPOST_PORT="0", **given) for _ in range(number)]
            assert number == 2
            for replica in replicas:
                assert READY.match(replica.stdout.readline())
        finally:
            for replica in replicas:
                replica.terminate()
            for replica in replicas:
                replica.communicate(timeout=20)
            drop_database(server_url, url)
        assert [replica.returncode for replica in replicas] == [0, 0]

    def test_the_key_must_be_given_and_nothing_is_open_to_the_network(self):
        services = self.services()
        assert services["fencepost"]["environment"]["FENCEPOST_ADMIN_KEY"].startswith("${FENCEPOST_ADMIN_KEY:?")
        assert all(port.startswith("127.0.0.1:") for port in services["fencepost"]["ports"])
        assert "ports" not in services["postgres"]
        assert services["fencepost"]["read_only"] is True

    def test_docker_reads_it(self):
        docker = shutil.which("docker")
        if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
            pytest.skip("there is no docker compose here")
        done = subprocess.run(
            [docker, "compose", "-f", ROOT / "compose.yaml", "config", "--quiet"],
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "FENCEPOST_ADMIN_KEY": "x"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
