"""Dead jobs: grouped by what killed them, each group with one example; replay or give up a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.jobs.records import Count
from resilient.store.inspect import pages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.responses import Response

    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]


async def dead(visit: Visit) -> Response:
    """A page of the groups, the largest first."""
    groups = await visit.read(pages.dead_groups)
    number = sum(int(one.count) for one in groups)
    total = Count(min(number, pages.DEAD_SAMPLE), more=number > pages.DEAD_SAMPLE)
    return visit.render("dead.html", groups=groups, total=total)


PAGES: dict[str, tuple[str, Page]] = {"/dead": ("read", dead)}
CHANGES: dict[str, tuple[str, Page]] = {}
