"""``resilient jobs ...`` and ``resilient dead ...``, and the options that select jobs, which other commands take too.

Times are ``1h`` (that long ago), ``+1h`` (that far ahead) or ``2030-01-31T12:00Z``; a time without a zone is refused,
because the command line prints UTC and the reader's clock may not.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer

from resilient.core.base.errors import FailureKind, InvalidInput, NaiveDatetime
from resilient.core.base.instants import add
from resilient.core.base.numbers import json_value
from resilient.core.base.phrases import counted
from resilient.core.gates.rate_limit import seconds
from resilient.surface.cli import output
from resilient.surface.cli.exits import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.core.jobs.records import Edited, JobInfo
    from resilient.store.jobs.filters import Criteria as Criteria  # noqa: PLC0414 - mypy: exported
    from resilient.surface.cli.context import Context
    from resilient.surface.cli.output import Output
else:
    Criteria = dict  # typer evaluates annotations; the store is only imported by commands that use it

_WHEN: Final = "1h (ago), +1h (ahead) or 2030-01-31T12:00Z"


def _option(*names: str, text: str, shape: str = "TEXT") -> Any:
    return typer.Option(*names, help=text, show_default=False, metavar=shape)


_MANY: Final = list[str] | None
_ONE: Final = str | None
OPTIONS: Final[dict[str, Any]] = {
    "state": Annotated[
        _MANY,
        _option(
            "--state",
            "-s",
            shape="STATE",
            text="blocked, scheduled, ready, running, succeeded, dead, cancelled; may be repeated.",
        ),
    ],
    "kind": Annotated[_MANY, _option("--kind", "-k", shape="KIND", text="Kind of job; may be repeated.")],
    "resource": Annotated[
        _MANY,
        _option("--resource", "-r", shape="KEY", text="Resource key or pattern, such as 'github/*'; may be repeated."),
    ],
    "within": Annotated[_ONE, _option("--within", shape="KEY", text="A resource key and everything below it.")],
    "tag": Annotated[
        _MANY, _option("--tag", "-t", shape="NAME=VALUE", text="name=value; all of them must fit; may be repeated.")
    ],
    "unique_key": Annotated[_ONE, _option("--unique-key", text="The unique key.")],
    "ordering_key": Annotated[_ONE, _option("--ordering-key", text="The ordering key.")],
    "error_kind": Annotated[
        _MANY,
        _option(
            "--error-kind", shape="KIND", text=f"Kind of the last error: {', '.join(FailureKind)}; none: without one."
        ),
    ],
    "error_code": Annotated[
        _MANY,
        _option("--error-code", shape="CODE", text="Code of the last error, such as http_422; none: without one."),
    ],
    "text": Annotated[_ONE, _option("--text", text="Occurs in the last error.")],
    "struggling": Annotated[
        bool, typer.Option("--struggling", help="Attempts used, and still going.", show_default=False)
    ],
    "worker": Annotated[_ONE, _option("--worker", text="The worker that runs it.")],
    "created_after": Annotated[
        _ONE, _option("--created-after", "--since", shape="TIME", text=f"Created since: {_WHEN}.")
    ],
    "created_before": Annotated[_ONE, _option("--created-before", shape="TIME", text="Created before.")],
    "finished_after": Annotated[_ONE, _option("--finished-after", shape="TIME", text="Finished since.")],
    "finished_before": Annotated[_ONE, _option("--finished-before", shape="TIME", text="Finished before.")],
    "run_after": Annotated[_ONE, _option("--run-after", shape="TIME", text="To run from then on.")],
    "run_before": Annotated[_ONE, _option("--run-before", shape="TIME", text="To run before then.")],
}


BULK: Final[dict[str, Any]] = {
    "dry_run": Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be changed.")],
    "rate": Annotated[_ONE, _option("--rate", shape="RATE", text="So many at a time: 10/s, 600/min.")],
    "limit": Annotated[int | None, typer.Option("--limit", "-l", min=1, help="At most so many.", show_default=False)],
    "stopped_after": Annotated[_ONE, _option("--stopped-after", shape="TIME", text=f"Stopped since: {_WHEN}.")],
    "stopped_before": Annotated[_ONE, _option("--stopped-before", shape="TIME", text="Stopped before.")],
}


def bulk(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that changes resources the options that bound it; it gets them as ``criteria``."""
    return _with_options({name: option for name, option in BULK.items() if name not in without})


def filtered(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the filter options; it gets them as ``criteria``."""
    return _with_options({name: option for name, option in OPTIONS.items() if name not in without})


def _with_options(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        kept = [p for p in own.values() if p.name != "criteria"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=option)
            for name, option in options.items()
        ]

        @functools.wraps(command)
        def call(*args: Any, **kwargs: Any) -> None:
            values = {name: kwargs.pop(name) for name in options}
            command(*args, **kwargs, criteria=criteria_of(values))

        parameters = kept + added
        del call.__wrapped__  # typer would look through it
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect honours
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return wrap


_DEFAULTS: Final = {"dry_run": False, "struggling": False}
_NONE: Final = "none"
_SPELT: Final = {"created_after": "--created-after/--since"}


def _spelt(name: str) -> str:
    """An option as it is typed."""
    return _SPELT.get(name, "--" + name.replace("_", "-"))


def criteria_of(options: dict[str, Any], spelt: Callable[[str], str] = _spelt) -> Criteria:
    """Options as `JobFilter` criteria, without those that are absent; ``spelt``: what messages call an option."""
    criteria = {name: value for name, value in options.items() if value}
    for name in ("error_kind", "error_code"):
        if name in criteria:
            criteria[name] = [word_or_none(text) for text in criteria[name]]
    if "tag" in criteria:
        criteria["tags"] = tags_of(criteria.pop("tag"), spelt("tag"))
    for name, value in criteria.items():
        if name.endswith(("_after", "_before")):
            criteria[name] = moment(spelt(name), value)
    return cast("Criteria", criteria)


def word_or_none(text: str) -> str | None:
    r"""The word that a text stands for: ``none`` is None, and ``\none`` the word itself."""
    return None if text == _NONE else text[1:] if _is_escaped(text) else text


def _is_escaped(text: str) -> bool:
    return text != _NONE and text.lstrip("\\") == _NONE


def text_of(word: str | None) -> str:
    """The opposite of `word_or_none`."""
    return _NONE if word is None else f"\\{word}" if word.lstrip("\\") == _NONE else word


def tags_of(pairs: list[str], option: str = "--tag") -> dict[str, str]:
    """``name=value`` options as a mapping."""
    tags = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidInput(f"{option} {pair!r}: write name=value")
        tags[name] = value
    return tags


def moment(option: str, text: str) -> datetime | timedelta:
    """A time, or how long ago (ahead: negative)."""
    ahead = text.startswith("+")
    try:
        if ahead or len(text) < len("2030-1-1"):
            far = timedelta(seconds=seconds(text.removeprefix("+")))
            return -far if ahead else far
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidInput(f"{option} {text!r} is not a time: write {_WHEN}") from None
    if at.tzinfo is None:
        raise NaiveDatetime(f"{option} {text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    return at


def span(option: str, text: str) -> timedelta:
    """A length of time: ``90s``, ``15m``, ``1h``, ``7d``."""
    try:
        return timedelta(seconds=seconds(text))
    except (InvalidInput, OverflowError):
        raise InvalidInput(f"{option} {text!r} is not a length of time: write 90s, 15m, 1h or 7d") from None


def until(option: str, duration: str | None, end: str | None) -> datetime | timedelta | None:
    """``--for 10m`` or ``--until 2030-01-31T12:00Z``."""
    if duration is not None and end is not None:
        raise InvalidInput(f"give --for or {option}, not both")
    if duration is not None:
        return span("--for", duration)
    if end is None:
        return None
    at = moment(option, end)
    return -at if isinstance(at, timedelta) and end.startswith("+") else at


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
    infos = run.app.sync.jobs.list(limit=limit, after=after, order=order, payloads=run.out.as_json, **criteria)
    more = infos[-1].id if len(infos) == limit else None
    if run.out.as_json:
        run.out.json({"jobs": [_shown(run, job).to_json() for job in infos], "next": more})
        return
    if not infos:
        only_dead = criteria.keys() == {"state"} and criteria["state"] == "dead"
        run.out.say("No job is dead." if only_dead else "No job fits." if criteria else "There are no jobs.")
        return
    now = run.now
    run.out.table(output.JOB_HEADERS, [output.job_row(job, now) for job in infos], folds=output.JOB_FOLDS)
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


def _shown(run: Context, job: JobInfo) -> JobInfo:
    """The job without what its kind hides of its payload."""
    return replace(job, payload=run.app.ground.encoder.view(job.kind, job.payload))


@jobs.command("count")
@filtered()
def count_jobs(ctx: typer.Context, *, criteria: Criteria) -> None:
    """Count jobs, up to 10,000."""
    run: Context = ctx.obj
    counts = run.app.sync.jobs.count(**criteria)
    if run.out.as_json:
        run.out.json({"count": int(counts), "more": counts.more})
    else:
        run.out.say(str(counts))


@jobs.command("show")
@dead.command("show")
def show(ctx: typer.Context, job_id: Id) -> None:
    """Everything about one job.

    Its values and history, and why it stands where it stands.
    """
    run: Context = ctx.obj
    api = run.app.sync.jobs
    job, attempts, why = _shown(run, api.get(job_id)), api.attempts(job_id), api.why(job_id)
    if run.out.as_json:
        run.out.json({"job": job.to_json(), "attempts": [a.to_json() for a in attempts], "why": why.to_json()})
    else:
        output.show_job(run.out, job, attempts, why, run.now)


@jobs.command("why")
def why_job(ctx: typer.Context, job_id: Id) -> None:
    """Why a job is not running, and when it will."""
    run: Context = ctx.obj
    why = run.app.sync.jobs.why(job_id)
    if run.out.as_json:
        run.out.json(why.to_json())
    else:
        output.say_why(run.out, why)


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
    with run.audited("jobs edit", " ".join(ids[:20]), dry_run=dry_run) as outcome:
        done: Edited = run.app.sync.jobs.edit(which, **values, new_operation=new_operation, dry_run=dry_run)
        outcome.update(done.to_json(), fields=sorted(values))
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
        with run.audited(f"jobs {verb.lower()}", " ".join(ids[:20]), dry_run=options["dry_run"]) as outcome:
            done = change(ids[0] if len(ids) == 1 else ids, **options).to_json()
            outcome.update(done)
    else:
        if not criteria and not everything:
            raise InvalidInput("which jobs? Give their ids, options that say which (see --help), or --all")
        count = change(everything=everything, **{**options, "dry_run": True}, **criteria).to_json()
        if options["dry_run"] or not _effective(count):
            _report(run.out, count, dry_run=options["dry_run"])
            return
        if not run.out.confirm(f"{verb} {counted(_effective(count), 'job')}?", yes=yes):
            raise typer.Exit(FAILED)
        with run.audited(f"jobs {verb.lower()}", _meaning(criteria)) as outcome:
            done = change(everything=everything, **options, **criteria).to_json()
            outcome.update(done)
    _report(run.out, done, dry_run=options["dry_run"])
    if ids and _effective(done) < len(ids):
        if len(ids) == 1:
            run.out.say(f"Where it stands: `resilient jobs show {ids[0]}`.")
        raise typer.Exit(FAILED)


def _meaning(criteria: Criteria) -> str:
    """Which jobs a filter means, in words."""
    return ", ".join(f"{name} {value}" for name, value in criteria.items()) or "all"


def _effective(tally: Mapping[str, int]) -> int:
    """How many were changed: the first number, and those asked to stop."""
    return next(iter(tally.values())) + tally.get("requested", 0)


LEFT_ALONE: Final = {
    "duplicates": "left alone: another job holds their unique key",
    "undone": "left alone: their workflow turned around",
    "in_workflow": "left alone: their workflow is not over",
}
WORDS = {
    "cancelled": "cancelled", "requested": "running, asked to stop", "too_late": "over already", "edited": "edited",
    "running": "running: left alone", "sent": "may have been sent: --new-operation edits them", "retried": "restarted",
    "not_finished": "not finished: left alone", "discarded": "discarded", "not_dead": "not dead: left alone",
    "ambiguous": "may have taken effect: left alone (--repeat-ambiguous)", "deleted": "deleted",
    **LEFT_ALONE,
}  # fmt: skip


def _report(out: Output, tally: Mapping[str, int], *, dry_run: bool) -> None:
    if out.as_json:
        out.json({**tally, "dry_run": dry_run})
        return
    parts = [f"{number:,} {WORDS[name]}" for name, number in tally.items() if number]
    if not parts:
        out.say(f"No job fits: nothing {'would change' if dry_run else 'changed'}.")
        return
    out.say(("Would be: " if dry_run else "") + "; ".join(parts) + ".")


def read_json(text: str) -> Any:
    """JSON from the argument itself, from ``@file`` or from standard input."""
    name = "standard input" if text == "-" else text[1:]
    try:
        if text == "-":
            text = "" if sys.stdin is None else sys.stdin.read()  # None: it is closed
        elif text.startswith("@"):
            text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"cannot read {name}: it is not text in UTF-8") from None
    try:
        return json_value(text)
    except RecursionError:
        raise InvalidInput("the payload is nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(f"the payload is not JSON ({error}); text needs quotes: '\"text\"'") from None


def _absolute(run: Context, option: str, text: str) -> Any:
    at = moment(option, text)
    return add(run.now, -at) if isinstance(at, timedelta) else at


def _number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{option} {text!r}: write a number, or none") from None
