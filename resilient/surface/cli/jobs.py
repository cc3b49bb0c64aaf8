"""``resilient jobs ...`` and ``resilient dead ...``."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from resilient.core.errors import InvalidInput
from resilient.core.phrases import counted
from resilient.surface.cli import views
from resilient.surface.cli.exits import FAILED
from resilient.surface.cli.filters import Criteria, filtered, moment, tags_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.core.changed import Edited
    from resilient.surface.cli.context import Context
    from resilient.surface.cli.output import Output

jobs = typer.Typer(help="Look at jobs and change them.", no_args_is_help=True)
dead = typer.Typer(help="Dead letters: see them, replay them, give them up.", no_args_is_help=True)

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Job ids; or say which by options.", show_default=False)
]
Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only count what would be changed.")]
All = Annotated[bool, typer.Option("--all", help="All jobs that can be; without it, no filter is an error.")]
Limit = Annotated[int | None, typer.Option("--limit", "-l", min=1, help="Look at no more jobs than this.")]
Rate = Annotated[str | None, typer.Option("--rate", help="Spread their start, such as 10/s or 600/min.")]
RepeatAmbiguous = Annotated[
    bool, typer.Option("--repeat-ambiguous", help="Also jobs whose last request may have taken effect.")
]
NewOperation = Annotated[
    bool, typer.Option("--new-operation", help="Under a new idempotency key: the provider does it again.")
]
PageSize = Annotated[int, typer.Option("--limit", "-l", min=1, max=10_000, help="How many.")]
After = Annotated[str | None, typer.Option("--after", help="Those that follow this id.", show_default=False)]
Order = Annotated[Literal["newest", "oldest"], typer.Option("--order", help="Which come first.")]


# -- looking -------------------------------------------------------------------------------------------------


@jobs.command("list")
@filtered()
def list_jobs(
    ctx: typer.Context, *, limit: PageSize = 50, after: After = None, order: Order = "newest", criteria: Criteria
) -> None:
    """List jobs, the newest first."""
    _list(ctx.obj, criteria, limit, after, order)


@dead.command("list")
@filtered(without=("state", "worker", "struggling"))
def list_dead(
    ctx: typer.Context, *, limit: PageSize = 50, after: After = None, order: Order = "newest", criteria: Criteria
) -> None:
    """List dead jobs, the newest first."""
    _list(ctx.obj, {**criteria, "state": "dead"}, limit, after, order)


def _list(run: Context, criteria: Criteria, limit: int, after: str | None, order: Literal["newest", "oldest"]) -> None:
    found = run.app.sync.jobs.list(limit=limit, after=after, order=order, payloads=run.out.as_json, **criteria)
    more = found[-1].id if len(found) == limit else None
    if run.out.as_json:
        run.out.json({"jobs": [job.to_json() for job in found], "next": more})
        return
    if not found:
        only_dead = criteria.keys() == {"state"} and criteria["state"] == "dead"
        run.out.say("No job is dead." if only_dead else "No job fits." if criteria else "There are no jobs.")
        return
    now = run.now
    run.out.table(views.JOB_HEADERS, [views.job_row(job, now) for job in found], folds=views.JOB_FOLDS)
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


@jobs.command("count")
@filtered()
def count_jobs(ctx: typer.Context, *, criteria: Criteria) -> None:
    """Count jobs, up to 10,000."""
    run: Context = ctx.obj
    found = run.app.sync.jobs.count(**criteria)
    if run.out.as_json:
        run.out.json({"count": int(found), "more": found.more})
    else:
        run.out.say(str(found))


@jobs.command("show")
@dead.command("show")
def show(ctx: typer.Context, job_id: Id) -> None:
    """Everything about one job.

    Its values and history, and why it stands where it stands.
    """
    run: Context = ctx.obj
    api = run.app.sync.jobs
    job, attempts, why = api.get(job_id), api.attempts(job_id), api.why(job_id)
    if run.out.as_json:
        run.out.json({"job": job.to_json(), "attempts": [a.to_json() for a in attempts], "why": why.to_json()})
    else:
        views.show_job(run.out, job, attempts, why, run.now)


@jobs.command("why")
def why_job(ctx: typer.Context, job_id: Id) -> None:
    """Why a job is not running, and when it will."""
    run: Context = ctx.obj
    found = run.app.sync.jobs.why(job_id)
    if run.out.as_json:
        run.out.json(found.to_json())
    else:
        views.say_why(run.out, found)


# -- changing ------------------------------------------------------------------------------------------------


@jobs.command("cancel")
@filtered(without=("finished_after", "finished_before"))
def cancel(
    ctx: typer.Context,
    ids: Ids = None,
    *,
    everything: All = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    criteria: Criteria,
) -> None:
    """Cancel jobs.

    Waiting ones end at once; the workers of running ones are asked to stop them.
    """
    run: Context = ctx.obj
    _change(run, "Cancel", run.app.sync.jobs.cancel, ids, criteria, everything, yes, limit=limit, dry_run=dry_run)


def again(
    ctx: typer.Context,
    ids: Ids = None,
    *,
    rate: Rate = None,
    repeat_ambiguous: RepeatAmbiguous = False,
    new_operation: NewOperation = False,
    everything: All = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    criteria: Criteria,
) -> None:
    """``jobs retry`` and ``dead replay``."""
    run: Context = ctx.obj
    _change(
        run, str(ctx.info_name).capitalize(), run.app.sync.jobs.retry, ids, criteria, everything, yes,
        limit=limit, dry_run=dry_run, rate=rate, repeat_ambiguous=repeat_ambiguous, new_operation=new_operation,
    )  # fmt: skip


_RETRY = "Start finished jobs over.\n\nWith a fresh budget of attempts. Options that name no --state mean dead ones."
jobs.command("retry", help=_RETRY)(filtered()(again))
_REPLAY = "Run dead jobs again, one by one or many at a bounded rate."
dead.command("replay", help=_REPLAY)(filtered(without=("state", "worker", "struggling"))(again))


@dead.command("discard")
@filtered(without=("state", "worker", "struggling"))
def discard(
    ctx: typer.Context,
    ids: Ids = None,
    *,
    everything: All = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    criteria: Criteria,
) -> None:
    """Give dead jobs up.

    They become cancelled and keep their error and history.
    """
    run: Context = ctx.obj
    _change(run, "Discard", run.app.sync.jobs.discard, ids, criteria, everything, yes, limit=limit, dry_run=dry_run)


@jobs.command("delete")
@filtered(without=("worker",))
def delete(
    ctx: typer.Context,
    ids: Ids = None,
    *,
    everything: All = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    criteria: Criteria,
) -> None:
    """Delete finished jobs and their history for good."""
    run: Context = ctx.obj
    _change(run, "Delete", run.app.sync.jobs.delete, ids, criteria, everything, yes, limit=limit, dry_run=dry_run)


@jobs.command("edit")
def edit(
    ctx: typer.Context,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Job ids.")],
    *,
    payload: Annotated[str | None, typer.Option(help="New payload: JSON, @file or - for standard input.")] = None,
    priority: Annotated[int | None, typer.Option(min=-100, max=100, help="Higher runs first.")] = None,
    run_at: Annotated[str | None, typer.Option(help="When to run: +10m, now or 2030-01-31T12:00Z.")] = None,
    max_attempts: Annotated[str | None, typer.Option(help="A number, or none for no end.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="When to give up: +1d, none or 2030-01-31T12:00Z.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="name=value; replaces all tags; may be repeated.")] = None,
    no_tags: Annotated[bool, typer.Option("--no-tags", help="Remove all tags.")] = False,
    new_operation: NewOperation = False,
    dry_run: DryRun = False,
) -> None:
    """Change jobs that wait, or are dead.

    A payload that may have been sent already is only replaced with --new-operation.
    """
    run: Context = ctx.obj
    values: dict[str, Any] = {} if priority is None else {"priority": priority}
    if payload is not None:
        values["payload"] = read_json(payload)
    if run_at is not None:
        values["run_at"] = run.now if run_at == "now" else _absolute(run, "--run-at", run_at)
    if max_attempts is not None:
        values["max_attempts"] = None if max_attempts == "none" else _number("--max-attempts", max_attempts)
    if expires_at is not None:
        values["expires_at"] = None if expires_at == "none" else _absolute(run, "--expires-at", expires_at)
    if tag or no_tags:
        values["tags"] = tags_of(tag or []) or None
    if not values:
        raise InvalidInput(
            "nothing to edit: say --payload, --priority, --run-at, --max-attempts, --expires-at, --tag or --no-tags"
        )
    which: Any = ids[0] if len(ids) == 1 else ids
    done: Edited = run.app.sync.jobs.edit(which, **values, new_operation=new_operation, dry_run=dry_run)
    _report(run.out, done.to_json(), dry_run=dry_run)
    if done.edited < len(ids):
        raise typer.Exit(FAILED)


def _change(
    run: Context,
    verb: str,
    change: Callable[..., Any],
    ids: list[str] | None,
    criteria: Criteria,
    everything: bool,  # noqa: FBT001 - passed on
    yes: bool,  # noqa: FBT001 - the same
    **options: Any,
) -> None:
    """Change what is meant; many only after a look at how many, and a yes."""
    if ids:
        if criteria or everything:
            raise InvalidInput("give job ids or options that say which, not both")
        done = change(ids[0] if len(ids) == 1 else ids, **options).to_json()
    else:
        if not criteria and not everything:
            raise InvalidInput("which jobs? Give their ids, options that say which (see --help), or --all")
        count = change(everything=everything, **{**options, "dry_run": True}, **criteria).to_json()
        if options["dry_run"] or not _effective(count):
            _report(run.out, count, dry_run=options["dry_run"])
            return
        if not run.out.confirm(f"{verb} {counted(_effective(count), 'job')}?", yes=yes):
            raise typer.Exit(FAILED)
        done = change(everything=everything, **options, **criteria).to_json()
    _report(run.out, done, dry_run=options["dry_run"])
    if ids and _effective(done) < len(ids):
        if len(ids) == 1:
            run.out.say(f"Where it stands: `resilient jobs show {ids[0]}`.")
        raise typer.Exit(FAILED)


def _effective(tally: Mapping[str, int]) -> int:
    """How many were changed: the first number, and those asked to stop."""
    return next(iter(tally.values())) + tally.get("requested", 0)


WORDS = {
    "cancelled": "cancelled", "requested": "running, asked to stop", "too_late": "over already", "edited": "edited",
    "running": "running: left alone", "sent": "may have been sent: --new-operation edits them", "retried": "restarted",
    "not_finished": "not finished: left alone", "discarded": "discarded", "not_dead": "not dead: left alone",
    "ambiguous": "may have taken effect: left alone (--repeat-ambiguous)", "deleted": "deleted",
    "duplicates": "left alone: another job holds their unique key",
    "undone": "left alone: their workflow turned around",
}  # fmt: skip


def _report(out: Output, tally: Mapping[str, int], *, dry_run: bool) -> None:
    if out.as_json:
        out.json({**tally, "dry_run": dry_run})
        return
    told = [f"{number:,} {WORDS[name]}" for name, number in tally.items() if number]
    out.say(("Would be: " if dry_run else "") + ("; ".join(told) or "No job fits: nothing changed") + ".")


def read_json(text: str) -> Any:
    """JSON from the argument itself, from ``@file`` or from standard input."""
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except OSError as error:
            raise InvalidInput(f"cannot read {text[1:]}: {error.strerror}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"the payload is not JSON ({error}); text needs quotes: '\"text\"'") from None


def _absolute(run: Context, option: str, text: str) -> Any:
    at = moment(option, text)
    return run.now - at if isinstance(at, timedelta) else at


def _number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{option} {text!r}: write a number, or none") from None
