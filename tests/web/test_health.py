"""Probes and metrics, with a database that answers, is away, or hangs."""

import asyncio
import time
from datetime import UTC, datetime

import pytest

from app.errors import Unavailable
from tests.web.stand_in import KeyedRing, client_of, make_app
from tests.web.test_edge import is_problem

LATE = {"loop": "reclaim", "last_pass_at": datetime(2026, 1, 1, tzinfo=UTC), "degraded": True, "error": "boom"}
FINE = {"loop": "prune", "last_pass_at": datetime(2026, 1, 1, tzinfo=UTC), "degraded": False, "error": None}


async def hang():
    await asyncio.Event().wait()


async def test_liveness_asks_nothing():
    app = make_app()
    app.state.composed.db.answer = Unavailable("away")
    async with client_of(app) as client:
        assert (await client.get("/livez")).json() == {"status": "ok"}
    assert app.state.composed.db.calls == 0


@pytest.mark.parametrize(
    "answer",
    [Unavailable("away"), hang, {"writable": False, "revision_ok": True}, {"writable": True, "revision_ok": False}],
)
async def test_not_ready(answer):
    app = make_app()
    app.state.composed.db.answer = answer
    async with client_of(app) as client:
        begun = time.monotonic()
        response = await client.get("/readyz")
        assert time.monotonic() - begun < 1
        document = is_problem(response, 503, "unavailable")
        assert response.headers["retry-after"] == "1"
        assert "database" not in document.keys() - {"detail"}, "details are not open"


async def test_ready_and_draining():
    app = make_app()
    async with client_of(app) as client:
        responses = await asyncio.gather(*(client.get("/readyz") for _ in range(50)))
        assert {r.status_code for r in responses} == {200}
        assert app.state.composed.db.calls == 1, "one ping for all who ask at once"
        app.state.composed.draining = True
        is_problem(await client.get("/readyz"), 503, "unavailable")


async def test_not_ready_while_the_keys_cannot_be_read():
    """Every call would be refused then, although the database answers again."""
    app = make_app()
    app.state.composed.keys.readable = False
    async with client_of(app) as client:
        assert "keys" in is_problem(await client.get("/readyz"), 503, "unavailable")["detail"]
        assert (await client.get("/livez")).status_code == 200


async def test_a_failing_loop_is_told_and_turns_only_the_strict_probe_red():
    app = make_app()
    app.state.composed.loops.rows = [LATE, FINE]
    async with client_of(app) as client:
        open_answer = {"status": "ready", "degraded": [{"loop": "reclaim", "last_pass_at": "2026-01-01T00:00:00Z"}]}
        assert (await client.get("/readyz")).json() == open_answer
        told = (await client.get("/readyz?verbose")).json()
        assert told["degraded"] == [{"loop": "reclaim", "last_pass_at": "2026-01-01T00:00:00Z", "error": "boom"}]
        assert is_problem(await client.get("/readyz?strict=true"), 503, "unavailable")["degraded"]
        app.state.composed.loops.rows = [FINE]
        assert (await client.get("/readyz?strict=true")).status_code == 200


async def test_details_need_a_key_where_keys_are_asked():
    async with client_of(make_app(KeyedRing())) as client:
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/readyz?verbose")).status_code == 401
        assert (await client.get("/readyz?strict=true")).status_code == 200
        assert (await client.get("/readyz?verbose=true", headers={"authorization": "Bearer work"})).status_code == 403
        assert (await client.get("/readyz?verbose=true", headers={"authorization": "Bearer read"})).status_code == 200


async def test_metrics():
    app = make_app()
    app.state.composed.gauge_rows = [
        *(("fencepost_jobs", "Jobs.", {"queue": f"q{i}", "status": "queued"}, 1.0) for i in range(800)),
        *(("fencepost_oldest_waiting_seconds", "Age.", {"queue": f"q{i}"}, float(i)) for i in range(800)),
        ("fencepost_waiters", "Waiting claims.", {}, 3.0),
        ("fencepost_odd", "Odd.", {"queue": 'a"\\\n'}, 1.0),
    ]
    async with client_of(app) as client:
        await client.get("/livez")
        response = await client.get("/metrics")
    text = response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "fencepost_waiters 3.0" in text
    assert "fencepost_database_up 1.0" in text
    assert 'fencepost_request_seconds_count{operation="getLivez",status="2xx"}' in text
    queues = {
        line.split('queue="')[1].split('"')[0] for line in text.splitlines() if line.startswith("fencepost_jobs{")
    }
    assert len(queues) == 501
    assert sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("fencepost_jobs{")) == 800


@pytest.mark.parametrize("failure", [Unavailable("away"), None])
async def test_metrics_without_the_database(failure):
    app = make_app()

    async def gauges():
        if failure is None:
            await hang()
        raise failure

    app.state.composed.gauges = gauges
    async with client_of(app) as client:
        begun = time.monotonic()
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert time.monotonic() - begun < 0.8
    assert "fencepost_database_up 0.0" in response.text
