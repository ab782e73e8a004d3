"""The document against the service: random calls made from the one, judged by the other; no 5xx."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

SCHEMATHESIS = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,unsupported_method"
)


@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed beside this Python")
def test_the_service_keeps_its_document(serve, tmp_path):
    service = serve()  # with its loops: without them `strict` readiness turns red after some seconds, as it should
    command = [
        str(SCHEMATHESIS), "run", f"{service.url}/openapi.json", "--checks", CHECKS, "--max-examples", "30",
        "--seed", "7", "--generation-database", "none", "--request-timeout", "40",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-6000:]
    document = httpx2.get(f"{service.url}/openapi.json").json()
    tested = re.search(r"Tested: (\d+)", done.stdout)
    assert tested is not None, done.stdout[-2000:]
    assert int(tested[1]) == sum(len(operations) for operations in document["paths"].values())
