"""The bytes of an answer, and what becomes of a request's body that nobody has read.

How slowly a client reads an answer is not bounded here: a deployment that faces strangers puts a proxy in front.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.types import Receive, Send

from app.errors import Refusal
from app.web import gate, problems
from app.web.door import MIB, Answer
from app.web.shapes import RawJson

LINGER_SECONDS = 2.0
LINGER_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class Rest:
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
class Reply:
    """The bytes of an answer."""

    status: int
    content: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, answer: Answer, media: str) -> "Reply":
        headers = {name.lower(): value for name, value in answer.headers.items()}
        if answer.body is None:
            return cls(answer.status, b"", headers)
        headers.setdefault("content-type", media)
        content = answer.body if isinstance(answer.body, bytes) else dump(answer.body)
        return cls(answer.status, content, headers)

    @classmethod
    def refusing(cls, refusal: Refusal) -> "Reply":
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

    async def send(self, send: Send, *, head_only: bool, rest: Rest) -> None:
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
