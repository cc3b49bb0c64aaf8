"""Running and keeping: ``enqueue``, ``status``, ``prune``, ``doctor`` and ``db ...``."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from resilient.core.accounts.tokens import UNREADABLE
from resilient.core.alerts.words import begun
from resilient.core.base.bounds import bounds
from resilient.core.base.errors import DatabaseUnreachable, InvalidInput, SetupError
from resilient.core.base.phrases import brief, counted, learnt_limit, rough, span, when
from resilient.core.base.resource_key import account
from resilient.core.inspect.blocked import held_lanes
from resilient.core.inspect.why import stands_still
from resilient.surface.cli import logs, output, settings
from resilient.surface.cli.exits import FAILED
from resilient.surface.cli.jobs import WORDS, DryRun, Yes, moment, read_json, tags_of
from resilient.surface.cli.jobs import span as span_of
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from resilient.core.alerts.overview import Overview, Trouble
    from resilient.core.alerts.rules import AlertInfo
    from resilient.core.inspect.retention import Pruned
    from resilient.core.inspect.why import WorkerSeen
    from resilient.core.jobs.records import AuditInfo
    from resilient.engine.app.app import Resilient
    from resilient.engine.inspect.doctor import Finding
    from resilient.surface.cli.context import Context

database = typer.Typer(help="The tables: make them, bring them up to date, check them.", no_args_is_help=True)


# -- dashboard, audit and enqueue ------------------------------------------------------------------------------


def dashboard(
    ctx: typer.Context,
    *,
    port: Annotated[
        int,
        typer.Option(envvar="RESILIENT_DASHBOARD_PORT", min=0, max=65535, help="Where on 127.0.0.1; 0: any free one."),
    ] = 8765,
    read_only: Annotated[bool, typer.Option("--read-only", help="Without payloads and without changes.")] = False,
    no_browser: Annotated[  # noqa: ARG001 - many type it: there is none to keep from opening
        bool, typer.Option("--no-browser", hidden=True, help="No browser is opened anyway.")
    ] = False,
    log: logs.LogShape = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Show what stands still and why, in a browser on this machine.

    The address that is printed opens it once. With --database it needs no program code.
    """
    from resilient.surface.web.dashboard.alone import serve  # noqa: PLC0415 - an extra, and only where needed

    run: Context = ctx.obj
    logs.set_up(log, log_level, run.out.options)

    def say(address: str) -> None:
        run.out.say(f"Dashboard: {address}")
        sys.stdout.flush()  # it may be a pipe

    with logs.last_words(log):
        shards = None if run.app_name is None else run.shards("a dashboard")
        app = None if shards else run.app
        try:
            if app is not None:
                app.ready_sync()
        except (DatabaseUnreachable, SetupError) as error:  # the pages say so too, and work once it is mended
            run.out.remark(f"warning: {error}")
        serve(shards or run.app, port, say, read_only=read_only, options=run.out.options)


def audit(
    ctx: typer.Context,
    *,
    who: Annotated[str | None, typer.Option(help="Only this person's changes.", show_default=False)] = None,
    subject: Annotated[str | None, typer.Option(help="Only changes of this.", show_default=False)] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=1, max=1000, help="How many.")] = 50,
    after: Annotated[int | None, typer.Option(help="Those before this number.", show_default=False)] = None,
) -> None:
    """List who changed what, why and when, the latest first.

    From the dashboard and from the command line, and what the program notes itself.
    """
    run: Context = ctx.obj
    rows = run.app.sync.audit.list(who=who, subject=subject, limit=limit, after=after)
    if run.out.as_json:
        run.out.json({"changes": [one.to_json() for one in rows], "next": rows[-1].id if len(rows) == limit else None})
        return
    if not rows:
        filters = {"by": who, "of": subject, "before": after}
        which = " ".join(f"{word} {value!r}" for word, value in filters.items() if value)
        run.out.say(f"No change {which} is noted." if which else "Nothing was changed by hand.")
        return
    now = run.now
    run.out.table(("WHEN", "WHO", "WHAT", "OF"), [_audit_row(one, now) for one in rows], folds=(3,))
    if len(rows) == limit:
        run.out.say(f"There may be more: --after {rows[-1].id}", style="dim")


def _audit_row(one: AuditInfo, now: datetime) -> Row:
    ended = "nobody knows how it ended" if one.outcome is None else _outcome(one.outcome)
    remark = "; ".join(part for part in (one.via, one.why, ended) if part)
    return Row(when(one.at, now), one.who, one.action, one.subject, remark=remark, folded=one.subject)


def _outcome(outcome: Mapping[str, Any]) -> str:
    parts = (
        f"{value} {WORDS[name]}" if "left alone" in WORDS.get(name, "") else f"{name.replace('_', ' ')} {value}"
        for name, value in outcome.items()
        if value not in (0, [], "")
    )
    return ", ".join(parts)


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
    run.go_to_shard_of(resource, strictly=True)
    app = run.program("enqueueing")
    with run.audited("enqueue", f"{kind} on {resource}") as outcome:
        done = app.sync.enqueue(kind, read_json(payload), resource_key=resource, **options)
        outcome["job"] = str(done.id)
    if run.out.as_json:
        run.out.json({"id": done.id, "created": done.created})
    else:
        run.out.say(str(done.id) if done.created else f"{done.id} (it has that unique key already; nothing was added)")


# -- status --------------------------------------------------------------------------------------------------


def status(ctx: typer.Context) -> None:
    """Everything at a glance.

    Jobs, workers, what is stopped (since when, until when, how many wait, an example), what fails.
    """
    from resilient.store.inspect.why import overview_soon  # noqa: PLC0415 - the store: only where needed

    run: Context = ctx.obj
    run.app.ready_sync()
    view = run.app.database.transaction_sync(overview_soon)
    if run.out.as_json:
        run.out.json(view.to_json())
        return
    _show_jobs(run, view)
    _show_workers(run, view)
    _show_stopped(run, view)
    if view.lanes:
        run.out.paragraph(held_lanes(view.lanes, view.lane_count), style="bold red")
    _show_learnt(run, view)
    _show_troubles(run, "Dead within the last hour", view.died, view)
    _show_troubles(run, "Failed, to be tried again", view.retrying, view)
    _show_alerts(run, view)


def _show_jobs(run: Context, view: Overview) -> None:
    run.out.say(f"{run.app.database.address} at {view.at:%Y-%m-%d %H:%M:%S} UTC", style="dim")
    counts = [f"{view.jobs[name]:,}{'+' if view.jobs[name].more else ''} {name}" for name in view.jobs]
    run.out.say("Jobs now:   " + ", ".join(counts))
    ended = [f"{n:,}{'+' if n.more else ''} {name}" for name, n in view.lately.items()]
    run.out.say("Last hour:  " + ", ".join(ended))
    if view.overdue:
        run.out.say(f"{counted(view.overdue, 'scheduled job is', 'scheduled jobs are')} overdue.", style="yellow")
    if view.stranded:
        whose = "its" if view.stranded == 1 else "their"
        text = f"{counted(view.stranded, 'resource')} lost {whose} turn; workers repair that. Please report it."
        run.out.say(text, style="bold red")


def _show_workers(run: Context, view: Overview) -> None:
    active = [worker for worker in view.workers if not worker.stopping]
    slots, busy = sum(w.concurrency for w in active), sum(w.running for w in active)
    if active:
        run.out.say(f"Workers:    {len(active)} alive, {busy:,} of {slots:,} slots busy{_heard(view, active)}")
        if still := [w.loop_lag for w in active if stands_still(w.loop_lag)]:
            loops, longest = counted(len(still), "event loop"), span(max(filter(None, still)))
            run.out.say(f"            {loops} stood still, for up to {longest}: the log says where", style="yellow")
    else:
        run.out.say("Workers:    none is running: start one with `resilient worker`", style="bold red")


def _heard(view: Overview, active: Sequence[WorkerSeen]) -> str:
    """When the workers said how many slots are busy, if more or fewer jobs run by now."""
    if sum(worker.running for worker in view.workers) == int(view.jobs["running"]):
        return ""
    return f", as heard {span((view.at - min(worker.seen_at for worker in active)).total_seconds())} ago"


def _show_stopped(run: Context, view: Overview) -> None:
    if view.unserved and any(not worker.stopping for worker in view.workers):
        kinds = ", ".join(f"{number:,}{'+' if number.more else ''} {kind}" for kind, number in view.unserved.items())
        run.out.paragraph(
            f"No worker: ready jobs of kinds that no running worker has: {kinds}. Start one with the program that lists"
            " their handlers",
            style="bold red",
        )
    if view.unserved_accounts:
        few = list(view.unserved_accounts.items())[:_MOST_UNSERVED]
        accounts = ", ".join(f"{number:,}{'+' if number.more else ''} of {name}" for name, number in few)
        others = len(view.unserved_accounts) - len(few)
        more = f" and {others:,} more accounts" if others else ""
        run.out.paragraph(
            f"No worker: ready jobs of resources that no running worker serves: {accounts}"
            f"{more}. Start one without --resource, or with one that fits",
            style="bold red",
        )
    if not view.stopped:
        run.out.say("Stopped:    nothing", style="green")
        return
    run.out.heading("Stopped")
    run.out.table(output.GROUP_HEADERS, [output.group_row(group, view.at) for group in view.stopped], right=(2, 3))
    first = view.stopped[0]
    more = f"More: `resilient resources why {first.example}`, `resilient resources list --stopped`"
    run.out.paragraph(more, indent=2, style="dim")


def _show_learnt(run: Context, view: Overview) -> None:
    if not view.learnt:
        return
    run.out.heading("Learnt limits")
    for key, limit in list(view.learnt.items())[:_MOST_LEARNT]:
        run.out.say(f"  {key}: {learnt_limit(limit, view.at)}")
    if (more := len(view.learnt) - _MOST_LEARNT) > 0:
        run.out.say(f"  and of {counted(more, 'resource')} more: `resilient resources show KEY`", style="dim")


def _show_troubles(run: Context, title: str, troubles: list[Trouble], view: Overview) -> None:
    if not troubles:
        return
    run.out.heading(title)
    rows = []
    for one in troubles[:_MOST_TROUBLES]:
        again = None if one.next_at is None else _next_try(one.next_at, view.at)
        remark = f"{one.example} {brief(one.error)}"
        code = one.error_code if one.codes == 1 else f"{one.codes:,} codes"
        remark += "" if one.codes == 1 else f" ({one.error_code}; all codes are of {account(one.resource_key)})"
        rows.append(Row(one.kind, one.error_kind, code, one.count, again, remark=remark, whole=True))
    dead = troubles[0].next_at is None
    run.out.table(("KIND", "ERROR", "CODE", "JOBS", "" if dead else "NEXT TRY"), rows, right=(3,))
    if (more := len(troubles) - _MOST_TROUBLES) > 0:
        which = "resilient dead list" if dead else "resilient jobs list --state scheduled"
        run.out.say(f"  and {counted(more, 'more group', 'more groups')}: `{which}`", style="dim")


def _next_try(at: datetime, now: datetime) -> str:
    ahead = (at - now).total_seconds()
    return f"in {rough(ahead, nearest=True)}" if ahead > 0 else f"due {rough(-ahead)}"


def _show_alerts(run: Context, view: Overview) -> None:
    """Alerts that last, without those that the lines above show already."""
    others = [one for one in view.alerts if not _is_above(one, view)]
    if not others:
        return
    looked = view.at if any(not one.stopping for one in view.workers) else max(one.last_at for one in others)
    notices = begun([(one, True) for one in others], {}, looked)
    stale = "" if looked == view.at else f", as they were at {when(looked, view.at)}: without a worker nobody looks"
    run.out.heading(f"Alerts{stale}")
    for notice in notices[:10]:
        run.out.paragraph(notice.text, indent=2)
    if len(notices) > 10:  # noqa: PLR2004 - a screenful
        run.out.say(f"  ... and {len(notices) - 10} more", style="dim")


def _is_above(alert: AlertInfo, view: Overview) -> bool:
    """Whether the lines above show it; those of an account that workers pass over for want of a key do not."""
    if alert.detail.get("auth") == UNREADABLE:
        provider = alert.subject.partition("/")[0]
        return any((one.provider, one.gate, one.code) == (provider, "auth", UNREADABLE) for one in view.stopped)
    return alert.name in _SHOWN


_MOST_LEARNT: Final = 10  # lines
_MOST_TROUBLES: Final = 10  # lines
_MOST_UNSERVED: Final = 5  # accounts in one line
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
    pruned = app.prune_sync(**options, dry_run=True)
    if dry_run or not pruned.total:
        _say_pruned(run, pruned, dry_run=dry_run)
        return
    if not run.out.confirm(f"Delete {_pruned(pruned)} for good?", yes=yes):
        raise typer.Exit(FAILED)
    _say_pruned(run, app.prune_sync(**options), dry_run=False)


def _pruned(pruned: Pruned) -> str:
    names = {
        "attempts": ("old execution",), "resources": ("idle resource",), "events": ("published event",),
        "inbox": ("message of the inbox", "messages of the inbox"),
    }  # fmt: skip
    parts = [counted(n, *names.get(name, (f"{name} job",))) for name, n in pruned.to_json().items() if n]
    return ", ".join(parts) or "nothing"


def _say_pruned(run: Context, pruned: Pruned, *, dry_run: bool) -> None:
    if run.out.as_json:
        run.out.json({**pruned.to_json(), "dry_run": dry_run})
    else:
        run.out.say(f"{'Would delete' if dry_run else 'Deleted'} {_pruned(pruned)}.")


def doctor(
    ctx: typer.Context,
    *,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All settings and bounds, also the usual.")] = False,
) -> None:
    """Look for what is wrong, or soon will be.

    With the database, its settings and tables, and the workers. Exit status 1 if something fails. Prints the settings
    that were made and where each comes from, and hides secrets.
    """
    run: Context = ctx.obj
    findings = asyncio.run(_examined(run.app))
    findings += _misnamed(ctx)
    failed = any(one.level == "fail" for one in findings)
    rows = settings.listed(ctx.find_root().command, settings.typed(ctx))
    if run.out.as_json:
        document = {
            "healthy": not failed, "findings": findings, "settings": [one._asdict() for one in rows],
            "bounds": bounds(),
        }  # fmt: skip
        run.out.json(document)
    else:
        marks = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
        for one in findings:
            mark, style = marks[one.level]
            run.out.say(mark, style=style, end="  ")
            run.out.say(f"{one.name}: {one.message}")
            if one.remedy:
                run.out.say(f"      -> {one.remedy}", style="dim")
        _say_settings(run, rows, verbose=verbose)
    if failed:
        raise typer.Exit(FAILED)
    if verbose and not run.out.as_json:  # behind what is wrong nobody would look for it
        _say_bounds(run)


def _misnamed(ctx: typer.Context) -> list[Finding]:
    """Variables that look like settings and are none."""
    from resilient.engine.inspect.doctor import Finding  # noqa: PLC0415 - as above

    names = settings.unknown(settings.options(ctx.find_root().command), os.environ)
    remedy = (
        f"the settings are below; remove what is not meant for resilient, or begin it with other than {settings.PREFIX}"
    )
    text = f"{', '.join(names)}: in the environment, and no setting"
    return [Finding("settings", "warn", text, remedy)] if names else []


def _say_settings(run: Context, rows: list[settings.Setting], *, verbose: bool) -> None:
    """Those that were made; the others, and the bounds, are counted unless ``verbose``."""
    made = rows if verbose else [one for one in rows if one.source != "default"]
    run.out.heading("Settings: an option, then the environment, then .env, then the default")
    if made:
        run.out.table(("setting", "value", "from"), [Row(*one) for one in made])
    if not verbose:
        usual = f"{counted(len(rows) - len(made), 'setting has its', 'settings have their')} default"
        usual += "" if len(rows) - len(made) == 1 else "s"
        bound = counted(len(bounds()), "bound")
        run.out.paragraph(f"{usual}, and {bound} hold for what comes from outside: `resilient doctor --verbose`")


def _say_bounds(run: Context) -> None:
    run.out.heading("Believed from outside, at most")
    rows = [Row(one.name, counted(one.value, one.unit.removesuffix("s")), one.beyond, one.setting) for one in bounds()]
    run.out.table(("bound", "most", "beyond it", "setting"), rows, folds=(2, 3))


async def _examined(app: Resilient) -> list[Finding]:
    from resilient.engine.inspect.doctor import examine  # noqa: PLC0415 - as above

    try:
        return await examine(
            app.database, listen_url=app.listen_url, providers=app.providers.values(),
            keys=app.grants.accounts.ring.key_ids, makes_tables=app.ground.tables.upgrade,
            own_table=app.grants.accounts.store is not None,
        )  # fmt: skip
    finally:  # its connections belong to this loop
        await app.close()


@database.command("upgrade")
def db_upgrade(ctx: typer.Context) -> None:
    """Make the tables, or bring them up to date.

    Safe to run at any time, and by several processes at once.
    """
    from resilient.store.db import schema  # noqa: PLC0415 - as above

    run: Context = ctx.obj
    applied = schema.upgrade_sync(run.app.database)
    if applied:  # afterwards: before the first one there is no audit
        with run.audited("db upgrade", schema.head()) as outcome:
            outcome["applied"] = len(applied)
    present = schema.current_sync(run.app.database)
    if run.out.as_json:
        run.out.json({"applied": applied, "revision": present, "needs": schema.head()})
    elif applied:
        run.out.say(f"Applied {', '.join(applied)}: the tables are at revision {present}.")
    else:
        run.out.say(f"Nothing to do: the tables are at revision {present}{_newer(present)}.")


@database.command("check")
def db_check(ctx: typer.Context) -> None:
    """Whether the tables fit this version; exit status 4 if not."""
    from resilient.store.db import schema  # noqa: PLC0415 - as above

    run: Context = ctx.obj
    schema.check_sync(run.app.database)
    present = schema.current_sync(run.app.database)
    if run.out.as_json:
        run.out.json({"revision": present, "needs": schema.head()})
    else:
        run.out.say(f"The tables fit: revision {present}{_newer(present)}.")


def _newer(present: str | None) -> str:
    """What is to be said of tables that newer code has made, and that fit."""
    from resilient.store.db import schema  # noqa: PLC0415 - as above

    return "" if present == schema.head() else f", made by a newer version; this one needs {schema.head()}"


__all__ = ["database", "doctor", "enqueue", "prune", "status"]
