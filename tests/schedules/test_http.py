"""The routes of schedules, and the verbs of the command line over them."""

import asyncio
import http.server
import threading

import httpx2
import pytest
from typer.testing import CliRunner

from app.cli_schedules import schedules as verbs
from tests.harness import wait_until

EVERY = {"every_seconds": 3600, "queue": "q", "payload": {"a": 1.0}}


async def test_put_and_get(client):
    made = await client.put(
        "/v1/schedules/nightly", json={"cron": "30 2 * * *", "timezone": "Europe/Berlin", "queue": "q"}
    )
    assert made.status_code == 201
    body = made.json()
    assert (body["kind"], body["payload"], body["startup_grace_seconds"], body["overlap"]) == ("q", None, 60, "skip")
    again = await client.put(
        "/v1/schedules/nightly", json={"cron": "30 2 * * *", "timezone": "Europe/Berlin", "queue": "q"}
    )
    assert (again.status_code, again.headers["etag"]) == (200, made.headers["etag"])
    assert again.json() == body
    assert (await client.get("/v1/schedules/nightly")).headers["etag"] == made.headers["etag"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"queue": "q"}, "body.every_seconds"),
        ({"every_seconds": 60, "cron": "* * * * *", "queue": "q"}, "body.every_seconds"),
        ({"every_seconds": 60}, "body.queue"),
        ({"every_seconds": 60, "queue": "q", "task": "prune"}, "body.queue"),
        ({"every_seconds": 60, "task": "prune", "payload": 1}, "body.payload"),
        ({"every_seconds": 60, "task": "drop-everything"}, "body.task"),
        ({"every_seconds": 60, "timezone": "UTC", "queue": "q"}, "body.timezone"),
        ({"every_seconds": 0, "queue": "q"}, "body.every_seconds"),
        ({"every_seconds": 1.5, "queue": "q"}, "body.every_seconds"),
        ({"every_seconds": "60", "queue": "q"}, "body.every_seconds"),
        ({"every_seconds": 31622401, "queue": "q"}, "body.every_seconds"),
        ({"cron": "0 0 30 2 *", "queue": "q"}, "body.cron"),
        ({"cron": "@reboot", "queue": "q"}, "body.cron"),
        ({"cron": "* * * * * *", "queue": "q"}, "body.cron"),
        ({"cron": "0 0 * * *", "timezone": "Mars/Olympus", "queue": "q"}, "body.timezone"),
        ({"every_seconds": 60, "queue": "q", "startup_grace_seconds": 86401}, "body.startup_grace_seconds"),
        ({"every_seconds": 60, "queue": "q", "overlaps": "skip"}, "body.overlaps"),
    ],
)
async def test_what_is_refused(client, body, place):
    answer = await client.put("/v1/schedules/s", json=body)
    assert answer.status_code == 422
    assert [error["place"] for error in answer.json()["errors"]] == [place]
    assert (await client.get("/v1/schedules/s")).status_code == 404


@pytest.mark.parametrize("payload", ["1.0", "9007199254740993", '{"b":1, "a":2}', '"\\\\u0000"'])
async def test_a_payload_goes_out_as_it_came_in(client, payload):
    answer = await client.put(
        "/v1/schedules/s", content=f'{{"every_seconds": 60, "queue": "q", "payload": {payload}}}'.encode()
    )
    assert f'"payload":{payload}'.encode() in answer.content
    job = await client.post("/v1/schedules/s/fire")
    assert f'"payload":{payload}'.encode() in job.content


async def test_if_match(client):
    made = await client.put("/v1/schedules/s", json=EVERY)
    old = made.headers["etag"]
    changed = await client.put("/v1/schedules/s", json={**EVERY, "payload": 2}, headers={"if-match": old})
    assert changed.status_code == 200
    for call in (
        client.put("/v1/schedules/s", json=EVERY, headers={"if-match": old}),
        client.delete("/v1/schedules/s", headers={"if-match": old}),
        client.put("/v1/schedules/other", json=EVERY, headers={"if-match": "*"}),
    ):
        answer = await call
        assert (answer.status_code, answer.json()["code"]) == (412, "precondition-failed")
    assert (await client.delete("/v1/schedules/s", headers={"if-match": changed.headers["etag"]})).status_code == 204


async def test_preconditions(client):
    new = {"if-none-match": "*"}
    made = await client.put("/v1/schedules/s", json=EVERY, headers=new)
    assert (made.status_code, made.headers["location"]) == (201, "/v1/schedules/s")
    assert (await client.put("/v1/schedules/s", json=EVERY, headers=new)).status_code == 412
    assert (await client.put("/v1/schedules/s", json=EVERY, headers={"if-none-match": '"x"'})).status_code == 422
    tag = made.headers["etag"]
    stale = '"0190a5b2-7c41-7b3e-9d52-5f7f3d9d2c11"'
    for headers in ({"if-match": f"W/{tag}"}, {"if-match": '"*"'}, {"if-match": stale}):
        for verb in ("pause", "resume", "fire"):
            answer = await client.post(f"/v1/schedules/s/{verb}", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (412, "precondition-failed")
        assert (await client.put("/v1/schedules/s", json=EVERY, headers=headers)).status_code == 412
    two_lines = [("if-match", stale), ("if-match", tag)]
    assert (await client.put("/v1/schedules/s", json=EVERY, headers=two_lines)).status_code == 200
    assert (await client.post("/v1/schedules/s/pause", headers={"if-match": f"{stale}, {tag}"})).status_code == 200


async def test_an_empty_zone_is_refused(client):
    answer = await client.put("/v1/schedules/s", json={"cron": "0 0 * * *", "timezone": "", "queue": "q"})
    assert [error["place"] for error in answer.json()["errors"]] == ["body.timezone"]


async def test_the_preview_of_a_rare_cron_shows_what_there_is(client):
    await client.put("/v1/schedules/s", json={"cron": "0 0 29 2 */7", "queue": "q"})
    answer = await client.get("/v1/schedules/s/preview?count=500")
    assert answer.status_code == 200
    assert 200 < len(answer.json()["times"]) < 500


async def test_pause_resume_fire_without_a_body(client):
    await client.put("/v1/schedules/s", json=EVERY)
    paused = await client.post("/v1/schedules/s/pause")
    assert (paused.status_code, paused.json()["enabled"]) == (200, False)
    assert (await client.put("/v1/schedules/s", json={**EVERY, "payload": 5})).json()["enabled"] is False
    fired = await client.post("/v1/schedules/s/fire", headers={"idempotency-key": "k"})
    assert (fired.status_code, fired.json()["schedule"]) == (201, "s")
    again = await client.post("/v1/schedules/s/fire", headers={"idempotency-key": "k"})
    assert (again.status_code, again.json()["id"]) == (200, fired.json()["id"])
    refused = await client.post("/v1/schedules/s/fire")
    assert (refused.status_code, refused.json()["code"], refused.json()["job_id"]) == (
        409,
        "overlap",
        fired.json()["id"],
    )
    assert (await client.post("/v1/schedules/s/fire", json={"force": True})).status_code == 201
    assert (await client.post("/v1/schedules/s/resume")).json()["enabled"] is True
    mismatch = await client.post("/v1/schedules/s/fire", json={"force": True}, headers={"idempotency-key": "k"})
    assert (mismatch.status_code, mismatch.json()["code"]) == (422, "idempotency-mismatch")


async def test_what_is_not_there(client):
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/pause"),
        ("POST", "/fire"),
        ("GET", "/preview"),
        ("GET", "/slots"),
    ):
        answer = await client.request(method, f"/v1/schedules/none{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "schedule-not-found")


async def test_slots_are_paged_and_outlive_the_schedule(client):
    await client.put("/v1/schedules/s", json={**EVERY, "overlap": "allow"})
    for _ in range(5):
        await client.post("/v1/schedules/s/fire")
    assert (await client.delete("/v1/schedules/s")).status_code == 204
    found, query = [], "limit=2"
    while True:
        page = (await client.get(f"/v1/schedules/s/slots?{query}")).json()
        found += [slot["id"] for slot in page["slots"]]
        if page["next_cursor"] is None:
            break
        query = f"limit=2&cursor={page['next_cursor']}"
    assert len(found) == len(set(found)) == 5
    assert len((await client.get("/v1/jobs?queue=q")).json()["jobs"]) == 5


async def test_preview(client):
    await client.put("/v1/schedules/s", json={"cron": "30 2 * * *", "timezone": "America/New_York", "queue": "q"})
    body = (await client.get("/v1/schedules/s/preview?count=500")).json()
    assert (body["timezone"], len(body["times"])) == ("America/New_York", 500)
    odd = [at for at in body["times"] if at["note"] is not None]
    assert odd
    assert all("does not exist" in at["note"] and "03:00:00" in at["local"] for at in odd)
    assert len({at["local"][:10] for at in body["times"]}) == 500, "one run each day"
    assert (await client.get("/v1/schedules/s/preview?count=501")).status_code == 422


async def test_a_broken_schedule_is_told(client):
    await client.put("/v1/schedules/s", json={"cron": "30 2 * * *", "queue": "q"})
    async with client.app.state.service.db.begin() as tx:
        await tx.run("UPDATE schedules SET timezone = 'Mars/Olympus', next_run_at = 'infinity' WHERE name = 's'")
    assert (await client.get("/v1/schedules")).status_code == 200
    preview = await client.get("/v1/schedules/s/preview")
    assert (preview.status_code, preview.json()["code"]) == (409, "schedule-broken")


async def test_health_and_metrics_tell_of_a_schedule_that_does_not_run(client):
    await client.put("/v1/schedules/s", json=EVERY)
    async with client.app.state.service.db.begin() as tx:
        await tx.run("UPDATE schedules SET next_run_at = fencepost_now() - interval '1 minute' WHERE name = 's'")
    told = (await client.get("/readyz?verbose")).json()["schedules"]
    assert [each["schedule"] for each in told["overdue"]] == ["s"]
    assert "fencepost_schedules_overdue 1.0" in (await client.get("/metrics")).text
    assert (await client.get("/v1/schedules/s")).json()["overdue"] is True


async def test_the_loop_fires_and_a_worker_gets_the_job(client_for):
    async with client_for(loops=True) as client:
        await client.put("/v1/schedules/s", json={"every_seconds": 1, "queue": "q", "payload": 1, "overlap": "skip"})
        claim = {"worker_id": "w", "queues": ["q"], "wait_seconds": 20}
        [job] = (await client.post("/v1/jobs/claim", json=claim)).json()["jobs"]
        assert (job["schedule"], job["kind"]) == ("s", "q")
        slots = (await client.get("/v1/schedules/s/slots")).json()["slots"]
        assert job["slot_at"] in [slot["slot_at"] for slot in slots]


async def test_the_services_own_schedule_runs(client_for):
    async with client_for(loops=True) as client:
        assert (await client.post("/v1/schedules/fencepost-prune/fire")).status_code == 202

        async def ended():
            [slot] = (await client.get("/v1/schedules/fencepost-prune/slots")).json()["slots"]
            return slot["ended_at"] is not None and slot["outcome"] == "fired"

        await wait_until(ended, 10)


async def test_the_verbs(serve, monkeypatch):
    service = await asyncio.to_thread(serve)
    monkeypatch.setenv("FENCEPOST_URL", service.url)

    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(verbs, list(words))
        assert result.exit_code == code, result.output
        return result.output

    def all_of_them():
        assert "every 60 s" in run("put", "s", "--every", "60", "--queue", "q", "--payload", '{"a": 1}')
        assert "paused by" in run("pause", "s", "--reason", "because")
        assert "because" in run("list")
        assert "job" in run("fire", "s")
        assert "overlap" in run("fire", "s", code=1)
        assert "ok" in run("resume", "s")
        assert run("preview", "s", "--count", "3").count("\n") == 4
        assert "by hand" in run("slots", "s")
        assert '"lateness_seconds"' in run("slots", "s", "--json")
        assert "schedule-not-found" in run("fire", "none", code=1)
        run("put", "s", "--every", "60", "--queue", "q", "--payload", '{"a": 1.10, "b": 12345678901234567890123}')
        assert '"a": 1.10, "b": 12345678901234567890123' in httpx2.get(f"{service.url}/v1/schedules/s").text

    await asyncio.to_thread(all_of_them)


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (["pause", "\udcff"], {}, "UTF-8"),
        (["put", "s", "--every", "60", "--queue", "q", "--payload", "[" * 100_000], {}, "nested too deep"),
        (["put", "s", "--every", "60", "--queue", "q", "--payload", "{"], {}, "not JSON"),
        (["list"], {"FENCEPOST_URL": "http://[::"}, "FENCEPOST_URL"),
        (["list"], {"FENCEPOST_URL": "http://127.0.0.1:1"}, "does not answer"),
        (["list"], {"FENCEPOST_KEY": "\u00e4"}, "FENCEPOST_KEY"),
        (["list"], {"FENCEPOST_KEY": "a\nb"}, "FENCEPOST_KEY"),
    ],
)
def test_what_a_verb_cannot_do_is_one_line(monkeypatch, words, environment, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(verbs, words)
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_server_that_is_no_fencepost_is_told(monkeypatch):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("FENCEPOST_URL", f"http://127.0.0.1:{server.server_port}")
        result = CliRunner().invoke(verbs, ["list"])
        server.shutdown()
    assert result.exit_code == 1
    assert "no JSON" in result.output
