"""The job's columns, in one list: every INSERT and COPY is generated from it, and every read into a named record.

To add a column: a field in `tables.Job`, a migration, a line in `COLUMNS`. If the caller writes it, a field of `NewJob`
too; whoever wants to read it names it in a record (`ClaimedJob`, `OverdueJob`, `JobInfo`). Nothing else: no statement
names a column by its position. `tests/store/test_job_columns.py` compares the list with the table.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import Enum
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store.db.dialect import ID, JSON, TIME
from resilient.store.db.types import AnyText

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from uuid import UUID


class Writer(Enum):
    """Who writes a column first."""

    CALLER = "the field of this name in `NewJob`"
    INSERT = "the insert, from what the caller wrote and the clock"
    ENGINE = "claim, run, finish or a change from outside; a new job has the default"


class Column(NamedTuple):
    """One column. ``type`` is PostgreSQL's name for it; a new job has ``default`` unless its writer gives a value."""

    name: str
    type: str
    writer: Writer
    default: int | bool | None = None


_CALLER, _INSERT, _ENGINE = Writer
COLUMNS: Final = (
    Column("id", "uuid", _CALLER),
    Column("kind", "text", _CALLER),
    Column("resource_key", "text", _CALLER),
    Column("payload", "json", _CALLER),
    Column("payload_version", "int", _CALLER, 1),
    Column("state", "text", _INSERT),
    Column("priority", "smallint", _CALLER, 0),
    Column("run_at", "timestamptz", _INSERT),
    Column("expires_at", "timestamptz", _INSERT),
    Column("attempts", "int", _ENGINE, 0),
    Column("max_attempts", "int", _CALLER),
    Column("executions", "int", _ENGINE, 0),
    Column("deferrals", "int", _ENGINE, 0),
    Column("rescues", "int", _ENGINE, 0),
    Column("version", "int", _ENGINE, 1),
    Column("locked_by", "text", _ENGINE),
    Column("lease_until", "timestamptz", _ENGINE),
    Column("started_at", "timestamptz", _ENGINE),
    Column("unique_key", "text", _CALLER),
    Column("unique_until", "text", _CALLER),
    Column("unique_lock", "text", _INSERT),
    Column("once_more", "boolean", _ENGINE, default=False),
    Column("wish", "json", _ENGINE),
    Column("idempotency_key", "text", _CALLER),
    Column("sent", "json", _ENGINE),
    Column("tags", "jsonb", _CALLER),
    Column("progress", "json", _ENGINE),
    Column("result", "json", _ENGINE),
    Column("last_error", "text", _ENGINE),
    Column("last_error_kind", "text", _ENGINE),
    Column("last_error_code", "text", _ENGINE),
    Column("waiting_for", "text", _ENGINE),
    Column("cancel_requested", "boolean", _ENGINE, default=False),
    Column("trace", "json", _CALLER),
    Column("ordering_key", "text", _CALLER),
    Column("order_no", "bigint", _CALLER),
    Column("ordering_policy", "text", _CALLER),
    Column("waits", "int", _CALLER, 0),
    Column("followed", "boolean", _CALLER, default=False),
    Column("created_at", "timestamptz", _INSERT),
    Column("updated_at", "timestamptz", _INSERT),
    Column("finished_at", "timestamptz", _ENGINE),
)
BY_NAME: Final = {column.name: column for column in COLUMNS}

# What every end of a job writes beside its state and time: it has no unique key, no request and no wait any more.
AT_THE_END: Final[Mapping[str, bool | None]] = MappingProxyType(
    {"unique_lock": None, "once_more": False, "wish": None, "cancel_requested": False, "waiting_for": None}
)
AT_THE_END_SQL: Final = ", ".join(
    f"{name} = {'NULL' if value is None else 'false'}" for name, value in AT_THE_END.items()
)


def names(writer: Writer) -> tuple[str, ...]:
    """The columns that have this writer."""
    return tuple(column.name for column in COLUMNS if column.writer is writer)


# -- inserting -----------------------------------------------------------------------------------------------


class NewJob(NamedTuple):
    """A job to insert. ``run_at`` or ``delay`` make it scheduled, else it is ready.

    ``delay`` and ``expires_in`` are seconds from the database's now. `like` relies on the order of the first four.
    """

    id: UUID
    kind: str
    resource_key: str
    payload: str  # JSON text
    payload_version: int = 1
    priority: int = 0
    run_at: datetime | None = None
    delay: float | None = None
    expires_at: datetime | None = None
    expires_in: float | None = None
    max_attempts: int | None = None
    unique_key: str | None = None
    unique_until: str | None = None
    idempotency_key: str | None = None
    tags: str | None = None  # JSON text
    trace: str | None = None  # JSON text
    ordering_key: str | None = None
    ordering_policy: str | None = None
    followed: bool = False  # it waits for others, or is a step: see `dependencies.release_followers`
    waits: int = 0  # how many things it waits for; more than none: blocked
    order_no: int | None = None

    def like(self, id_: UUID, resource_key: str, payload: str) -> NewJob:
        """Another job of the same batch (a third of the time of `_replace`)."""
        return NewJob(id_, self.kind, resource_key, payload, *self[4:])

    @property
    def is_later(self) -> bool:
        """Whether it is scheduled for a time of its own."""
        return self.run_at is not None or self.delay is not None

    def start(self, now: datetime) -> datetime:
        """When it may run, if it is inserted ``now``."""
        return self.run_at or (now + timedelta(seconds=self.delay) if self.delay else now)

    def expiry(self, now: datetime) -> datetime | None:
        """When it expires, if it is inserted ``now``."""
        return self.expires_at if self.expires_in is None else now + timedelta(seconds=self.expires_in)


OWN: Final = ("id", "resource_key", "payload", "waits", "order_no")  # mostly each job's own in a batch
SHARED: Final = tuple(name for name in NewJob._fields if name not in OWN)  # mostly the same for a whole batch


def getter(fields: Iterable[str]) -> Callable[[NewJob], tuple[Any, ...]]:
    """A function that reads these fields (at least two) of a new job: an `itemgetter` costs half of an `attrgetter`."""
    return itemgetter(*map(NewJob._fields.index, fields))


def has_only(columns: Iterable[str]) -> Callable[[NewJob], bool]:
    """Whether a job has its default in every other field: the guard of a statement that writes only these columns."""
    others = [name for name in NewJob._fields if name not in columns]
    values = getter(others)
    defaults = tuple(NewJob._field_defaults[name] for name in others)
    return lambda job: values(job) == defaults


def parameter(name: str) -> str:
    """A column's value as a parameter of its name (PostgreSQL, which infers by itself which texts are ``text``)."""
    type_ = BY_NAME[name].type
    return f":{name}" if type_ == "text" else f"CAST(:{name} AS {type_})"


# -- reading -------------------------------------------------------------------------------------------------
# A record is a NamedTuple whose fields are columns; those in ``computed`` are expressions instead.

_SPELLED: Final = {"payload": "{payload}"}  # its exact text, which the handler's model reads
_TYPES: Final = {"uuid": ID, "timestamptz": TIME, "json": JSON, "jsonb": JSON}


def selected(record: type[tuple[Any, ...]], **computed: str) -> str:
    """The SELECT list of a record."""
    spelled = _SPELLED | computed
    return ", ".join(f"{spelled[name]} AS {name}" if name in spelled else name for name in _fields(record, computed))


def types(record: type[tuple[Any, ...]], *computed: str) -> dict[str, Any]:
    """The types by which the columns of that list are read (see `Dialect.run`)."""
    readers = {name: None if name in computed else _TYPES.get(BY_NAME[name].type) for name in _fields(record, computed)}
    return readers | ({"payload": AnyText()} if "payload" in readers else {})


def _fields(record: type[tuple[Any, ...]], computed: Iterable[str]) -> Sequence[str]:
    fields: Sequence[str] = record._fields  # type: ignore[attr-defined]
    if unknown := [name for name in fields if name not in BY_NAME and name not in computed]:
        raise LookupError(f"{record.__name__} names {unknown[0]!r}, which is no column of the job")
    return fields
