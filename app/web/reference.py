"""`/docs`: the reference for people, made on the server from the OpenAPI document.

No script, no style sheet, font or image from anywhere: it opens offline and under the strictest content policy.
"""

import base64
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from app.web.contract import codes_of
from app.web.door import Answer, Call, Door, Doors
from app.web.problems import PROBLEMS

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--wash:#f4f6f8;--accent:#0a5cc2;
--get:#0a6b3d;--post:#0a5cc2;--put:#8a5a00;--delete:#b3261e}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e9ec;--soft:#9aa4ae;--line:#30363d;--wash:#1d2126;
--accent:#6cb0ff;--get:#5fd39a;--post:#6cb0ff;--put:#e5b35c;--delete:#ff8f87}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
.page{max-width:74rem;margin:0 auto;padding:1rem;display:grid;gap:2rem;grid-template-columns:minmax(0,1fr)}
@media (min-width:60rem){td:first-child{white-space:nowrap}.page{grid-template-columns:16rem minmax(0,1fr)}
nav{position:sticky;top:1rem;align-self:start;max-height:calc(100vh - 2rem);overflow:auto}}
a{color:var(--accent)}
nav ul{list-style:none;margin:0 0 1rem;padding:0;font-size:.9rem}
nav li{padding:.15rem 0}
nav h2{font-size:.85rem;margin:.6rem 0 .2rem;color:var(--soft)}
h1{margin:.2rem 0}
h2{margin:2.2rem 0 .6rem}
article,section.problem{border-top:1px solid var(--line);padding:1rem 0}
h3{margin:0;font-size:1.05rem;overflow-wrap:anywhere}
h4{margin:1rem 0 .3rem;font-size:.9rem;color:var(--soft)}
code,pre{font:.86rem/1.5 ui-monospace,monospace}
pre{background:var(--wash);border:1px solid var(--line);border-radius:6px;padding:.7rem;overflow-x:auto;margin:.4rem 0}
.verb{display:inline-block;min-width:3.6rem;font-weight:700}
.GET{color:var(--get)}.POST{color:var(--post)}.PUT{color:var(--put)}.DELETE{color:var(--delete)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line)}
td:first-child{min-width:7rem;overflow-wrap:anywhere}
.soft{color:var(--soft)}
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_EXAMPLES: Mapping[str, Any] = {
    "queue": "emails",
    "kind": "send",
    "name": "emails",
    "queues": ["emails"],
    "worker_id": "worker-1",
    "max_jobs": 10,
    "payload": {"to": "a@example.org"},
    "result": {"sent": True},
    "error_message": "connection refused",
    "error_type": "ConnectionError",
    "outcome": "done",
    "reason": "the cause is fixed",
}


def reference_doors(document: Mapping[str, Any], doors: Sequence[Door]) -> list[Door]:
    """The door `/docs`; the page is made once."""
    content = page(document, doors)
    own = Doors("health")

    @own.get("/docs", scope=None, answers={200: None}, media="text/html; charset=utf-8", listed=False)
    async def get_docs(call: Call) -> Answer:
        """The reference, for people."""
        return Answer(200, content, {"content-security-policy": POLICY, "cache-control": "no-cache"})

    return own.doors


def page(document: Mapping[str, Any], doors: Sequence[Door]) -> bytes:
    by_name = {door.name: door for door in doors}
    operations = [
        (method.upper(), path, operation)
        for path in sorted(document["paths"], key=lambda path: _order(path, document["paths"]))
        for method, operation in document["paths"][path].items()
    ]
    writer = _Writer(document["components"]["schemas"])
    tags = [tag for tag in document["tags"] if any(tag["name"] in operation["tags"] for _, _, operation in operations)]
    contents = "".join(
        f"<h2>{escape(tag['name'])}</h2><ul>"
        + "".join(
            f'<li><a href="#{op["operationId"]}">{_prose(op["summary"])}</a></li>'
            for _, _, op in operations
            if tag["name"] in op["tags"]
        )
        + "</ul>"
        for tag in tags
    )
    body = "".join(
        f'<h2 id="tag-{escape(tag["name"])}">{escape(tag["name"])}</h2><p>{_prose(tag["description"])}</p>'
        + "".join(
            writer.operation(method, path, op, by_name[op["operationId"]])
            for method, path, op in operations
            if tag["name"] in op["tags"]
        )
        for tag in tags
    )
    info = document["info"]
    html = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])} reference</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><div class="page"><nav aria-label="Contents">{contents}<h2><a href="#problems">Problems</a></h2></nav><main>
<h1>{escape(info["title"])} <span class="soft">{escape(info["version"])}</span></h1>
<p>{_prose(info["description"])}</p>
<p>The same for machines: <a href="/openapi.json">/openapi.json</a>. Keys go into the header
<code>Authorization: Bearer …</code>; on a loopback listener that never had a key, none is asked.</p>
{body}
<h2 id="problems">Problems</h2>
<p>Every error is <code>application/problem+json</code>. Branch on <code>code</code>; <code>detail</code> is for
people.</p>
{"".join(_problem(code) for code in sorted(PROBLEMS))}
</main></div></body></html>
"""
    return html.encode()


def _order(path: str, paths: Collection[str]) -> tuple[str, bool]:
    """By path, but the call for one job directly before the same call for many."""
    many = path.replace("/{id}/", "/")
    return (many, False) if many in paths and many != path else (path, True)


def _problem(code: str) -> str:
    kind = PROBLEMS[code]
    return (
        f'<section class="problem" id="problem-{code}"><h3><code>{code}</code> '
        f'<span class="soft">{kind.status}</span></h3><p>{_prose(kind.title)}. {_prose(kind.advice)}</p></section>'
    )


def _number(bound: float | None) -> str:
    if bound is None:
        return ""
    return str(int(bound)) if bound == int(bound) else str(bound)


def _prose(text: str) -> str:
    """Plain text with `code`, escaped."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False)).replace("\n\n", "</p><p>")


class _Writer:
    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self.schemas = schemas

    def resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        if "$ref" in schema:
            target = self.schemas.get(str(schema["$ref"]).rsplit("/", 1)[1], {})
            return {**target, **{word: value for word, value in schema.items() if word != "$ref"}}
        return schema

    def operation(self, method: str, path: str, op: Mapping[str, Any], door: Door) -> str:
        parts = [
            f'<article id="{op["operationId"]}"><h3><span class="verb {method}">{method}</span> '
            f"<code>{escape(path)}</code></h3>",
            f"<p><strong>{_prose(op['summary'])}.</strong> {_prose(op['description'])}</p>",
            f"<pre>{escape(self.curl(method, path, op))}</pre>",
        ]
        rows = [
            (p["name"], f"{p['in']}, {self.kind(p['schema'])}", p["required"], p.get("description", ""))
            for p in op.get("parameters", ())
        ]
        if rows:
            parts.append(_table("Parameters", rows))
        if "requestBody" in op:
            schema = op["requestBody"]["content"]["application/json"]["schema"]
            need = "" if op["requestBody"]["required"] else " (may be left out)"
            parts.append(_table(f"Body{need}", list(self.members(schema))))
        for status, response in op["responses"].items():
            content = response.get("content", {}).get("application/json")
            if content and status < "300":
                parts.append(_table(f"Answer {status}", list(self.members(content["schema"], answer=True))))
        parts.append("<h4>Problems</h4><p>")
        parts.append(
            " · ".join(
                f'{status} <a href="#problem-{code}">{code}</a>'
                for status, codes in codes_of(door).items()
                for code in codes
            )
        )
        parts.append("</p></article>")
        return "".join(parts)

    def members(
        self, schema: Mapping[str, Any], prefix: str = "", depth: int = 0, *, answer: bool = False
    ) -> Iterator[tuple[str, str, bool, str]]:
        schema = self.resolve(schema)
        required = set(schema.get("required", ()))
        for name, inner in schema.get("properties", {}).items():
            about = str(self.resolve(inner).get("description", ""))
            yield f"{prefix}{name}", self.kind(inner), name in required and not answer, about
            nested, mark = self.nested(inner)
            if nested is not None and depth < 3:
                yield from self.members(nested, f"{prefix}{name}{mark}.", depth + 1, answer=answer)

    def nested(self, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
        schema = self.resolve(schema)
        if "properties" in schema:
            return schema, ""
        if schema.get("type") == "array":
            inner, mark = self.nested(schema.get("items", {}))
            return inner, f"[]{mark}"
        for branch in schema.get("anyOf", ()):
            inner, mark = self.nested(branch)
            if inner is not None:
                return inner, mark
        return None, ""

    def kind(self, schema: Mapping[str, Any]) -> str:
        schema = self.resolve(schema)
        if "const" in schema:
            return json.dumps(schema["const"])
        if "enum" in schema:
            return " | ".join(json.dumps(value) for value in schema["enum"])
        if "anyOf" in schema:
            text = " or ".join(dict.fromkeys(self.kind(branch) for branch in schema["anyOf"]))
        elif schema.get("type") == "array":
            text = f"list of {self.kind(schema.get('items', {}))}"
        else:
            text = str(schema.get("format") or schema.get("type") or "any JSON")
        least, most = schema.get("minimum"), schema.get("maximum")
        if least is not None or most is not None:
            text += f" {_number(least)}…{_number(most)}"
        if "maxItems" in schema:
            text += f", at most {schema['maxItems']}"
        if schema.get("default") is not None:
            text += f", default {json.dumps(schema['default'])}"
        return text

    def curl(self, method: str, path: str, op: Mapping[str, Any]) -> str:
        path = path.replace("{id}", "$ID").replace("{name}", "emails")
        line = "curl" if method == "GET" else f"curl -X {method}"
        line += f' "$FENCEPOST{path}"' if "$" in path else f" $FENCEPOST{path}"
        if op.get("security") != []:
            line += ' -H "Authorization: Bearer $FENCEPOST_KEY"'
        if op.get("requestBody", {}).get("required"):
            schema = op["requestBody"]["content"]["application/json"]["schema"]
            body = json.dumps(self.example(schema), ensure_ascii=False).replace("'", "'\\''")
            line += f" \\\n  -d '{body}'"
        return line

    def example(self, schema: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
        """A value that the schema takes, with the required members of each object."""
        schema = self.resolve(schema)
        if "properties" in schema:
            wanted = set(schema.get("required", ()))
            wanted |= {"max_jobs", "payload"} & schema["properties"].keys()
            return {
                member: self.example(inner, member, depth + 1)
                for member, inner in schema["properties"].items()
                if member in wanted
            }
        if name in _EXAMPLES:
            return _EXAMPLES[name]
        for word in ("examples", "enum"):
            if schema.get(word):
                return schema[word][0]
        if "const" in schema:
            return schema["const"]
        if "anyOf" in schema:
            return self.example(schema["anyOf"][0], name, depth)
        kind = schema.get("type")
        if kind == "array":
            return [self.example(schema.get("items", {}), "", depth + 1)] if depth < 6 else []
        if kind in ("integer", "number"):
            return schema.get("minimum", 1)
        return {"string": "text", "boolean": True, "object": {}}.get(str(kind))


def _table(title: str, rows: Sequence[tuple[str, str, bool, str]]) -> str:
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if required else ''}</td><td>{escape(kind)}</td>"
        f"<td>{_prose(about)}</td></tr>"
        for name, kind, required, about in rows
    )
    star = ' <span class="soft">(* required)</span>' if any(required for _, _, required, _ in rows) else ""
    return f'<h4>{escape(title)}{star}</h4><div class="scroll"><table>{lines}</table></div>'
