"""`app.arrays.array`: what it writes, PostgreSQL reads as the same values."""

import uuid
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.arrays import array

AWKWARD = st.sampled_from(
    ["", " ", "NULL", "null", "\\", "\\\\", '"', '\\"', "{}", "{", "}", ",", "a,b", "{a,b}", "'", "\n", "\t", "\r\n",
     "\\N", "\\x00", "\x01\x7f", "é", "日本", "\u2028", "\U0001f600", "\ufeff", "\u202e", "x" * 5000]
)  # fmt: skip
# What PostgreSQL cannot hold in a text: NUL, and the halves of surrogate pairs. The doors refuse or clean both.
CHARACTERS = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
TEXTS = AWKWARD | st.text(CHARACTERS) | st.lists(AWKWARD, max_size=4).map("".join)
INSTANTS = st.datetimes(
    min_value=datetime(1, 1, 2),
    max_value=datetime(9999, 12, 30),
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7)), timezone(timedelta(hours=5, minutes=45))]),
)
TYPES = {
    "text": TEXTS,
    "bytea": st.binary(max_size=64),
    "uuid": st.uuids(),
    "float8": st.floats(allow_nan=False) | st.sampled_from([5e-324, 1.7976931348623157e308, -0.0, 0.1, 1e16, 1e-7]),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "boolean": st.booleans(),
    "timestamptz": INSTANTS,
}
QUICKLY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def connection(server_url):
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        yield connection


def through(connection, kind, values):
    """As a hot statement gives it: one text with a cast, taken apart by unnest; and how long it was."""
    rows = connection.execute(
        f"SELECT v FROM unnest(%s::{kind}[]) WITH ORDINALITY AS u(v, n) ORDER BY n", [array(values)]
    ).fetchall()
    return [bytes(value) if kind == "bytea" and value is not None else value for (value,) in rows]


@pytest.mark.parametrize("kind", TYPES)
def test_what_goes_in_comes_out(connection, kind):
    @QUICKLY
    @given(st.lists(st.none() | TYPES[kind], max_size=12))
    def check(values):
        back = through(connection, kind, values)
        assert back == values
        assert [repr(value) for value in back] == [repr(v) for v in values] or kind == "timestamptz"

    check()


@QUICKLY
@given(st.lists(st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.none(), max_size=12))
def test_whole_numbers_may_stand_among_fractions(connection, values):
    assert through(connection, "float8", values) == values


@QUICKLY
@given(st.lists(st.tuples(TEXTS, st.none() | TEXTS), max_size=8))
def test_two_arrays_in_one_statement_stay_side_by_side(connection, pairs):
    left, right = array(a for a, _ in pairs), array(b for _, b in pairs)
    rows = connection.execute("SELECT a, b FROM unnest(%s::text[], %s::text[]) AS u(a, b)", [left, right]).fetchall()
    assert rows == pairs


def test_not_a_number_and_the_infinities(connection):
    values = [float("nan"), float("inf"), float("-inf")]
    assert [repr(value) for value in through(connection, "float8", values)] == ["nan", "inf", "-inf"]


def test_a_kind_of_text_is_text(connection):
    class Word(StrEnum):
        ONE = 'o"n\\e'

    assert through(connection, "text", [Word.ONE, "two"]) == ['o"n\\e', "two"]


@pytest.mark.parametrize("value", [[1], (1,), {}, object(), 1j])
def test_anything_else_is_refused(value):
    with pytest.raises(TypeError):
        array([value])


def test_a_nul_is_refused_and_cuts_nothing_off(connection):
    with pytest.raises((psycopg.DataError, ValueError)):
        through(connection, "text", ["a\x00b", "c"])


def test_the_same_as_psycopg_makes_of_a_list(connection):
    values = ["", "NULL", 'a"b', "c\\d", "{e,f}", None, uuid.UUID(int=7).hex]
    [(mine, theirs)] = connection.execute("SELECT %s::text[], %s::text[]", [array(values), values]).fetchall()
    assert mine == theirs == values
