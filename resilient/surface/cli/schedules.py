"""``resilient schedules ...``: recurring jobs."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.core.base.phrases import nearest, span, when
from resilient.surface.cli.exits import NotFound
from resilient.surface.cli.jobs import PageSize  # noqa: TC001 - typer evaluates annotations
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.schedules.schedule import ScheduledAccount, ScheduleInfo
    from resilient.surface.cli.context import Context

schedules = typer.Typer(help="Recurring jobs.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


@schedules.command("list")
def list_schedules(ctx: typer.Context) -> None:
    """List the schedules, with their next and last tick."""
    run: Context = ctx.obj
    infos = run.app.sync.schedules.list()
    if run.out.as_json:
        run.out.json({"schedules": [one.to_json() for one in infos]})
        return
    if not infos:
        run.out.say("There are no schedules.")
        return
    now, rows = run.now, []
    for one in infos:
        ahead = (one.next_at - now).total_seconds()
        due = "removed" if one.removed else "paused" if one.paused else f"in {span(ahead)}" if ahead > 0 else "due"
        last = f"{span((now - one.last_at).total_seconds())} ago" if one.last_at else "never"
        for_each = "" if one.accounts is None else f"{one.accounts:,} of {one.for_each}"
        rows.append(Row(one.name, one.timing, for_each or one.resource_key, due, last, one.last_state))
    run.out.table(("NAME", "TIMING", "ACCOUNTS", "NEXT", "LAST", "LAST JOB"), rows)


@schedules.command("show")
def show(
    ctx: typer.Context,
    name: Name,
    *,
    limit: PageSize = 50,
    after: Annotated[str | None, typer.Option(help="Those that follow this account.", show_default=False)] = None,
) -> None:
    """One schedule; of one for each account, every account's ticks."""
    run: Context = ctx.obj
    one = _known(run, name)
    accounts = run.app.sync.schedules.accounts(name, limit=limit, after=after or "")
    more = accounts[-1].resource_key if len(accounts) == limit else None
    if run.out.as_json:
        run.out.json({"schedule": one.to_json(), "accounts": [a.to_json() for a in accounts], "next": more})
        return
    now = run.now
    run.out.fields(
        [
            ("schedule", one.name + (" (removed)" if one.removed else " (paused)" if one.paused else "")),
            ("kind", one.kind),
            ("timing", one.timing),
            ("accounts", one.resource_key if one.accounts is None else f"{one.accounts:,} of {one.for_each}"),
            ("missed ticks", one.catch_up),
            ("overlap", one.overlap),
            ("next", when(one.next_at, now)),
            ("last", when(one.last_at, now) if one.last_at else "never"),
            ("last job", one.last_job and f"{one.last_job} ({one.last_state or 'deleted since'})"),
            ("last success", when(one.succeeded_at, now) if one.succeeded_at else "never"),
        ]
    )
    if accounts:
        run.out.table(
            ("ACCOUNT", "NEXT", "LAST", "LAST JOB", "LAST SUCCESS"), [_account_row(a, now) for a in accounts]
        )  # fmt: skip
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


def _account_row(a: ScheduledAccount, now: datetime) -> Row:
    last = when(a.last_at, now) if a.last_at else "never"
    succeeded = when(a.succeeded_at, now) if a.succeeded_at else "never"
    return Row(a.resource_key, when(a.next_at, now), last, a.last_state, succeeded)


@schedules.command("pause")
def pause(ctx: typer.Context, name: Name) -> None:
    """Let no tick of it happen until it is resumed."""
    _set(ctx.obj, name, paused=True)


@schedules.command("resume")
def resume(ctx: typer.Context, name: Name) -> None:
    """Go on with the next tick."""
    _set(ctx.obj, name, paused=False)


@schedules.command("run")
def run_now(
    ctx: typer.Context,
    name: Name,
    *,
    account: Annotated[
        str | None, typer.Option(help="Of a schedule for each account: which one.", show_default=False)
    ] = None,
) -> None:
    """Enqueue its job now, beside its ticks."""
    run: Context = ctx.obj
    _known(run, name)
    with run.audited("schedules run", name if account is None else f"{name} {account}") as outcome:
        done = run.app.sync.schedules.run(name, account)
        outcome["job"] = str(done.id)
    if run.out.as_json:
        run.out.json({"id": done.id, "created": done.created})
    elif done.created:
        run.out.say(f"Enqueued job {done.id}.")
    else:
        run.out.say(f"Job {done.id} of {name} is not finished, so no other one was enqueued.")


@schedules.command("remove")
def remove(ctx: typer.Context, name: Name) -> None:
    """Let one tick no more that no program declares any longer."""
    run: Context = ctx.obj
    _known(run, name)
    with run.audited("schedules remove", name):
        run.app.sync.schedules.remove(name)
    if run.out.as_json:
        run.out.json({"removed": name})
    else:
        run.out.say(f"{name} ticks no more. A program that declares it brings it back when it starts.")


def _set(run: Context, name: str, *, paused: bool) -> None:
    _known(run, name)
    api = run.app.sync.schedules
    with run.audited(f"schedules {'pause' if paused else 'resume'}", name):
        info = api.pause(name) if paused else api.resume(name)
    if run.out.as_json:
        run.out.json(info.to_json())
    elif paused:
        run.out.say(f"{name} is paused until somebody runs `resilient schedules resume {quote(name)}`.")
    else:
        run.out.say(f"{name} ticks again; next at {when(info.next_at, run.now)}.")


def _known(run: Context, name: str) -> ScheduleInfo:
    infos = {one.name: one for one in run.app.sync.schedules.list()}
    if name not in infos:
        raise NotFound(f"there is no schedule {name!r}{nearest(name, infos)}; known are: {', '.join(infos) or 'none'}")
    return infos[name]
