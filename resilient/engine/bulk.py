"""From what a caller asks about jobs to what the store does: filters, checked values, rates.

Shared by the async and the synchronous face of `Jobs`, so that they cannot differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from uuid import UUID

from resilient.core.errors import InvalidInput, JobNotFound
from resilient.core.limit import Limit
from resilient.engine.handler import Kind
from resilient.store import queries
from resilient.store.edits import UNSET, Edit
from resilient.store.filters import Criteria, JobFilter, as_id

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient.engine.app import Resilient
    from resilient.store.changes import Sweep
    from resilient.store.dialect import Dialect

Which: TypeAlias = "UUID | str | Iterable[UUID | str] | JobFilter | Criteria | None"
_ANY: Final[Kind[Any]] = Kind("any")


def filter_of(which: Which, criteria: Criteria, *, everything: bool = False) -> JobFilter:
    """The jobs that are meant: an id, several, a filter, or criteria.

    Raises `InvalidInput` for both at once, and for nothing at all unless ``everything`` is said.
    """
    if which is not None and criteria:
        raise InvalidInput("give job ids or a filter, not both")
    if which is None or isinstance(which, (Mapping, JobFilter)):
        made = which if isinstance(which, JobFilter) else JobFilter.of(cast("Criteria", which or criteria))
        if made == JobFilter() and not everything:
            raise InvalidInput("this would mean every job: give an id or a filter, or say everything=True")
        return made
    if not isinstance(which, (str, UUID, Iterable)):
        raise InvalidInput(f"which takes a job's id, several ids or a filter, not {type(which).__name__}")
    ids = [which] if isinstance(which, (str, UUID)) else list(which)
    return JobFilter(ids=tuple(as_id(i) for i in ids))


def single(which: Which) -> UUID | None:
    """The one job that is meant, if it was named by its id alone."""
    return as_id(which) if isinstance(which, (str, UUID)) else None


def found(which: Which, sweep: Sweep) -> Sweep:
    """The sweep, if the one job that was named exists; else `JobNotFound`."""
    if not sweep.looked_at and (id_ := single(which)) is not None:
        raise JobNotFound(queries.missing(id_))
    return sweep


def spacing_of(rate: float | str | None) -> timedelta | None:
    """The distance of two jobs at a rate such as ``"10/s"``, ``"600/min"`` or 10 (a second)."""
    if rate is None:
        return None
    limit = Limit.parse(rate) if isinstance(rate, str) else Limit(rate, per=1)
    return timedelta(seconds=limit.per / limit.rate)


def plan_edit(
    c: Connection, d: Dialect, app: Resilient, f: JobFilter, values: Mapping[str, Any], *, new_operation: bool
) -> Edit:
    """The edit, with every value checked as an enqueue would check it.

    Raises `InvalidInput` (one of its kinds); a payload is checked against the one kind that ``f`` means.
    """
    given = {name: value for name, value in values.items() if value is not UNSET}
    if not given:
        raise InvalidInput("nothing to edit: give payload, priority, run_at, delay, max_attempts, tags or expires_at")
    payload = given.pop("payload", UNSET)
    encode = app._encoder.encode  # noqa: SLF001 - the app's one encoder; it checks what enqueue checks
    checked = encode(_ANY, None, "any", **{name: value for name, value in given.items() if value is not None})
    if given.pop("delay", None) is not None:
        given["run_at"] = d.now(c) + timedelta(seconds=checked.row.delay or 0)
    for name in ("priority", "run_at"):
        if name in given and given[name] is None:
            raise InvalidInput(f"{name} cannot be None")
    if "tags" in given:
        given["tags"] = json.loads(checked.row.tags) if checked.row.tags else None
    if payload is not UNSET:
        row = encode(_kind_of(c, d, app, f), payload, "any").row
        given |= {"payload": json.loads(row.payload), "payload_version": row.payload_version}
    return Edit(new_operation=new_operation, **given)


def _kind_of(c: Connection, d: Dialect, app: Resilient, f: JobFilter) -> Kind[Any]:
    """The declaration of the one kind that the filter means."""
    kinds = set(f.kind)
    if f.ids is not None and not kinds:
        kinds = {job.kind for job in queries.page(c, d, f, limit=queries.PAGE_LIMIT, payloads=False)}
        if not kinds:
            raise JobNotFound(queries.missing(*f.ids))
    if len(kinds) != 1:
        raise InvalidInput("a payload fits one kind of job: filter by one kind, or name jobs of one kind")
    declared: Kind[Any] = app._encoder.kind_of(kinds.pop())  # noqa: SLF001 - as above
    return declared
