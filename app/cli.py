"""The verbs of `./fencepost`. Options go before the environment. What a verb needs is imported when it runs."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from app import __version__
from app.cli_schedules import schedules
from app.settings import Settings, misspelt

ROOT = Path(__file__).resolve().parents[1]

cli = typer.Typer(
    name="fencepost",
    help="Fencepost, an HTTP job-control service on PostgreSQL.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
epoch = typer.Typer(help="The fence's epoch, after a restore.", no_args_is_help=True)
cli.add_typer(epoch, name="epoch")
cli.add_typer(schedules, name="schedules")


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fencepost {__version__}")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Fencepost, an HTTP job-control service on PostgreSQL."""


DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of the embedded database.")]


def settings_with(**options: Any) -> Settings:
    """The settings of the environment, under the options that were given."""
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(map(str, first["loc"]))
        # The variable is called as the field is, in capitals; an option goes before it.
        said = f"--{name.replace('_', '-')}" if name in given else f"FENCEPOST_{name.upper()}"
        fail(f"{said}: {first['msg']}", 2)
    for line in misspelt(os.environ):
        typer.echo(f"fencepost: {line}", err=True)
    if "data_dir" not in settings.model_fields_set:
        # Beside the checkout, from wherever it is called: another folder would be another database.
        return settings.model_copy(update={"data_dir": ROOT / ".fencepost"})
    return settings


def fail(text: str, code: int = 1) -> NoReturn:
    typer.echo(f"fencepost: {text}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    from app.serving import CannotStart, leave

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    except CannotStart as problem:
        if problem.told:
            raise typer.Exit(1) from None
        fail(str(problem))


@cli.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. [8080]")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that answer. [1]")] = None,
    data_dir: DataDir = None,
) -> None:
    """Start the service.

    Without FENCEPOST_DATABASE_URL it starts a database of its own as well.
    """
    settings = settings_with(host=host, port=port, workers=workers, data_dir=data_dir)
    with starting():
        from app import serving

        serving.serve(settings)


@cli.command()
def migrate(data_dir: DataDir = None) -> None:
    """Bring the database to this schema."""
    settings = settings_with(data_dir=data_dir)
    with starting():
        from app import serving

        with serving.database(settings) as found:
            typer.echo(f"fencepost: {serving.named(found.database_url or '')} has this build's schema")


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context) -> None:
    """Run the tests; more words go to pytest."""
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *context.args])


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def soak(context: typer.Context) -> None:
    """Kill instances under load, and judge.

    It takes some minutes and looks for jobs lost, stale tokens that were taken, and lateness.
    """
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "tests.reliability.soak", *context.args])


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure, against floors in the same run.

    A table and JSON: how fast this machine is with us, and with bare routes and PostgreSQL alone.
    """
    if not (ROOT / "bench").is_dir():
        fail("bench runs from a checkout; this installation has none")
    os.environ["PYTHONPATH"] = str(ROOT)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "bench", *context.args])


@cli.command()
def openapi() -> None:
    """Print the OpenAPI document."""
    from app.main import create_app

    typer.echo(json.dumps(create_app(settings_with()).openapi(), indent=2, ensure_ascii=False))


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """A story of crashes, told in 25 s.

    Real work, a kill -9, a reclaim, a refused late completion, and every promise checked.
    """
    from app.demo import run

    raise typer.Exit(run(context.args) or 0)


@epoch.command("bump")
def epoch_bump(
    restored: Annotated[bool, typer.Option("--restored", help="The database was restored from a backup.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Lift all later fences.

    Every later fence is above all earlier ones; with --restored every processing job is taken back too.
    """
    settings = settings_with(data_dir=data_dir)
    with starting():
        from app import serving

        with serving.database(settings) as found:
            asyncio.run(_bump(found, restored))


async def _bump(settings: Settings, restored: bool) -> None:
    from app.db import Database
    from app.errors import Refusal
    from app.jobs import epoch

    database = Database(
        settings.database_url or "", pool_size=1, statement_timeout=60.0, prepared=settings.prepared_statements
    )
    await database.open()
    try:
        number, taken = await epoch.bump(database, restored=restored)
    except Refusal as refusal:
        fail(f"{refusal.detail} A job may be locked by somebody and still hold its old token: run it again.")
    finally:
        await database.close()
    typer.echo(f"fencepost: the epoch is {number}; {taken} processing jobs were taken back")


def main() -> None:
    cli(prog_name="fencepost")
