"""The first page; the pages beside jobs and accounts.

These are workflows, schedules, streams, the outbox, connections, workers, the system and the audit.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from resilient.core.accounts.tokens import UNREADABLE, GrantState
from resilient.core.alerts.words import begun
from resilient.core.base import resource_key
from resilient.core.base.errors import InvalidInput
from resilient.core.base.phrases import counted, span
from resilient.core.events.message import RESOURCE
from resilient.core.inspect.why import stands_still
from resilient.core.jobs.states import JobState
from resilient.core.jobs.workflow import OVER, WorkflowState
from resilient.engine.inspect.doctor import examine
from resilient.store.gates import resources as gates
from resilient.store.inspect import pages
from resilient.store.inspect.why import glance
from resilient.store.jobs.filters import as_id
from resilient.surface.cli import jobs as options_of
from resilient.surface.web.dashboard.charts import figure, recent, ticks
from resilient.surface.web.dashboard.graph import draw, layers

from starlette.exceptions import HTTPException  # isort: skip - `visit` says which extra is missing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.responses import Response

    from resilient.core.alerts.overview import Overview
    from resilient.core.jobs.records import ResourceInfo
    from resilient.store.inspect.pages import Cause, Totals
    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]


# -- the first page ---------------------------------------------------------------------------------------------------
#
# One sentence, what is stopped, what fails, who works.

MOST: Final = 20  # causes, and alerts, that are shown


async def now(visit: Visit) -> Response:
    """The sentence, the causes, failing jobs, alerts and workers."""
    causes, totals, overview, throughput = await asyncio.gather(  # side by side: each reads through some large table
        visit.read(pages.causes, visit.now), visit.read(pages.totals), visit.read(glance), recent(visit)
    )
    alerts = begun([(one, True) for one in overview.alerts], {}, overview.at)
    return visit.render(
        "now.html", sentence=sentence(causes, totals, overview), causes=causes[:MOST], more=len(causes) - MOST,
        overview=overview, totals=totals, alerts=[one.text for one in alerts[:MOST]],
        still=[one.loop_lag for one in overview.workers if stands_still(one.loop_lag)],
        is_read=throughput is not None,
        throughput=figure(throughput, visit.now, "Executions that ended within 48 hours"),
        healthy=not causes and overview.workers and not overview.stranded,
    )  # fmt: skip


def sentence(causes: Sequence[Cause], totals: Totals, overview: Overview) -> str:
    """Everything in one line, such as "3 of 4,812 accounts stopped; 12,040 jobs behind them; oldest waits 4 s."."""
    stopped = sum(one.resources for one in causes)
    behind = sum(int(one.waiting) for one in causes)
    more = any(one.waiting.more for one in causes)
    parts = ["Nothing is stopped" if not stopped else f"{stopped:,} of {counted(totals.accounts, 'account')} stopped"]
    if stopped:
        number = f"{behind:,}{'+' if more else ''}" if behind else "no"
        parts.append(f"{number} {'job' if behind in (0, 1) and not more else 'jobs'} behind them")
    if not overview.workers:
        parts.append("no worker runs")
    elif totals.oldest is not None:
        age = (overview.at - totals.oldest).total_seconds()
        parts.append(f"oldest runnable job waits {span(age)}" if age >= 1 else "what may run starts at once")
    elif int(overview.jobs["ready"]) == 0:
        runs = counted(overview.jobs["running"], "job runs", "jobs run") if overview.jobs["running"] else "nothing runs"
        parts.append(f"nothing waits, {runs}")
    return "; ".join(parts) + "."


# -- the others -------------------------------------------------------------------------------------------------------

PAGE: Final = 50
_DIGITS: Final = 18  # of a number that both databases take


async def workflows(visit: Visit) -> Response:
    """A page of workflows, the newest first."""
    state = visit.query.get("state") or None
    if state is not None and state not in list(WorkflowState):
        raise InvalidInput(f"{state!r} is not a workflow state: use one of {', '.join(WorkflowState)}")
    after = as_id(visit.query["after"], "workflow") if visit.query.get("after") else None
    rows = await visit.read(pages.workflows, state=state, after=after, limit=PAGE + 1)
    return visit.render(
        "workflows.html", rows=rows[:PAGE], following=rows[PAGE - 1].id if len(rows) > PAGE else None, state=state,
        states=[one.value for one in WorkflowState],
    )  # fmt: skip


async def workflow(visit: Visit) -> Response:
    """One workflow: its steps in the order in which they can run, and their undos."""
    info = await visit.app.workflows.get(visit.request.path_params["id"])
    levels = {step.name: n for n, layer in enumerate(layers(info.steps)) for step in layer}
    return visit.render(
        "workflow.html", info=info, levels=levels, over=info.state in OVER, drawing=draw(info.steps, visit.url)
    )


async def schedules(visit: Visit) -> Response:
    """Every schedule."""
    return visit.render("schedules.html", rows=await visit.app.schedules.list())


async def schedule(visit: Visit) -> Response:
    """One schedule with its latest jobs, and the accounts it is for."""
    name = visit.name("name")
    info = next((one for one in await visit.app.schedules.list() if one.name == name), None)
    if info is None:
        raise HTTPException(404, f"there is no schedule {name!r}")
    after = visit.query.get("after", "")
    accounts = await visit.app.schedules.accounts(name, limit=PAGE + 1, after=after) if info.for_each else []
    latest = await visit.app.jobs.list(kind=info.kind, tags={"schedule": name}, limit=40, payloads=False)
    in_order = latest[::-1]
    return visit.render(
        "schedule.html", info=info, foreign=name not in visit.app.schedules.declared, accounts=accounts[:PAGE],
        latest=latest,
        sparkline=ticks(in_order, name, [visit.url(f"/jobs/{one.id}") for one in in_order]),
        following=accounts[PAGE - 1].resource_key if len(accounts) > PAGE else None,
    )  # fmt: skip


async def streams(visit: Visit) -> Response:
    """A page of sync streams by resource."""
    after: Sequence[str] = visit.request.query_params.getlist("after")
    place = (after[0], after[1], after[2]) if len(after) == 3 else None  # noqa: PLR2004 - resource, stream, part
    rows = await visit.read(pages.streams, after=place, limit=PAGE + 1)
    last = rows[PAGE - 1] if len(rows) > PAGE else None
    return visit.render("streams.html", rows=rows[:PAGE], last=last)


async def outbox(visit: Visit) -> Response:
    """The destinations of events (how many wait, since when, how many are dead), and a page of events."""
    destinations = await visit.read(pages.destinations, visit.app.outbox.destinations)
    filters = {name: visit.query.get(name, "").strip() for name in ("state", "destination")}
    filters["key"] = visit.query.get("key", "")  # a blank at an end belongs to it
    after = visit.query.get("after") or None
    rows = await visit.app.outbox.list(
        state=filters["state"] or (), destination=filters["destination"] or None, key=filters["key"] or None,
        limit=PAGE + 1, after=after,
    ) if destinations else []  # fmt: skip
    stops = {one.key: one for name in (RESOURCE, f"{RESOURCE}/*") for one in await _stopped(visit, name)}
    return visit.render(
        "outbox.html", destinations=destinations, stops=stops, rows=rows[:PAGE], filters=filters,
        states=[one.value for one in JobState],
        following=rows[PAGE - 1].job_id if len(rows) > PAGE else None,
    )  # fmt: skip


async def _stopped(visit: Visit, pattern: str) -> Sequence[ResourceInfo]:
    rows: Sequence[ResourceInfo] = await visit.app.resources.list(pattern, gate="any", limit=200)
    return rows


async def connections(visit: Visit) -> Response:
    """A page of connections by key; of each provider the states, and whether its fuse has blown."""
    state, provider = visit.query.get("state") or None, visit.query.get("provider") or None
    rows = await visit.app.connections.list(provider, state=state, limit=PAGE + 1, after=visit.query.get("after", ""))
    facts = await visit.read(gates.read, [one.resource_key for one in rows[:PAGE]])
    return visit.render(
        "connections.html", unreadable={key for key, one in facts.items() if one.auth == UNREADABLE}, rows=rows[:PAGE],
        state=state, provider=provider, states=[one.value for one in GrantState],
        following=rows[PAGE - 1].resource_key if len(rows) > PAGE else None,
        providers=await visit.read(pages.grants_by_provider),
    )  # fmt: skip


async def workers(visit: Visit) -> Response:
    """The worker processes."""
    return visit.render("workers.html", rows=await visit.read(pages.workers))


async def system(visit: Visit) -> Response:
    """The findings of `resilient doctor`."""
    app = visit.app
    findings = await examine(
        app.database, listen_url=app.listen_url, providers=app.providers.values(),
        keys=app.grants.accounts.ring.key_ids if app.kinds or app.providers else None,
        own_table=app.grants.accounts.store is not None,
    )  # fmt: skip
    worst = {"fail": 0, "warn": 1}
    return visit.render("system.html", findings=sorted(findings, key=lambda one: worst.get(one.level, 2)))


async def audit(visit: Visit) -> Response:
    """Who changed what, why and when."""
    query = visit.query
    after = query.get("after", "").strip()
    if len(after) > _DIGITS or not (after or "0").isdecimal():
        raise InvalidInput(f"after: {after[:40]!r} is not the number of a change")
    rows = await visit.app.audit.list(
        who=query.get("who") or None, subject=query.get("subject") or None, limit=PAGE + 1,
        after=int(after) if after else None,
    )  # fmt: skip
    return visit.render(
        "audit.html", rows=rows[:PAGE], following=rows[PAGE - 1].id if len(rows) > PAGE else None,
        who=query.get("who", ""), subject=query.get("subject", ""),
    )  # fmt: skip


# -- changes ---------------------------------------------------------------------------------------------------------


async def change_schedule(visit: Visit) -> Response:
    """Pause or resume a schedule, run its job now, or let one tick no more that no program declares any longer."""
    name, verb = visit.form.get("name", ""), visit.form.get("verb", "")
    if verb not in _OF_SCHEDULES:
        raise InvalidInput(f"verb={verb!r}: use one of {', '.join(_OF_SCHEDULES)}")
    async with visit.audited(f"schedules {verb}", name):
        await getattr(visit.app.schedules, verb)(name)
    return visit.back(visit.url(f"/schedules/{name}"), f"{name} {_OF_SCHEDULES[verb]}.")


_OF_SCHEDULES: Final = {
    "pause": "does not tick until it is resumed", "resume": "ticks again", "run": "has a job now",
    "remove": "ticks no more; a program that declares it brings it back when it starts",
}  # fmt: skip


async def change_workflow(visit: Visit) -> Response:
    """Turn a workflow around."""
    async with visit.audited("workflows cancel", visit.form.get("id", "")) as outcome:
        info = await visit.app.workflows.cancel(visit.form.get("id", ""))
        outcome["state"] = info.state.value
    return visit.back(
        visit.url(f"/workflows/{info.id}"), "It turns around: what is unfinished stops, the rest is undone."
    )


async def change_stream(visit: Visit) -> Response:
    """Let the next pass of one stream of one resource be a full one; without ``part`` that of its part ""."""
    form = visit.form
    stream, key, part = form.get("stream", ""), resource_key.check_stored(form.get("key", "")), form.get("part", "")
    async with visit.audited("sync reset", " ".join(one for one in (stream, key, part) if one)) as outcome:
        reason = f"reset by {visit.operator.name}"
        number = await visit.app.streams.reset(stream, key, part=part, reason=reason)
        outcome["reset"] = number
    return visit.back(visit.url("/streams"), f"{counted(number, 'stream begins', 'streams begin')} anew.")


async def replay(visit: Visit) -> Response:
    """Publish events once more: first how many, then, confirmed, the replay."""
    form = visit.form
    since, destination = form.get("since", "").strip() or "1h", form.get("destination") or None
    criteria: dict[str, Any] = {"since": options_of.moment("since", since), "destination": destination}
    if form.get("sure") != "yes":
        would = await visit.app.outbox.replay(**criteria, dry_run=True)
        return visit.render(
            "sure.html", title=f"Publish {counted(would.events, 'event')} once more?", count=would.events,
            action="/do/replay", fields={**form, "sure": "yes"}, examples=[], capped=would.more,
            back=visit.url("/outbox"),
            detail=f"published since {since} to {destination or 'any destination'}",
        )  # fmt: skip
    async with visit.audited("outbox replay", f"{destination or 'every destination'}, since {since}") as outcome:
        again = await visit.app.outbox.replay(**criteria)
        outcome["events"] = again.events
    return visit.back(visit.url("/outbox"), f"{counted(again.events, 'event')} in line again.")


async def change_fuse(visit: Visit) -> Response:
    """Decide what the deaths of many accounts of a provider meant."""
    provider, verb = visit.form.get("provider", ""), visit.form.get("verb", "")
    if verb not in ("release", "confirm"):
        raise InvalidInput(f"verb={verb!r}: use release or confirm")
    async with visit.audited(f"connections {verb}", provider) as outcome:
        number = await getattr(visit.app.connections, verb)(provider)
        outcome["grants"] = number
    text = "are tried again" if verb == "release" else "must be connected again"
    return visit.back(visit.url("/connections", provider=provider), f"{counted(number, 'connection')} {text}.")


PAGES: dict[str, tuple[str, Page]] = {
    "/": ("read", now), "/workflows": ("read", workflows), "/workflows/{id}": ("read", workflow),
    "/schedules": ("read", schedules), "/schedules/{name:path}": ("read", schedule), "/streams": ("read", streams),
    "/outbox": ("read", outbox),
    "/connections": ("read", connections), "/workers": ("read", workers), "/system": ("read", system),
    "/audit": ("read", audit),
}  # fmt: skip
CHANGES: dict[str, tuple[str, Page]] = {
    "/do/schedule": ("jobs", change_schedule), "/do/workflow": ("jobs", change_workflow),
    "/do/stream": ("jobs", change_stream), "/do/replay": ("jobs", replay), "/do/fuse": ("connections", change_fuse),
}  # fmt: skip
