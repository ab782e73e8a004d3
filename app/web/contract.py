"""The OpenAPI 3.1 document, made from the doors and their models: what is served is what is described.

Rules that generated clients taught (measured with eight generators): one `Problem` schema under
`application/problem+json` and no other error shape, short unique operationIds, a format on every number, answers whose
schema stays open, no status that cannot occur. The document is the same from start to start, byte for byte.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.web.door import Answer, Call, Door, Doors
from app.web.problems import MEDIA_TYPE, PROBLEMS
from app.web.shapes import EXAMPLE_ID, NAME_PATTERN

TAGS: Mapping[str, str] = {
    "jobs": "Enqueue jobs and look at them.",
    "work": "A worker's side: claim, heartbeat, complete, fail, release.",
    "operate": "An operator's side: cancel, requeue, resolve.",
    "queues": "Queues: settings, pause, holds.",
    "schedules": "Periodic schedules.",
    "keys": "API keys.",
    "audit": "Who did what.",
    "health": "Liveness, readiness, metrics.",
}
HEADERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Idempotency-Key": (
        "Makes the call repeatable: the same key and content answer with the same job.",
        {"type": "string", "minLength": 1, "maxLength": 200},
    ),
    "If-None-Match": ("`*`: only where there is none yet; else 412.", {"type": "string", "enum": ["*"]}),
    "If-Match": ("The ETag that was read; another one now answers 412.", {"type": "string"}),
}
DESCRIPTION = """\
Fencepost hands jobs to workers over HTTP, on PostgreSQL. A claim gives an attempt token; only its holder can extend \
the lease or finish the job. Every error is a problem document with a stable `code`; /docs explains each."""

_MEANINGS = {
    200: "Done.",
    201: "Made.",
    202: "Taken on.",
    204: "Done; nothing to say.",
}


def describe(app: FastAPI, doors: Sequence[Door], *, version: str) -> tuple[dict[str, Any], list[Door]]:
    """The document of these doors, set as `app.openapi`, and the door that serves it as bytes made once."""
    made = document(doors, version=version)
    content = render(made)
    app.openapi = lambda: made  # type: ignore[method-assign]
    own = Doors("health")

    @own.get("/openapi.json", scope=None, answers={200: None}, listed=False)
    async def get_openapi(call: Call) -> Answer:
        """This document."""
        return Answer(200, content, {"cache-control": "no-cache"})

    return made, own.doors


def render(made: Mapping[str, Any]) -> bytes:
    return (json.dumps(made, indent=1, ensure_ascii=False) + "\n").encode()


def document(doors: Iterable[Door], *, version: str) -> dict[str, Any]:
    listed = sorted((door for door in doors if door.listed), key=lambda door: (door.path, door.method))
    schemas = _Schemas(listed)
    paths: dict[str, Any] = {}
    for door in listed:
        paths.setdefault(door.path, {})[door.method.lower()] = _operation(door, schemas)
    used = {door.tag for door in listed}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fencepost",
            "version": version,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "contact": {"name": "The operator of this service"},
        },
        "servers": [{"url": "/", "description": "This service"}],
        "security": [{"bearer": []}],
        "tags": [{"name": name, "description": about} for name, about in TAGS.items() if name in used]
        + [{"name": name, "description": name.capitalize() + "."} for name in sorted(used - TAGS.keys())],
        "paths": paths,
        "components": {
            "schemas": schemas.components(),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key. On a loopback listener that never had a key, none is asked.",
                }
            },
        },
    }


class _Schemas:
    """The JSON schemas of all models, under their names; those of queries are taken apart into parameters."""

    def __init__(self, doors: Iterable[Door]) -> None:
        inputs: list[type[BaseModel]] = []
        outputs: list[type[BaseModel]] = []
        queries: set[type[BaseModel]] = set()
        for door in doors:
            inputs += [model for model in (door.body, door.query) if model is not None]
            outputs += [model for model in door.answers.values() if model is not None]
            if door.query is not None:
                queries.add(door.query)
        wanted: dict[tuple[type[BaseModel], Any], None] = {}
        for model in inputs:
            wanted[(model, "validation")] = None
        for model in outputs:
            wanted[(model, "serialization")] = None
        refs, definitions = models_json_schema(list(wanted), ref_template="#/components/schemas/{model}")
        self._refs = refs
        self._all: dict[str, Any] = definitions.get("$defs", {})
        self._queries = {self._name(model, "validation") for model in queries}
        for schema in self._all.values():
            _tidy(schema)

    def _name(self, model: type[BaseModel], mode: Any) -> str:
        return str(self._refs[(model, mode)]["$ref"]).rsplit("/", 1)[1]

    def reference(self, model: type[BaseModel], mode: str) -> dict[str, str]:
        return {"$ref": f"#/components/schemas/{self._name(model, mode)}"}

    def parameters(self, model: type[BaseModel]) -> list[dict[str, Any]]:
        schema = self._all[self._name(model, "validation")]
        required = set(schema.get("required", ()))
        parameters = []
        for name, inner in schema.get("properties", {}).items():
            inner = _not_null(inner)
            about = inner.pop("description", None)
            parameter = {"name": name, "in": "query", "required": name in required, "schema": inner}
            if about:
                parameter["description"] = about
            parameters.append(parameter)
        return parameters

    def components(self) -> dict[str, Any]:
        shown = {name: schema for name, schema in self._all.items() if name not in self._queries}
        shown["Problem"] = PROBLEM
        return dict(sorted(shown.items()))


PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "Every error (RFC 9457). Facts such as `job_id`, `fence` or `holder_id` are members beside these.",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {
            "type": "string",
            "description": "Where the problem is explained.",
            "examples": ["/docs#problem-lease-lost"],
        },
        "title": {"type": "string", "description": "The kind of problem, for people."},
        "status": {"type": "integer", "format": "int32", "description": "The HTTP status."},
        "detail": {"type": "string", "description": "This very problem, for people."},
        "code": {"type": "string", "description": "The kind of problem, for machines. More may come."},
        "errors": {
            "type": "array",
            "description": "With invalid-input: what is wrong, and where.",
            "items": {
                "type": "object",
                "required": ["place", "message"],
                "properties": {
                    "place": {"type": "string", "examples": ["body.jobs[3].priority"]},
                    "message": {"type": "string"},
                },
                "additionalProperties": True,
            },
        },
    },
    "additionalProperties": True,
}


def _not_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter is there or not; null cannot be written in a URL."""
    schema = dict(schema)
    if schema.get("default", 0) is None:
        del schema["default"]
    branches = [branch for branch in schema.get("anyOf", ()) if branch != {"type": "null"}]
    if "anyOf" in schema and len(branches) == 1:
        del schema["anyOf"]
        return {**branches[0], **schema}
    if branches:
        schema["anyOf"] = branches
    return schema


def _tidy(schema: Any) -> None:
    """Numbers get a format (generators take int32 and float32 otherwise); titles that repeat a name go."""
    if isinstance(schema, list):
        for inner in schema:
            _tidy(inner)
        return
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "integer":
        schema.setdefault("format", "int64")
    elif schema.get("type") == "number":
        schema.setdefault("format", "double")
    if isinstance(schema.get("title"), str):
        del schema["title"]
    for word, inner in schema.items():
        if word in ("properties", "$defs", "patternProperties"):
            for member in inner.values():
                _tidy(member)
        elif word not in ("examples", "example", "default", "const", "enum"):
            _tidy(inner)


def codes_of(door: Door) -> dict[int, list[str]]:
    """The refusals that this door can really answer with, by status."""
    codes = {"internal", "invalid-input", "cross-site", "not-local", *door.refusals}
    if door.scope is not None:
        codes |= {"key-rejected", "scope-missing", "unavailable"}
    if door.reads_body:
        codes |= {"not-json", "too-large", "unsupported-media-type", "request-timeout"}
    by_status: dict[int, list[str]] = {}
    for code in sorted(codes):
        by_status.setdefault(PROBLEMS[code].status, []).append(code)
    return dict(sorted(by_status.items()))


def _operation(door: Door, schemas: _Schemas) -> dict[str, Any]:
    about = door.description
    if door.scope is not None:
        about = f"{about}\n\nNeeds a key with the scope `{door.scope}`.".strip()
    operation: dict[str, Any] = {
        "operationId": door.name,
        "tags": [door.tag],
        "summary": door.summary or door.name,
        "description": about or f"{door.summary or door.name}.",
    }
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", door.path)]
    for name in door.headers:
        meaning, schema = HEADERS.get(name, ("", {"type": "string"}))
        parameters.append(
            {"name": name, "in": "header", "required": False, "description": meaning, "schema": dict(schema)}
        )
    if door.query is not None:
        parameters += schemas.parameters(door.query)
    if parameters:
        operation["parameters"] = parameters
    if door.body is not None:
        operation["requestBody"] = {
            "required": door.body_required,
            "description": f"At most {door.max_body} bytes.",
            "content": {"application/json": {"schema": schemas.reference(door.body, "validation")}},
        }
    responses: dict[str, Any] = {}
    for status, model in sorted(door.answers.items()):
        response: dict[str, Any] = {"description": _MEANINGS.get(status, "Answered.")}
        if model is not None:
            response["content"] = {door.media: {"schema": schemas.reference(model, "serialization")}}
        elif status != 204 and door.media != "application/json":
            response["content"] = {door.media.partition(";")[0]: {"schema": {"type": "string"}}}
        if status == 201:
            response["headers"] = {"Location": {"description": "Where it is.", "schema": {"type": "string"}}}
        if door.etag and status in (200, 201) and model is not None:
            response.setdefault("headers", {})["ETag"] = {
                "description": "The edition, for `If-Match`.",
                "schema": {"type": "string"},
            }
        responses[str(status)] = response
    for status, codes in codes_of(door).items():
        responses[str(status)] = _problem_response(status, codes)
    operation["responses"] = dict(sorted(responses.items()))
    if door.scope is None:
        operation["security"] = []
    else:
        operation["x-scope"] = door.scope
    return operation


def _problem_response(status: int, codes: Sequence[str]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": "; ".join(f"`{code}`: {PROBLEMS[code].title}" for code in codes) + ".",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if status in (408, 429, 503):
        response["headers"] = {
            "Retry-After": {
                "description": "Seconds to wait before the call is repeated.",
                "schema": {"type": "integer", "format": "int32", "minimum": 1},
            }
        }
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}}
    return response


def _path_parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if name == "id":
        schema = {"type": "string", "format": "uuid", "examples": [EXAMPLE_ID]}
    elif name == "name":
        schema = {"type": "string", "pattern": NAME_PATTERN, "minLength": 1, "maxLength": 100}
    return {"name": name, "in": "path", "required": True, "description": f"The {name}.", "schema": schema}
