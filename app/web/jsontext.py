"""Reading request bodies: strict JSON, with the text of `payload`, `result` and `progress` kept as it was sent.

The standard library's C scanner does the work; only the members of our own objects (the top level and the
items of a batch) are walked here, so that the span of each raw member is known. What a strict parser or
PostgreSQL's `json` type could not give back is refused with its place (spec 3): NUL, lone surrogates, NaN,
Infinity, numbers beyond a double, integers over 4 300 digits, nesting deeper than 64.

Sources: RFC 8259 (grammar, one encoding: UTF-8); PostgreSQL's json type refuses `\\u0000` when it is read.
This module must never know HTTP or a schema.
"""

import datetime
import enum
import gc
import hashlib
import json
import re
import sys
import uuid
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import accumulate
from json.decoder import scanstring as _untyped_scanstring  # type: ignore[attr-defined]
from json.scanner import make_scanner as _make_scanner
from typing import Any, NamedTuple, cast

import orjson
from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from app.errors import InvalidInput, NotJson

PAYLOAD_BYTES = 256 * 1024
PROGRESS_BYTES = 4 * 1024
RAW_MEMBERS: Mapping[str, int] = {"payload": PAYLOAD_BYTES, "result": PAYLOAD_BYTES, "progress": PROGRESS_BYTES}
"""The most bytes of each. Told here too, so that no work is spent on the inside of what is refused anyhow."""
RAW_ITEM_ARRAYS = frozenset({"jobs", "items"})
MAX_DEPTH = 64
"""Levels of nesting, counted from the root of each member of our own objects."""
MAX_DIGITS = 4300
"""Digits of an integer: CPython's own default limit, so every Python reader can read it back."""
MAX_ITEMS = 1000
"""Items of a batch."""
MAX_MEMBERS = 50
"""Members of our own objects; no shape has as many."""
MAX_ERRORS = 1000
# A hostile body must not buy CPU: what is walked in Python is bounded for the body as a whole.
_INNER_TEXT = 64 * 1024
"""Characters of a list or object that is no raw member; the longest that any shape takes has about 10 000."""
_INNER_VALUES = 20_000
"""Values inside of all such lists and objects."""
_PLACE_BUDGET = 500_000
"""Characters looked at to name places exactly; past them the place is the member."""
_SKIP_BUDGET = 200_000
"""Brackets and strings looked at to find the end of error texts that are nested too deep for the scanner."""
_AS_TEXT = 1024
"""Characters of a list or object in place of an error text up to which it is written anew; longer ones stay as sent."""
_CUT = 64 * 1024
"""Characters of an error text that are looked at; the shapes keep less."""
_PLACE_LENGTH = 200


class RawJson(str):
    """JSON text exactly as it was sent; always strict, storable and within the depth limit when `read` made it."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.is_instance_schema(cls)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {}


NULL = RawJson("null")

Problems = list[dict[str, str]]


class Reading(NamedTuple):
    """A parsed body and what was wrong in it; a raw member that was refused is `null` in the value."""

    value: Any
    errors: Problems


_scanstring = cast("Callable[[str, int, bool], tuple[str, int]]", _untyped_scanstring)


class _Context:
    """What the C scanner wants to know (the attributes of a `json.JSONDecoder`)."""

    def __init__(self, *, strict: bool = True, lossless: bool = False) -> None:
        self.strict = strict
        self.object_hook = None
        self.object_pairs_hook = _pairs if lossless else None
        self.parse_float: Callable[[str], Any] = _number_text if lossless else self.float_
        self.parse_int: Callable[[str], Any] = _number_text if lossless else _FAST_INT or self.int_
        self.parse_constant: Callable[[str], Any] = self.constant
        self.memo: dict[str, str] = {}
        self.odd = False
        """Set when a number was met that cannot be kept; the place is looked for afterwards."""

    def float_(self, text: str) -> float:
        number = float(text)
        if number in (_INF, -_INF):
            self.odd = True
        return number

    def int_(self, text: str) -> int:
        if len(text) > 300 and _int_refusal(text):
            self.odd = True
            return 0
        return int(text)

    def constant(self, text: str) -> None:
        self.odd = True


_INF = float("inf")
_FAST_INT = int if sys.get_int_max_str_digits() == MAX_DIGITS else None
"""int itself, called from C without a Python frame, as long as nobody moved CPython's own limit."""
_WS = re.compile(r"[ \t\n\r]*")
_MEMBER = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*(?:"([^"\\\x00-\x1f]*)"[ \t\n\r]*([,}]))?')
"""A member's name, and its value where that is text without an escape: one call for the common case."""
_AS_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRINGS_OR_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|([\[\]{}])', re.DOTALL)
_STEP = {"": 0, "[": 1, "{": 1, "]": -1, "}": -1}
_GOOD = re.compile(
    r"(?:[^\\]++|\\(?:[^u]|u(?!0000|[dD][89a-fA-F])|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*+",
    re.DOTALL,
)
"""All up to the first escape that cannot be kept: one call, whatever the text holds."""
_MAYBE_BAD = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},:]|[^\[\]{},:" \t\n\r]+', re.DOTALL)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,59}")


def read(
    raw: bytes,
    *,
    raw_members: Mapping[str, int] = RAW_MEMBERS,
    raw_item_arrays: Collection[str] = RAW_ITEM_ARRAYS,
) -> Any:
    """The value of a body. Raises NotJson (with `position`, a byte offset) or InvalidInput (with places)."""
    value, errors = parse(raw, raw_members=raw_members, raw_item_arrays=raw_item_arrays)
    if errors:
        raise InvalidInput(errors)
    return value


def parse(
    raw: bytes,
    *,
    raw_members: Mapping[str, int] = RAW_MEMBERS,
    raw_item_arrays: Collection[str] = RAW_ITEM_ARRAYS,
) -> Reading:
    """As `read`, but what is wrong inside a member is returned, so that every bad item can be named at once."""
    flat = _flat(raw, raw_members) if len(raw) < _FLAT_BYTES else None
    if flat is not None:
        return Reading(flat, [])
    text = _decode(raw)
    return _Reader(text, raw_members, raw_item_arrays).body()


_FLAT_BYTES = 1024
_FLAT_TYPES = frozenset({str, bool, int, float, type(None)})


def _flat(raw: bytes, raw_members: Mapping[str, int]) -> dict[str, Any] | None:
    """The small plain body of most calls: no nesting, no escapes, no raw member. None for all that is not surely so,
    or not surely right; `_Reader` then says what it is.

    A member given twice is one that orjson leaves out: the quotes in the body are then more than those of what is left.
    """
    if b"\\" in raw or b"[" in raw or raw.count(b"{") != 1:
        return None
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if type(value) is not dict or len(value) > MAX_MEMBERS or not raw_members.keys().isdisjoint(value):
        return None
    texts = len(value)
    for each in value.values():
        kind = type(each)
        if kind is str:
            texts += 1
        elif kind not in _FLAT_TYPES or (kind is float and not -_LARGE < each < _LARGE):
            return None
    return value if raw.count(b'"') == 2 * texts else None


_LARGE = 2.0**63
"""Beyond it orjson makes a float of an integer."""


class _Reader:
    def __init__(self, text: str, raw_members: Mapping[str, int], raw_item_arrays: Collection[str]) -> None:
        self.text = text
        self.raw_members = raw_members
        self.raw_item_arrays = raw_item_arrays
        self.context = _Context()
        self.scan: Callable[[str, int], tuple[Any, int]] = _make_scanner(cast(Any, self.context))
        self.escapes = _MAYBE_BAD.search(text) is not None
        self.errors: Problems = []
        self.inner_left = _INNER_VALUES
        self.places_left = _PLACE_BUDGET

    def body(self) -> Reading:
        # The scanner may make millions of lists; each pass of the collector in between would visit them all.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._body()
        finally:
            if collecting:
                gc.enable()

    def _body(self) -> Reading:
        text = self.text
        start = self._space(0)
        if text[start : start + 1] == "{":
            value, end = self._object(start, "body", arrays=self.raw_item_arrays)
        else:
            value, end = self._value(start, "body", "")
        end = self._space(end)
        if end != len(text):
            raise _not_json(text, end, "more text after the end of the JSON value")
        return Reading(value, self.errors)

    def _space(self, at: int) -> int:
        if self.text[at : at + 1] > " ":  # the common case
            return at
        return cast("re.Match[str]", _WS.match(self.text, at)).end()

    def _error(self, place: str, message: str) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"place": place, "message": message})

    def _object(self, start: int, place: str, arrays: Collection[str] = ()) -> tuple[dict[str, Any], int]:
        """One of our own objects, which begins at `start`; the offset after it comes back too."""
        text, match_member, raw_members = self.text, _MEMBER.match, self.raw_members
        members: dict[str, Any] = {}
        at = self._space(start + 1)
        if text[at : at + 1] == "}":
            return members, at + 1
        while True:
            match = match_member(text, at)
            if match is None:
                name, at = self._member_name(at)
                short = None
            else:
                name, short, sign = match.groups()
                at = match.end()
            if name in members:
                self._error(place + _step(name), "the member is given twice")
            elif len(members) >= MAX_MEMBERS:
                raise InvalidInput.at(place, f"more than {MAX_MEMBERS} members")
            if short is not None:  # text without an escape, the sign after it already seen
                members[name] = RawJson(f'"{short}"') if name in raw_members else short
            else:
                if name in arrays and text[at : at + 1] == "[":
                    members[name], at = self._items(at, place + _step(name))
                else:
                    members[name], at = self._value(at, place, name, raw=name in raw_members)
                sign = text[at : at + 1]
                if sign not in (",", "}"):
                    at = self._space(at)
                    sign = text[at : at + 1]
                at += 1
            if sign == "}":
                return members, at
            if sign != ",":
                raise _not_json(text, at - 1, "',' or '}' is missing")

    def _member_name(self, at: int) -> tuple[str, int]:
        """A member's name that holds an escape, or none at all."""
        text = self.text
        at = self._space(at)
        if text[at : at + 1] != '"':
            raise _not_json(text, at, "a member name in double quotes is missing")
        try:
            name, at = _scanstring(text, at + 1, True)
        except json.JSONDecodeError as error:
            raise _not_json(text, error.pos, error.msg) from None
        at = self._space(at)
        if text[at : at + 1] != ":":
            raise _not_json(text, at, "':' is missing")
        return name, self._space(at + 1)

    def _items(self, start: int, place: str) -> tuple[list[Any], int]:
        text = self.text
        items: list[Any] = []
        at = self._space(start + 1)
        if text[at : at + 1] == "]":
            return items, at + 1
        while True:
            if len(items) >= MAX_ITEMS:
                raise InvalidInput.at(place, f"more than {MAX_ITEMS} items; send several batches")
            inner = f"{place}[{len(items)}]"
            if text[at : at + 1] == "{":
                item, at = self._object(at, inner)
            else:
                item, at = self._value(at, inner, "")
            items.append(item)
            at = self._space(at)
            sign = text[at : at + 1]
            if sign == "]":
                return items, at + 1
            if sign != ",":
                raise _not_json(text, at, "',' or ']' is missing")
            at = self._space(at + 1)

    def _value(self, start: int, place: str, name: str, *, raw: bool = False) -> tuple[Any, int]:
        """Any value; `name` is its member's name in the object at `place`, or empty."""
        text = self.text
        context = self.context
        try:
            value, end = self.scan(text, start)
        except StopIteration as error:
            raise _not_json(text, int(error.value), "a JSON value is missing or broken") from None
        except json.JSONDecodeError as error:
            raise _not_json(text, error.pos, error.msg) from None
        except RecursionError:
            # Its end is unknown, so nothing after it can be judged.
            self._error(place + (_step(name) if name else ""), f"nested deeper than {MAX_DEPTH} levels")
            raise InvalidInput(self.errors) from None
        except ValueError:  # int() refuses long numbers: read again with a hook that only takes note of them
            context.parse_int = context.int_
            self.scan = _make_scanner(cast(Any, context))
            return self._value(start, place, name, raw=raw)
        kept = True
        if raw and end - start > self.raw_members[name]:
            context.odd = False
            size = len(text[start:end].encode("utf-8"))
            self._error(place + _step(name), f"{size} bytes of JSON; at most {self.raw_members[name]}")
            return NULL, end
        if context.odd:
            context.odd = kept = False
            inner = place + (_step(name) if name else "")
            self._error(*_find(text, start, self._looked_at(start, end), inner, _number_refusal))
        if self.escapes and text.find("\\u", start, end) >= 0:
            bad = cast("re.Match[str]", _GOOD.match(text, start, end)).end()
            if bad < end:
                kept = False
                inner, why = place + (_step(name) if name else ""), _escape_refusal(text[bad + 1 : bad + 6])
                self._error(*_at(text, start, self._looked_at(start, end), bad, inner, why))
        if type(value) in (dict, list):
            if not raw and end - start > _INNER_TEXT:
                inner = place + (_step(name) if name else "")
                raise InvalidInput.at(inner, f"longer than {_INNER_TEXT} characters, which no member here may be")
            if _too_deep(text, start, end):
                kept = False
                self._error(place + (_step(name) if name else ""), f"nested deeper than {MAX_DEPTH} levels")
            elif not raw:
                self._bound(value, place + (_step(name) if name else ""))
        if raw:
            return (RawJson(text[start:end]) if kept else NULL), end
        return value, end

    def _looked_at(self, start: int, end: int) -> int:
        """Where to end the look for the exact place in a value."""
        end = min(end, start + self.places_left)
        self.places_left -= end - start
        return end

    def _bound(self, value: Any, place: str) -> None:
        """Refuse at once what no shape takes: each unknown member or bad value of it would become an error."""
        open_ones = [value]
        while open_ones:
            inner = open_ones.pop()
            self.inner_left -= len(inner)
            if type(inner) is dict:
                if len(inner) > MAX_MEMBERS:
                    raise InvalidInput.at(place, f"more than {MAX_MEMBERS} members")
                inner = inner.values()
            elif len(inner) > MAX_ITEMS:
                raise InvalidInput.at(place, f"more than {MAX_ITEMS} items")
            if self.inner_left < 0:
                raise InvalidInput.at(place, f"more than {_INNER_VALUES} values in lists and objects of the body")
            open_ones += [one for one in inner if type(one) in (dict, list)]


def _decode(raw: bytes) -> str:
    if raw[:3] == b"\xef\xbb\xbf":
        raise NotJson("The body begins with a byte order mark; send plain UTF-8.", position=0)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(raw) > 1 and 0 in raw[:2]):
        raise NotJson("The body looks like UTF-16 or UTF-32; send UTF-8.", position=0)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotJson(f"Byte {error.start} of the body is not UTF-8.", position=error.start) from None


def _not_json(text: str, at: int, why: str) -> NotJson:
    """`at` is an offset in characters; people and `head -c` count bytes."""
    position = len(text[:at].encode("utf-8"))
    if at >= len(text):
        return NotJson(f"The body ends too early, at byte {position}.", position=position)
    why = why.rstrip(": ")
    for sentence in (" starting at", " at", " enclosed in double quotes"):
        why = why.removesuffix(sentence)
    return NotJson(f"The body is not JSON: {why}, at byte {position}.", position=position)


def _too_deep(text: str, start: int, end: int) -> bool:
    if text.count("[", start, end) + text.count("{", start, end) <= MAX_DEPTH:
        return False
    # In steps of C only, for a body may be all brackets: without the strings, brackets as ±1, their sums.
    part = text[start:end]
    if "\\" in part:
        part = part.replace("\\\\", "").replace('\\"', "")
    if '"' in part:
        part = "".join(part.split('"')[::2])
    steps = array("b", part.encode("utf-8", "replace").translate(_AS_STEPS, _NO_BRACKETS))
    return max(accumulate(steps)) > MAX_DEPTH


def _step(name: str) -> str:
    """A member as a step of a path, short and on one line whatever the name holds."""
    if _PLAIN_NAME.fullmatch(name):
        return f".{name}"
    return f"[{json.dumps(name[:40] + ('…' if len(name) > 40 else ''))}]"


def _int_refusal(text: str) -> str | None:
    digits = len(text) - (text[:1] == "-")
    if digits > MAX_DIGITS:
        return f"an integer of {digits} digits; at most {MAX_DIGITS}"
    return None


def _number_refusal(token: str) -> str | None:
    if token in ("NaN", "Infinity", "-Infinity"):
        return f"{token} is not JSON"
    first = token[0]
    if first == "-" or first.isdigit():
        if token.lstrip("-").isdigit():
            return _int_refusal(token)
        if float(token) in (_INF, -_INF):
            shown = token if len(token) <= 30 else token[:29] + "…"
            return f"{shown} is beyond the range of a double"
    return None


def _escape_refusal(escape: str) -> str:
    if escape == "u0000":
        return "\\u0000 cannot be stored"
    return f"\\{escape} is half of a surrogate pair, which is no character"


def _walk(text: str, start: int, end: int) -> Iterator[tuple[int, str, list[list[Any]]]]:
    """Each piece with its offset and the open containers, as [kind, step, is a name next]."""
    stack: list[list[Any]] = []
    for match in _TOKEN.finditer(text, start, end):
        piece = match[0]
        top = stack[-1] if stack else None
        if piece == "{":
            stack.append(["{", None, True])
        elif piece == "[":
            stack.append(["[", 0, False])
        elif piece in ("}", "]"):
            if stack:
                stack.pop()
        elif piece == ",":
            if top is not None:
                if top[0] == "[":
                    top[1] += 1
                else:
                    top[2] = True
        elif piece == ":":
            if top is not None:
                top[2] = False
        else:
            yield match.start(), piece, stack
            if top is not None and top[2]:
                top[1] = piece


def _render(place: str, stack: Sequence[Sequence[Any]], *, name_is_bad: bool) -> str:
    steps = stack[:-1] if name_is_bad else stack
    for kind, step, _ in steps:
        if len(place) > _PLACE_LENGTH:
            return place + "…"
        if kind == "[":
            place += f"[{step}]"
        elif step is not None:
            try:
                place += _step(_scanstring(step, 1, True)[0])
            except json.JSONDecodeError:
                place += ".?"
    return place


def _find(text: str, start: int, end: int, place: str, refusal: Callable[[str], str | None]) -> tuple[str, str]:
    for _, token, stack in _walk(text, start, end):
        why = None if token[0] == '"' else refusal(token)
        if why is not None:
            return _render(place, stack, name_is_bad=False), why
    return place, "holds a number that cannot be kept"


def _at(text: str, start: int, end: int, offset: int, place: str, why: str) -> tuple[str, str]:
    """The place of the string that holds `offset`."""
    for begin, piece, stack in _walk(text, start, end):
        if begin + len(piece) > offset:
            is_name = bool(stack) and bool(stack[-1][2])
            return _render(place, stack, name_is_bad=is_name), f"a member name: {why}" if is_name else why
    return place, why


# The lenient reader ---------------------------------------------------------------------------------------

LENIENT_MEMBERS = frozenset({"error_type", "error_message", "reason"})
_BAD_CHARACTERS = re.compile("[\x00\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def read_lenient(raw: bytes) -> Any:
    """As `read`, for the bodies of fail and release: a worker must always be able to report its failure.

    NUL, lone surrogates, bytes that are no UTF-8 and raw control characters become U+FFFD or stay as text;
    NaN and numbers out of range keep their letters. `error_type`, `error_message` and `reason` of any JSON
    type become text (an object or array: its JSON). Whatever is wrong in another member is an error as usual;
    so is a body that is no JSON at all.
    """
    value, errors = parse_lenient(raw)
    if errors:
        raise InvalidInput(errors)
    return value


def parse_lenient(raw: bytes) -> Reading:
    if raw[:3] == b"\xef\xbb\xbf":
        raw = raw[3:]
    text = raw.decode("utf-8", "replace")
    return _LenientReader(text, RAW_MEMBERS, RAW_ITEM_ARRAYS).body()


class _LenientReader(_Reader):
    def __init__(self, text: str, raw_members: Mapping[str, int], raw_item_arrays: Collection[str]) -> None:
        super().__init__(text, raw_members, raw_item_arrays)
        self.skip_left = _SKIP_BUDGET
        context = _Context(strict=False)
        context.parse_float = context.parse_int = context.parse_constant = _Number
        self.tolerant: Callable[[str, int], tuple[Any, int]] = _make_scanner(cast(Any, context))

    def _value(self, start: int, place: str, name: str, *, raw: bool = False) -> tuple[Any, int]:
        if name not in LENIENT_MEMBERS:
            return super()._value(start, place, name, raw=raw)
        try:
            value, end = self.tolerant(self.text, start)
        except StopIteration as error:
            raise _not_json(self.text, int(error.value), "a JSON value is missing or broken") from None
        except json.JSONDecodeError as error:
            raise _not_json(self.text, error.pos, error.msg) from None
        except RecursionError:
            end = self._skip(start, place + _step(name))
            return clean(self.text[start : min(end, start + _CUT)]), end
        if value is None:
            return None, end
        if type(value) in (dict, list) and (end - start > _AS_TEXT or _too_deep(self.text, start, end)):
            return clean(self.text[start : min(end, start + _CUT)]), end
        return clean((value if type(value) in (str, _Number) else _as_text(value))[:_CUT]), end

    def _skip(self, start: int, place: str) -> int:
        """The end of a value that is nested too deep for the scanner; brackets outside strings are counted."""
        depth = 0
        for match in _STRINGS_OR_BRACKETS.finditer(self.text, start):
            depth += _STEP[match[1] or ""]
            if depth == 0:
                return match.end()
            self.skip_left -= 1
            if self.skip_left < 0:
                self._error(place, "nested too deep")
                raise InvalidInput(self.errors)
        raise _not_json(self.text, len(self.text), "")


class _Number(str):
    """A number's letters, so that 1e400 or NaN in an error message stays what the worker wrote."""

    __slots__ = ()


def _as_text(value: Any) -> str:
    """JSON text of a value of the tolerant scanner (whose numbers are letters)."""
    kind = type(value)
    if kind is _Number:
        return str(value)
    if kind is dict:
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {_as_text(v)}" for k, v in value.items()) + "}"
    if kind is list:
        return "[" + ", ".join(_as_text(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def clean(text: str) -> str:
    """Text that PostgreSQL can store: NUL and lone surrogates become U+FFFD."""
    return _BAD_CHARACTERS.sub(REPLACEMENT, text)


# Digest ---------------------------------------------------------------------------------------------------


def _number_text(text: str) -> str:
    return "\x00" + text  # no accepted string holds NUL, so a number is never taken for a string


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    members = dict(pairs)
    if len(members) != len(pairs):
        return {"\x00twice": pairs}
    return members


_lossless: Callable[[str, int], tuple[Any, int]] = _make_scanner(cast(Any, _Context(lossless=True)))


def canonical_digest(value: Any) -> bytes:
    """SHA-256 of fields: keys in any order, white space ignored, numbers of raw JSON as sent (1 is not 1.0).

    Takes what bodies are made of: models, mappings, sequences, text, numbers, UUIDs, instants, RawJson.
    """
    try:
        dumped = orjson.dumps(value, default=_plain, option=_DIGEST_OPTIONS)
    except (orjson.JSONEncodeError, RecursionError) as error:  # an integer over 64 bits or the like: slower, exact
        dumped = json.dumps(_slow(value), sort_keys=True).encode()
        del error
    return hashlib.sha256(dumped).digest()


_DIGEST_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_UTC_Z | orjson.OPT_NON_STR_KEYS


def _plain(value: Any) -> Any:
    if isinstance(value, RawJson):
        return _lossless(value, 0)[0] if value[:1] > " " else _lossless(value.strip(" \t\n\r"), 0)[0]
    if isinstance(value, BaseModel):
        return dict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, Decimal):
        return _number_text(str(value))
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no digest")


def _slow(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _slow(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, str):
        return [_slow(v) for v in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (uuid.UUID, datetime.datetime)):
        return str(value)
    return _slow(_plain(value))
