"""How a route is declared, and everything that happens between the socket and its handler.

A capability's `http.py` declares doors:

    doors = Doors("jobs")

    @doors.post("/v1/jobs/claim", scope="work", body=Claim, answers={200: Claimed}, refusals=("too-many-waiters",))
    async def claim_jobs(call: Call) -> Answer: ...

and `mount(app, doors, composed)` serves them: site and key rules, known path and method, query, content type, a body
that is limited while it streams in, strict JSON, the model, the handler, the bytes of the answer. Every refusal on that
way is a problem document.

What cannot be bounded here: the request's head, which is read before anybody is called (`web/wire.py` bounds it), and
how slowly a client reads an answer. A deployment that faces strangers puts a proxy in front.
"""

import asyncio
import contextlib
import json
import re
import secrets
import time
import types
import typing
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from app.errors import InvalidInput, Refusal, TooLarge, UnsupportedMediaType
from app.keys.ops import Caller
from app.telemetry import get_logger, observe_request
from app.web import gate, jsontext, problems
from app.web.shapes import ID_SAYS, NAME, NAME_SAYS, Answered, RawJson, Strict, parse_id

log = get_logger("fencepost.http")

T = TypeVar("T")
REPLY, WHEN_GONE = "fencepost.reply", "fencepost.when-gone"
"""The server's extensions (`web/wire.py`): one takes a whole answer at once, one calls when the client has gone."""

MIB = 1 << 20
BODY_SECONDS = 15.0
"""A body must have arrived this long after its head."""
LINGER_SECONDS = 2.0
LINGER_BYTES = 32 * MIB
MAX_PARAMETERS = 50


class Nothing(Strict):
    """The body or query of a door that takes none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler gives back. `body` is dumped as JSON (RawJson and orjson.Fragment go in as they are); bytes are
    sent as they are, with a `content-type` among the headers. None sends no body."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """One request on its way to a handler."""

    request: Request
    app: Any
    caller: Caller
    path: dict[str, Any]
    body: Any
    query: Any

    def left(self) -> bool:
        """Whether the client has closed the connection, as known now; the body must have been read."""
        step = cast("types.CoroutineType[Any, Any, Message]", self.request.receive())
        try:
            step.send(None)
        except StopIteration as here:
            message: Message = here.value
            return bool(message["type"] == "http.disconnect")
        step.close()  # it waits, so nothing has happened
        return False

    @contextlib.contextmanager
    def watched(self, gone: Callable[[], None]) -> Iterator[None]:
        """`gone` is called when the client closes the connection meanwhile; for calls that wait."""
        when_gone = self.request.scope.get("extensions", _NONE).get(WHEN_GONE)
        if when_gone is not None:
            when_gone(gone)
            try:
                yield
            finally:
                when_gone(None)
            return
        watch = asyncio.ensure_future(self._watch(gone))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, gone: Callable[[], None]) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        gone()


Handler = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True)
class Door:
    method: str
    path: str
    name: str
    """The operationId: lowerCamel of the handler's name."""
    handler: Handler
    scope: str | None
    body: type[Strict] | None
    body_required: bool
    query: type[Strict] | None
    answers: Mapping[int, type[Answered] | None]
    refusals: tuple[str, ...]
    max_body: int
    lenient: bool
    tag: str
    summary: str
    description: str
    headers: tuple[str, ...] = ()
    """Request headers that the handler reads, for the OpenAPI document."""
    media: str = "application/json"
    """Of the good answers; pages and metrics have their own."""
    listed: bool = True
    """Whether the OpenAPI document shows it."""
    etag: bool = False
    """Whether the good answers carry an ETag."""

    @property
    def reads_body(self) -> bool:
        """The body of a GET has no meaning (RFC 9110, 9.3.1): it is neither read nor judged."""
        return self.method != "GET"


class Doors:
    """The doors of one capability; `tag` groups them in the OpenAPI document."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.doors: list[Door] = []

    def _door(
        self,
        method: str,
        path: str,
        *,
        scope: str | None,
        answers: Mapping[int, type[Answered] | None],
        body: type[Strict] | None = None,
        body_required: bool = True,
        query: type[Strict] | None = None,
        refusals: tuple[str, ...] = (),
        max_body: int = MIB,
        lenient: bool = False,
        headers: tuple[str, ...] = (),
        media: str = "application/json",
        listed: bool = True,
        etag: bool = False,
    ) -> Callable[[Handler], Handler]:
        def decorate(handler: Handler) -> Handler:
            words = cast("types.FunctionType", handler).__name__.split("_")
            summary, _, rest = (handler.__doc__ or "").strip().partition("\n")
            self.doors.append(
                Door(
                    method=method,
                    path=path,
                    name=words[0] + "".join(word.capitalize() for word in words[1:]),
                    handler=handler,
                    scope=scope,
                    body=body,
                    body_required=body_required and body is not None,
                    query=query,
                    answers=answers,
                    refusals=refusals,
                    max_body=max_body,
                    lenient=lenient,
                    tag=self.tag,
                    summary=summary.strip().rstrip("."),
                    description="\n".join(line.strip() for line in rest.strip().splitlines()),
                    headers=headers,
                    media=media,
                    listed=listed,
                    etag=etag,
                )
            )
            return handler

        return decorate

    def get(self, path: str, **kwargs: Any) -> Callable[[Handler], Handler]:
        return self._door("GET", path, **kwargs)

    def post(self, path: str, **kwargs: Any) -> Callable[[Handler], Handler]:
        return self._door("POST", path, **kwargs)

    def put(self, path: str, **kwargs: Any) -> Callable[[Handler], Handler]:
        return self._door("PUT", path, **kwargs)

    def delete(self, path: str, **kwargs: Any) -> Callable[[Handler], Handler]:
        return self._door("DELETE", path, **kwargs)


def mount(app: "App", doors: Iterable[Door], composed: Any) -> None:
    """Serve the doors in front of the app's own routes, and make its own 404 a problem document too.

    `composed` has at least `keys` (a KeyRing). Raises ValueError for two doors of the same name, or method and path.
    """
    switch = Switch(doors, composed)
    app.router.redirect_slashes = False
    app.router.default = switch.unknown
    app.switch = switch


class App(FastAPI):
    """Takes the paths of doors before any middleware, which would cost a hot call more than its handler; all others go
    the way of FastAPI, whose end of the line is `Switch.unknown`."""

    switch: "Switch | None" = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.switch is not None:
            found = self.switch.find(scope["path"])
            if found is not None:
                await self.switch.serve(scope, receive, send, found)
                return
        await super().__call__(scope, receive, send)


# Parsing a request ----------------------------------------------------------------------------------------


class _Gone(Exception):
    """The client closed the connection before its body was complete."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    many: bool
    kinds: frozenset[type]


class _Prepared:
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


def _parse_query(prepared: _Prepared, pairs: list[tuple[str, str]]) -> Strict:
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


def _pairs(query: bytes) -> list[tuple[str, str]] | None:
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


def _check_type(headers: Mapping[str, str]) -> None:
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


async def _read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The body, at most `limit` bytes, within BODY_SECONDS. Raises TooLarge, RequestTimeout, _Gone."""
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
                    raise _Gone
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


def _parse_body(prepared: _Prepared, raw: bytes) -> Strict:
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


# Serving --------------------------------------------------------------------------------------------------


class Switch:
    """An ASGI application: path → method → door."""

    def __init__(self, doors: Iterable[Door], composed: Any) -> None:
        self.composed = composed
        self.plain: dict[str, dict[str, _Prepared]] = {}
        self.patterns: dict[tuple[str, ...], tuple[int, str, dict[str, _Prepared]]] = {}
        """By the steps of a path with one parameter, `{}` in its place: where it stands, and its name."""
        self.places: list[int] = []
        by_path: dict[str, dict[str, _Prepared]] = {}
        names: set[str] = set()
        for door in doors:
            methods = by_path.setdefault(door.path, {})
            if door.name in names or door.method in methods:
                raise ValueError(f"two doors {door.name} or {door.method} {door.path}")
            names.add(door.name)
            methods[door.method] = _Prepared(door)
        for path, methods in by_path.items():
            if "{" not in path:
                self.plain[path] = methods
                continue
            steps = path.split("/")
            [place] = [index for index, step in enumerate(steps) if step.startswith("{")]
            name, steps[place] = steps[place].strip("{}"), "{}"
            self.patterns[tuple(steps)] = place, name, methods
            if place not in self.places:
                self.places.append(place)

    def find(self, path: str) -> tuple[dict[str, _Prepared], dict[str, str]] | None:
        methods = self.plain.get(path)
        if methods is not None:
            return methods, {}
        steps = path.split("/")
        for place in self.places:
            if place < len(steps) and (value := steps[place]):
                steps[place] = "{}"
                found = self.patterns.get(tuple(steps))
                if found is not None:
                    return found[2], {found[1]: value}
                steps[place] = value
        return None

    async def unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every path that has no door."""
        if scope["type"] == "http":
            await self(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.serve(scope, receive, send, self.find(scope["path"]))

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        found: tuple[dict[str, _Prepared], dict[str, str]] | None,
    ) -> None:
        """Answer a call whose path was found, or was not."""
        begun = time.perf_counter()
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        prepared = found[0].get(method) if found is not None else None
        status = 499
        headers = _headers(scope)
        body_read = not _has_body(headers)

        async def receive_all() -> Message:
            nonlocal body_read
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                body_read = True
            return message

        try:
            try:
                answer = await self._answer(scope, receive_all, headers, found, prepared)
                reply = _Reply.of(answer, prepared.door.media if prepared else "")
            except Refusal as refusal:
                reply = _Reply.refusing(refusal)
            except _Gone:
                return
            except Exception as error:
                incident = secrets.token_hex(6)
                log.exception(
                    "a request failed",
                    operation=prepared.door.name if prepared else "unknown",
                    error=type(error).__name__,
                    incident=incident,
                )
                reply = _Reply.refusing(
                    problems.Internal(f"The service failed; its log says why ({incident}).", incident=incident)
                )
            status = reply.status
            at_once = scope.get("extensions", _NONE).get(REPLY) if body_read else None
            if at_once is None or not at_once(status, *reply.lines(head_only=scope["method"] == "HEAD")):
                await reply.send(send, head_only=scope["method"] == "HEAD", rest=_Rest(receive, headers, body_read))
        finally:
            observe_request(prepared.door.name if prepared else "unknown", status, time.perf_counter() - begun)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        headers: Mapping[str, str],
        found: tuple[dict[str, _Prepared], dict[str, str]] | None,
        prepared: _Prepared | None,
    ) -> Answer:
        keys = self.composed.keys
        client = scope.get("client")
        gate.admit(keys, scope["method"], scope["path"], headers, client[0] if client else None)
        if found is None:
            raise problems.NotFound("There is nothing at this path; /docs lists what there is.")
        if prepared is None:
            raise problems.MethodNotAllowed(
                f"This path does not take {scope['method'][:20]}.", allow=_allowed(found[0])
            )
        pairs = _pairs(scope["query_string"])
        caller = gate.identify(keys, prepared.door.scope, headers, dict(pairs or ()))
        if pairs is None:
            raise InvalidInput.at("query", f"is not UTF-8, or has more than {MAX_PARAMETERS} parameters")
        path = _path(found[1])
        query = _parse_query(prepared, pairs)
        raw = b""
        if prepared.door.reads_body and _has_body(headers):
            _check_type(headers)
            raw = await _read_body(receive, headers, prepared.door.max_body)
        body: Strict | None = None
        if prepared.door.body is not None or raw:
            body = _parse_body(prepared, raw)
        call = Call(Request(scope, receive), self.composed, caller, path, body, query)
        return await prepared.door.handler(call)


def _headers(scope: Scope) -> dict[str, str]:
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


def _has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _allowed(methods: Mapping[str, _Prepared]) -> list[str]:
    return sorted({*methods, *(("HEAD",) if "GET" in methods else ())})


def _path(parameters: Mapping[str, str]) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class _Rest:
    """What of the request's body nobody has read."""

    receive: Receive
    headers: Mapping[str, str]
    complete: bool

    @property
    def small(self) -> bool:
        length = self.headers.get("content-length", "")
        return len(length) <= 5 and length.isascii() and length.isdigit() and int(length) <= 65_536

    async def drain(self) -> None:
        """Read on for a while and forget it. A client that sends first and reads later would otherwise meet a closed
        connection in place of the answer that is waiting for it."""
        left = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0:
                    message = await self.receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
                    left -= len(message.get("body", b""))


@dataclass(frozen=True, slots=True)
class _Reply:
    """The bytes of an answer."""

    status: int
    content: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, answer: Answer, media: str) -> "_Reply":
        headers = {name.lower(): value for name, value in answer.headers.items()}
        if answer.body is None:
            return cls(answer.status, b"", headers)
        headers.setdefault("content-type", media)
        content = answer.body if isinstance(answer.body, bytes) else dump(answer.body)
        return cls(answer.status, content, headers)

    @classmethod
    def refusing(cls, refusal: Refusal) -> "_Reply":
        headers = {"content-type": problems.MEDIA_TYPE, **problems.headers_of(refusal)}
        document = problems.problem(refusal)
        try:
            content = dump(document)
        except TypeError:  # half a surrogate pair or a huge number among the facts
            content = json.dumps(document, default=repr).encode("ascii")
        return cls(problems.status_of(refusal), content, headers)

    def lines(self, *, head_only: bool) -> tuple[bytes, bytes]:
        """The lines of the headers and the body, of an answer that needs nothing more."""
        if self.headers == _JSON_ONLY:
            headers = _JSON_LINES + b"content-length: %d\r\n" % len(self.content)
        else:
            given = {**_DEFAULT_HEADERS, **self.headers}
            if self.status not in (204, 304):
                given["content-length"] = str(len(self.content))
            if any("\n" in value or "\r" in value for value in given.values()):
                raise ValueError("a header's value has a line end")
            headers = "".join(f"{name}: {value}\r\n" for name, value in given.items()).encode("latin-1")
        return headers, b"" if head_only else self.content

    async def send(self, send: Send, *, head_only: bool, rest: _Rest) -> None:
        headers = self.headers
        for name, value in _DEFAULT_HEADERS.items():
            headers.setdefault(name, value)
        if self.status not in (204, 304):
            headers["content-length"] = str(len(self.content))
        closing = not rest.complete and (not rest.small or self.status == 408)
        if closing:
            headers["connection"] = "close"
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        content = b"" if head_only else self.content
        if rest.complete:
            await send({"type": "http.response.body", "body": content})
            return
        await send({"type": "http.response.body", "body": content, "more_body": True})
        await rest.drain()
        await send({"type": "http.response.body", "body": b""})


_DEFAULT_HEADERS = {
    **{name.decode(): value.decode() for name, value in gate.SECURITY_HEADERS},
    "content-security-policy": gate.CONTENT_POLICY,
}


_NONE: Mapping[str, Any] = {}
_JSON_ONLY = {"content-type": "application/json"}
_JSON_LINES = "".join(f"{name}: {value}\r\n" for name, value in {**_JSON_ONLY, **_DEFAULT_HEADERS}.items()).encode(
    "latin-1"
)


def dump(value: Any) -> bytes:
    """JSON of an answer: raw JSON goes in as it is, instants in UTC with `Z`. Raises TypeError."""
    return orjson.dumps(value, default=_dumpable, option=_DUMP_OPTIONS)


_DUMP_OPTIONS = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_UTC_Z


def _dumpable(value: Any) -> Any:
    if isinstance(value, RawJson):
        return orjson.Fragment(value.encode("utf-8"))
    if isinstance(value, BaseModel):
        return {**dict(value), **(value.model_extra or {})}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Set, tuple)):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON")
