"""Logs are one JSON line each whatever a client typed; labels stay bounded."""

import io
import json
import logging
import logging.config

import pytest

from app import telemetry


@pytest.fixture
def lines():
    """Configure the logs onto a buffer, and put things back."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    stream = io.StringIO()
    config = telemetry.log_config()
    config["handlers"]["stderr"]["stream"] = stream
    logging.config.dictConfig(config)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:], _ = before
    root.setLevel(before[1])


NASTY = ["a\r\nb", "\x1b[31mred", "\u2028\u2029", "x" * 1_000_000, "\x00", '"}{"', "\ud800"]


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_one_json_line_each(lines, text):
    telemetry.get_logger("fencepost.test").warning("seen", name=text)
    logging.getLogger("foreign").warning("foreign %s", text)
    found = lines()
    assert [line["level"] for line in found] == ["warning", "warning"]
    assert all(len(json.dumps(line)) < 10_000 for line in found)


def test_a_traceback_shows_no_local_variables(lines):
    authorization = "Bearer very-secret-value"
    try:
        raise RuntimeError(len(authorization))
    except RuntimeError:
        telemetry.get_logger("fencepost.test").exception("failed")
    assert "Traceback" in lines()[0]["exception"]
    assert "very-secret-value" not in json.dumps(lines())


def test_access_lines_drop_the_query(lines):
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "1.2.3.4", "GET", "/x?api_key=s3", "1.1", 200)
    assert "s3" not in json.dumps(lines())


def test_queue_labels_are_bounded():
    for index in range(2_000):
        telemetry.publish("enqueue", queue=f"bounded-{index}")
    text = telemetry.render_counters().decode()
    assert text.count("fencepost_enqueues_total{") <= telemetry.MAX_QUEUES + 1
    assert 'queue="other"' in text


def test_other_labels_are_of_a_closed_set():
    telemetry.publish("stale_refused", verb="<script>")
    telemetry.publish("pass", loop="typed-by-somebody", ok=True)
    telemetry.publish("no_such_fact", queue="q")
    text = telemetry.render_counters().decode()
    assert "script" not in text
    assert "typed-by-somebody" not in text


def test_every_fact_counts():
    for fact, kind in telemetry.FACTS.items():
        telemetry.publish(fact, count=3)
        assert f"fencepost_{kind.metric}_total" in telemetry.render_counters().decode()
