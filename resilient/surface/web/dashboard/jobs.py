"""Pages of jobs: lists by the command line's filters, one job with its reasons, dead jobs by cause; their changes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import FailureKind, InvalidInput
from resilient.core.base.phrases import counted
from resilient.core.jobs.records import Count
from resilient.core.jobs.states import TERMINAL, JobState
from resilient.store.inspect import pages
from resilient.store.jobs.filters import JobFilter
from resilient.surface.cli.jobs import criteria_of, text_of
from resilient.surface.web.dashboard import bulk
from resilient.surface.web.dashboard.charts import figure, lifeline, recent
from resilient.surface.web.dashboard.words import quoted, words_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from uuid import UUID

    from starlette.responses import Response

    from resilient.core.jobs.records import AttemptInfo, JobInfo
    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]


PAGE: Final = 50
MOST: Final = 10_000  # jobs that one change may reach
FILTERS: Final = (
    "state", "kind", "resource", "within", "tag", "unique_key", "ordering_key", "error_kind", "error_code", "text",
    "worker", "created_after", "created_before", "finished_after", "finished_before", "run_after", "run_before",
)  # fmt: skip
_LISTS: Final = frozenset({"state", "kind", "resource", "tag", "error_kind", "error_code"})
_EXACT: Final = frozenset({"unique_key", "ordering_key", "text"})  # blanks at their ends count
VERBS: Final = {"retry": "Run again", "cancel": "Cancel", "discard": "Give up"}
_DOUBT: Final = "ambiguous"


async def jobs(visit: Visit) -> Response:
    """A page of jobs."""
    filters = filters_of(visit.query)
    rows = await visit.app.jobs.list(
        limit=PAGE + 1, after=visit.query.get("after") or None, payloads=False, **criteria(filters)
    )
    following = rows[PAGE - 1].id if len(rows) > PAGE else None
    kind = filters.get("kind", "")
    title = f"{kind}: executions that ended within 48 hours"
    throughput = figure(await recent(visit), visit.now, title, kind=kind) if kind else None
    return visit.render(
        "jobs.html", throughput=throughput,
        rows=rows[:PAGE], following=following, filters=filters, command=command("jobs list", filters),
        blank=[name.replace("_", " ") for name in sorted(_EXACT) if (one := filters.get(name, "")) != one.strip()],
        states=[one.value for one in JobState], error_kinds=[*FailureKind, text_of(None)], verbs=VERBS,
    )  # fmt: skip


def filters_of(values: Mapping[str, str]) -> dict[str, str]:
    """The filters of a form, as the person wrote them."""
    texts = {
        name: values[name] if name in _LISTS | _EXACT else values[name].strip()
        for name in FILTERS if values.get(name, "").strip()
    }  # fmt: skip
    return texts | ({"struggling": "yes"} if values.get("struggling") == "yes" else {})


def criteria(filters: Mapping[str, str]) -> Any:
    """The filters as `JobFilter` takes them."""
    values: dict[str, Any] = {name: words_of(value) if name in _LISTS else value for name, value in filters.items()}
    if "struggling" in values:
        values["struggling"] = True
    return criteria_of(values, lambda name: name.replace("_", " "))


def command(verb: str, filters: Mapping[str, str]) -> str:
    """The command line with the same filters."""
    words = ["resilient", *verb.split()]
    for name, value in filters.items():
        option = "--" + name.replace("_", "-")
        if name == "struggling":
            words.append(option)
            continue
        for one in words_of(value) if name in _LISTS else [value]:
            words += [option, quoted(one)]
    return " ".join(words)


async def job(visit: Visit) -> Response:
    """One job."""
    job_id = visit.request.path_params["id"]
    info = await visit.app.jobs.get(job_id)
    attempts = await visit.app.jobs.attempts(job_id)
    why = await visit.app.jobs.why(job_id)
    payloads, shown = visit.operator.may("payloads"), visit.app.ground.encoder.view(info.kind, info.payload)
    return visit.render(
        "job.html", job=replace(info, payload=shown), attempts=attempts, why=why, life=life(info, attempts),
        line=lifeline(info, attempts, visit.now), commands=_commands(info),
        in_doubt=info.last_error_kind == _DOUBT and info.state == JobState.DEAD,
        over=info.state in TERMINAL, waiting=info.state in (JobState.BLOCKED, JobState.SCHEDULED, JobState.READY),
        payloads=payloads, stored=not payloads, command=f"resilient jobs show {info.id}", seen=_end_of(info),
    )  # fmt: skip


def _end_of(info: JobInfo) -> str:
    """The end of a job that a page shows, for its buttons: a person decides about that one, not about a later one."""
    return f"{info.state.value} {info.finished_at.isoformat()}" if info.finished_at is not None else ""


def _commands(info: JobInfo) -> list[str]:
    """What can be done to a job, as commands."""
    in_doubt = info.last_error_kind == _DOUBT and info.state == JobState.DEAD
    verbs = []
    if info.state in TERMINAL:
        verbs.append(("jobs retry", " --repeat-ambiguous" if in_doubt else ""))
    else:
        verbs.append(("jobs cancel", ""))
    if info.state == JobState.DEAD:
        verbs.append(("dead discard", ""))
    return [f"resilient {verb} {info.id}{options}" for verb, options in verbs]


def life(info: JobInfo, attempts: list[AttemptInfo]) -> list[dict[str, Any]]:
    """The past of a job and its next try, in order: ``at``, ``what``, ``detail``, and ``state`` for the colour."""
    points: list[dict[str, Any]] = [{"at": info.created_at, "what": "enqueued", "state": "ready", "detail": ""}]
    for one in attempts:
        error = " ".join(part for part in (one.kind, one.code) if part)
        free = "" if one.charged else "no attempt charged"
        points.append(
            {
                "at": one.finished_at,
                "what": f"execution {one.execution}: {one.decision}",
                "state": "dead" if one.decision == "dead" else "scheduled",
                "detail": ", ".join(part for part in (error, free) if part),
            }
        )
    if info.state == JobState.RUNNING and info.started_at is not None:
        text = f"execution {info.executions} on {info.locked_by}"
        points.append({"at": info.started_at, "what": "started", "state": "running", "detail": text})
    if info.finished_at is not None and not (points[-1]["state"] == "dead" and info.state == JobState.DEAD):
        points.append({"at": info.finished_at, "what": info.state.value, "state": info.state.value, "detail": ""})
    if info.state == JobState.SCHEDULED:
        points.append({"at": info.run_at, "what": "next try", "state": "scheduled", "detail": ""})
    return points


# -- changes ---------------------------------------------------------------------------------------------------------


async def change_one(visit: Visit) -> Response:
    """Change one job without a confirmation."""
    form = visit.form
    job_id, verb = form.get("id", ""), _verb(form)
    async with visit.audited(f"jobs {verb}", job_id) as outcome:
        counts = await _change(visit, verb, form, _as_seen(form, job_id) if verb != "cancel" else job_id)
        outcome.update(counts)
    reasons = ", ".join(name for name, n in counts.items() if n).replace("_", " ")
    changed = next(iter(counts.values())) + counts.get("requested", 0)
    if not (changed or reasons):
        reasons = f"the page was old, it is {(await visit.app.jobs.get(job_id)).state.value} now"
    text = _PAST[verb] if changed else f"Nothing was changed: {reasons}"
    return visit.back(visit.url(f"/jobs/{visit.seg(job_id)}"), f"{text}.", bad=not changed)


def _as_seen(form: Mapping[str, str], job_id: str) -> str | JobFilter:
    """This job, if its end is still the one that the page showed.

    Otherwise a second click, or another tab, would run a job again that has run since.
    """
    state, _, end = form.get("seen", "").partition(" ")
    if not end:
        return job_id
    try:
        at = datetime.fromisoformat(end)
        after = at + _MOMENT
    except (ValueError, OverflowError):
        raise InvalidInput(f"seen={form['seen'][:60]!r} is no end of a job") from None
    return JobFilter.of({"ids": [job_id], "state": state, "finished_after": at, "finished_before": after})


_MOMENT: Final = timedelta(microseconds=1)  # the resolution of a column of times
_PAST: Final = {
    "retry": "It runs again, with a fresh budget of attempts", "cancel": "It is cancelled, or asked to stop",
    "discard": "It was given up; error and history stay",
}  # fmt: skip


async def change_many(visit: Visit) -> Response:
    """Change the jobs of a filter: the first request counts them, the confirmation changes them."""
    form = visit.form
    verb, filters = _verb(form), filters_of(form)
    if verb != "cancel":
        filters.setdefault("state", "dead")
    if not filters:
        raise InvalidInput("which jobs? Use at least one filter")
    spacing = bulk.spacing_from(form.get("rate", ""))
    back = visit.url(form["from"] if form.get("from") in ("/dead", "/jobs") else "/jobs", **filters)
    if form.get("sure") != "yes":
        count = await visit.app.jobs.count(**criteria(filters), limit=MOST)
        return visit.render(
            "sure.html", title=f"{VERBS[verb]}: {counted(count, 'job')}?", count=int(count), action="/do/jobs",
            fields={**form, **filters, "sure": "yes"}, examples=[], back=back, capped=count.more,
            detail=", ".join(f"{name.replace('_', ' ')} {value}" for name, value in filters.items())
            + (f", at {form['rate'].strip()}" if form.get("rate", "").strip() else ""),
        )  # fmt: skip
    meaning = ", ".join(f"{name} {value}" for name, value in filters.items())
    if verb != "retry" or not spacing:  # a retry at a rate writes all times at once, in the database
        count = await visit.app.jobs.count(**criteria(filters), limit=MOST)
        if spacing or count > bulk.PART:
            change = bulk.Bulk("jobs", f"{VERBS[verb]}: {counted(count, 'job')}", int(count), back, spacing)
            parts, apply = _parts(visit, filters), partial(_change_some, visit, verb, form, filters)
            return bulk.begin(visit, change, f"jobs {verb}", meaning, parts, apply)
    async with visit.audited(f"jobs {verb}", meaning) as outcome:
        counts = await _change(visit, verb, form, None, limit=MOST, **criteria(filters))
        outcome.update(counts)
    text = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items() if n) or "nothing was changed"
    return visit.back(visit.url("/dead") if form.get("from") == "/dead" else back, f"{text}.".capitalize())


def _verb(form: Mapping[str, str]) -> str:
    verb = form.get("verb", "")
    if verb not in VERBS:
        raise InvalidInput(f"verb={verb!r}: use one of {', '.join(VERBS)}")
    return verb


def _parts(visit: Visit, filters: Mapping[str, str]) -> Callable[[int], AsyncIterator[list[UUID]]]:
    """The ids of the jobs that the filters match, part by part."""

    async def parts(size: int) -> AsyncIterator[list[UUID]]:
        after: UUID | None = None
        while page := await visit.app.jobs.list(limit=size, after=after, payloads=False, **criteria(filters)):
            after = page[-1].id
            yield [one.id for one in page]

    return parts


async def _change_some(
    visit: Visit, verb: str, form: Mapping[str, str], filters: Mapping[str, str], ids: Sequence[UUID]
) -> dict[str, int]:
    """Change those of these jobs that the filters still match."""
    which = replace(JobFilter.of(criteria(filters)), ids=tuple(ids))
    return await _change(visit, verb, {**form, "rate": ""}, which)


async def _change(
    visit: Visit, verb: str, form: Mapping[str, str], which: str | JobFilter | None, **criteria: Any
) -> dict[str, int]:
    options: dict[str, Any] = {}
    if verb == "retry":
        options = {
            "repeat_ambiguous": form.get("repeat_ambiguous") == "yes",
            "new_operation": form.get("new_operation") == "yes", "rate": form.get("rate", "").strip() or None,
        }  # fmt: skip
    counts: dict[str, int] = (await getattr(visit.app.jobs, verb)(which, **options, **criteria)).to_json()
    return counts


# -- dead jobs --------------------------------------------------------------------------------------------------------
#
# Grouped by cause, each group with one example; a group can be run again or given up.


async def dead(visit: Visit) -> Response:
    """A page of the groups, the largest first."""
    groups = await visit.read(pages.dead_groups)
    number = sum(int(one.count) for one in groups)
    total = Count(min(number, pages.DEAD_SAMPLE), more=number > pages.DEAD_SAMPLE)
    return visit.render("dead.html", groups=groups, total=total)


PAGES: dict[str, tuple[str, Page]] = {
    "/jobs": ("read", jobs), "/jobs/{id}": ("read", job), "/dead": ("read", dead),
}  # fmt: skip
CHANGES: dict[str, tuple[str, Page]] = {
    "/do/job": ("jobs", change_one), "/do/jobs": ("jobs", change_many),
}  # fmt: skip
