"""What is stored about one account: ``erase`` deletes it, ``export`` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from resilient.core.base.phrases import counted
from resilient.surface.cli.exits import FAILED
from resilient.surface.cli.jobs import DryRun, Yes
from resilient.surface.cli.jobs import span as span_of

if TYPE_CHECKING:
    from resilient.core.inspect.erasure import Erased
    from resilient.surface.cli.context import Context

Account = Annotated[str, typer.Argument(metavar="KEY", help="An account such as github/acct-7; no pattern.")]


def erase(
    ctx: typer.Context,
    key: Account,
    *,
    why: Annotated[str | None, typer.Option(help="For the audit; it stays.", show_default=False)] = None,
    wait: Annotated[
        str | None, typer.Option(help="Wait so long for its running jobs: 30s, 5m.", show_default=False, metavar="SPAN")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete everything that is stored about an account.

    Its jobs with their history, its events, credentials, cursors, limits, gates, and what lies below it; the audit
    keeps who did it, and how many rows. Refused while its jobs run.
    """
    run: Context = ctx.obj
    run.go_to_shard_of(key)
    accounts = run.app.sync.accounts
    seconds = 0.0 if wait is None else span_of("--wait", wait).total_seconds()
    rows = accounts.erase(key, dry_run=True)
    if dry_run or not rows.total:
        _say(run, rows)
        return
    if not run.out.confirm(f"Delete {_counts(rows)} of {key} for good?", yes=yes):
        raise typer.Exit(FAILED)
    _say(run, accounts.erase(key, timeout=seconds, why=why))


def _say(run: Context, erased: Erased) -> None:
    if run.out.as_json:
        run.out.json(erased.to_json())
    else:
        run.out.say(f"{'Would delete' if erased.dry_run or not erased.total else 'Deleted'} {_counts(erased)}.")


_ROWS: Final = {  # tables whose name and an s is not what one calls their rows
    "authorization": ("begun consent",),
    "dependency": ("dependency", "dependencies"),
    "inbox_key": ("message of the inbox", "messages of the inbox"),
    "order": ("ordering key",),
    "schedule_account": ("account of a schedule", "accounts of schedules"),
    "turn": ("place in line", "places in line"),
}


def _counts(erased: Erased) -> str:
    parts = [counted(number, *_ROWS.get(table, (table.replace("_", " "),))) for table, number in erased.rows.items()]
    return ", ".join(parts) or "nothing"


def export(ctx: typer.Context, key: Account) -> None:
    """Print everything that is stored about an account.

    Each line is a row as JSON, with its table. Payloads and results are printed as they are; credentials never.
    """
    run: Context = ctx.obj
    run.go_to_shard_of(key)
    for row in run.app.sync.accounts.export(key):
        run.out.json(row, indent=None)
