"""Changes of many, made beside the requests: at a rate, with a page that says how far they are, and a way to stop.

A change is made in small parts, each of which looks once more at what it changes. It belongs to the process that began
it: ends that process, the rest stays as it was, and the audit knows no outcome. So it can be begun again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from resilient.core.base.errors import InvalidInput
from resilient.core.base.loggers import logger
from resilient.core.base.phrases import counted, span
from resilient.engine.jobs.api import spacing_of
from resilient.surface.web.dashboard.guard import RefusedChangeError

from starlette.exceptions import HTTPException  # isort: skip - `visit` says which extra is missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from starlette.responses import Response

    from resilient.store.db.database import Database
    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]
    Parts = Callable[[int], AsyncIterator[Sequence[Any]]]  # of a size: what is meant, part by part
    Apply = Callable[[Sequence[Any]], Awaitable[dict[str, int]]]

log = logger("dashboard")
PART: Final = 100
AT_ONCE: Final = 4  # that go on in one process
_REMEMBERED: Final = 50
_GONE: Final = "This process does not know it: it began in another one, or long ago. The audit says what it brought."


@dataclass(slots=True)
class Bulk:
    """One change of many. ``counts`` is what it brought so far, ``state`` "running", "ended", "stopped" or "failed".

    ``right`` is what it takes to stop it, ``back`` the page it came from.
    """

    right: str
    title: str
    total: int
    back: str
    spacing: float  # seconds between two; 0: as fast as it goes
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    state: str = "running"
    error: str = ""
    halt: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def remaining(self) -> str:
        """How long it still takes, as far as that is known."""
        if self.state != "running" or not self.done:
            return ""
        took = time.monotonic() - self.began
        return span((self.total - self.done) * max(self.spacing, took / self.done))


_BULKS: Final[WeakKeyDictionary[Database, dict[str, Bulk]]] = WeakKeyDictionary()


def spacing_from(text: str) -> float:
    """The seconds between two changes at a rate that somebody typed; 0 for none. Raises `InvalidInput`."""
    far = spacing_of(text.strip() or None)
    return 0.0 if far is None else far.total_seconds()


def begin(
    visit: Visit, bulk: Bulk, action: str, subject: str, parts: Parts, apply: Apply, why: str | None = None
) -> Response:
    """Begin a change, and go to its page. Raises `InvalidInput` where too many go on."""
    bulks = _BULKS.setdefault(visit.app.database, {})
    if sum(one.state == "running" for one in bulks.values()) >= AT_ONCE:
        raise InvalidInput(f"{AT_ONCE} changes of many go on already: wait for one, or stop it")
    bulks[bulk.id] = bulk
    for old in [one.id for one in bulks.values() if one.state != "running"][: max(len(bulks) - _REMEMBERED, 0)]:
        del bulks[old]
    bulk.task = asyncio.create_task(_run(visit, bulk, action, subject, parts, apply, why))
    return visit.back(visit.url(f"/bulk/{bulk.id}"), "Begun.")


async def _run(
    visit: Visit, bulk: Bulk, action: str, subject: str, parts: Parts, apply: Apply, why: str | None
) -> None:
    try:
        async with visit.audited(action, subject, why) as outcome:
            try:
                await _in_parts(bulk, parts, apply)
            finally:
                outcome.update(bulk.counts, **({"stopped_after": bulk.done} if bulk.done < bulk.total else {}))
        bulk.state = "stopped" if bulk.halt.is_set() and bulk.done < bulk.total else "ended"
    except Exception as error:
        bulk.state, bulk.error = "failed", f"{type(error).__name__}: {error}"
        log.warning("%s stopped after %s of %s", bulk.title, bulk.done, bulk.total, exc_info=error)
    finally:
        if bulk.state == "running":
            bulk.state = "stopped"


async def _in_parts(bulk: Bulk, parts: Parts, apply: Apply) -> None:
    size = PART if not bulk.spacing else max(1, min(PART, int(1 / bulk.spacing)))
    async for part in parts(size):
        ahead = bulk.began + bulk.done * bulk.spacing - time.monotonic()
        if ahead > 0:
            await _rest(bulk, ahead)
        if bulk.halt.is_set() or bulk.done >= bulk.total:
            return
        some = part[: bulk.total - bulk.done]
        bulk.counts.update(await apply(some))
        bulk.done += len(some)


async def _rest(bulk: Bulk, seconds: float) -> None:
    try:
        await asyncio.wait_for(bulk.halt.wait(), seconds)
    except TimeoutError:
        return


def _bulk_of(visit: Visit, name: str) -> Bulk:
    bulk = _BULKS.get(visit.app.database, {}).get(name)
    if bulk is None:
        raise HTTPException(404, _GONE)
    return bulk


async def show(visit: Visit) -> Response:
    """How far a change is."""
    bulk = _bulk_of(visit, visit.request.path_params["id"])
    what = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in bulk.counts.items() if n)
    return visit.render("bulk.html", bulk=bulk, what=what, sentence=f"{bulk.done:,} of {counted(bulk.total, 'change')}")


async def change(visit: Visit) -> Response:
    """Stop a change: what is done stays."""
    bulk = _bulk_of(visit, visit.form.get("id", ""))
    if not visit.operator.may(bulk.right):
        raise RefusedChangeError(f"{visit.operator.name} lacks the right “{bulk.right}”")
    bulk.halt.set()
    return visit.back(visit.url(f"/bulk/{bulk.id}"), "It stops: what is done stays.")


PAGES: dict[str, tuple[str, Page]] = {"/bulk/{id}": ("read", show)}
CHANGES: dict[str, tuple[str, Page]] = {"/do/bulk": ("read", change)}
