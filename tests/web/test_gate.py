# ruff: noqa: E501
"""Local-only rules without keys, and cross-site rules always."""

import pytest

from tests.web.stand_in import KeyedRing, client_of, make_app
from tests.web.test_edge import is_problem

PATHS = ["/v1/things", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs", "/nope"]
LOCAL = [
    "127.0.0.1",
    "127.0.0.1:8080",
    "127.9.9.9",
    "localhost",
    "LOCALHOST:1",
    "[::1]",
    "[::1]:8080",
    "a.localhost",
    "localhost.",
]
FOREIGN = [
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0", "[::]", "::1", "", "localhost@x",
    "notlocalhost", "127.0.0.1:x", "127.0.0.1:8080:1", "2130706433", "0x7f.1", "127.1", "[fe80::1]", "127.0.0.1, evil.example", "169.254.169.254",
]  # fmt: skip


@pytest.mark.parametrize("host", LOCAL)
async def test_keyless_answers_under_local_names(host):
    async with client_of(make_app()) as client:
        assert (await client.get("/v1/things", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", PATHS)
async def test_keyless_refuses_foreign_names(path, host):
    async with client_of(make_app()) as client:
        is_problem(await client.get(path, headers={"host": host}), 403, "not-local")


@pytest.mark.parametrize(
    "header", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "x-forwarded-anything"]
)
async def test_keyless_refuses_forwarded_calls(header):
    async with client_of(make_app()) as client:
        is_problem(await client.get("/livez", headers={header: "127.0.0.1"}), 403, "not-local")
    async with client_of(make_app(KeyedRing())) as client:
        assert (await client.get("/livez", headers={header: "1.2.3.4", "host": "jobs.example"})).status_code == 200


NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
SITES = [
    ({"sec-fetch-site": "same-origin"}, True), ({"sec-fetch-site": "none"}, True), ({}, True),
    ({"origin": "http://127.0.0.1"}, True), ({"sec-fetch-site": "cross-site"}, False), ({"sec-fetch-site": "same-site"}, False),
    ({"origin": "http://evil.example"}, False), ({"origin": "null"}, False), ({"origin": "http://127.0.0.1:9"}, False),
    ({"origin": "file://127.0.0.1"}, False), ({"origin": ""}, False), ({"sec-fetch-site": "odd"}, False),
    ({"sec-fetch-site": "same-origin", "origin": "http://evil.example"}, False),
    ({"sec-fetch-site": "same-origin, cross-site"}, False), (NAVIGATION, False),
]  # fmt: skip


@pytest.mark.parametrize("ring", [None, KeyedRing])
@pytest.mark.parametrize(("headers", "passes"), SITES, ids=range(len(SITES)))
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/things"), ("GET", "/v1/things"), ("GET", "/livez"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("POST", "/docs")]
)  # fmt: skip
async def test_cross_site_calls_are_refused_everywhere(ring, method, path, headers, passes):
    async with client_of(make_app(ring and ring())) as client:
        response = await client.request(method, path, headers={**headers, "authorization": "Bearer admin"})
    if passes:
        assert response.json()["code"] != "cross-site" if response.status_code == 403 else True
    else:
        is_problem(response, 403, "cross-site")


async def test_links_to_the_reference_open():
    async with client_of(make_app(KeyedRing())) as client:
        assert (await client.get("/docs", headers=NAVIGATION)).status_code == 200
        for change in ({"sec-fetch-dest": "iframe"}, {"sec-fetch-mode": "no-cors"}, {"sec-fetch-mode": "cors"}):
            assert (await client.get("/docs", headers={**NAVIGATION, **change})).status_code == 403
