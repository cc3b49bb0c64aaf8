"""Jobs, resources and their stories as people read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from resilient.core.admission import error_shut, hand_shut
from resilient.core.phrases import brief, counted, error_line, rough, span, when
from resilient.core.states import TERMINAL, JobState
from resilient.surface.cli.output import Row
from resilient.surface.cli.traces import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from resilient.core.events import EventInfo
    from resilient.core.records import AttemptInfo, JobInfo, ResourceInfo, StoppedGroup
    from resilient.core.why import Why
    from resilient.surface.cli.output import Output

JOB_HEADERS = ("ID", "STATE", "WHEN", "KIND", "RESOURCE")
JOB_FOLDS = (3, 4)
RESOURCE_HEADERS = ("RESOURCE", "STATE", "ENDS", "WAITING", "RUNNING")
GROUP_HEADERS = ("PROVIDER", "GATE", "RESOURCES", "WAITING", "SINCE", "ENDS")


def job_row(job: JobInfo, now: datetime) -> Row:
    """One job of a list; what went wrong last stands below it."""
    folded = f"{job.kind} on {job.resource_key}"
    return Row(
        job.id, job.state.value, when_of(job, now), job.kind, job.resource_key, remark=_remark(job), folded=folded
    )


def when_of(job: JobInfo | EventInfo, now: datetime) -> str:
    """When it runs, since when it runs or waits, or when it ended; in a few characters."""
    if job.state in TERMINAL and job.finished_at:
        return f"{rough((now - job.finished_at).total_seconds())} ago"
    if job.state == JobState.RUNNING and job.started_at:
        return f"for {rough((now - job.started_at).total_seconds())}"
    if job.state == JobState.SCHEDULED and job.run_at > now:
        return f"in {rough((job.run_at - now).total_seconds())}"
    since = job.created_at if job.state == JobState.BLOCKED else max(job.run_at, job.created_at)
    if job.state == JobState.SCHEDULED:
        return f"due {rough((now - since).total_seconds())}"
    return f"for {rough((now - since).total_seconds())}"


def _remark(job: JobInfo) -> str:
    if not job.last_error or job.state == JobState.SUCCEEDED:
        return ""
    return f"{_attempts(job)}: {error_line(job.last_error_kind, job.last_error_code, job.last_error)}"


def _attempts(job: JobInfo) -> str:
    return f"{job.attempts} of {job.max_attempts} attempts" if job.max_attempts else counted(job.attempts, "attempt")


def show_job(out: Output, job: JobInfo, attempts: Sequence[AttemptInfo], why: Why, now: datetime) -> None:
    """Everything about one job."""
    out.fields(
        [
            ("id", job.id),
            ("kind", job.kind),
            ("resource", job.resource_key),
            ("state", job.state.value),
            (
                "attempts",
                f"{_attempts(job)}, {counted(job.executions, 'execution')}, {counted(job.deferrals, 'deferral')}",
            ),
            ("rescues", job.rescues or None),
            ("priority", job.priority or None),
            ("created", when(job.created_at, now)),
            ("run at", when(job.run_at, now)),
            ("started", job.started_at and when(job.started_at, now)),
            ("finished", job.finished_at and when(job.finished_at, now)),
            ("expires", job.expires_at and when(job.expires_at, now)),
            ("worker", job.locked_by),
            ("unique key", job.unique_key),
            ("ordering key", job.ordering_key and f"{job.ordering_key} (number {job.order_no})"),
            ("idempotency key", job.idempotency_key),
            ("tags", ", ".join(f"{k}={v}" for k, v in (job.tags or {}).items())),
            ("unanswered", _compact(job.sent)),
            ("progress", _compact(job.progress)),
            ("payload", _compact(job.payload) or "null"),
            ("result", _compact(job.result)),
        ]
    )
    show_why(out, why)
    if attempts:
        out.heading("What happened")
        for one in attempts:
            _show_attempt(out, one, now)
    if (latest := next((one for one in reversed(attempts) if one.traceback), None)) is not None:
        out.heading(f"Traceback of execution {latest.execution}")
        for line in shortened(latest.traceback or ""):
            out.say(f"  {line}", style="dim")


def _show_attempt(out: Output, one: AttemptInfo, now: datetime) -> None:
    took = f", took {span(one.duration)}" if one.duration is not None and one.duration >= 1 else ""
    charged = "" if one.charged else ", not charged"
    out.say(f"  {one.execution}. {when(one.finished_at, now)}: {one.decision}{charged}{took}")
    if one.message:
        on = f" [{one.resource_key}]" if one.resource_key else ""
        out.paragraph(f"{error_line(one.kind, one.code, one.message)}{on}", indent=5, style="dim")
    if one.next_at is not None and one.next_at > now:
        out.say(f"     next try {when(one.next_at, now)}", style="dim")


def say_why(out: Output, why: Why) -> None:
    """The reasons alone."""
    for reason in why.reasons:
        out.paragraph(reason.text)


def show_why(out: Output, why: Why) -> None:
    """The reasons, one sentence each."""
    out.heading("Why")
    for reason in why.reasons:
        out.paragraph(reason.text, indent=2)
    if why.until is not None and len(why.reasons) > 1:
        out.paragraph(f"Nothing known stops it after {why.until:%Y-%m-%d %H:%M:%S} UTC.", indent=2)


def resource_row(info: ResourceInfo, now: datetime) -> Row:
    """One resource of a list."""
    if info.until is not None:
        until = f"in {rough((info.until - now).total_seconds())}"
    else:
        until = _END.get(info.gate or "", "")
    remark = ""
    if info.last_error and error_shut(info.gate, info.code, info.since, info.last_error_at):
        remark = error_line(info.last_error_kind, info.last_error_code, info.last_error)
    if info.paused_reason and hand_shut(info.gate, info.code):
        remark = info.paused_reason
    return Row(info.key, state_of(info), until, f"{info.waiting:,}", f"{info.running:,}", remark=remark)


_END = {"pause": "by hand", "breaker": "by hand", "auth": "on reconnect"}


def state_of(info: ResourceInfo) -> str:
    """One or two words for what stops a resource."""
    if info.gate == "breaker":
        return {"probing": "probe", "isolated": "isolated"}.get(info.code or "", "circuit open")
    if info.gate is not None:
        return {"pause": "paused"}.get(info.gate, info.gate)
    return "well" if info.breaker == "closed" else "probe due"


def group_row(group: StoppedGroup, now: datetime) -> Row:
    """One group of stopped resources; an example and the code stand below."""
    since = f"{rough((now - group.since).total_seconds())} ago" if group.since else ""
    until = _ends(group, now)
    example = f"such as {group.example}" + (f", job {group.example_job}" if group.example_job else "")
    code = f" ({group.code})" if group.code else ""
    error = f": {brief(group.last_error, 60)}" if group.last_error else ""
    error += f"; {brief(group.reason, 60)}" if group.reason else ""
    gate = _GATE.get(group.gate, group.gate)
    waiting = f"{group.waiting:,}{'+' if group.waiting.more else ''}"
    return Row(group.provider, gate, group.resources, waiting, since, until, remark=example + code + error, whole=True)


def _ends(group: StoppedGroup, now: datetime) -> str:
    """When it ends, of many the first and the last; or what ends it."""
    if group.until is None:
        return _END.get(group.gate, "")
    last, first = rough((group.until - now).total_seconds()), ""
    if group.first_until is not None:
        first = rough((group.first_until - now).total_seconds())
    return f"in {last}" if first in ("", last) else f"in {first} to {last}"


_GATE = {"breaker": "circuit", "pause": "paused"}


def _compact(value: Any) -> str:
    if value is None:
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2_000 else text[:2_000] + f"… ({len(text):,} characters; --json shows all)"  # noqa: PLR2004
