"""``resilient sync ...``: where sync streams stand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from resilient.core.phrases import span
from resilient.surface.cli.exits import NotFound
from resilient.surface.cli.jobs import PageSize  # noqa: TC001 - typer evaluates annotations
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
    limit: PageSize = 50,
) -> None:
    """Show each stream's pass, and how far it is. Those that wait longest for the end of a pass come first."""
    run: Context = ctx.obj
    found = run.app.sync.streams.list(stream, pattern, part=part)
    if run.out.as_json:
        run.out.json({"streams": [one.to_json() for one in found]})
        return
    if not found:
        run.out.say("No stream that was read fits." if stream or pattern or part else "No stream was read yet.")
        return
    now, rows = run.now, []
    found.sort(key=lambda one: one.cursor.completed_at or _NEVER)
    for one in found[:limit]:
        c = one.cursor
        ended = f"{span((now - c.completed_at).total_seconds())} ago" if c.completed_at else "never"
        read = f"{c.records} in {c.pages} pages" + (f", {c.rejected} rejected" if c.rejected else "")
        cells = (one.stream, one.resource_key, one.part, one.doing, read, ended, c.error)
        folded = " ".join(filter(None, (one.resource_key, one.part))) + (f"; began anew: {c.error}" if c.error else "")
        rows.append(Row(*cells, folded=folded, whole=True))
    run.out.table(("STREAM", "RESOURCE", "PART", "DOING", "READ", "LAST END", "BEGAN ANEW"), rows, folds=(1, 2, 6))
    if len(found) > limit:
        run.out.say(f"... and {len(found) - limit:,} more: --limit, --resource", style="dim")


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


@sync.command("forget")
def forget(
    ctx: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="STREAM", help="The stream's name; without it all.")] = None,
    pattern: Pattern = None,
    part: Part = None,
) -> None:
    """Forget where streams stand, of accounts that are gone for good."""
    run: Context = ctx.obj
    count = run.app.sync.streams.forget(stream, pattern, part=part)
    if not count:
        raise NotFound("no such stream was read; `resilient sync status` lists those that were")
    if run.out.as_json:
        run.out.json({"forgotten": count})
    else:
        run.out.say(f"Forgot {count:,} cursor{'s' if count > 1 else ''}.")


_NEVER: Final = datetime.min.replace(tzinfo=UTC)
