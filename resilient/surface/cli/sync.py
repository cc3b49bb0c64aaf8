"""``resilient sync ...``: where sync streams stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from resilient.core.phrases import span
from resilient.surface.cli.exits import NotFound
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from resilient.surface.cli.context import Context

sync = typer.Typer(help="Sync streams: where they stand.", no_args_is_help=True)
Pattern = Annotated[
    str | None,
    typer.Option("--resource", "-r", metavar="PATTERN", help="Only of these resources, as github/*."),
]
Part = Annotated[str | None, typer.Option(help="Only this part (the stream's parameters, as `status` shows them).")]


@sync.command("status")
def status(
    ctx: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="STREAM", help="Only this stream.")] = None,
    pattern: Pattern = None,
    part: Part = None,
) -> None:
    """Show each stream's pass, and how far it is."""
    run: Context = ctx.obj
    found = run.app.sync.streams.list(stream, pattern, part=part)
    if run.out.as_json:
        run.out.json({"streams": [one.to_json() for one in found]})
        return
    if not found:
        run.out.say("No stream was read yet.")
        return
    now, rows = run.now, []
    for one in found:
        c = one.cursor
        ended = f"{span((now - c.completed_at).total_seconds())} ago" if c.completed_at else "never"
        read = f"{c.records} in {c.pages} pages" + (f", {c.rejected} rejected" if c.rejected else "")
        rows.append(Row(one.stream, one.resource_key, one.part, one.doing, read, ended, c.error))
    run.out.table(("STREAM", "RESOURCE", "PART", "DOING", "READ", "LAST END", "BEGAN ANEW"), rows)


@sync.command("reset")
def reset(
    ctx: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    pattern: Pattern = None,
    part: Part = None,
) -> None:
    """Let the next pass of a stream be a full one."""
    run: Context = ctx.obj
    count = run.app.sync.streams.reset(stream, pattern, part=part, reason="reset from the command line")
    if not count:
        raise NotFound(f"no stream {stream!r} was read there; `resilient sync status` lists those that were")
    if run.out.as_json:
        run.out.json({"reset": count})
    else:
        run.out.say(f"The next pass of {count} stream{'s' if count > 1 else ''} reads everything.")
