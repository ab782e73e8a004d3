"""What a request brings, read strictly: its head, its query, and a body that is limited while it streams in.

What cannot be bounded here: the request's head, which is read before anybody is called (`web/wire.py` bounds it).
"""

import asyncio
import contextlib
import re
import types
import typing
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.types import Message, Receive, Scope

from app.errors import InvalidInput, TooLarge, UnsupportedMediaType
from app.web import jsontext, problems
from app.web.door import Door, Nothing
from app.web.shapes import ID_SAYS, NAME, NAME_SAYS, Strict, parse_id

BODY_SECONDS = 15.0
"""A body must have arrived this long after its head."""
MAX_PARAMETERS = 50

T = TypeVar("T")


class Gone(Exception):
    """The client closed the connection before its body was complete."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    many: bool
    kinds: frozenset[type]


class Prepared:
    """A door with what is worked out once."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.body = door.body or Nothing
        self.query = door.query or Nothing
        self.parameters = {(f.alias or name): _parameter(f.annotation) for name, f in self.query.model_fields.items()}
        self.no_query = None if any(f.is_required() for f in self.query.model_fields.values()) else self.query()
        self.no_body: Strict | None = None
        if not door.body_required:
            with contextlib.suppress(ValidationError):
                self.no_body = self.body()


def _parameter(annotation: Any) -> _Parameter:
    """What a query parameter's text may have to become."""
    kinds: set[type] = set()
    many = False
    stack = [annotation]
    while stack:
        kind = stack.pop()
        origin = typing.get_origin(kind)
        if origin in (list, tuple, set, frozenset):
            many = True
            stack.extend(typing.get_args(kind))
        elif origin is typing.Annotated:
            stack.append(typing.get_args(kind)[0])
        elif origin in (typing.Union, types.UnionType):
            stack.extend(typing.get_args(kind))
        elif hasattr(kind, "__value__"):  # `type X = …`
            stack.append(kind.__value__)
        elif isinstance(kind, type):
            kinds.add(kind)
    return _Parameter(many, frozenset(kinds))


_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?")


def _typed(text: str, kinds: frozenset[type]) -> Any:
    """The text of a query parameter as its type; what does not fit stays text, for the model to refuse."""
    if int in kinds and _INTEGER.fullmatch(text):
        return int(text)
    if float in kinds and _NUMBER.fullmatch(text):
        return float(text)
    if bool in kinds and text in ("true", "false", ""):  # `?verbose` alone means yes
        return text != "false"
    return text


def parse_query(prepared: Prepared, pairs: list[tuple[str, str]]) -> Strict:
    if not pairs and prepared.no_query is not None:
        return prepared.no_query
    errors: list[dict[str, str]] = []
    values: dict[str, Any] = {}
    for name, text in pairs:
        parameter = prepared.parameters.get(name)
        if parameter is None:
            errors.append(problems.unknown_parameter(name, prepared.parameters))
        elif any(sign < " " or sign == "\x7f" for sign in text):
            errors.append({"place": problems.place_of("query", (name,)), "message": "holds a control character"})
        elif parameter.many:
            values.setdefault(name, []).append(_typed(text, parameter.kinds))
        elif name in values:
            errors.append({"place": problems.place_of("query", (name,)), "message": "is given twice"})
        else:
            values[name] = _typed(text, parameter.kinds)
    try:
        query = prepared.query.model_validate(values)
    except ValidationError as error:
        errors += problems.from_validation(error, "query", prepared.query).facts["errors"]
    if errors:
        raise InvalidInput(_unique(errors))
    return query


def pairs(query: bytes) -> list[tuple[str, str]] | None:
    """The parameters; None for what cannot be read, which is told only to callers who may call at all."""
    if not query:
        return []
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except ValueError:
        return None


def _unique(errors: list[dict[str, str]]) -> list[dict[str, str]]:
    """The first error of each place."""
    by_place: dict[str, dict[str, str]] = {}
    for error in errors:
        by_place.setdefault(error["place"], error)
    return list(by_place.values())[: jsontext.MAX_ERRORS]


_JSON_TYPES = frozenset({"", "application/json", "application/x-www-form-urlencoded"})


def check_type(headers: Mapping[str, str]) -> None:
    media, _, parameters = headers.get("content-type", "").partition(";")
    media = media.strip().lower()
    if media not in _JSON_TYPES:
        raise UnsupportedMediaType(f"The body's type {media[:100]!r} is not supported; send application/json.")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower().replace("_", "-") not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType(f"The charset {charset[1][:40]!r} is not supported; JSON is UTF-8.")
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"Content-Encoding {encoding[:40]!r} is not supported; send the body as it is.")


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The body, at most `limit` bytes, within BODY_SECONDS. Raises TooLarge, RequestTimeout, Gone."""
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > limit):
        raise TooLarge(f"The body has {length[:20]} bytes; this route takes at most {limit}.", limit=limit)
    parts: list[bytes] = []
    size = 0
    # A small body is here with its head, mostly: then there is nothing to wait for, and no timer is set.
    first = cast("types.CoroutineType[Any, Any, Message]", receive())
    try:
        pending = first.send(None)
    except StopIteration as here:
        message: Message | None = here.value
        if message is not None and message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            if len(body) > limit:
                raise TooLarge(f"The body is larger than {limit} bytes.", limit=limit) from None
            return body
    else:
        message = None
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if message is None:
                message = await _resumed(first, pending)
            while True:
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                if part:
                    size += len(part)
                    if size > limit:
                        raise TooLarge(f"The body is larger than {limit} bytes.", limit=limit)
                    parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                message = await receive()
    except TimeoutError:
        raise problems.RequestTimeout(f"The body was not complete {BODY_SECONDS:g} s after its head.") from None


@types.coroutine
def _resumed(step: "types.CoroutineType[Any, Any, T]", pending: Any) -> Generator[Any, Any, T]:
    """The rest of a coroutine that was begun by hand and waits for `pending`."""
    try:
        while True:
            try:
                sent = yield pending
            except BaseException as error:
                pending = step.throw(error)
            else:
                pending = step.send(sent)
    except StopIteration as done:
        return cast("T", done.value)


def parse_body(prepared: Prepared, raw: bytes) -> Strict:
    if not raw.strip(b" \t\r\n") or raw.strip(b" \t\r\n") == b"null":
        if prepared.no_body is not None:
            return prepared.no_body
        raise InvalidInput.at("body", "is required: a JSON object")
    value, errors = jsontext.parse_lenient(raw) if prepared.door.lenient else jsontext.parse(raw)
    if type(value) is not dict:
        raise InvalidInput(errors or [{"place": "body", "message": "a JSON object is needed"}])
    try:
        body = prepared.body.model_validate(value)
    except ValidationError as error:
        errors = errors + problems.from_validation(error, "body", prepared.body).facts["errors"]
    if errors:
        raise InvalidInput(_unique(errors))
    return body


def headers_of(scope: Scope) -> dict[str, str]:
    """By name, which ASGI gives in lower case. A header given twice is joined by a comma: no Host, key or length comes
    out of that valid."""
    raw = scope["headers"]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}
    if len(headers) == len(raw):
        return headers
    headers = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def parse_path(parameters: Mapping[str, str]) -> dict[str, Any]:
    """`id` as a UUID, `name` as it is once it has the form of a name. Raises InvalidInput."""
    path: dict[str, Any] = dict(parameters)
    if "id" in path:
        try:
            path["id"] = parse_id(path["id"])
        except ValueError:
            raise InvalidInput.at("path.id", ID_SAYS) from None
    if "name" in path and not NAME.fullmatch(path["name"]):
        raise InvalidInput.at("path.name", NAME_SAYS)
    return path
