"""Everything that happens between the socket and a door's handler.

Site and key rules, known path and method, query, content type, body, strict JSON, the model, the handler, the bytes of
the answer. Every refusal on that way is a problem document.
"""

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from app.errors import InvalidInput, Refusal
from app.telemetry import get_logger, observe_request
from app.web import gate, problems
from app.web.door import REPLY, Answer, Call, Door
from app.web.incoming import (
    MAX_PARAMETERS,
    Gone,
    Prepared,
    check_type,
    has_body,
    headers_of,
    pairs,
    parse_body,
    parse_path,
    parse_query,
    read_body,
)
from app.web.outgoing import Reply, Rest
from app.web.shapes import Strict

log = get_logger("fencepost.http")

_NONE: Mapping[str, Any] = {}


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


class Switch:
    """An ASGI application: path → method → door."""

    def __init__(self, doors: Iterable[Door], composed: Any) -> None:
        self.composed = composed
        self.plain: dict[str, dict[str, Prepared]] = {}
        self.patterns: dict[tuple[str, ...], tuple[int, str, dict[str, Prepared]]] = {}
        """By the steps of a path with one parameter, `{}` in its place: where it stands, and its name."""
        self.places: list[int] = []
        by_path: dict[str, dict[str, Prepared]] = {}
        names: set[str] = set()
        for door in doors:
            methods = by_path.setdefault(door.path, {})
            if door.name in names or door.method in methods:
                raise ValueError(f"two doors {door.name} or {door.method} {door.path}")
            names.add(door.name)
            methods[door.method] = Prepared(door)
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

    def find(self, path: str) -> tuple[dict[str, Prepared], dict[str, str]] | None:
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
        found: tuple[dict[str, Prepared], dict[str, str]] | None,
    ) -> None:
        """Answer a call whose path was found, or was not."""
        begun = time.perf_counter()
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        prepared = found[0].get(method) if found is not None else None
        status = 499
        headers = headers_of(scope)
        body_read = not has_body(headers)

        async def receive_all() -> Message:
            nonlocal body_read
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                body_read = True
            return message

        try:
            try:
                answer = await self._answer(scope, receive_all, headers, found, prepared)
                reply = Reply.of(answer, prepared.door.media if prepared else "")
            except Refusal as refusal:
                reply = Reply.refusing(refusal)
            except Gone:
                return
            except Exception as error:
                incident = secrets.token_hex(6)
                log.exception(
                    "a request failed",
                    operation=prepared.door.name if prepared else "unknown",
                    error=type(error).__name__,
                    incident=incident,
                )
                reply = Reply.refusing(
                    problems.Internal(f"The service failed; its log says why ({incident}).", incident=incident)
                )
            status = reply.status
            at_once = scope.get("extensions", _NONE).get(REPLY) if body_read else None
            if at_once is None or not at_once(status, *reply.lines(head_only=scope["method"] == "HEAD")):
                await reply.send(send, head_only=scope["method"] == "HEAD", rest=Rest(receive, headers, body_read))
        finally:
            observe_request(prepared.door.name if prepared else "unknown", status, time.perf_counter() - begun)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        headers: Mapping[str, str],
        found: tuple[dict[str, Prepared], dict[str, str]] | None,
        prepared: Prepared | None,
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
        given = pairs(scope["query_string"])
        caller = gate.identify(keys, prepared.door.scope, headers, dict(given or ()))
        if given is None:
            raise InvalidInput.at("query", f"is not UTF-8, or has more than {MAX_PARAMETERS} parameters")
        path = parse_path(found[1])
        query = parse_query(prepared, given)
        raw = b""
        if prepared.door.reads_body and has_body(headers):
            check_type(headers)
            raw = await read_body(receive, headers, prepared.door.max_body)
        body: Strict | None = None
        if prepared.door.body is not None or raw:
            body = parse_body(prepared, raw)
        call = Call(Request(scope, receive), self.composed, caller, path, body, query)
        return await prepared.door.handler(call)


def _allowed(methods: Mapping[str, Prepared]) -> list[str]:
    return sorted({*methods, *(("HEAD",) if "GET" in methods else ())})
