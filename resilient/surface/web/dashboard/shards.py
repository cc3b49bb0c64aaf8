"""A program of several shards: the pages of each under ``/shard/NAME``, and a first page that looks at all of them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from resilient.core.base.errors import DatabaseUnreachable, ResilientError, SetupError
from resilient.core.base.phrases import counted
from resilient.store.inspect import pages
from resilient.store.inspect.why import glance
from resilient.surface.web.dashboard.overviews import sentence
from resilient.surface.web.dashboard.visit import ENVIRONMENT, HERE, SHARDS, VERSION, ShardLink

from starlette.responses import Response  # isort: skip - `visit` says which extra is missing
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from resilient.core.alerts.overview import Overview
    from resilient.engine.app.app import Resilient
    from resilient.surface.shards import Shards
    from resilient.surface.web.dashboard.guard import Operator

PATIENCE: Final = 5.0  # seconds for which the first page waits for a shard
_NAME: Final = re.compile(r"(?!\.+$)[\w.-]+")  # one segment of a path


@dataclass(frozen=True, slots=True)
class Look:
    """What the first page says of a shard; ``overview`` is None if its database could not be read."""

    link: ShardLink
    text: str
    overview: Overview | None = None
    is_well: bool = False


class _Named(NamedTuple):
    name: str
    app: ASGIApp
    names: tuple[str, ...]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the shard's own pages, with links to the other shards."""
        base = scope.get("root_path", "").rstrip("/").removesuffix(f"/shard/{self.name}")
        await self.app({**scope, SHARDS: links(base, self.names, self.name)}, receive, send)


def links(base: str, names: tuple[str, ...], here: str) -> tuple[ShardLink, ...]:
    """Links to the first page and to each shard; ``here``: the shard of this page, "" on the first."""
    first = ShardLink("All shards", f"{base}/", not here)
    return (first, *(ShardLink(name, f"{base}/shard/{name}/", name == here) for name in names))


def routes(
    shards: Shards, pages_of: Callable[[str], ASGIApp], admit: Callable[[Request], Awaitable[Operator | Response]]
) -> list[Route | Mount]:
    """The routes of all pages. Raises `SetupError` for a name that cannot be part of a path."""
    names = tuple(shards)
    if odd := [name for name in names if not _NAME.fullmatch(name)]:
        raise SetupError(
            f"dashboard(): {odd[0]!r} cannot be part of an address: name shards by letters, digits, - and _"
        )

    async def first(request: Request) -> Response:
        who = await admit(request)
        if isinstance(who, Response):
            return who
        base = request.scope.get("root_path", "").rstrip("/")
        _, *places = links(base, names, "")
        looks = await asyncio.gather(*(look(place, shards[place.name]) for place in places))
        body = ENVIRONMENT.get_template("shards.html").render(
            url=lambda path: base + path, version=VERSION, operator=who, note=None, signals=None, section="",
            current=f"{base}/", shards=links(base, names, ""), looks=looks,
        )  # fmt: skip
        return Response(body, headers={"Cache-Control": "no-store"}, media_type="text/html")

    return [
        Route("/", first, methods=["GET"]),
        *(Mount(f"/shard/{name}", app=_Named(name, pages_of(name), names).answer) for name in names),
        Mount("/static", app=StaticFiles(directory=HERE / "static")),
    ]


async def look(link: ShardLink, app: Resilient) -> Look:
    """One shard's state; a database that is away, or of another version, is part of it and no error."""
    try:
        async with asyncio.timeout(PATIENCE):
            await app.ready()
            read = app.database.transaction
            moment = await read(lambda c, d: d.now(c))
            causes, totals, overview = await asyncio.gather(
                read(pages.causes, moment), read(pages.totals), read(glance)
            )
    except TimeoutError:
        return Look(link, f"its database did not answer within {PATIENCE:.0f} s")
    except DatabaseUnreachable:
        return Look(link, "its database does not answer")
    except ResilientError as error:
        return Look(link, str(error))
    alerts = len(overview.alerts)
    text = sentence(causes, totals, overview) + (f" {counted(alerts, 'alert')}." if alerts else "")
    return Look(link, text, overview, is_well=bool(overview.workers) and not causes and not overview.stranded)
