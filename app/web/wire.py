"""The HTTP protocol of the server, with the bounds that uvicorn's own lacks: the size and the time of a request's head.

Pass it as uvicorn's `http`. Measured: uvicorn with httptools takes a head of 10 MB, and a client that sends one byte a
minute holds its connection for good. What is no HTTP at all is answered by a problem document too.

It also takes a whole answer at once (REPLY in the scope's extensions), which spares a hot call half of what uvicorn
does for two ASGI messages: a check of each header, and two writes.

uvicorn also stops reading while a request waits behind another on its connection, and tells only the latest request
that the connection is gone: a claim that waits would hand jobs to a client that died. Here the reading goes on, up to
`HELD_BYTES` kept unparsed, and every request of a lost connection is told. A client that pipelines more than that
behind a waiting claim and dies is still not noticed; its jobs come back when their leases lapse.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.web.door import REPLY, WHEN_GONE
from app.web.problems import MEDIA_TYPE, MalformedRequest, problem

HEAD_BYTES = 64 * 1024
"""Checked after each read from the socket, so the real bound is this and one read (at most 256 KiB)."""
HEAD_SECONDS = 15.0
HELD_BYTES = 64 * 1024
"""What is read behind a request that is queued; with more the reading stops until that request begins."""


Reply = Callable[[int, bytes, bytes], bool]
"""Status, header lines (each with its line end) and body of a whole answer; False: not taken, use ASGI messages."""


def _reply_of(cycle: RequestResponseCycle) -> Reply:
    def reply(status: int, headers: bytes, body: bytes) -> bool:
        if cycle.response_started or cycle.access_log or cycle.flow.write_paused:
            return False
        if cycle.disconnected:
            return True
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        parts = [STATUS_LINE[status]]
        for name, value in cycle.default_headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(headers)
        parts.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        parts.append(body)
        cycle.transport.write(b"".join(parts))
        cycle.response_complete = True
        cycle.scope["extensions"] = {}  # else the two hold each other, for the collector to find
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    return reply


class BoundedHttp(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._between = True
        """No request under way: the next byte begins a head."""
        self._in_head = True
        self._head_bytes = 0
        self._begun = 0
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request being answered; `self.cycle` is the latest one read."""
        self._held = b""
        self._when_gone: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if self._when_gone is not None:
                self._when_gone()
        self.pipeline.clear()
        self._held = b""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._when_gone = None
        extensions = {REPLY: _reply_of(cycle), WHEN_GONE: self._set_when_gone}
        cycle.scope["extensions"] = cast("dict[str, dict[object, object]]", extensions)
        super()._start_asgi_task(cycle, app)

    def _set_when_gone(self, call: Callable[[], None] | None) -> None:
        """Of the request being answered. In place of a task that waits for `http.disconnect`: claims wait by the
        thousand."""
        self._when_gone = call
        if call is not None and self._running is not None and self._running.disconnected:
            call()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and not self.pipeline and not self.transport.is_closing():
            held, self._held = self._held, b""
            self.data_received(held)

    def data_received(self, data: bytes) -> None:
        if self.pipeline:
            self._held += data
            if len(self._held) > HELD_BYTES:
                self.flow.pause_reading()
            return
        self._feed(data)
        if self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()  # to see the end of the connection

    def _feed(self, data: bytes) -> None:
        fresh, self._begun = self._between, 0
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if fresh and self._begun == 1 and self._in_head:
            # All of this read is of the one head that began with it; behind another request only later reads count.
            self._head_bytes = len(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(f"The head of the request is larger than {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._between = False
        self._begun += 1
        self._in_head = True
        self._head_bytes = 0
        self._arm()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._between = True
        super().on_message_complete()

    # One timer a connection looks at the deadline of the moment: one for each request would cost more than its head.

    def _arm(self) -> None:
        self._deadline = self.loop.time() + HEAD_SECONDS
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._look)

    def _disarm(self) -> None:
        self._deadline = None

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._deadline > self.loop.time():
            self._timer = self.loop.call_at(self._deadline, self._look)
        else:
            self._late()

    def _late(self) -> None:
        self._deadline = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm()  # an earlier call of this connection still waits for its answer
        elif not self.transport.is_closing():
            self._refuse(f"The head of the request was not complete after {HEAD_SECONDS:g} s.")

    def _refuse(self, detail: str) -> None:
        self.send_400_response(detail)

    def send_400_response(self, msg: str) -> None:
        content = json.dumps(problem(MalformedRequest(msg))).encode("ascii")
        head = [
            b"HTTP/1.1 400 Bad Request",
            b"content-type: " + MEDIA_TYPE.encode(),
            b"content-length: " + str(len(content)).encode(),
            b"cache-control: no-store",
            b"x-content-type-options: nosniff",
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join([*head, b"", content]))
        self.transport.close()
