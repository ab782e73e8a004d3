"""Page cursors: where a keyset page ended, as an opaque text bound to the filters it was made for."""

import base64
import binascii
import hashlib
from typing import Any

import orjson

from app.errors import InvalidInput


def make(position: list[Any], filters: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([_bound_to(filters), *position])).rstrip(b"=").decode()


def read(cursor: str, filters: dict[str, Any], kinds: tuple[type, ...]) -> list[Any]:
    """The position. Raises InvalidInput for garbage and for a cursor of another list or other filters."""
    try:
        bound, *position = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error):
        raise InvalidInput.at("query.cursor", "is not a cursor of this service; start again without one") from None
    if len(position) != len(kinds) or not all(type(part) is kind for part, kind in zip(position, kinds, strict=True)):
        raise not_of_this_list()
    if any(sign < " " or sign == "\x7f" for part in position if type(part) is str for sign in part):
        raise not_of_this_list()
    if bound != _bound_to(filters):
        raise InvalidInput.at("query.cursor", "was made for other filters; keep the filters while you page")
    return list(position)


def not_of_this_list() -> InvalidInput:
    return InvalidInput.at("query.cursor", "is not a cursor of this list; start again without one")


def _bound_to(filters: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(filters, option=orjson.OPT_SORT_KEYS, default=str)).hexdigest()[:16]
