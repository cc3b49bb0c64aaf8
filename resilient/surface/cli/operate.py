"""Running and keeping: ``worker``, ``enqueue``, ``status``, ``prune``, ``doctor`` and ``db ...``."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from resilient.core.alert_groups import begun
from resilient.core.bounds import bounds
from resilient.core.errors import InvalidInput
from resilient.core.phrases import brief, counted, rough, when
from resilient.surface.cli import views
from resilient.surface.cli.exits import FAILED
from resilient.surface.cli.filters import moment, tags_of
from resilient.surface.cli.filters import span as span_of
from resilient.surface.cli.jobs import DryRun, Yes, read_json
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.overview import Overview, Trouble
    from resilient.core.retention import Pruned
    from resilient.engine.app import Resilient
    from resilient.engine.checks import Finding
    from resilient.surface.cli.context import Context

database = typer.Typer(help="The tables: make them, bring them up to date, check them.", no_args_is_help=True)


# -- worker and enqueue --------------------------------------------------------------------------------------


def worker(
    ctx: typer.Context,
    *,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Jobs at once.")] = 50,
    kinds: Annotated[list[str] | None, typer.Option("--kind", "-k", help="Only this kind; may be repeated.")] = None,
    lease: Annotated[float, typer.Option(min=1, help="Seconds until a vanished worker's jobs run elsewhere.")] = 60,
    grace: Annotated[float, typer.Option(min=0, help="Seconds running jobs get when it is stopped.")] = 30,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run jobs until stopped.

    SIGTERM or Ctrl-C lets running jobs finish; a second one hands them back at once.
    """
    run: Context = ctx.obj
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise InvalidInput(f"--log-level {log_level!r}: use debug, info, warning or error")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(max(level, logging.WARNING))  # it logs whole addresses
    logging.getLogger("alembic").setLevel(max(level, logging.WARNING))  # two lines for each look at the tables
    app = run.program("a worker")
    asyncio.run(_work(app, concurrency=concurrency, kinds=kinds or None, lease=lease, grace=grace))


async def _work(app: Any, **options: Any) -> None:
    from resilient.engine.services import exit_if_stuck  # noqa: PLC0415 - half a second of imports, only where needed

    worker = app.worker(**options)
    try:
        await worker.run()  # it waits for a database that is away
    finally:
        await app.close()
    exit_if_stuck(worker)


def enqueue(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="The kind of job.")],
    payload: Annotated[str, typer.Argument(metavar="PAYLOAD", help="JSON, @file or - for standard input.")] = "null",
    *,
    resource: Annotated[str, typer.Option("--resource", "-r", help="What it goes through, such as github/acct-7.")],
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Higher runs first.")] = 0,
    delay: Annotated[str | None, typer.Option(help="Start later: 30s, 15m, 2h.", show_default=False)] = None,
    run_at: Annotated[str | None, typer.Option(help="Start at: 2030-01-31T12:00Z.", show_default=False)] = None,
    expires_in: Annotated[str | None, typer.Option(help="Give up if not started by then.", show_default=False)] = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Default: the handler's.", show_default=False)] = None,
    unique_key: Annotated[str | None, typer.Option(help="At most one waiting job has it.", show_default=False)] = None,
    ordering_key: Annotated[
        str | None, typer.Option(help="Jobs of one resource and key run one after the other.", show_default=False)
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Wait for this job to succeed; may be repeated.")
    ] = None,
    on_dead: Annotated[
        Literal["cancel", "wait", "run"], typer.Option(help="What becomes of it if one of those dies.")
    ] = "cancel",
    idempotency_key: Annotated[str | None, typer.Option(help="Default: the job's id.", show_default=False)] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", "-t", help="name=value; may be repeated.")] = None,
) -> None:
    """Enqueue one job; prints its id."""
    run: Context = ctx.obj
    options: dict[str, Any] = {
        "priority": priority, "max_attempts": max_attempts, "unique_key": unique_key,
        "ordering_key": ordering_key, "after": after or (), "on_dead": on_dead,
        "idempotency_key": idempotency_key, "tags": tags_of(tag or []) or None,
        "delay": span_of("--delay", delay) if delay else None,
        "expires_in": span_of("--expires-in", expires_in) if expires_in else None,
    }  # fmt: skip
    if run_at is not None:
        at = moment("--run-at", run_at)
        if isinstance(at, timedelta):
            raise InvalidInput(f"--run-at {run_at!r}: for a length of time say --delay")
        options["run_at"] = at
    app = run.program("enqueueing")
    done = app.sync.enqueue(kind, read_json(payload), resource_key=resource, **options)
    if run.out.as_json:
        run.out.json({"id": done.id, "created": done.created})
    else:
        run.out.say(str(done.id) if done.created else f"{done.id} (it has that unique key already; nothing was added)")


# -- status --------------------------------------------------------------------------------------------------


def status(ctx: typer.Context) -> None:
    """Everything at a glance.

    Jobs, workers, what is stopped (since when, until when, how many wait, an example), what fails.
    """
    from resilient.store.overview import overview  # noqa: PLC0415 - the store: only where needed

    run: Context = ctx.obj
    run.app.ready_sync()
    seen = run.app.database.transaction_sync(overview)
    if run.out.as_json:
        run.out.json(seen.to_json())
        return
    _show_jobs(run, seen)
    _show_workers(run, seen)
    _show_stopped(run, seen)
    _show_troubles(run, "Dead within the last hour", seen.died, seen)
    _show_troubles(run, "Failed, to be tried again", seen.retrying, seen)
    _show_alerts(run, seen)


def _show_jobs(run: Context, seen: Overview) -> None:
    run.out.say(f"{run.app.database.address} at {seen.at:%Y-%m-%d %H:%M:%S} UTC", style="dim")
    counts = [f"{seen.jobs[name]:,}{'+' if seen.jobs[name].more else ''} {name}" for name in seen.jobs]
    run.out.say("Jobs now:   " + ", ".join(counts))
    ended = [f"{n:,}{'+' if n.more else ''} {name}" for name, n in seen.lately.items()]
    run.out.say("Last hour:  " + ", ".join(ended))
    if seen.overdue:
        run.out.say(f"{counted(seen.overdue, 'scheduled job is', 'scheduled jobs are')} overdue.", style="yellow")
    if seen.stranded:
        text = f"{counted(seen.stranded, 'resource')} lost their turn; workers repair that. Please report it."
        run.out.say(text, style="bold red")


def _show_workers(run: Context, seen: Overview) -> None:
    active = [worker for worker in seen.workers if not worker.stopping]
    slots, busy = sum(w.concurrency for w in active), sum(w.running for w in active)
    if active:
        run.out.say(f"Workers:    {len(active)} running, {busy:,} of {slots:,} slots busy")
    else:
        run.out.say("Workers:    none is running: start one with `resilient worker`", style="bold red")


def _show_stopped(run: Context, seen: Overview) -> None:
    if seen.unserved and any(not worker.stopping for worker in seen.workers):
        told = ", ".join(f"{number:,}{'+' if number.more else ''} {kind}" for kind, number in seen.unserved.items())
        run.out.paragraph(
            f"No worker: ready jobs of kinds that no running worker has: {told}. Start one with the program that lists"
            " their handlers",
            style="bold red",
        )
    if not seen.stopped:
        run.out.say("Stopped:    nothing", style="green")
        return
    run.out.heading("Stopped")
    run.out.table(views.GROUP_HEADERS, [views.group_row(group, seen.at) for group in seen.stopped], right=(2, 3))
    first = seen.stopped[0]
    more = f"More: `resilient resources why {first.example}`, `resilient resources list --stopped`"
    run.out.paragraph(more, indent=2, style="dim")


def _show_troubles(run: Context, title: str, troubles: list[Trouble], seen: Overview) -> None:
    if not troubles:
        return
    run.out.heading(title)
    rows = []
    for one in troubles[:10]:
        again = None if one.next_at is None else _next_try(one.next_at, seen.at)
        remark = f"{one.example} {brief(one.error)}"
        rows.append(Row(one.kind, one.error_kind, one.error_code, one.count, again, remark=remark, whole=True))
    last = "" if troubles[0].next_at is None else "NEXT TRY"
    run.out.table(("KIND", "ERROR", "CODE", "JOBS", last), rows, right=(3,))


def _next_try(at: datetime, now: datetime) -> str:
    ahead = (at - now).total_seconds()
    return f"in {rough(ahead)}" if ahead > 0 else f"due {rough(-ahead)}"


def _show_alerts(run: Context, seen: Overview) -> None:
    """What people were told and is not over; what stands above already is left out."""
    told = [one for one in seen.alerts if one.name not in _SHOWN]
    if not told:
        return
    looked = seen.at if any(not one.stopping for one in seen.workers) else max(one.last_at for one in told)
    notices = begun([(one, True) for one in told], {}, looked)
    stale = "" if looked == seen.at else f", as they were at {when(looked, seen.at)}: without a worker nobody looks"
    run.out.heading(f"Alerts{stale}")
    for notice in notices[:10]:
        run.out.paragraph(notice.text, indent=2)
    if len(notices) > 10:  # noqa: PLR2004 - a screenful
        run.out.say(f"  ... and {len(notices) - 10} more", style="dim")


_SHOWN: Final = ("dead", "new_error", "circuit_open", "needs_reauth")  # stand above, as what is stopped or fails

# -- housekeeping --------------------------------------------------------------------------------------------


def prune(
    ctx: typer.Context,
    *,
    older_than: Annotated[
        str | None, typer.Option(help="Finished longer ago than: 7d, 12h.", show_default=False, metavar="SPAN")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", "-s", help="Only those: succeeded, dead, cancelled; may be repeated.", metavar="STATE"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-l", min=1, help="Delete no more jobs than this.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete what is kept no longer.

    Without options, what the program's retention says: old jobs, history, idle resources. --older-than and --state
    mean finished jobs alone. The oldest go first, with their history, in batches.
    """
    run: Context = ctx.obj
    app = run.app
    age = None if older_than is None else span_of("--older-than", older_than)
    options: dict[str, Any] = {"older_than": age, "state": state, "limit": limit}
    found = app.prune_sync(**options, dry_run=True)
    if dry_run or not found.total:
        _say_pruned(run, found, dry_run=dry_run)
        return
    if not run.out.confirm(f"Delete {_pruned(found)} for good?", yes=yes):
        raise typer.Exit(FAILED)
    _say_pruned(run, app.prune_sync(**options), dry_run=False)


def _pruned(found: Pruned) -> str:
    names = {
        "attempts": "old executions", "resources": "idle resources", "events": "published events",
        "inbox": "messages of the inbox",
    }  # fmt: skip
    told = [f"{number:,} {names.get(name, name + ' jobs')}" for name, number in found.to_json().items() if number]
    return ", ".join(told) or "nothing"


def _say_pruned(run: Context, found: Pruned, *, dry_run: bool) -> None:
    if run.out.as_json:
        run.out.json({**found.to_json(), "dry_run": dry_run})
    else:
        run.out.say(f"{'Would delete' if dry_run else 'Deleted'} {_pruned(found)}.")


def doctor(ctx: typer.Context) -> None:
    """Look for what is wrong, or soon will be.

    With the database, its settings and tables, and the workers. Exit status 1 if something fails.
    """
    run: Context = ctx.obj
    found = asyncio.run(_examined(run.app))
    failed = any(one.level == "fail" for one in found)
    if run.out.as_json:
        run.out.json({"healthy": not failed, "findings": found, "bounds": bounds()})
    else:
        marks = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
        for one in found:
            mark, style = marks[one.level]
            run.out.console.print(mark, style=style, end="  ")
            run.out.say(f"{one.name}: {one.message}")
            if one.remedy:
                run.out.say(f"      -> {one.remedy}", style="dim")
    if failed:
        raise typer.Exit(FAILED)
    if not run.out.as_json:  # behind what is wrong nobody would look for it
        _say_bounds(run)


def _say_bounds(run: Context) -> None:
    run.out.heading("Believed from outside, at most")
    rows = [Row(one.name, f"{one.value:,} {one.unit}", one.beyond, one.setting) for one in bounds()]
    run.out.table(("bound", "most", "beyond it", "setting"), rows, folds=(2, 3))


async def _examined(app: Resilient) -> list[Finding]:
    from resilient.engine.doctor import examine  # noqa: PLC0415 - as above

    try:
        return await examine(
            app.database, listen_url=app.listen_url, providers=app.providers.values(),
            keys=app.grants.accounts.ring.key_ids,
        )  # fmt: skip
    finally:  # its connections belong to this loop
        await app.close()


@database.command("upgrade")
def db_upgrade(ctx: typer.Context) -> None:
    """Make the tables, or bring them up to date.

    Safe to run at any time, and by several processes at once.
    """
    from resilient.store import schema  # noqa: PLC0415 - as above

    run: Context = ctx.obj
    applied = schema.upgrade_sync(run.app.database)
    if run.out.as_json:
        run.out.json({"applied": applied, "revision": schema.head()})
    elif applied:
        run.out.say(f"Applied {', '.join(applied)}: the tables are at revision {schema.head()}.")
    else:
        run.out.say(f"Nothing to do: the tables are at revision {schema.head()}.")


@database.command("check")
def db_check(ctx: typer.Context) -> None:
    """Whether the tables fit this version; exit status 4 if not."""
    from resilient.store import schema  # noqa: PLC0415 - as above

    run: Context = ctx.obj
    schema.check_sync(run.app.database)
    if run.out.as_json:
        run.out.json({"revision": schema.head()})
    else:
        run.out.say(f"The tables fit: revision {schema.head()}.")


__all__ = ["database", "doctor", "enqueue", "prune", "status", "worker"]
