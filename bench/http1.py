"""As little HTTP/1.1 as a load client needs: whole requests made beforehand, answers cut out of what the socket gives.

An answer must have a content-length; chunked ones are refused, for none of the servers measured here sends them.
"""

import re

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
MAX_HEAD = 64 * 1024
"""Bytes."""


class Unreadable(Exception):
    """What came is no answer that this client can read."""


def request(path: str, body: bytes, host: str) -> bytes:
    """A whole POST with a JSON body, ready to be written."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


class Answers:
    """Cuts a stream into answers."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The (status, body) of each answer that is whole now. Raises Unreadable."""
        if self._rest:
            data = self._rest + data
        found: list[tuple[int, bytes]] = []
        while data:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD:
                    raise Unreadable("an answer's head is too long")
                break
            status, length = _STATUS.match(data), _LENGTH.search(data, 0, end + 2)
            if status is None:
                raise Unreadable("an answer does not begin with a status line")
            if length is None:
                raise Unreadable("an answer has no content-length")
            stop = end + 4 + int(length[1])
            if len(data) < stop:
                break
            found.append((int(status[1]), data[end + 4 : stop]))
            data = data[stop:]
        self._rest = data
        return found

    @property
    def amid(self) -> bool:
        """Whether a part of an answer is here."""
        return bool(self._rest)
