"""``resilient resources ...``: what is stopped, and stopping it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from resilient.core.base.errors import ConnectionNotFound, InvalidInput
from resilient.core.base.phrases import counted, figure, learnt_limit, length, span, when
from resilient.core.base.resource_key import account
from resilient.core.inspect.names import meaning
from resilient.surface.cli import output
from resilient.surface.cli.exits import FAILED, NotFound
from resilient.surface.cli.jobs import PageSize, Yes, bulk, until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from resilient.core.inspect.why import Why
    from resilient.core.jobs.records import Changed, ResourceInfo
    from resilient.engine.gates.api import Bulk
    from resilient.surface.cli.context import Context
else:
    Bulk = dict  # typer evaluates annotations

resources = typer.Typer(help="What jobs go through: see what is stopped, stop it, limit it.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="A resource key, such as github/acct-7.")]
Which = Annotated[
    str,
    typer.Argument(metavar="KEY|PATTERN", help="A key, or a pattern such as 'github/*' for those in use or with jobs."),
]
Gate = Annotated[
    str | None, typer.Option(help="Only those it stops: breaker, cooldown, pause, auth or any.", show_default=False)
]
Reason = Annotated[str | None, typer.Option(help="Why; shown to whoever asks.", show_default=False)]
For = Annotated[str | None, typer.Option("--for", help="How long: 15m, 2h.", show_default=False)]
Until = Annotated[str | None, typer.Option("--until", help="Until when: 2030-01-31T12:00Z.", show_default=False)]


# -- looking -------------------------------------------------------------------------------------------------


@resources.command("list")
def list_resources(
    ctx: typer.Context,
    pattern: Annotated[str | None, typer.Argument(help="Such as 'github/*'.", show_default=False)] = None,
    *,
    gate: Gate = None,
    stopped: Annotated[bool, typer.Option("--stopped", help="The same as --gate any.")] = False,
    limit: PageSize = 50,
    after: Annotated[str | None, typer.Option(help="Those that follow this key.", show_default=False)] = None,
) -> None:
    """List the resources in use, by key."""
    run: Context = ctx.obj
    stop: Any = gate or ("any" if stopped else None)
    infos = run.app.sync.resources.list(pattern, gate=stop, limit=limit, after=after)
    more = infos[-1].key if len(infos) == limit else None
    if run.out.as_json:
        run.out.json({"resources": [one.to_json() for one in infos], "next": more})
        return
    if not infos:
        if stop and not pattern:
            run.out.say("No resource is stopped.")
        else:
            run.out.say(_none_fits(pattern) if pattern else "No resource is in use yet.")
        return
    now = run.now
    run.out.table(output.RESOURCE_HEADERS, [output.resource_row(one, now) for one in infos], right=(3, 4))
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


@resources.command("show")
def show_resource(ctx: typer.Context, key: Key) -> None:
    """Everything about one resource, with the limits that apply to it."""
    run: Context = ctx.obj
    api = _api(run, key)
    info, why = api.get(key), api.why(key)
    is_unused = _is_unused(run, info)
    policy = run.app.policies.for_key(key, info.policy).to_json()
    if run.out.as_json:
        run.out.json({"resource": info.to_json(), "policy": policy, "why": why.to_json()})
    else:
        _show(run, info, policy)
        if (shown := _of_unused(why) if is_unused else why).reasons:
            output.show_why(run.out, shown, run.now)
    _require_known(info, is_unused=is_unused)


def _show(run: Context, info: ResourceInfo, policy: dict[str, Any]) -> None:
    now, override = run.now, info.policy or {}
    marks = {name: " (set at runtime)" if name in override else "" for name in policy}
    run.out.fields(
        [
            ("resource", info.key),
            ("stands for", meaning(info.key)),
            ("state", output.state_of(info)),
            ("circuit", f"{info.breaker}, opened {info.reopens + 1} times in a row" if info.reopens else info.breaker),
            ("credentials", _credentials(run, info)),
            ("waiting", counted(info.waiting, "job")),
            ("running", counted(info.running, "job")),
            ("limits", limits_of(policy) + marks["limits"]),
            ("concurrency", cap_of(policy) + marks["concurrency"]),
            ("learnt", info.learnt and learnt_limit(info.learnt, now)),
            *((f"budget {name}", _budget(one, now)) for name, one in info.budgets.items()),
            ("breaker", json.dumps(override["breaker"]) + marks["breaker"] if "breaker" in override else None),
            ("last success", info.last_success_at and when(info.last_success_at, now)),
            ("last error", info.last_error and f"{info.last_error} ({info.last_error_kind or 'unknown'})"),
            ("last error at", info.last_error_at and when(info.last_error_at, now)),
            ("first used", when(info.created_at, now) if info.created_at else "not yet"),
        ]
    )
    if not run.knows_policies:
        run.out.say("Limits declared by the program are not known here: say --app to see them.", style="dim")


def _credentials(run: Context, info: ResourceInfo) -> str | None:
    """What is known of its credentials; None of a whole provider, and of one that this program does not list."""
    provider = run.app.providers.get(info.key.partition("/")[0])
    if info.auth != "ok":
        return info.auth
    if "/" not in info.key and not (provider and provider.single_account):
        return None
    try:
        run.app.sync.connections.get(account(info.key))
    except ConnectionNotFound:
        if provider is None:
            return None
        if not provider.auth or provider.anonymous:
            return "none needed"
        return "in a table of the program" if run.app.grants.accounts.store is not None else "not connected"
    return "ok"


def _budget(budget: Mapping[str, Any], now: datetime) -> str:
    """What is known of one budget that the provider names."""
    rests = f"rests until {when(budget['until'], now)}" if budget["until"] else ""
    return "; ".join(filter(None, (rests, learnt_limit(budget["learnt"], now) if budget["learnt"] else "")))


def limits_of(policy: dict[str, Any]) -> str:
    """The rate limits of a policy in words."""
    parts = (
        f"{figure(one['rate'])} {one['counts']} per {length(one['per'])}"
        + (f", burst {figure(one['burst'])}" if "burst" in one else "")
        for one in policy["limits"]
    )
    return "; ".join(parts) or "none"


def cap_of(policy: dict[str, Any]) -> str:
    """The concurrency cap of a policy in words."""
    return "no cap" if policy["concurrency"] is None else f"{policy['concurrency']:,} at once"


@resources.command("why")
def why_resource(ctx: typer.Context, key: Key) -> None:
    """Why the jobs of a resource are not running, and when they will."""
    run: Context = ctx.obj
    api = _api(run, key)
    why, info = api.why(key), api.get(key)
    is_unused = _is_unused(run, info)
    if run.out.as_json:
        run.out.json(why.to_json())
    else:
        output.say_why(run.out, _of_unused(why) if is_unused else why)
    _require_known(info, is_unused=is_unused)


def _of_unused(why: Why) -> Why:
    """What stops a key without any job; "Nothing stops it" would be read as "it is right"."""
    return replace(why, reasons=tuple(one for one in why.reasons if one.code not in ("open", "waiting")))


def _require_known(info: ResourceInfo, *, is_unused: bool) -> None:
    """Raise `NotFound` for a key without any job: a slip is likelier than a question about the future."""
    if is_unused:
        raise NotFound(f"there is no job of {info.key}, and never was one: {_IS_IT_RIGHT}")


def _is_unused(run: Context, info: ResourceInfo) -> bool:
    return info.created_at is None and not run.app.sync.jobs.count(within=info.key, limit=1)


_ENDING: Final = ("resume", "close", "reset")  # what can only be meant for a resource in use
_LASTING: Final = ("pause", "open")  # what many expect to bind later keys too
_IS_IT_RIGHT: Final = "is the key right? `resilient resources list` shows those in use"


def _none_fits(pattern: str) -> str:
    return f"No resource in use fits {pattern!r}{_wider(pattern)}."


def _wider(pattern: str) -> str:
    head, _, rest = pattern.partition("/")
    return "" if rest == "**" else f"; * stays within its segment, '{head}/**' is everything below"


def _none_meant(run: Context, pattern: str) -> None:
    """Nothing was changed: because nothing fits (exit status 3), or because what fits is not stopped."""
    if _is_pattern(pattern) and not run.app.sync.resources.list(pattern, limit=1):
        what = f"no resource in use and no job in the queue fits {pattern!r}"
        raise NotFound(f"nothing was changed: {what}{_wider(pattern)}")
    if not run.out.as_json:
        which = f"any resource that fits {pattern!r}" if _is_pattern(pattern) else pattern
        run.out.say(f"Nothing to do: nothing of the kind stops {which}.")


# -- trying --------------------------------------------------------------------------------------------------


@resources.command("test")
def send_test(ctx: typer.Context, key: Key) -> None:
    """Send one harmless request as this account.

    It is the one that the provider's facts name, with the account's credentials and through its gates. Shows how it
    was answered and what the gates learnt. A pause, a cooldown or dead credentials refuse it; where a circuit is due,
    it is its probe.
    """
    run: Context = ctx.obj
    run.go_to_shard_of(key)
    api = run.program("a test request").sync.resources
    with run.audited("resources test", key) as outcome:
        answer = api.test(key)
        outcome["ok"] = int(answer.failure is None)
    if run.out.as_json:
        run.out.json(answer.to_json())
    else:
        run.out.say(answer.line)
        for lesson in answer.lessons:
            run.out.paragraph(lesson, indent=2)
    if answer.failure is not None:
        raise typer.Exit(FAILED)


# -- changing ------------------------------------------------------------------------------------------------


@resources.command("pause")
@bulk()
def pause(
    ctx: typer.Context,
    which: Which,
    *,
    reason: Reason = None,
    duration: For = None,
    end: Until = None,
    gate: Gate = None,
    yes: Yes = False,
    criteria: Bulk,
) -> None:
    """Start nothing there until it is resumed.

    Or for some time (--for, --until). What runs goes on.
    """
    run: Context = ctx.obj
    options = {"reason": reason, "until": until("--until", duration, end), "gate": gate}
    _change(run, "paused", _api(run, which).pause, which, options, criteria, yes)


@resources.command("resume")
@bulk()
def resume(ctx: typer.Context, which: Which, *, yes: Yes = False, criteria: Bulk) -> None:
    """End a pause."""
    run: Context = ctx.obj
    _change(run, "resumed", _api(run, which).resume, which, {}, criteria, yes)


@resources.command("open")
@bulk()
def open_(
    ctx: typer.Context,
    which: Which,
    *,
    reason: Reason = None,
    duration: For = None,
    end: Until = None,
    gate: Gate = None,
    yes: Yes = False,
    criteria: Bulk,
) -> None:
    """Open the circuit by hand.

    Nothing goes through, not even requests of jobs that run, until it is closed by hand or a probe goes well.
    """
    run: Context = ctx.obj
    options = {"reason": reason, "until": until("--until", duration, end), "gate": gate}
    _change(run, "opened", _api(run, which).open, which, options, criteria, yes)


@resources.command("close")
@bulk()
def close(ctx: typer.Context, which: Which, *, yes: Yes = False, criteria: Bulk) -> None:
    """Close the circuit by hand.

    The load comes back step by step.
    """
    run: Context = ctx.obj
    _change(run, "closed", _api(run, which).close, which, {}, criteria, yes)


@resources.command("reset")
@bulk()
def reset(ctx: typer.Context, which: Which, *, gate: Gate = None, yes: Yes = False, criteria: Bulk) -> None:
    """Close the circuit, end cooldown and pause. Credentials and limits stay."""
    run: Context = ctx.obj
    options = {} if gate is None else {"gate": gate}
    _change(run, "reset", _api(run, which).reset, which, options, criteria, yes)


@resources.command("limit")
@bulk(without=("limit",))
def limit_(
    ctx: typer.Context,
    which: Which,
    *,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="RATE", help="100/min, evenly; '2/s burst 40', a bucket; may be repeated."),
    ] = None,
    no_limits: Annotated[bool, typer.Option("--no-limits", help="No rate limit at all.")] = False,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Jobs at once.", show_default=False)] = None,
    no_concurrency: Annotated[bool, typer.Option("--no-concurrency", help="No cap.")] = False,
    breaker: Annotated[
        list[str] | None, typer.Option(help="name=value: streak, ratio, volume, window, first_open, longest_open ...")
    ] = None,
    clear: Annotated[
        list[str] | None, typer.Option(help="Back to what the program declares: limits, concurrency, breaker or all.")
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Drop what throttles taught; the next one does anew.")
    ] = False,
    yes: Yes = False,
    criteria: Bulk,
) -> None:
    """Override the limits of a resource.

    At once and for every worker; --clear goes back to what the program declares, --forget drops what was learnt.
    """
    run: Context = ctx.obj
    options: dict[str, Any] = {"clear": True if "all" in (clear or []) else tuple(clear or ())}
    if forget:
        options["forget"] = True
    if limit or no_limits:
        options["limits"] = limit or None
    if concurrency is not None or no_concurrency:
        options["concurrency"] = concurrency
    if breaker:
        options["breaker"] = dict(_member(one) for one in breaker)
    if options == {"clear": ()}:
        raise InvalidInput(
            "nothing to set: say --limit, --no-limits, --concurrency, --no-concurrency, --breaker, --clear or --forget"
        )
    _change(run, "limited anew", _api(run, which).limit, which, options, criteria, yes)
    if not (run.out.as_json or criteria.get("dry_run") or _is_pattern(which)):
        policy = run.app.policies.for_key(which, run.app.sync.resources.get(which).policy).to_json()
        run.out.say(f"  rate limits: {limits_of(policy)}; concurrency: {cap_of(policy)}")


def _member(text: str) -> tuple[str, float | int | None]:
    name, equals, value = text.partition("=")
    try:
        number = None if value == "none" else float(value)
    except ValueError:
        equals = ""
        number = None
    if not equals:
        raise InvalidInput(f"--breaker {text!r}: write name=number, such as streak=10, or name=none")
    return name, int(number) if number is not None and number.is_integer() else number


def _is_pattern(which: str) -> bool:
    return "*" in which or "?" in which


def _lasting(criteria: Bulk, count: int) -> str:
    """How long it takes at a bounded rate."""
    from resilient.engine.jobs.api import spacing_of  # noqa: PLC0415 - half a second of imports, only where needed

    spacing = spacing_of(criteria.get("rate"))
    return "" if spacing is None else f", which takes {span((count - 1) * spacing.total_seconds())}"


def _remark(run: Context, key: str, change: str, *, unused: bool, dry_run: bool) -> None:
    """What one should know after changing a resource: what else stops it."""
    if unused and change != "limit":  # an account is often limited before its first job
        run.out.say(f"There is no job of it, and never was one: {_IS_IT_RIGHT}.")
    if change not in _ENDING or dry_run:
        return
    # Another gate, or one of an ancestor: jobs do not go on yet.
    why = run.app.sync.resources.why(key)
    for reason in why.reasons if why.state == "stopped" else ():
        if reason.resource is not None and reason.code != "waiting":
            run.out.paragraph(f"Still: {reason.text}", indent=2, style="yellow")


def _api(run: Context, which: str) -> Any:
    run.go_to_shard_of(which)
    return run.app.sync.resources


def _change(
    run: Context,
    done: str,
    change: Callable[..., Any],
    which: str,
    options: dict[str, Any],
    criteria: Bulk,
    yes: bool,  # noqa: FBT001 - passed on
) -> None:
    """Change one resource, or those of a pattern after a look at how many, and a yes."""
    pattern, dry_run = _is_pattern(which), bool(criteria.get("dry_run"))
    if pattern and not dry_run:
        meant = change(which, **options, **{**criteria, "dry_run": True})
        ask = f"{counted(len(meant), 'resource')} would be {done}{_lasting(criteria, len(meant))}. Go on?"
        if meant and not run.out.confirm(ask, yes=yes):
            raise typer.Exit(FAILED)
    unused = not pattern and _is_unused(run, run.app.sync.resources.get(which))
    if unused and change.__name__ in _ENDING:
        raise NotFound(f"{which} is not {done}: there is no job of it, and never was one: {_IS_IT_RIGHT}")
    action, why = f"resources {change.__name__}", options.get("reason")
    with run.audited(action, which, why, dry_run=dry_run) as outcome:
        changed = change(which, **options, **criteria)
        outcome["changed"] = len(changed)
    if not changed:
        _none_meant(run, which)
    if run.out.as_json:
        run.out.json({**changed.to_json(), "dry_run": dry_run})
        return
    would = "would be " if dry_run else ""
    if changed and not pattern:
        run.out.say(f"{which} {would or 'is '}{done}.")
        _remark(run, which, change.__name__, unused=unused, dry_run=dry_run)
    elif changed:
        _tell_changed(run, which, change.__name__, f"{would}{done}", changed)


def _tell_changed(run: Context, which: str, change: str, done: str, changed: Changed) -> None:
    for key in changed.keys[:20]:
        run.out.say(f"  {key}")
    if len(changed) > 20:  # noqa: PLR2004 - a screenful
        run.out.say(f"  ... and {len(changed) - 20:,} more")
    new = f"; no worker has used {len(changed.queued):,} of them yet" if changed.queued else ""
    run.out.say(f"{counted(len(changed), 'resource')} {done}{new}.")
    if change in _LASTING:
        head = which.partition("*")[0].partition("?")[0].rpartition("/")[0]
        wider = f"; `resilient resources {change} {head}` means everything below it" if head else ""
        run.out.say(f"Keys that come into use later are not meant{wider}.", style="dim")
