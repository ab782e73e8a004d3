"""What the reader accepts, a `json` column stores and gives back to the letter, and a strict parser can read."""

import json

import psycopg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import InvalidInput, NotJson
from app.web.jsontext import canonical_digest, read

scalars = st.one_of(
    st.none().map(lambda _: "null"),
    st.booleans().map(lambda b: "true" if b else "false"),
    st.integers(min_value=-(10**40), max_value=10**40).map(str),
    st.floats().map(json.dumps),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?", fullmatch=True).filter(str.isascii),
    st.text(max_size=20).map(json.dumps),
    st.text(st.characters(codec="utf-8"), max_size=20).map(lambda s: json.dumps(s, ensure_ascii=False)),
    st.from_regex(r'"(\\u[0-9a-fA-F]{4}|\\[\\/bfnrt"]|[a-z]){0,8}"', fullmatch=True),
    st.sampled_from(["-0", "1e400", "1" + "0" * 4299, "1" + "0" * 4300, "NaN", '"\\u0000"', '"\\\\u0000"', "1E-400"]),
)
space = st.sampled_from(["", " ", "\n", "\t "])
texts = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.tuples(st.lists(inner, max_size=4), space).map(lambda t: "[" + ("," + t[1]).join(t[0]) + t[1] + "]"),
        st.lists(st.tuples(st.text(max_size=5).map(json.dumps), space, inner), max_size=4).map(
            lambda members: "{" + ",".join(f"{k}{s}:{v}" for k, s, v in members) + "}"
        ),
    ),
    max_leaves=12,
)


def test_what_is_accepted_comes_back_to_the_letter(database_url):
    accepted = 0
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TEMP TABLE kept (raw json)")

        @settings(max_examples=1500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(texts)
        def check(text):
            nonlocal accepted
            try:
                raw = read(b'{"payload":' + text.encode("utf-8", "surrogatepass") + b"}")["payload"]
            except (InvalidInput, NotJson):
                return
            accepted += 1
            row = connection.execute(
                "INSERT INTO kept VALUES (%s::json) RETURNING raw::text, raw #>> '{}', octet_length(raw::text)",
                (str(raw),),
            ).fetchone()
            assert row[0] == text
            assert json.loads(row[0], parse_constant=lambda name: 1 / 0) == json.loads(text)
            assert canonical_digest(raw) == canonical_digest(raw)

        check()
    assert accepted > 300
