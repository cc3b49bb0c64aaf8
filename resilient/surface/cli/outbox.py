"""``resilient outbox ...``: events and where they stand at their destinations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.core.base.phrases import counted, error_line, in_json
from resilient.core.events.message import RESOURCE
from resilient.surface.cli import output
from resilient.surface.cli.exits import FAILED, NotFound
from resilient.surface.cli.jobs import moment
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.events.message import EventInfo, Replayed
    from resilient.surface.cli.context import Context

outbox = typer.Typer(help="Events on their way to their destinations.", no_args_is_help=True)
Types = Annotated[list[str] | None, typer.Option("--type", help="Type of event; may be repeated.", metavar="TYPE")]
Destinations = Annotated[
    list[str] | None, typer.Option("--to", help="Destination; may be repeated.", metavar="DESTINATION")
]
Key = Annotated[str | None, typer.Option("--key", help="The events of this key.", metavar="KEY")]
_HEADERS = ("EVENT", "STATE", "WHEN", "TYPE", "TO", "KEY")


@outbox.command("list")
def list_events(
    ctx: typer.Context,
    *,
    types: Types = None,
    destinations: Destinations = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="State of its job; may be repeated.", metavar="STATE")
    ] = None,
    key: Key = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Written since: 1h (ago) or 2030-01-31T12:00Z.", metavar="TIME")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=1, max=10_000, help="How many.")] = 50,
    after: Annotated[str | None, typer.Option("--after", help="Those that follow this job id.")] = None,
) -> None:
    """List events, the newest first: one line for each destination."""
    run: Context = ctx.obj
    written = moment("--since", since) if since else None
    events = run.app.sync.outbox.list(
        type=types or (), destination=destinations, state=state or (), key=key, created_after=written, limit=limit,
        after=after,
    )  # fmt: skip
    more = events[-1].job_id if len(events) == limit else None
    if run.out.as_json:
        run.out.json({"events": [one.to_json() for one in events], "next": more})
        return
    if not events:
        narrowed = types or destinations or state or key or since or after
        run.out.say("No event fits." if narrowed else "There are no events.")
        return
    now = run.now
    run.out.table(_HEADERS, [_row(one, now) for one in events], folds=(3, 4, 5))
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


@outbox.command("show")
def show(ctx: typer.Context, event_id: Annotated[str, typer.Argument(metavar="EVENT", help="The event's id.")]) -> None:
    """Everything about one event, at each of its destinations."""
    run: Context = ctx.obj
    event = run.app.sync.outbox.get(event_id)
    if not event:
        raise NotFound(f"there is no event {event_id}: it was never committed, or it was pruned since")
    if run.out.as_json:
        run.out.json({"events": [one.to_json() for one in event]})
        return
    attributes = {name: value for name, value in event[0].event.items() if name != "data"}
    run.out.fields([(name, value) for name, value in attributes.items() if name != "sequence"])
    run.out.heading("Data")
    run.out.say(in_json(json.dumps(event[0].event.get("data"), ensure_ascii=False, indent=2)))
    run.out.heading("Destinations")
    now = run.now
    rows = [
        Row(e.destination, e.state.value, output.when_of(e, now), e.sequence, e.job_id, remark=_remark(e))
        for e in event
    ]
    run.out.table(("TO", "STATE", "WHEN", "NUMBER", "JOB"), rows)


@outbox.command("replay")
def replay(
    ctx: typer.Context,
    since: Annotated[
        str, typer.Option("--since", help="Published since: 1h (ago) or 2030-01-31T12:00Z.", metavar="TIME")
    ],
    *,
    until: Annotated[str | None, typer.Option("--until", help="Published before.", metavar="TIME")] = None,
    types: Types = None,
    destinations: Destinations = None,
    key: Key = None,
    limit: Annotated[int | None, typer.Option("--limit", "-l", min=1, help="No more events than this.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only count them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Publish once more what was published.

    For what a broker lost, or a new consumer. Dead events were never published: replay those with
    `resilient dead replay --resource outbox/DESTINATION`.
    """
    run: Context = ctx.obj
    api = run.program("replay").sync.outbox
    words: dict[str, Any] = {
        "since": moment("--since", since), "until": moment("--until", until) if until else None, "type": types or (),
        "destination": destinations, "key": key, "limit": limit,
    }  # fmt: skip
    done = api.replay(**words, dry_run=True)
    if done.events and not dry_run:
        if not run.out.confirm(f"Publish once more {_counted(done, limit)}?", yes=yes):
            raise typer.Exit(FAILED)
        with run.audited("outbox replay", _meaning(words, since, until)) as outcome:
            done = api.replay(**words)
            outcome["events"] = done.events
    if run.out.as_json:
        run.out.json({**done.to_json(), "dry_run": dry_run})
    elif not done.events:
        run.out.say(_NONE_FITS if types or destinations or key else _NOTHING)
    else:
        run.out.say(f"{'Would be p' if dry_run else 'P'}ut in line to be published once more: {_counted(done, limit)}.")


def _meaning(words: dict[str, Any], since: str, until: str | None) -> str:
    """What is published once more, for the audit."""
    parts = [", ".join(words["destination"] or ("every destination",)), f"since {since}"]
    parts += [f"until {until}"] if until else []
    parts += [f"{name} {words[name]}" for name in ("type", "key", "limit") if words[name]]
    return ", ".join(parts)


_KEPT = f"(Events are jobs on {RESOURCE}/DESTINATION, kept as long as succeeded jobs.)"
_NOTHING = f"Nothing was published then. {_KEPT}"
_NONE_FITS = f"No event that was published then fits. {_KEPT}"


def _counted(replayed: Replayed, limit: int | None) -> str:
    """At each destination; of more than a dry run counts, these and that there are others."""
    more = replayed.more and replayed.events != limit
    parts = [f"{counted(number, 'event')} to {name}" for name, number in sorted(replayed.by_destination.items())]
    return ", ".join(parts) + (", and more" if more else "")


def _row(e: EventInfo, now: datetime) -> Row:
    folded = f"{e.type} to {e.destination}" + (f", key {e.key}" if e.key else "")
    when = output.when_of(e, now)
    return Row(e.id, e.state.value, when, e.type, e.destination, e.key, remark=_remark(e), folded=folded)


def _remark(e: EventInfo) -> str:
    """What went wrong last, unless it went well since."""
    if not e.last_error or e.published_at is not None:
        return ""
    return f"{counted(e.attempts, 'attempt')}: {error_line(e.last_error_kind, e.last_error_code, e.last_error)}"
