"""Who calls: the key ring keeps the live keys of the table in memory and reads it anew every two seconds.

A revocation therefore works on every instance within about 2 s (spec 5: 5 s), and an authenticated call costs no
statement. When the table cannot be read for longer than 5 s nobody is let in by what was known before.
This module must never know HTTP beyond the text of an Authorization header.
"""

import asyncio
import fnmatch
import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.db import Database
from app.errors import KeyRejected, Refusal, Unavailable
from app.keys import sql
from app.telemetry import get_logger

SCOPES = ("enqueue", "work", "read", "operate", "admin")
BOOTSTRAP = "bootstrap"
REFRESH_SECONDS = 2.0
STALE_SECONDS = 5.0

log = get_logger("fencepost.keys")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `key_id` is the key's id, or "keyless" on a loopback listener that never had a key."""

    key_id: str
    name: str
    scopes: frozenset[str]
    queues: tuple[str, ...] = ("*",)

    def allows(self, scope: str) -> bool:
        """Scopes do not contain each other; `admin` contains all."""
        return scope in self.scopes or "admin" in self.scopes

    def may(self, queue: str) -> bool:
        return any(pattern == "*" or fnmatch.fnmatchcase(queue, pattern) for pattern in self.queues)


KEYLESS = Caller("keyless", "keyless", frozenset(SCOPES))
NOBODY = Caller("none", "nobody", frozenset())
"""The caller of an open route who showed no key."""


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    caller: Caller
    expires: float = field(default=float("inf"))
    """On the monotonic clock of this process."""


def is_loopback(host: str) -> bool:
    """Whether a listener bound to `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_admin_key(secret: str) -> None:
    """Raises ValueError, whose text says what is wanted and not what was given."""
    if not re.fullmatch(r"[\x21-\x7e]{8,512}", secret):
        raise ValueError("FENCEPOST_ADMIN_KEY must be 8 to 512 visible ASCII characters without a space.")


_BEARER = re.compile(r"bearer +([\x21-\x7e]{1,512})", re.IGNORECASE)


class KeyRing:
    """The keys that are valid now. `host` is what the listener is bound to; anything but loopback asks for a key."""

    def __init__(self, db: Database, *, host: str) -> None:
        self._db = db
        self._loopback = is_loopback(host)
        self._keys: Mapping[bytes, _Known] = {}
        self._ever: bool | None = None
        self._read_at: float | None = None

    @property
    def keyless(self) -> bool:
        """A loopback listener whose table, as last read, never held a row."""
        return self._loopback and self._ever is False

    @property
    def readable(self) -> bool:
        """Whether the keys are known well enough to judge a call."""
        return self._read_at is not None and time.monotonic() - self._read_at <= STALE_SECONDS

    async def install_admin(self, secret: str) -> None:
        """The bootstrap key (scope admin). Only its hash is kept; another secret replaces the one before."""
        check_admin_key(secret)
        async with self._db.begin() as tx:
            await tx.run(
                sql.INSTALL,
                {
                    "id": BOOTSTRAP,
                    "name": BOOTSTRAP,
                    "secret_sha256": hashlib.sha256(secret.encode()).digest(),
                    "scopes": ["admin"],
                    "queues": ["*"],
                },
            )
        await self.refresh()

    async def refresh(self) -> None:
        """Read the table. Raises Unavailable; what was known stays usable until it is 5 s old."""
        begun = time.monotonic()
        async with self._db.begin() as tx:
            rows: Sequence[Mapping[str, Any]] = await tx.rows(sql.LIVE)
            ever = bool(rows)
            if not ever and not self._ever:
                row = await tx.row(sql.EVER)
                ever = bool(row and row["ever"])
        self._keys = {bytes(row["secret_sha256"]): _known(row, begun) for row in rows}
        self._ever = bool(ever or self._ever)
        self._read_at = begun

    async def run(self, stop: asyncio.Event) -> None:
        """Read the table every two seconds until `stop` is set. Nothing ends this loop but `stop` or a cancel."""
        failing = False
        while not stop.is_set():
            try:
                await self.refresh()
                failing = False
            except Exception as error:
                if not failing:
                    log.warning("keys cannot be read", error=type(error).__name__, exc_info=_unless_refusal(error))
                failing = True
            try:
                await asyncio.wait_for(stop.wait(), REFRESH_SECONDS if not failing else REFRESH_SECONDS / 4)
            except TimeoutError:
                continue

    def check(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header. Raises KeyRejected, and Unavailable while keys cannot be read.

        Secrets are looked up by their SHA-256: how long that takes tells nothing about a secret of 128 bits.
        """
        if not self.readable:
            raise Unavailable("The keys cannot be read now.")
        if self.keyless:
            return KEYLESS
        if authorization is None:
            raise KeyRejected("A key is needed: send `Authorization: Bearer <key>`.")
        match = _BEARER.fullmatch(authorization.strip())
        if match is None:
            raise KeyRejected("The Authorization header is not of the form `Bearer <key>`.")
        digest = hashlib.sha256(match[1].encode()).digest()
        known = self._keys.get(digest)
        if known is None or not hmac.compare_digest(known.digest, digest) or known.expires <= time.monotonic():
            raise KeyRejected("The key is unknown, expired or revoked.")
        return known.caller


def _known(row: Mapping[str, Any], now: float) -> _Known:
    caller = Caller(row["id"], row["name"], frozenset(row["scopes"]), tuple(row["queues"]))
    expires = float("inf") if row["expires_in"] is None else now + row["expires_in"]
    return _Known(bytes(row["secret_sha256"]), caller, expires)


def _unless_refusal(error: Exception) -> Exception | None:
    return None if isinstance(error, Refusal) else error
