"""The first page: one sentence, what is stopped, what fails, who works."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from resilient.core.alerts.words import begun
from resilient.core.base.phrases import counted, span
from resilient.store.inspect import pages
from resilient.store.inspect.why import glance
from resilient.surface.web.dashboard.charts import figure, recent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.responses import Response

    from resilient.core.alerts.overview import Overview
    from resilient.store.inspect.pages import Cause, Totals
    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]
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
        parts.append(f"{behind:,}{'+' if more else ''} {'job' if behind == 1 and not more else 'jobs'} behind them")
    if not overview.workers:
        parts.append("no worker runs")
    elif totals.oldest is not None:
        age = (overview.at - totals.oldest).total_seconds()
        parts.append(f"oldest runnable job waits {span(age)}" if age >= 1 else "what may run starts at once")
    elif int(overview.jobs["ready"]) == 0:
        parts.append(f"nothing waits, {counted(overview.jobs['running'], 'job runs', 'jobs run')}")
    return "; ".join(parts) + "."


PAGES: dict[str, tuple[str, Page]] = {"/": ("read", now)}
CHANGES: dict[str, tuple[str, Page]] = {}
