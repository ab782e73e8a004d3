"""`./fencepost schedules …`: what an operator does to schedules, over HTTP to a service that runs.

FENCEPOST_URL names it (http://127.0.0.1:8080 when absent) and FENCEPOST_KEY the key to show.
"""

import json
import os
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer

schedules = typer.Typer(help="Schedules of a running service.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="The service's answer as it is.")]
Name = Annotated[str, typer.Argument(help="The schedule's name.")]
Reason = Annotated[str | None, typer.Option(help="Why; kept in the audit.")]

TIMEOUT_SECONDS = 15.0


def _fail(text: str) -> NoReturn:
    typer.echo(f"fencepost: {text}", err=True)
    raise typer.Exit(1)


def _call(
    method: str, path: str, body: dict[str, Any] | None = None, *, payload: str | None = None, **query: Any
) -> Any:
    """The answer's JSON. A refusal is told in one line. `payload` is JSON text, sent as it is, digit by digit."""
    import httpx2

    url = os.environ.get("FENCEPOST_URL") or f"http://127.0.0.1:{os.environ.get('FENCEPOST_PORT', '8080')}"
    key = os.environ.get("FENCEPOST_KEY")
    if key and not (key.isascii() and key.isprintable()):
        _fail("FENCEPOST_KEY holds signs that no key has; visible ASCII is needed")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    text = json.dumps(body) if body is not None else None
    if text is not None and payload is not None:
        text = f'{text[:-1]}{", " if body else ""}"payload": {payload}}}'
    known = {name: value for name, value in query.items() if value is not None}
    try:
        answer = httpx2.request(
            method,
            url.rstrip("/") + path,
            content=text.encode() if text is not None else None,
            headers=headers,
            params=known,
            timeout=TIMEOUT_SECONDS,
        )
    except httpx2.HTTPError as error:
        _fail(f"{url} does not answer ({error}); is it running, and is FENCEPOST_URL right?")
    except (httpx2.InvalidURL, UnicodeError) as error:
        _fail(f"{url!r} cannot be called ({error}); is FENCEPOST_URL right?")
    try:
        found = answer.json() if answer.content else {}
    except ValueError:
        _fail(f"{url} answers {answer.status_code}, but no JSON; is FENCEPOST_URL right?")
    if not isinstance(found, dict):
        _fail(f"{url} answers as no Fencepost does; is FENCEPOST_URL right?")
    if answer.status_code >= 400:
        _fail(f"{found.get('detail', answer.status_code)} ({found.get('code', answer.status_code)})")
    return found


def _path(name: str, verb: str = "") -> str:
    try:
        return f"/v1/schedules/{quote(name, safe='')}{verb}"
    except UnicodeError:
        _fail("the name is not UTF-8")


def _table(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cadence(row: dict[str, Any]) -> str:
    if row["cron"] is not None:
        return f"{row['cron']} {row['timezone']}"
    return f"every {row['every_seconds']} s"


def _state(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return f"broken: {row['error']}"
    if not row["enabled"]:
        return f"paused by {row['paused_by']}" + (f": {row['paused_reason']}" if row["paused_reason"] else "")
    if row["blocked_by"] is not None:
        return f"blocked by job {row['blocked_by']}"
    return "overdue" if row["overdue"] else "ok"


def _show(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(row, indent=2, ensure_ascii=False))
    else:
        typer.echo(f"{row['name']}: {_cadence(row)}, next {row['next_run_at']}, {_state(row)}")


@schedules.command("list")
def list_(as_json: Json = False) -> None:
    """List schedules: cadence, next and last time, state."""
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = _call("GET", "/v1/schedules", limit=500, cursor=cursor)
        found += page["schedules"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    head = ["NAME", "CADENCE", "RUNS", "NEXT", "LAST FIRED", "STATE"]
    rows = [
        [
            row["name"],
            _cadence(row),
            row["task"] or row["queue"],
            row["next_run_at"] or "-",
            row["last_fired_at"] or "-",
            _state(row),
        ]
        for row in found
    ]
    _table([head, *rows])


@schedules.command()
def put(
    name: Name,
    every: Annotated[int | None, typer.Option(help="Seconds from one run to the next.")] = None,
    cron: Annotated[str | None, typer.Option(help="Five fields, or @daily and the like.")] = None,
    timezone: Annotated[str | None, typer.Option(help="Of the cron. [UTC]")] = None,
    queue: Annotated[str | None, typer.Option(help="Queue of its jobs.")] = None,
    kind: Annotated[str | None, typer.Option(help="Kind of its jobs. [the queue's name]")] = None,
    payload: Annotated[str | None, typer.Option(help="Payload of its jobs, as JSON.")] = None,
    task: Annotated[str | None, typer.Option(help="A maintenance task in place of jobs.")] = None,
    grace: Annotated[float | None, typer.Option(help="startup_grace_seconds. [60]")] = None,
    overlap: Annotated[str | None, typer.Option(help="skip or allow. [skip]")] = None,
    enabled: Annotated[bool | None, typer.Option("--enabled/--paused", help="Absent keeps what is there.")] = None,
    as_json: Json = False,
) -> None:
    """Make a schedule, or set all of it; the same again changes nothing."""
    body: dict[str, Any] = {
        "every_seconds": every,
        "cron": cron,
        "timezone": timezone,
        "queue": queue,
        "kind": kind,
        "task": task,
        "startup_grace_seconds": grace,
        "overlap": overlap,
        "enabled": enabled,
    }
    if payload is not None:
        try:
            json.loads(payload)
            payload.encode()
        except ValueError as error:
            _fail(f"--payload is not JSON: {error}")
        except RecursionError:
            _fail("--payload is not JSON: it is nested too deep")
    given = {key: value for key, value in body.items() if value is not None}
    _show(_call("PUT", _path(name), given, payload=payload), as_json)


@schedules.command()
def pause(name: Name, reason: Reason = None, as_json: Json = False) -> None:
    """Stop firing until it is resumed."""
    _show(_call("POST", _path(name, "/pause"), {"reason": reason}), as_json)


@schedules.command()
def resume(name: Name, reason: Reason = None, as_json: Json = False) -> None:
    """Go on with the next slot of the grid."""
    _show(_call("POST", _path(name, "/resume"), {"reason": reason}), as_json)


@schedules.command()
def fire(
    name: Name,
    reason: Reason = None,
    force: Annotated[bool, typer.Option("--force", help="Also while a run is unfinished.")] = False,
    as_json: Json = False,
) -> None:
    """Run it now; its next time stays."""
    found = _call("POST", _path(name, "/fire"), {"reason": reason, "force": force})
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif found.get("queue"):
        typer.echo(f"{name}: job {found['id']} in queue {found['queue']}")
    else:
        typer.echo(f"{name}: task {found['task']} will run at once")


@schedules.command()
def preview(
    name: Name,
    count: Annotated[int, typer.Option(help="How many, up to 500.")] = 5,
    as_json: Json = False,
) -> None:
    """The next times, in UTC and on the schedule's own clock."""
    found = _call("GET", _path(name, "/preview"), count=count)
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    _table([["UTC", found["timezone"], ""], *([at["utc"], at["local"], at["note"] or ""] for at in found["times"])])


@schedules.command()
def slots(
    name: Name,
    limit: Annotated[int, typer.Option(help="How many, up to 500.")] = 20,
    as_json: Json = False,
) -> None:
    """The ledger: what was fired, skipped or collapsed, and how late; the newest first."""
    found = _call("GET", _path(name, "/slots"), limit=limit)["slots"]
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    head = ["SLOT", "FIRED", "LATE", "OUTCOME", "COUNT", "JOB OR REASON"]
    rows = [
        [
            row["slot_at"],
            row["fired_at"],
            f"{row['lateness_seconds']:.2f} s",
            row["outcome"] + (" (by hand)" if row["manual"] else ""),
            str(row["count"]),
            row["reason"] or row["job_id"] or "",
        ]
        for row in found
    ]
    _table([head, *rows])
