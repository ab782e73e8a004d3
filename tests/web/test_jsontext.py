"""The strict reader: what it keeps to the letter, what it refuses and where."""

import contextlib
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import InvalidInput, NotJson
from app.web.jsontext import MAX_ITEMS, RawJson, canonical_digest, parse, read, read_lenient

REFUSED = [
    ('{"payload":"x\\u0000y"}', "body.payload"),
    ('{"payload":{"a":"x\\u0000y"}}', "body.payload.a"),
    ('{"payload":{"a":[1,2,"\\u0000"]}}', "body.payload.a[2]"),
    ('{"payload":{"a\\u0000b":1}}', "body.payload"),
    ('{"payload":{"x":{"k\\u0000":1}}}', "body.payload.x"),
    ('{"payload":{"odd name":["\\u0000"]}}', 'body.payload["odd name"][0]'),
    ('{"payload":"\\ud800"}', "body.payload"),
    ('{"payload":"\\udc00"}', "body.payload"),
    ('{"payload":"\\ud800\\ud800"}', "body.payload"),
    ('{"payload":"\\uDBFFx"}', "body.payload"),
    ('{"payload":"\\\\\\u0000"}', "body.payload"),
    ('{"payload":NaN}', "body.payload"),
    ('{"payload":[0,Infinity]}', "body.payload[1]"),
    ('{"payload":{"a":-Infinity}}', "body.payload.a"),
    ('{"payload":1e400}', "body.payload"),
    ('{"payload":[[-1e400]]}', "body.payload[0][0]"),
    ('{"payload":{"a":1e5000}}', "body.payload.a"),
    ('{"payload":{"a":1E140000}}', "body.payload.a"),
    ('{"payload":{"a":' + "9" * 4301 + "}}", "body.payload.a"),
    ('{"payload":{"a":-' + "9" * 4301 + "}}", "body.payload.a"),
    ('{"payload":{"a":' + "9" * 5000 + ".5}}", "body.payload.a"),
    ('{"result":{"a":NaN}}', "body.result"),
    ('{"progress":"\\u0000"}', "body.progress"),
    ('{"worker_id":"a\\u0000"}', "body.worker_id"),
    ('{"queues":["a","\\ud800"]}', "body.queues[1]"),
    ('{"limit":1e999}', "body.limit"),
    ('{"payload":' + "[" * 65 + "]" * 65 + "}", "body.payload"),
    ('{"payload":' + '{"a":' * 65 + "1" + "}" * 65 + "}", "body.payload"),
    ('{"unknown":' + "[" * 500 + "]" * 500 + "}", "body.unknown"),
    ('{"jobs":[{"payload":1},{"payload":NaN}]}', "body.jobs[1].payload"),
    ('{"items":[{},{},{},{"result":{"a":[0,0,"\\u0000"]}}]}', "body.items[3].result.a[2]"),
    ('{"jobs":[{"kind":"a","kind":"b"}]}', "body.jobs[0].kind"),
    ('{"queue":"a","queue":"b"}', "body.queue"),
    ('{"queue":"a","qu\\u0065ue":"b"}', "body.queue"),
    ('{"payload":1,"payload":2}', "body.payload"),
]


@pytest.mark.parametrize(("text", "place"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_given_back_is_refused_with_its_place(text, place):
    with pytest.raises(InvalidInput) as caught:
        read(text.encode())
    assert caught.value.facts["errors"][0]["place"].startswith(place)


KEPT = [
    "9007199254740993",
    "9223372036854775808",
    "0.1",
    "1.0",
    "-0",
    "-0.0",
    "1e-400",
    "1.7976931348623157e308",
    "1E5",
    "9" * 4300,
    "-" + "9" * 4300,
    '{"a":1,"a":2}',
    '{"b": 1,\n "a" :[ ] }',
    '"\\\\u0000"',
    '"\\\\ud800"',
    '"\\ud83d\\ude00"',
    '"\\u00e9 é \\/ \\b"',
    '"\u2028\u2029\x7f"',
    "null",
    "true",
    '""',
    "[]",
    "[" * 64 + "]" * 64,
    '"' + "[" * 200 + '"',
]


@pytest.mark.parametrize("raw", KEPT, ids=[str(i) for i in range(len(KEPT))])
def test_raw_members_are_kept_to_the_letter(raw):
    body = read(f' {{ "queue" : "q" , "payload" :\t{raw} , "jobs":[ {{"payload":{raw}}} ] }} '.encode())
    assert type(body["payload"]) is RawJson
    assert body["payload"] == raw
    assert body["jobs"][0]["payload"] == raw


NOT_JSON = [
    (b"", 0),
    (b"{", 1),
    (b"{a:1}", 1),
    (b"{'a':1}", 1),
    (b'{"a":1,}', 7),
    (b'{"a" 1}', 5),
    (b'{"a":tru}', 5),
    (b'{"a":01}', 6),
    (b'{"a":1.}', 6),
    (b'{"a":.5}', 5),
    (b'{"a":+1}', 5),
    (b'{"a":1}}', 7),
    (b'{"a":1} {}', 8),
    (b'{"a":"x\ny"}', 7),
    (b'{"a":"\x00"}', 6),
    (b'{"a":"\\x"}', 6),
    (b'{"a":"\\u12"}', 7),
    (b'{"a":"x}', 5),
    (b'\xef\xbb\xbf{"a":1}', 0),
    ('{"a":1}'.encode("utf-16"), 0),
    ('{"a":1}'.encode("utf-16-le"), 0),
    ('{"a":1}'.encode("utf-32"), 0),
    (b'{"a":"\xff"}', 6),
    (b'{"a":"\xed\xa0\x80"}', 6),
    (b'{"a":"\xc0\xaf"}', 6),
    ('{"é":x}'.encode(), 6),
    (b'{"jobs":[1,]}', 11),
    (b'{"jobs":[{} {}]}', 12),
    (b'{"payload":/*x*/1}', 11),
    (b"\xa0{}", 0),
]


@pytest.mark.parametrize(("raw", "position"), NOT_JSON, ids=[str(i) for i in range(len(NOT_JSON))])
def test_a_body_that_is_no_json_names_the_byte(raw, position):
    with pytest.raises(NotJson) as caught:
        read(raw)
    assert caught.value.facts["position"] == position


@pytest.mark.parametrize("shape", ["[", '{"a":', '{"payload":[', '{"jobs":[', '{"jobs":[{"payload":['])
def test_a_hundred_thousand_brackets_are_refused_at_once(shape):
    begun = time.monotonic()
    with pytest.raises((InvalidInput, NotJson)):
        read(shape.encode() * 100_000)
    assert time.monotonic() - begun < 1


def test_hostile_sizes_stay_cheap():
    for raw in (
        b'{"jobs":[' + b"{}," * 2_000_000 + b"{}]}",
        b"{" + b",".join(b'"a%d":1' % i for i in range(500_000)) + b"}",
        b'{"payload":[' + b"1," * 4_000_000 + b"NaN]}",
        b'{"payload":"' + b"\\\\" * 4_000_000 + b'\\u0000"}',
    ):
        begun = time.monotonic()
        with pytest.raises(InvalidInput):
            read(raw)
        assert time.monotonic() - begun < 3


UNKNOWN = b",".join(b'"backof%d":1' % i for i in range(70_000))
HOSTILE = [
    b'{"queue":"q","payload":1,"backoff":{' + UNKNOWN + b"}}",
    b'{"jobs":[' + b'{"backoff":{"a":{' + UNKNOWN[:20_000].rpartition(b",")[0] + b"}}}" + b"]}",
    b'{"x":[' + b"[]," * 5_000 + b"[]]}",
    b'{"jobs":[' + b",".join([b'{"x":[' + b"[]," * 900 + b"1]}"] * 1000) + b"]}",
    b'{"x":[' + b"[]," * 5_000_000 + b"[]]}",
    b'{"payload":[' + b"[]," * 5_000_000 + b"[]]}",
    b'{"progress":[' + b"1," * 3_000 + b"1]}",
    b'{"jobs":[' + b",".join([b'{"payload":[' + b"1," * 7_000 + b"NaN]}"] * 1000) + b"]}",
    b'{"jobs":[' + b",".join([b'{"payload":"' + b"\\n" * 7_000 + b'\\u0000"}'] * 1000) + b"]}",
]


@pytest.mark.parametrize("raw", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_body_buys_no_walk(raw):
    begun = time.process_time()
    with pytest.raises(InvalidInput) as caught:
        read(raw)
    assert time.process_time() - begun < 1.5
    assert len(caught.value.facts["errors"]) <= 1000


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 8_000_000 + b"]" * 8_000_000,
        b"[" + b"[]," * 5_000_000 + b"1]",
        b'"' + b"\\u0000" * 2_500_000 + b'"',
        b"{" + b'"a":[{}],' * 1_500_000 + b'"b":1}',
    ],
    ids=range(4),
)
def test_a_hostile_error_text_buys_no_walk(text):
    begun = time.process_time()
    with contextlib.suppress(InvalidInput):  # nested deeper than can be followed
        assert len(read_lenient(b'{"error_message":' + text + b"}")["error_message"]) <= 64 * 1024
    assert time.process_time() - begun < 1.5


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("[" * 64 + "]" * 64, False),
        ("[" * 65 + "]" * 65, True),
        ('{"a":' * 64 + "1" + "}" * 64, False),
        ('{"a":' * 65 + "1" + "}" * 65, True),
        ("[" + "[[]]," * 500 + "{}]", False),
        (json.dumps(["[" * 100, '"' + "[" * 100, "\\" + "{" * 100, '\\"[' * 100] * 3), False),
        (json.dumps({'"\\' + "[" * 100: ["\\\\" + "]" * 100]}), False),
        ("[" * 60 + json.dumps(["]" * 50, "\\", [[[[[]]]]]]) + "]" * 60, True),
    ],
    ids=range(8),
)
def test_depth_counts_brackets_outside_strings_only(text, deep):
    errors = parse(b'{"payload":' + text.encode() + b"}").errors
    assert errors == ([{"place": "body.payload", "message": "nested deeper than 64 levels"}] if deep else [])


def test_every_bad_item_is_named():
    raw = json.dumps({"jobs": [{"payload": float("nan") if i % 3 == 0 else i} for i in range(30)]}).encode()
    errors = parse(raw).errors
    assert [error["place"] for error in errors] == [f"body.jobs[{i}].payload" for i in range(0, 30, 3)]


def test_items_past_the_limit_are_refused():
    assert len(read(b'{"jobs":[' + b",".join([b"{}"] * MAX_ITEMS) + b"]}")["jobs"]) == MAX_ITEMS
    with pytest.raises(InvalidInput):
        read(b'{"jobs":[' + b",".join([b"{}"] * (MAX_ITEMS + 1)) + b"]}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(json_values, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_agrees_with_the_standard_library(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    raw = json.dumps({"a": 1, "other": value, "payload": 0}, ensure_ascii=ascii_only).replace(
        '"payload": 0', '"payload": ' + text
    )
    try:
        encoded = raw.encode()
    except UnicodeEncodeError:
        return
    found = parse(encoded)
    bad = "\\u0000" in json.dumps(value).replace("\\\\", "")
    if bad:
        assert found.errors
    elif not found.errors:
        assert found.value["payload"] == text
        assert found.value["other"] == value


@settings(max_examples=500)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ud80 0e1-.NaItrusl\n', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(raw):
    for reader in (read, read_lenient):
        try:
            reader(raw)
        except (InvalidInput, NotJson):
            pass
        else:
            if reader is read:
                json.loads(raw)


LENIENT = [
    (b'{"error_message":"a\\u0000b"}', "a\ufffdb"),
    (b'{"error_message":"\\ud800"}', "\ufffd"),
    (b'{"error_message":"\xff\xfe"}', "\ufffd\ufffd"),
    (b'{"error_message":"a\nb\x00"}', "a\nb\ufffd"),
    (b'{"error_message":NaN}', "NaN"),
    (b'{"error_message":-Infinity}', "-Infinity"),
    (b'{"error_message":1e400}', "1e400"),
    (b'{"error_message":1.0}', "1.0"),
    (b'{"error_message":' + b"9" * 5000 + b"}", "9" * 5000),
    (b'{"error_message":true}', "true"),
    (b'{"error_message":null}', None),
    (b'{"error_message":["a",{"b":1e999}]}', '["a", {"b": 1e999}]'),
    (b'{"error_message":' + b"[" * 70 + b"]" * 70 + b"}", "[" * 70 + "]" * 70),
    (b'{"error_message":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "[" * 50_000 + "]" * 50_000),
    (b'\xef\xbb\xbf{"error_message":"x"}', "x"),
    (b'{"error_message":"\\ud83d\\ude00"}', "\U0001f600"),
]


@pytest.mark.parametrize(("raw", "text"), LENIENT, ids=[str(i) for i in range(len(LENIENT))])
def test_an_error_text_of_any_kind_becomes_text(raw, text):
    text = text and text[: 64 * 1024]  # the shapes keep 16 KiB
    assert read_lenient(raw)["error_message"] == text
    assert read_lenient(b'{"items":[' + raw.removeprefix(b"\xef\xbb\xbf") + b"]}")["items"][0]["error_message"] == text


def test_the_lenient_reader_is_strict_elsewhere():
    with pytest.raises(InvalidInput):
        read_lenient(b'{"attempt_token":"\\u0000"}')
    with pytest.raises(NotJson):
        read_lenient(b'{"error_message":')


SAME = [
    ('{"a":1,"b":[1,2]}', ' { "b" : [1, 2],\n"a":1 }', True),
    ("1", "1.0", False),
    ("1e2", "100", False),
    ('"a"', '"\\u0061"', True),
    ("[1,2]", "[2,1]", False),
    ('{"a":{"x":1,"y":2}}', '{"a":{"y":2,"x":1}}', True),
    ('{"a":1,"a":2}', '{"a":2}', False),
    ('"1"', "1", False),
    ("null", '"null"', False),
    ("{}", "[]", False),
    ("9007199254740993", "9007199254740992", False),
]


@pytest.mark.parametrize(("one", "other", "same"), SAME)
def test_sameness(one, other, same):
    digests = {canonical_digest({"q": "x", "payload": RawJson(text)}) for text in (one, other)}
    assert (len(digests) == 1) is same
