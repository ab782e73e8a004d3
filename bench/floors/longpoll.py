"""Floor: a bare ASGI long-poll. It reads the request, waits for something that does not come, and answers."""

import asyncio
from typing import Any

WAIT_SECONDS = 120.0
ANSWER = b'{"jobs":[]}'


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await asyncio.wait([happened], timeout=WAIT_SECONDS)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": ANSWER})
