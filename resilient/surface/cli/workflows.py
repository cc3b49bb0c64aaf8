"""``resilient workflows ...``: jobs that belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.core.base.phrases import error_line, rough, when
from resilient.surface.cli.exits import FAILED
from resilient.surface.cli.jobs import After, PageSize, Yes  # noqa: TC001 - typer evaluates annotations
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.jobs.workflow import StepInfo, WorkflowInfo
    from resilient.surface.cli.context import Context
    from resilient.surface.cli.output import Output

workflows = typer.Typer(help="Jobs that belong together, and are undone together.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(metavar="ID", help="The workflow's id.")]


@workflows.command("list")
def list_workflows(
    ctx: typer.Context,
    *,
    state: Annotated[
        str | None,
        typer.Option(
            "--state", "-s", metavar="STATE", show_default=False,
            help="running, succeeded, undoing, stuck, undone, failed.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of this name only.", show_default=False)] = None,
    limit: PageSize = 50,
    after: After = None,
) -> None:  # fmt: skip
    """List workflows, the newest first."""
    run: Context = ctx.obj
    infos = run.app.sync.workflows.list(state=state, name=name, limit=limit, after=after)
    more = infos[-1].id if len(infos) == limit else None
    if run.out.as_json:
        run.out.json({"workflows": [one.to_json() for one in infos], "next": more})
        return
    if not infos:
        run.out.say("No workflow fits." if state or name else "There are no workflows.")
        return
    rows = [
        Row(w.id, w.state.value, w.name, _done(w), f"{rough((run.now - w.created_at).total_seconds())} ago",
            remark=w.reason or "")
        for w in infos
    ]  # fmt: skip
    run.out.table(("ID", "STATE", "NAME", "STEPS", "BEGAN"), rows)
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


@workflows.command("show")
def show(ctx: typer.Context, workflow_id: Id) -> None:
    """One workflow: where each of its steps stands, and their undos."""
    run: Context = ctx.obj
    info = run.app.sync.workflows.get(workflow_id)
    if run.out.as_json:
        run.out.json(info.to_json())
    else:
        _show(run.out, info, run.now)


@workflows.command("cancel")
def cancel(ctx: typer.Context, workflow_id: Id, *, yes: Yes = False) -> None:
    """Turn a workflow around: undo its finished steps.

    The unfinished ones are cancelled.
    """
    run: Context = ctx.obj
    info = run.app.sync.workflows.get(workflow_id)
    over = info.finished_at is not None
    ask = f"Cancel workflow {info.name} and undo its steps?"
    if not over and not run.out.confirm(ask, yes=yes, dry_run=False):
        raise typer.Exit(FAILED)
    with run.audited("workflows cancel", workflow_id) as outcome:
        info = run.app.sync.workflows.cancel(workflow_id)
        outcome["state"] = info.state.value
    if run.out.as_json:
        run.out.json(info.to_json())
    else:
        run.out.say(f"Workflow {info.id} is {info.state.value}{' already' if over else ''}.")
    if over:
        raise typer.Exit(FAILED)


def _done(w: WorkflowInfo) -> str:
    return f"{sum(s.state == 'succeeded' for s in w.steps)} of {len(w.steps)}"


def _show(out: Output, w: WorkflowInfo, now: datetime) -> None:
    out.fields(
        [
            ("workflow", w.id),
            ("name", w.name),
            ("state", w.state.value),
            ("reason", w.reason),
            ("steps", f"{_done(w)} succeeded"),
            ("began", when(w.created_at, now)),
            ("ended", w.finished_at and when(w.finished_at, now)),
        ]
    )
    rows = [_step(one, now) for one in w.steps]
    out.table(("STEP", "STATE", "WHEN", "AFTER", "JOB", "UNDO"), rows, folds=(3, 5))


def _step(one: StepInfo, now: datetime) -> Row:
    at: Any = one.finished_at or one.started_at
    since = f"{rough((now - at).total_seconds())} ago" if at is not None else ""
    undo = one.undo or ""
    if one.undo_job_id is not None:
        undo = f"{one.undo}: {one.undo_state or 'deleted'} ({one.undo_job_id})"
    after = ", ".join(one.after)
    failed, kind = one.last_error if one.state != "succeeded" else None, one.last_error_kind
    if one.undo_state == "dead":
        failed, kind = one.undo_error, None
    folded = "; ".join(part for part in (f"after {after}" if after else "", f"undo {undo}" if undo else "") if part)
    state = one.state.value if one.state else "deleted"
    return Row(
        one.name,
        state,
        since,
        after,
        one.job_id,
        undo,
        remark=error_line(kind, None, failed) if failed else "",
        folded=folded,
    )
