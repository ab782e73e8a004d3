"""A plain HTTP/1.1 connection: quick, and honest about what it does not know."""

import asyncio
import contextlib
from typing import Any

import orjson


class NoAnswer(Exception):
    """The call may or may not have arrived, and may or may not have been done."""


class Wire:
    """One caller's connection to an instance, made anew after each lost answer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(
        self, method: str, path: str, body: Any = None, *, headers: str = "", seconds: float = 3.0
    ) -> tuple[int, Any]:
        """(status, answer). Raises NoAnswer."""
        content = orjson.dumps(body) if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
        try:
            async with asyncio.timeout(seconds):
                if self._writer is None:
                    self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
                self._writer.write(f"{head}{headers}content-length: {len(content)}\r\n\r\n".encode() + content)
                return await self._answer()
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            self.close()
            raise NoAnswer(str(error)) from error
        except asyncio.CancelledError:
            self.close()
            raise

    async def _answer(self) -> tuple[int, Any]:
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        content = await self._reader.readexactly(length)
        if b"connection: close" in head:
            self.close()
        return status, orjson.loads(content) if content[:1] in (b"{", b"[") else content.decode()

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        self._reader = self._writer = None
