"""How a route is declared. A capability's `http.py` declares doors:

    doors = Doors("jobs")

    @doors.post("/v1/jobs/claim", scope="work", body=Claim, answers={200: Claimed}, refusals=("too-many-waiters",))
    async def claim_jobs(call: Call) -> Answer: ...

and `web/switch.py` serves them: `web/incoming.py` reads what comes in, `web/outgoing.py` writes what goes out.
"""

import asyncio
import contextlib
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request
from starlette.types import Message

from app.keys.ops import Caller
from app.web.shapes import Answered, Strict

MIB = 1 << 20
REPLY, WHEN_GONE = "fencepost.reply", "fencepost.when-gone"
"""Extensions of our server (`web/wire.py`): one takes a whole answer at once, one calls when the client has gone."""

_NONE: Mapping[str, Any] = {}


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
