"""The commands put together, and the options that all of them share."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from resilient.core.base.errors import SetupError
from resilient.surface.cli import operate, settings
from resilient.surface.cli.connect import connect
from resilient.surface.cli.connections import connections, secrets, sync
from resilient.surface.cli.context import Context
from resilient.surface.cli.erasure import erase, export
from resilient.surface.cli.exits import HELP, OK, USAGE
from resilient.surface.cli.hints import which_of
from resilient.surface.cli.jobs import dead, jobs
from resilient.surface.cli.outbox import outbox
from resilient.surface.cli.output import Output
from resilient.surface.cli.providers import providers
from resilient.surface.cli.resources import resources
from resilient.surface.cli.schedules import schedules
from resilient.surface.cli.worker import worker
from resilient.surface.cli.workflows import workflows

if TYPE_CHECKING:
    from collections.abc import Sequence

cli = typer.Typer(
    name="resilient",
    help="Work that must go through somebody else's API: see it, run it, change it.",
    epilog=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
SHARED: Final = "Also --app, --database, --schema, --as, --because, --json and --debug: see `resilient --help`."
VALUED: Final = {
    "--app": "shop.jobs:app", "-A": "shop.jobs:app", "--schema": "jobs", "--as": "ann", "--because": "'they asked'",
    "--shard": "eu", "--database": "sqlite:///app.db or postgresql://user:password@host/name",
}  # fmt: skip
_NUMBERS: Final = (
    "limit",
    "concurrency",
    "priority",
    "max_attempts",
    "port",
    "max_jobs",
    "max_memory",
    "processes",
    "jobs",
    "resources",
    "workers",
    "blocked",
)
_KEYS: Final = ("resource", "grant_of", "account", "unique_key", "ordering_key", "idempotency_key")
SHAPES: Final = {  # what an option takes, by its name, for the help
    **dict.fromkeys(_NUMBERS, "N"),
    **dict.fromkeys(_KEYS, "KEY"),
    **dict.fromkeys(("lease", "grace", "timeout"), "SECONDS"),
    **dict.fromkeys(("delay", "expires_in", "duration"), "SPAN"),
    **dict.fromkeys(("run_at", "expires_at", "end"), "TIME"),
    **dict.fromkeys(("tag", "detail", "breaker"), "NAME=VALUE"),
    **dict.fromkeys(("schema", "name", "user", "shard"), "NAME"),
    **dict.fromkeys(("kind", "kinds", "except_kinds"), "KIND"),
    "patterns": "PATTERN",
    **dict.fromkeys(("key_file", "csv"), "FILE"),
    "app": "MODULE:APP", "database": "ADDRESS", "gate": "GATE", "rate": "RATE", "payload": "JSON",
    "log_level": "LEVEL", "into": "FOLDER", "person": "NAME", "because": "WHY",
}  # fmt: skip
FLAGS: Final = ("--json", "--debug")
_OTHERS: Final = ("worker", "dashboard", "bench", "demo")  # what is changed there is not changed by who typed this
OWN_OPTIONS: Final = ("bench", "demo")  # commands with a --database and --json of their own


def _print_version(shown: bool) -> None:  # noqa: FBT001 - what typer calls it with
    if shown:
        from resilient.engine.run.heartbeat import code_version  # noqa: PLC0415 - half a second of imports, only where needed

        typer.echo(f"resilient {code_version()}")
        raise typer.Exit


@cli.callback()
def shared(
    ctx: typer.Context,
    app: Annotated[
        str | None, typer.Option("--app", "-A", envvar="RESILIENT_APP", help="The program's app, as module:app.")
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(envvar="RESILIENT_DATABASE", help="Instead of --app: sqlite:///app.db or postgresql://..."),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(envvar="RESILIENT_SCHEMA", help="PostgreSQL schema of the tables, with --database.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(envvar="RESILIENT_SHARD", help="Which shard, of an app that has several.")
    ] = None,
    person: Annotated[
        str | None, typer.Option("--as", envvar="RESILIENT_AS", help="Who changes something, for the audit.")
    ] = None,
    because: Annotated[str | None, typer.Option(help="Why, for the audit.", show_default=False)] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback has answered
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """These options may also stand after the command."""
    sources = {name: ctx.get_parameter_source(name) for name in ("app", "database", "shard")}
    names = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if {"app", "database"} <= names:
        raise SetupError("give --app or --database, not both")
    if {"shard", "database"} <= names:
        raise SetupError("a --shard is one of an app's: give --app, or the shard's own address as --database")
    if database is not None and (app is None or "database" in names):
        app = None  # what was typed wins over the environment
    else:
        database = None
    made = Context(app, database, schema, debug, Output(as_json=as_json, options=ctx.obj))
    made.shard = shard
    made.typed_database = database if "database" in names else None
    made.person, made.because, made.acts = person or "", because, ctx.invoked_subcommand not in _OTHERS
    ctx.obj = made
    ctx.call_on_close(made.close)


cli.command()(operate.status)
cli.command()(worker)
cli.command()(operate.audit)
cli.command()(operate.dashboard)
cli.command()(operate.enqueue)
cli.command()(connect)
cli.add_typer(jobs, name="jobs")
cli.add_typer(dead, name="dead")
cli.add_typer(resources, name="resources")
cli.add_typer(schedules, name="schedules")
cli.add_typer(workflows, name="workflows")
cli.add_typer(outbox, name="outbox")
cli.add_typer(sync, name="sync")
cli.add_typer(connections, name="connections")
cli.add_typer(secrets, name="secrets")
cli.add_typer(providers, name="providers")
cli.add_typer(operate.database, name="db")
cli.command()(operate.prune)
cli.command()(erase)
cli.command()(export)
cli.command()(operate.doctor)

_PASSED_ON: Final[dict[str, Any]] = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    "add_help_option": False,
}


@cli.command(**_PASSED_ON)
def bench(ctx: typer.Context) -> None:
    """Measure the engine on this machine."""
    from resilient.surface.bench.command import app  # noqa: PLC0415 - only where needed

    alone = _plain(no_args_is_help=True, help="Measure the engine on this machine.")
    alone.add_typer(app)
    _pass_on(ctx, alone, at_least=1)


@cli.command(**_PASSED_ON)
def demo(ctx: typer.Context) -> None:
    """Show the engine at work, and audit it."""
    from resilient.surface.demo.command import demo as command  # noqa: PLC0415 - only where needed

    alone = _plain()
    alone.command()(command)
    _pass_on(ctx, alone, at_least=0)


def _plain(**options: Any) -> typer.Typer:
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=names, **options
    )


def _pass_on(ctx: typer.Context, app: typer.Typer, *, at_least: int) -> None:
    """Hand the rest of the line to a command that lives elsewhere, with the shared options that were typed."""
    run: Context = ctx.obj
    arguments = list(ctx.args)
    if len(arguments) >= at_least:
        arguments += ["--database", run.typed_database] if run.typed_database else []
        arguments += ["--json"] if run.out.as_json else []
    command = typer.main.get_command(app)
    _finish(command, epilog="")
    raise typer.Exit(command.main(arguments, prog_name=ctx.command_path, standalone_mode=False) or 0)


# -- running -------------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """Run a command; errors are raised."""
    settings.read_file()
    for line in settings.misspelt(settings.options(_command()), os.environ):
        Output().remark(line)
    try:
        words = hoisted(arguments)
        result = _command().main(words, prog_name="resilient", standalone_mode=False, obj=which_of(words))
    except SystemExit as end:  # click's answer to a reader that has gone: a failure, without a word
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    except Exception as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            raise
        Output().say(usage_line(error) or "")
        return USAGE
    return result if isinstance(result, int) else OK


@cache
def _command() -> Any:
    """The tree of all commands; typer takes a tenth of a second to make it."""
    command = typer.main.get_command(cli)
    _finish(command)
    return command


def _finish(command: Any, epilog: str = SHARED) -> None:
    """Add to every help where the shared options are explained, and name the values of options by our own words."""
    for param in command.params:
        if param.param_type_name == "option" and param.metavar is None and not _says_itself(param):
            param.metavar = SHAPES.get(param.name, "TEXT")
    for one in getattr(command, "commands", {}).values():
        one.epilog = one.epilog or epilog
        _finish(one, epilog)


def _says_itself(param: Any) -> bool:
    """A flag takes nothing, and a choice lists what it takes. Asked of both shapes that typer's options have had."""
    kind = getattr(param, "type_descriptor", None) or getattr(param, "type", None)
    return bool(getattr(param, "is_flag", False) or getattr(kind, "choices", None))


def hoisted(arguments: Sequence[str]) -> list[str]:
    """The same line with the shared options in front, wherever they stood."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for one in words:
        if one == "--" or (one in OWN_OPTIONS and not [word for word in rest if not word.startswith("-")]):
            rest += [one, *words]
        elif one in FLAGS:
            front.append(one)
        elif one in VALUED:
            value = next(words, "")
            if not value or value.startswith("-"):
                raise SetupError(f"{one} needs a value, such as {VALUED[one]}")
            front += [one, value]
        elif one.startswith(tuple(f"{name}=" for name in VALUED)):
            front.append(one)
        else:
            rest.append(one)
    return front + rest


_NO_COMMAND: Final = re.compile(r"No such command '([a-z-]+)'")
_FEW: Final = 4


def usage_line(error: BaseException) -> str | None:
    """A wrong command line in one sentence; None for other errors.

    Told by shape: newer typers bring their own click, older ones import it.
    """
    if not callable(format_message := getattr(error, "format_message", None)):
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(format_message())
    ctx = getattr(error, "ctx", None)
    text = str(format_message()).rstrip(".").replace("Value error, ", "")
    if (wrong := _NO_COMMAND.match(text)) is not None and (elsewhere := _elsewhere(wrong[1])):
        text = f"{wrong[0]}. Did you mean {elsewhere}?"
    return text + (f" (see `{ctx.command_path} --help`)" if ctx is not None else "")


def _elsewhere(name: str) -> str:
    """The groups in which there is a command of that name: ``why`` is in two."""
    groups = getattr(_command(), "commands", {})
    places = [f"`resilient {group} {name}`" for group, one in groups.items() if name in getattr(one, "commands", {})]
    return " or ".join(places[:_FEW])


def errors(arguments: Sequence[str]) -> Output:
    """Where errors of this command line are printed."""
    try:
        return Output(options=which_of(hoisted(arguments)))
    except SetupError:  # an option lacks its value: that is the error
        return Output()
