# ruff: noqa: E501
"""The document: complete, unique, the same from start to start; the page and the answers agree with it."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from app.jobs import http as jobs
from app.queues import http as queues
from app.web import contract, reference
from app.web.problems import PROBLEMS
from tests.web.stand_in import client_of, make_app


@pytest.fixture(scope="module")
def document():
    return make_app().openapi()


def every(node):
    if isinstance(node, dict):
        yield node
        for inner in node.values():
            yield from every(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from every(inner)


def operations(document):
    return [operation for methods in document["paths"].values() for operation in methods.values()]


def test_operation_ids_are_short_and_unique(document):
    names = [operation["operationId"] for operation in operations(document)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch("[a-z][A-Za-z0-9]{2,40}", name) for name in names)


def test_every_reference_leads_somewhere_and_nothing_is_unused(document):
    targets = {node["$ref"].rsplit("/", 1)[1] for node in every(document) if isinstance(node.get("$ref"), str)}
    assert targets == set(document["components"]["schemas"])
    assert not {"HTTPValidationError", "ValidationError"} & targets


def test_every_number_has_a_format(document):
    for node in every(document):
        if node.get("type") in ("integer", "number"):
            assert node.get("format") in ("int32", "int64", "double"), node


def test_errors_are_problems_and_nothing_else(document):
    for operation in operations(document):
        for status, response in operation["responses"].items():
            if status >= "400":
                assert list(response["content"]) == ["application/problem+json"]
                assert response["content"]["application/problem+json"]["schema"]["$ref"].endswith("/Problem")
            if status == "204":
                assert "content" not in response
        assert {"422", "403"} <= operation["responses"].keys()
        assert "401" in operation["responses"] or operation["security"] == []


def test_answers_stay_open_and_requests_closed(document):
    schemas = document["components"]["schemas"]
    assert schemas["Thing"]["additionalProperties"] is False
    assert schemas["Echo"]["additionalProperties"] is True


def test_what_linters_ask_for(document):
    assert document["openapi"] == "3.1.0"
    assert document["servers"]
    assert document["security"]
    assert {"license", "contact", "description"} <= document["info"].keys()
    assert all(tag["description"] for tag in document["tags"])
    assert {tag for o in operations(document) for tag in o["tags"]} == {tag["name"] for tag in document["tags"]}
    assert all(o["summary"] and o["description"] for o in operations(document))


def test_query_parameters_are_described(document):
    parameters = {p["name"]: p for p in document["paths"]["/v1/things"]["get"]["parameters"]}
    assert parameters["limit"]["schema"] == {
        "type": "integer",
        "format": "int32",
        "minimum": 1,
        "maximum": 500,
        "default": 100,
    }
    assert parameters["after"]["schema"]["format"] == "date-time"
    assert "anyOf" not in parameters["queue"]["schema"]


@pytest.fixture(scope="module")
def whole():
    return [*jobs.all_doors, *queues.doors.doors]


def test_what_any_call_can_answer_is_listed(whole):
    for operation in operations(contract.document(whole, version="0")):
        assert "`internal`" in operation["responses"]["500"]["description"]
        assert "Retry-After" in operation["responses"].get("408", {"headers": "Retry-After"})["headers"]
    for door in whole:
        assert (door.method == "GET") is (413 not in contract.codes_of(door))


def test_a_full_range_is_told_by_its_format(whole):
    document = contract.document(whole, version="0")
    assert document["components"]["schemas"]["Job"]["properties"]["fence"] == {"type": "integer", "format": "int64"}
    assert document["components"]["schemas"]["Job"]["properties"]["attempts"] == {"type": "integer", "format": "int32"}
    assert b"e+0" not in reference.page(document, whole)
    assert b"e+1" not in reference.page(document, whole)


def test_the_contents_read_well(whole):
    page = reference.page(contract.document(whole, version="0"), whole).decode()
    contents = page.partition("<nav")[2].partition("</nav>")[0]
    assert "`" not in contents
    links = re.findall(r'href="#([a-zA-Z]+)"', contents)
    for one in ("complete", "fail", "heartbeat", "release"):
        assert links.index(f"{one}Jobs") == links.index(f"{one}Job") + 1
    narrow = re.sub(r"@media \(min-width.*?\}\}", "", reference.STYLE, flags=re.DOTALL)
    assert "td:first-child{min-width:7rem;overflow-wrap:anywhere}" in narrow
    assert "nowrap" not in narrow


SCRIPT = "import sys; from app.web.contract import render; from tests.web.stand_in import make_app; sys.stdout.buffer.write(render(make_app().openapi()))"


def test_the_same_from_start_to_start():
    made = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1] != b""


async def test_it_is_served_as_it_is(document):
    async with client_of(make_app()) as client:
        response = await client.get("/openapi.json")
    assert response.content == contract.render(document)
    assert response.headers["content-type"] == "application/json"


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.links, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src"):
                self.links.append(value)
            assert name != "style"
            assert not name.startswith("on")


async def test_the_reference_page(document):
    async with client_of(make_app()) as client:
        response = await client.get("/docs")
    page = Page()
    page.feed(response.text)
    assert len(page.ids) == len(set(page.ids))
    assert {o["operationId"] for o in operations(document)} <= set(page.ids)
    assert {f"problem-{code}" for code in PROBLEMS} <= set(page.ids)
    assert not {"script", "img", "iframe", "form"} & page.tags
    for link in page.links:
        assert link in ("data:,", "/openapi.json") or (link[0] == "#" and link[1:] in page.ids), link
    assert "curl" in response.text
    assert response.headers["content-security-policy"] == reference.POLICY
    assert "unsafe" not in reference.POLICY
