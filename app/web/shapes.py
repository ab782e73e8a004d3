"""The types that requests and answers are made of, each with the JSON schema that says exactly what it takes.

How to use them in a `schemas.py`:

    class Fail(Strict):
        attempt_token: Id
        error_message: str | None = None
        retry_after_seconds: Annotated[float, Seconds(0, 366 * DAY)] | None = None
        max_attempts: Annotated[int, Whole(1, 100)] = 5
        recovery_policy: Literal["auto", "manual"] = "auto"      # Literal: strict mode takes no text for an Enum

Numbers are strict (spec 8): text, booleans and `1.0` for an integer are refused. Query models use the same types;
`web/incoming.py` turns the text of a query into numbers and booleans before they are validated.
This module must never know a capability.
"""

import datetime
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, LiteralString
from uuid import UUID

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from app.errors import InvalidInput
from app.web.jsontext import NULL, PAYLOAD_BYTES, PROGRESS_BYTES, RawJson, clean

__all__ = [
    "DAY",
    "NULL",
    "Answered",
    "ErrorMessage",
    "ErrorType",
    "Id",
    "Instant",
    "Int32",
    "Int64",
    "JsonText",
    "Key",
    "Name",
    "Payload",
    "Progress",
    "RawJson",
    "Reason",
    "Result",
    "Seconds",
    "Strict",
    "Whole",
    "check_key",
    "parse_id",
    "parse_instant",
]

DAY = 86_400


class Strict(BaseModel):
    """A request: unknown members are refused by name, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class Answered(BaseModel):
    """An answer. Its schema stays open, so that a generated client survives a new member."""

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        json_schema_extra={"additionalProperties": True},
        json_schema_serialization_defaults_required=True,
    )


def _refusal(kind: LiteralString, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, message)


@dataclass(frozen=True, slots=True)
class JsonLimit:
    """Raw JSON of at most `limit` bytes of UTF-8."""

    limit: int
    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: Any) -> RawJson:
        if type(value) is not RawJson:
            raise _refusal("json_text", "JSON text as it was sent is needed")
        if len(value) * 4 > self.limit:
            size = len(value.encode("utf-8"))
            if size > self.limit:
                raise _refusal("json_size", f"{size} bytes of JSON; at most {self.limit}")
        return value

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "description": f"{self.what} Any JSON, kept as sent; at most {self.limit} bytes, nested at most 64 deep."
        }


JsonText = RawJson
"""Any JSON, kept as sent, without a limit of its own."""
Payload = Annotated[RawJson, JsonLimit(PAYLOAD_BYTES, "What the job is to be run with.")]
Result = Annotated[RawJson, JsonLimit(PAYLOAD_BYTES, "What the job came to.")]
Progress = Annotated[RawJson, JsonLimit(PROGRESS_BYTES, "How far the attempt has come.")]


@dataclass(frozen=True, slots=True)
class Cut:
    """Text that is cut, never refused: at `characters`, or at `size` bytes of UTF-8, and never within a character."""

    characters: int | None = None
    size: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise _refusal("string_type", "text is needed")
        text = clean(value)
        if self.characters is not None:
            text = text[: self.characters]
        if self.size is not None and len(text) * 4 > self.size:
            text = text.encode("utf-8")[: self.size].decode("utf-8", "ignore")
        return text

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        most = f"{self.characters} characters" if self.characters is not None else f"{self.size} bytes of UTF-8"
        return {"type": "string", "description": f"Cut at {most}; characters that cannot be stored are replaced."}


ErrorType = Annotated[str, Cut(characters=200)]
ErrorMessage = Annotated[str, Cut(size=16 * 1024)]
Reason = Annotated[str, Cut(size=16 * 1024)]
"""Why somebody did something: of a release, or of an operator."""


@dataclass(frozen=True, slots=True)
class _Text:
    """Text that `pattern` matches as a whole; `says` tells people what is wanted."""

    kind: str
    pattern: "re.Pattern[str]"
    says: str
    schema: tuple[tuple[str, Any], ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.check, serialization=core_schema.to_string_ser_schema()
        )

    def check(self, value: Any) -> str:
        if isinstance(value, str) and type(value) is not RawJson and self.pattern.fullmatch(value):
            return value
        raise _refusal(self.kind, self.says)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string"} | {word: list(x) if type(x) is tuple else x for word, x in self.schema}


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAME_SAYS = "a name is needed: 1 to 100 of A-Z a-z 0-9 . _ - and the first a letter or digit"
Name = Annotated[
    str,
    _Text(
        "name",
        NAME,
        NAME_SAYS,
        (("pattern", NAME_PATTERN), ("minLength", 1), ("maxLength", 100), ("examples", ("emails",))),
    ),
]
"""A queue, a kind, a schedule."""

_CONTROL = "\\x00-\\x1f\\x7f-\\x9f"
KEY_PATTERN = rf"^[^\s{_CONTROL}]([^{_CONTROL}]*[^\s{_CONTROL}])?$"
_NO = _CONTROL + "\ud800-\udfff"
_KEY = re.compile(rf"(?=.{{1,200}}\Z)[^\s{_NO}](?:[^{_NO}]*[^\s{_NO}])?", re.DOTALL)
KEY_SAYS = "1 to 200 characters are needed, without control characters and without a space at either end"
Key = Annotated[
    str,
    _Text(
        "key",
        _KEY,
        KEY_SAYS,
        (("pattern", KEY_PATTERN), ("minLength", 1), ("maxLength", 200)),
    ),
]
"""A worker id, a unique key, an idempotency key: compared as sent, no normalising."""


def check_key(place: str, header: str) -> str:
    """A key from a header, whose bytes are UTF-8 although HTTP hands them on as Latin-1. Raises InvalidInput."""
    try:
        text = header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise InvalidInput.at(place, "must be UTF-8") from None
    if not _KEY.fullmatch(text):
        raise InvalidInput.at(place, KEY_SAYS)
    return text


_UUID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")
ID_SAYS = "a UUID is needed, such as 0190a5b2-7c41-7b3e-9d52-5f7f3d9d2c11"
EXAMPLE_ID = "0190a5b2-7c41-7b3e-9d52-5f7f3d9d2c11"


def parse_id(text: Any) -> UUID:
    """A UUID in its hyphenated form. Raises ValueError."""
    if isinstance(text, UUID):
        return text
    if isinstance(text, str) and _UUID.fullmatch(text):
        return UUID(text)
    raise ValueError(ID_SAYS)


class _IdShape:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.check, serialization=core_schema.to_string_ser_schema()
        )

    @staticmethod
    def check(value: Any) -> UUID:
        try:
            return parse_id(value)
        except ValueError:
            raise _refusal("id", ID_SAYS) from None

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "format": "uuid", "examples": [EXAMPLE_ID]}


Id = Annotated[UUID, _IdShape()]

_INSTANT = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})[Tt](\d{2}):(\d{2}):(\d{2})(?:\.(\d+))?(?:([Zz])|([+-])(\d{2}):(\d{2}))", re.ASCII
)
INSTANT_SAYS = "an RFC 3339 instant with an offset is needed, such as 2026-11-30T09:30:00Z"


def parse_instant(value: Any) -> datetime.datetime:
    """RFC 3339 with an offset, in UTC. Digits of a second beyond the sixth are dropped. Raises ValueError."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value
    if not isinstance(value, str) or len(value) > 64:
        raise ValueError(INSTANT_SAYS)
    match = _INSTANT.fullmatch(value)
    if match is None:
        if re.fullmatch(r"[^ ]+ \d{2}:\d{2}", value):
            raise ValueError(INSTANT_SAYS + " (in a URL the + of an offset is written %2B)")
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?", value):
            raise ValueError(INSTANT_SAYS + "; the offset is missing")
        raise ValueError(INSTANT_SAYS)
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    micros = int((match[7] or "0")[:6].ljust(6, "0"))
    offset = datetime.timedelta()
    if match[9]:
        hours, minutes = int(match[10]), int(match[11])
        if hours > 23 or minutes > 59:
            raise ValueError(f"{INSTANT_SAYS}; the offset {match[9]}{match[10]}:{match[11]} does not exist")
        offset = datetime.timedelta(hours=hours, minutes=minutes) * (-1 if match[9] == "-" else 1)
    try:
        local = datetime.datetime(year, month, day, hour, minute, second, micros, datetime.UTC)
    except ValueError:
        raise ValueError(f"{INSTANT_SAYS}; this date or time does not exist") from None
    try:
        return local - offset
    except OverflowError:
        raise ValueError("in UTC the instant must be within the years 1 to 9999") from None


class _InstantShape:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    @staticmethod
    def check(value: Any) -> datetime.datetime:
        try:
            return parse_instant(value)
        except ValueError as error:
            raise _refusal("instant", str(error)) from None

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "format": "date-time", "examples": ["2026-11-30T09:30:00Z"]}


Instant = Annotated[datetime.datetime, _InstantShape()]


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration in seconds within `ge` … `le`; fractions allowed. `Annotated[float, Seconds(0, 60)]`."""

    ge: float
    le: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: Any) -> float:
        # Compared before float(): an integer of 400 digits would overflow.
        if type(value) in (int, float) and self.ge <= value <= self.le:
            return float(value)
        raise _refusal("seconds", f"a number of seconds from {_short(self.ge)} to {_short(self.le)} is needed")

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "number", "format": "double", "minimum": self.ge, "maximum": self.le}


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer within `ge` … `le`. `Annotated[int, Whole(1, 100)]`."""

    ge: int
    le: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: Any) -> int:
        if type(value) is int and self.ge <= value <= self.le:
            return value
        raise _refusal("whole", f"an integer from {self.ge} to {self.le} is needed")

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        width = "int32" if self.ge >= -(2**31) and self.le < 2**31 else "int64"
        if (self.ge, self.le) in _FULL:  # the format says it; numbers of 19 digits help nobody
            return {"type": "integer", "format": width}
        return {"type": "integer", "format": width, "minimum": self.ge, "maximum": self.le}


_FULL = ((-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1))


Int32 = Annotated[int, Whole(-(2**31), 2**31 - 1)]
Int64 = Annotated[int, Whole(-(2**63), 2**63 - 1)]


def _short(number: float) -> str:
    return str(int(number)) if math.isfinite(number) and number == int(number) else str(number)
