"""``resilient schedules ...``: recurring jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from resilient.core.phrases import span, when
from resilient.surface.cli.exits import NotFound
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from resilient.surface.cli.context import Context

schedules = typer.Typer(help="Recurring jobs.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


@schedules.command("list")
def list_schedules(ctx: typer.Context) -> None:
    """List the schedules, with their next and last tick."""
    run: Context = ctx.obj
    found = run.app.sync.schedules.list()
    if run.out.as_json:
        run.out.json({"schedules": [one.to_json() for one in found]})
        return
    if not found:
        run.out.say("There are no schedules.")
        return
    now, rows = run.now, []
    for one in found:
        ahead = (one.next_at - now).total_seconds()
        due = "removed" if one.removed else "paused" if one.paused else f"in {span(ahead)}" if ahead > 0 else "due"
        last = f"{span((now - one.last_at).total_seconds())} ago" if one.last_at else "never"
        rows.append(Row(one.name, one.timing, due, last, one.last_state))
    run.out.table(("NAME", "TIMING", "NEXT", "LAST", "LAST JOB"), rows)


@schedules.command("pause")
def pause(ctx: typer.Context, name: Name) -> None:
    """Let no tick of it happen until it is resumed."""
    _set(ctx.obj, name, paused=True)


@schedules.command("resume")
def resume(ctx: typer.Context, name: Name) -> None:
    """Go on with the next tick."""
    _set(ctx.obj, name, paused=False)


@schedules.command("run")
def run_now(ctx: typer.Context, name: Name) -> None:
    """Enqueue its job now, beside its ticks."""
    run: Context = ctx.obj
    _known(run, name)
    done = run.app.sync.schedules.run(name)
    if run.out.as_json:
        run.out.json({"id": done.id, "created": done.created})
    elif done.created:
        run.out.say(f"Enqueued job {done.id}.")
    else:
        run.out.say(f"Job {done.id} of {name} is not finished, so no other one was enqueued.")


def _set(run: Context, name: str, *, paused: bool) -> None:
    _known(run, name)
    api = run.app.sync.schedules
    found = api.pause(name) if paused else api.resume(name)
    if run.out.as_json:
        run.out.json(found.to_json())
    elif paused:
        run.out.say(f"{name} is paused until somebody runs `resilient schedules resume {name}`.")
    else:
        run.out.say(f"{name} ticks again; next at {when(found.next_at, run.now)}.")


def _known(run: Context, name: str) -> None:
    names = [one.name for one in run.app.sync.schedules.list()]
    if name not in names:
        raise NotFound(f"there is no schedule {name!r}; known are: {', '.join(names) or 'none'}")
