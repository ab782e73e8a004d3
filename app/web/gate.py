"""Who may pass: local-only rules without keys, cross-site rules always, keys and scopes.

Spec 5. A page of another site can make a browser call 127.0.0.1; `Sec-Fetch-Site` and `Origin` tell such calls,
and a `Host` beyond loopback tells a rebound DNS name. Nothing here trusts a forwarded header.
This module must never know a capability's routes.
"""

import functools
import ipaddress
import re
from collections.abc import Mapping

from app.errors import CrossSite, KeyRejected, NotLocal, ScopeMissing
from app.keys.ops import NOBODY, Caller, KeyRing, is_loopback

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
CONTENT_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

_LINKABLE = re.compile(r"/(?:docs|ui)(?:/.*)?", re.DOTALL)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_KEY_PARAMETERS = frozenset({"api_key", "apikey", "api-key", "access_token", "token", "key", "authorization"})


def admit(keys: KeyRing, method: str, path: str, headers: Mapping[str, str], client: str | None) -> None:
    """What holds on every path, known or not, before anything else is looked at. Raises CrossSite, NotLocal.

    `headers` by lower-case name.
    """
    if keys.keyless:
        _local(headers, client)
    _same_site(method, path, headers)


def _local(headers: Mapping[str, str], client: str | None) -> None:
    host = headers.get("host", "")
    if not local_host(host):
        raise NotLocal(
            "Without keys this service answers only as 127.0.0.1, [::1] or localhost. "
            "Set FENCEPOST_ADMIN_KEY to serve other names.",
            host=host[:100],
        )
    for name in headers:
        if name == "forwarded" or name.startswith("x-forwarded-"):
            raise NotLocal(
                f"Without keys this service takes no call through a proxy (the header {name[:60]} is set). "
                "Set FENCEPOST_ADMIN_KEY first."
            )
    if client is not None and not _from_here(client):
        raise NotLocal("Without keys this service answers only calls from this machine.")


@functools.lru_cache(256)
def local_host(host: str) -> bool:
    """Whether a Host header names this machine: 127.0.0.0/8, [::1], localhost, *.localhost, with any port."""
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or (_is_address(name) and is_loopback(name))


@functools.lru_cache(256)
def _from_here(client: str) -> bool:
    return not _is_address(client) or is_loopback(client)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def _same_site(method: str, path: str, headers: Mapping[str, str]) -> None:
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site in (None, "none", "same-origin") and (origin is None or _own_origin(origin, headers)):
        return
    # Links from chat, alerts and runbooks must open: a navigation cannot read the answer across sites.
    if (
        method in ("GET", "HEAD")
        and _LINKABLE.fullmatch(path)
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest", "document") == "document"
        and origin is None
    ):
        return
    raise CrossSite("The request comes from a page of another site.")


def _own_origin(origin: str, headers: Mapping[str, str]) -> bool:
    scheme, _, authority = origin.partition("://")
    return scheme in ("http", "https") and authority.lower() == headers.get("host", "").lower() != ""


def identify(keys: KeyRing, scope: str | None, headers: Mapping[str, str], parameters: Mapping[str, object]) -> Caller:
    """The caller, who must hold `scope` (None: open to all). Raises KeyRejected, ScopeMissing, Unavailable."""
    if scope is None:
        return NOBODY
    if not keys.keyless and "authorization" not in headers and _KEY_PARAMETERS & {p.lower() for p in parameters}:
        raise KeyRejected("A key is never taken from the URL: send `Authorization: Bearer <key>`.")
    caller = keys.check(headers.get("authorization"))
    if not caller.allows(scope):
        raise ScopeMissing(f"This call needs a key with the scope {scope}.", scope=scope)
    return caller
