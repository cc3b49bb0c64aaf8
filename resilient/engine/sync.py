"""Streams: what a program declares about one feed of a provider, the page it gets, and `app.streams`.

A `Stream` is a value like a handler: it registers nowhere. Its facts (paginator, incremental mechanism) are
mostly the provider's, so ``Stream("issues", request=..., paginator=P.pagination["rest"])`` says the rest. `Streams`
says how far each was read, and lets one begin anew. `run/stream_reader.py` does the reading.

May use: `ground`. Begin with: `Stream`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast
from urllib.parse import quote

from pydantic import ValidationError

from resilient.core.base import resource_key
from resilient.core.base.errors import InvalidInput, SetupError
from resilient.core.base.misfit import check_number, check_storable, explained_calls, explained_class
from resilient.core.inspect.retention import span
from resilient.core.sync.paginators import OnePage
from resilient.core.sync.stream import Cursor, Record, Rules, asked_since
from resilient.engine.ground.audited import audited
from resilient.engine.ground.kinds import adapter_of, value_of_foreign
from resilient.engine.ground.sessions import CallersSession, SyncFacade, Transactions, blocking
from resilient.store import sync as cursors

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any

    from pydantic import TypeAdapter

    from resilient.core.sync.incremental import Incremental
    from resilient.core.sync.paging import PageRequest, Paginator
    from resilient.core.sync.stream import CursorInfo
    from resilient.engine.ground.ground import Ground
    from resilient.store.sync import Place


T = TypeVar("T")
_LONGEST_PART: Final = 200
_LONGEST_NAME: Final = 100
# Errors of pydantic where a strict model is given what JSON has in place of a time, an id, bytes or a set.
_STRICT: Final = frozenset({
    "bytes_type", "complex_type", "date_type", "datetime_type", "decimal_type", "frozen_set_type", "is_instance_of",
    "set_type", "time_delta_type", "time_type", "tuple_type", "url_type", "uuid_type",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that does not fit the stream's model: put aside, so that it holds up no other.

    ``key``: None if it cannot be read. ``why``: places and rules in pydantic's words, without the
    values; a validator of your own may quote them.
    """

    raw: Any = field(repr=False)
    key: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a stream.

    ``full``: it belongs to a full pass. ``pass_id``: the number of its pass; later passes have larger ones.
    ``items``: what is new or changed. ``deleted``: keys of records that the provider says are gone.
    ``rejected``: records that do not fit the model. ``last``: the pass ends with it.
    """

    full: bool
    pass_id: int
    items: list[T]
    deleted: list[str]
    rejected: list[Rejected]
    last: bool
    stream: str


@explained_class
@dataclass(frozen=True, eq=False)
class Stream(Generic[T]):
    """One feed of a provider, read page by page.

    ``request(**params)`` makes the first request of a full pass, with ``incremental`` (the provider's fact)
    also of incremental ones, unless ``changes(since, **params)`` makes those. ``paginator`` pages it,
    ``changes_paginator`` the incremental pass, where that differs. ``model``: what each record is read as (a
    pydantic model, dataclass or TypedDict; None leaves the decoded JSON). ``key``: the path of a record's
    key. ``deleted``: what marks a record as gone, ``field`` or ``field=value``; ``deleted_key``: where the key of what
    is gone stands, in events that tell of deletions and stay items (defaults: the incremental mechanism's).
    ``overlap``: seconds by which incremental passes go back (default: the provider's precision).
    ``full_every``: how often a pass is full, for deletions the feed does not show. ``expected``: within which time a
    pass shall end; people are told of accounts where none did for several times that (`Alerting.periods`).
    ``before(**params)``: the request that tells the cursor where it must be read before the pass.

    Raises `SetupError`.
    """

    name: str
    request: Callable[..., PageRequest]
    paginator: Paginator = field(default_factory=OnePage)
    model: type[T] | None = None
    incremental: Incremental | None = None
    changes: Callable[..., PageRequest] | None = None
    changes_paginator: Paginator | None = None
    key: str = "id"
    deleted: str = ""
    deleted_key: str = ""
    overlap: float | timedelta | str | None = None
    full_every: float | timedelta | str | None = None
    expected: float | timedelta | str | None = None
    before: Callable[..., PageRequest] | None = None
    rules: Rules = field(init=False, repr=False)
    _adapter: TypeAdapter[Any] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _LONGEST_NAME or self.name != self.name.strip():
            raise SetupError(f"{self.name!r} is not a stream's name: 1 to {_LONGEST_NAME} characters")
        mechanism = self.incremental
        if mechanism is not None and mechanism.source == "before_pass" and self.before is None:
            raise SetupError(f"stream {self.name!r} needs before=: its cursor is read by a request before the pass")
        if mechanism is not None and mechanism.style == "conditional" and not isinstance(self.paginator, OnePage):
            raise SetupError(
                f"stream {self.name!r} has several pages, and a conditional request speaks for one: use another"
                " incremental mechanism, or none"
            )
        marked = mechanism.deleted if mechanism is not None and mechanism.deletions == "marked" else ""
        overlap = 0.0 if mechanism is None else mechanism.precision
        rules = Rules(
            key=self.key, incremental=mechanism, deleted=self.deleted or marked,
            deleted_key=self.deleted_key or ("" if mechanism is None or self.deleted else mechanism.deleted_key),
            overlap=overlap if self.overlap is None else _seconds("overlap", self.overlap),
            full_every=None if self.full_every is None else _seconds("full_every", self.full_every),
            expected=None if self.expected is None else _seconds("expected", self.expected),
        )  # fmt: skip
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "_adapter", None if self.model is None else adapter_of(self.model))

    def place(self, resource_key: str, params: dict[str, Any]) -> Place:
        """Where its cursor is kept: each set of parameters is a part of its own."""
        part = "&".join(f"{name}={quote(str(value), safe='/:@,')}" for name, value in sorted(params.items()))
        if len(part) > _LONGEST_PART:
            part = sha256(part.encode()).hexdigest()[:32]
        return resource_key, self.name, part

    def pages_by(self, cursor: Cursor) -> Paginator:
        """The paginator of a pass."""
        return self.paginator if cursor.full or self.changes_paginator is None else self.changes_paginator

    def first(self, cursor: Cursor, params: dict[str, Any]) -> PageRequest:
        """The first request of a pass."""
        if cursor.full:
            return self.pages_by(cursor).first(self.request(**params))
        since = asked_since(cursor, self.rules)
        if self.changes is not None:
            return self.pages_by(cursor).first(self.changes(since, **params))
        return self.pages_by(cursor).first(self._asking(self.request(**params), since))

    def _asking(self, request: PageRequest, since: str) -> PageRequest:
        """The request with the cursor in the place that the provider's facts name."""
        mechanism = self.incremental
        assert mechanism is not None  # noqa: S101 - only incremental passes ask
        value = mechanism.form.replace("{cursor}", since)
        if mechanism.query:
            return request.with_query(**{mechanism.query: value})
        if mechanism.body:
            return request.with_body(mechanism.body, value)
        if mechanism.header:
            return replace(request, headers={**request.headers, mechanism.header: value})
        return request.at(since)

    @staticmethod
    def _read(adapter: TypeAdapter[Any], raw: Any) -> Any:
        try:
            return adapter.validate_python(raw)
        except ValidationError as error:
            if _STRICT.isdisjoint(one["type"] for one in error.errors(include_input=False, include_url=False)):
                raise
            return value_of_foreign(adapter, raw)

    def read(self, record: Record) -> T | Rejected:
        """A record as the model, or the reason why it does not fit."""
        if self._adapter is None:
            return cast("T", record.raw)
        try:
            return cast("T", self._read(self._adapter, record.raw))
        except ValidationError as error:
            problems = error.errors(include_input=False, include_url=False, include_context=False)[:3]
            why = "; ".join(".".join(map(str, e["loc"])) + ": " + e["msg"] for e in problems)
            return Rejected(record.raw, record.key, why)
        except Exception as error:  # noqa: BLE001 - of a validator, which met what nobody thought of
            why = f"{type(error).__name__} in a validator of the model"  # its text may quote the record
            return Rejected(record.raw, record.key, why)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, (int, float)):
        check_number("Stream", name, value, above=False)
        return float(value)
    duration = span(name, value)
    return 0.0 if duration is None else duration.total_seconds()


def checked_params(stream: Stream[Any], params: dict[str, Any]) -> dict[str, Any]:
    """Parameters that can name a part. Raises `InvalidInput`."""
    for name, value in params.items():
        if not isinstance(value, (str, int, float, bool)):
            raise InvalidInput(
                f"stream {stream.name!r}: parameter {name} is a {type(value).__name__}; parameters are text, numbers"
                " or flags, because each set of them has a cursor of its own"
            )
        if isinstance(value, float) and not isfinite(value):
            raise InvalidInput(f"stream {stream.name!r}: parameter {name} is {value}: give a finite number, or a text")
    return params


@explained_calls("app.streams")
class Streams:
    """Streams of one app. Raises `BadResourceKey` for what is no key or pattern."""

    def __init__(self, ground: Ground, *, here: bool = False) -> None:
        self._ground, self._db = ground, Transactions(ground, here=here)

    @property
    def sync(self) -> SyncStreams:
        """The same for synchronous programs."""
        return SyncStreams(Streams(self._ground, here=True))

    async def list(
        self,
        stream: Stream[Any] | str | None = None,
        pattern: str | None = None,
        *,
        part: str | None = None,
        session: CallersSession = None,
    ) -> builtins.list[CursorInfo]:
        """Where streams stand: all that were ever read, or those of one name, resource pattern and part."""
        return await self._db.read(session, cursors.list_cursors, _where(stream, pattern, part))

    @audited("sync reset")
    async def reset(
        self,
        stream: Stream[Any] | str,
        pattern: str | None = None,
        *,
        part: str | None = None,
        reason: str = "reset by hand",
        session: CallersSession = None,
    ) -> int:
        """Let the next pass be a full one; returns how many cursors there were.

        A job in the middle of a pass notices at its next checkpoint, which is refused, and reads the cursor again.
        """
        where, why = _where(stream, pattern, part), check_storable("reason", reason)
        return await self._db.write(session, cursors.reset, where, why)

    @audited("sync forget")
    async def forget(
        self,
        stream: Stream[Any] | str | None = None,
        pattern: str | None = None,
        *,
        part: str | None = None,
        session: CallersSession = None,
    ) -> int:
        """Forget where streams stand, of accounts that are gone for good; returns how many cursors there were.

        Raises `InvalidInput` if neither a stream nor resources are named.
        """
        if stream is None and pattern is None:
            raise InvalidInput("this would forget every stream: name one, or a resource pattern")
        return await self._db.write(session, cursors.forget, _where(stream, pattern, part))


class SyncStreams(SyncFacade[Streams]):
    """`Streams` for synchronous programs: the same methods, without ``await``."""

    list = blocking(Streams.list)
    reset = blocking(Streams.reset)
    forget = blocking(Streams.forget)


def _where(stream: Stream[Any] | str | None, pattern: str | None, part: str | None) -> cursors.Where:
    name = stream.name if isinstance(stream, Stream) else stream
    for what, text in (("the name of a stream", name), ("part", part)):
        check_storable(what, text or "")
    return cursors.Where(name, None if pattern is None else resource_key.check_pattern(pattern), part)
