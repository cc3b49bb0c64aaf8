"""Where a sync stream stands, as a state machine: full pass, incremental passes, reset.

    cursor = begin(cursor, now, rules)          the pass under way, or the next one; each has a number of its own
    news, cursor = take(cursor, ...)            one answer: its records, and the cursor behind it
    cursor = restart(cursor, why)               the provider refused the cursor, or the pages go round: a full pass

A cursor is saved with its page's rows, so what is in the database is what the cursor says. Rules:

- nothing is lost at the border: an incremental pass begins at the newest record of the last one, the border
  included, the provider's precision further back, and never after the time at which the last pass began (a
  record may change behind a pass that takes long). What comes twice is known by its hash and dropped;
- a stream without a cursor for the next pass starts a full one: never a pass that reads nothing;
- records that are gone may be deleted only after a full pass that ended, and saw the key of each record.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.body import pick
from resilient.core.base.bounds import CURSOR, LIST_RECORDS
from resilient.core.base.errors import InvalidInput
from resilient.core.base.instants import http_date
from resilient.core.sync.incremental import instant, later, shifted
from resilient.core.sync.paging import Loop, PageRead, PageRequest, PagingError, cursor_at

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from datetime import datetime

    from resilient.core.base.exchange import AnswerFacts
    from resilient.core.sync.incremental import Incremental

EDGE: Final = 500  # hashes of the border's records that are kept; beyond them a record comes twice
SLICE: Final = 100  # records that are worked on at a time
RESETS: Final = 5  # passes in a row that may begin anew before somebody must look
_OUR_CLOCK: Final = 300.0  # seconds by which our clock may be ahead of a provider that does not tell its own
Edge = tuple[tuple[str, float], ...]  # hash and instant of records at the border


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a stream says about its passes. ``overlap``, ``full_every`` and ``expected`` in seconds."""

    key: str = "id"
    incremental: Incremental | None = None
    overlap: float = 0.0
    full_every: float | None = None
    expected: float | None = None
    deleted: str = ""
    deleted_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a stream stands. ``next`` is the page to ask for; None: no pass is under way.

    ``since``: where the next incremental pass begins; None: the next pass is a full one. ``provider_cursor`` (the one
    that the provider named for the next pass), ``newest``, ``began`` and ``fresh`` belong to the pass under way.
    ``full_pass``: the number of the last full pass that ended. ``nameless``: rejected records without a readable key,
    in this pass. ``execution``: the number of the execution that read the latest page; 0: nobody noted it.
    """

    version: int = 0  # of its row; 0: it has none
    pass_id: int = 0
    full: bool = True
    next: PageRequest | None = None
    since: str | None = None
    provider_cursor: str | None = None
    newest: str | None = None
    began: float | None = None
    edge: Edge = ()
    fresh: Edge = ()
    loop: Loop = Loop()  # noqa: RUF009 - immutable
    resets: int = 0
    nameless: int = 0
    execution: int = 0
    full_pass: int = 0
    full_nameless: int = 0
    swept_pass: int = 0
    pages: int = 0
    records: int = 0
    rejected: int = 0
    full_at: datetime | None = None
    completed_at: datetime | None = None
    error: str | None = None
    expected: float | None = None  # seconds within which a pass shall end

    @property
    def may_sweep(self) -> bool:
        """Whether what the last full pass did not see is gone: it ended, saw every key, none is under way or due."""
        return (
            self.full_pass > self.swept_pass
            and self.full_nameless == 0
            and not (self.full and self.next is not None)
            and self.error is None
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads; only what is not a column of its own."""
        values = asdict(self)
        doc = {key: values[name] for name, key in _STORED.items()}
        doc["next"] = None if self.next is None else self.next.to_json()
        doc["loop"] = list(self.loop)
        return {name: value for name, value in doc.items() if value not in (None, (), 0)}

    @classmethod
    def from_json(cls, doc: Any, **columns: Any) -> Cursor:
        """Read what `to_json` wrote. Raises `InvalidInput`."""
        if not isinstance(doc, dict):
            raise InvalidInput("the stored cursor is none: reset the stream, so that it starts a full pass")
        fields = {name: doc[key] for name, key in _STORED.items() if key in doc}
        fields["next"] = None if doc.get("next") is None else PageRequest.from_json(doc["next"])
        fields["loop"] = Loop(*doc.get("loop", ()))
        for name in ("edge", "fresh"):
            fields[name] = tuple((str(h), float(at)) for h, at in doc.get(name, ()))
        return cls(**fields, **columns)


_STORED: Final = {  # field to its key in the stored document
    "next": "next", "since": "since", "provider_cursor": "told", "newest": "newest", "began": "began", "edge": "edge",
    "fresh": "fresh", "loop": "loop", "resets": "resets", "nameless": "nameless", "full_nameless": "full_nameless",
    "execution": "execution",
}  # fmt: skip


class Record(NamedTuple):
    """One record as it came. ``key``: None if it cannot be read.

    ``gone``: it is a deletion and nothing else. ``deleted``: the keys of what it says is gone.
    """

    raw: Any
    key: str | None
    gone: bool
    deleted: tuple[str, ...] = ()


class CursorInfo(NamedTuple):
    """One stream of one resource, for people."""

    resource_key: str
    stream: str
    part: str
    cursor: Cursor
    updated_at: datetime

    @property
    def doing(self) -> str:
        """What the stream is doing: a full pass, an incremental one, or neither."""
        if self.cursor.next is not None:
            return "full pass" if self.cursor.full else "changes"
        return "up to date" if self.cursor.completed_at is not None and self.cursor.error is None else "to be read anew"

    def to_json(self) -> dict[str, Any]:
        """For programs; never the cursor itself, which may name customers' data."""
        c = self.cursor
        return {
            "resource_key": self.resource_key, "stream": self.stream, "part": self.part, "doing": self.doing,
            "pass_id": c.pass_id, "full": c.full, "full_pass": c.full_pass, "may_sweep": c.may_sweep,
            "pages": c.pages, "records": c.records, "rejected": c.rejected, "error": c.error,
            "full_at": None if c.full_at is None else c.full_at.isoformat(),
            "completed_at": None if c.completed_at is None else c.completed_at.isoformat(),
            "updated_at": self.updated_at.isoformat(),
        }  # fmt: skip


def begin(cursor: Cursor, now: datetime, rules: Rules) -> Cursor:
    """The pass under way, or the next one with nothing read; its first request is the caller's to set."""
    if cursor.next is not None:
        return replace(cursor, expected=rules.expected)
    return replace(
        cursor, expected=rules.expected,
        pass_id=cursor.pass_id + 1, full=_wants_full(cursor, now, rules), provider_cursor=None, newest=None, began=None,
        fresh=(), loop=Loop(), nameless=0, pages=0, records=0, rejected=0,
    )  # fmt: skip


def _wants_full(cursor: Cursor, now: datetime, rules: Rules) -> bool:
    if rules.incremental is None or cursor.since is None:
        return True
    if rules.full_every is not None and (cursor.full_at is None or _age(cursor.full_at, now) >= rules.full_every):
        return True
    life = rules.incremental.life
    return life is not None and (cursor.completed_at is None or _age(cursor.completed_at, now) >= life)


def _age(then: datetime, now: datetime) -> float:
    return (now - then).total_seconds()


def asked_since(cursor: Cursor, rules: Rules) -> str:
    """The cursor that an incremental pass sends: one made of a time goes back by the overlap."""
    since = cursor.since or ""
    if rules.incremental is None or rules.incremental.style != "filter":
        return since
    return shifted(since, -rules.overlap) if rules.overlap else since


class TooManyRecords(PagingError):
    """A page holds more than is decoded, or than a program can be asked to write, at once."""


def take(
    cursor: Cursor, request: PageRequest, answer: AnswerFacts, read: PageRead, rules: Rules, now: datetime
) -> tuple[list[Record], Cursor]:
    """`take_in_slices`, all at once."""
    steps = take_in_slices(cursor, request, answer, read, rules, now)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            after: tuple[list[Record], Cursor] = end.value
            return after


def take_in_slices(
    cursor: Cursor,
    request: PageRequest,
    answer: AnswerFacts,
    read: PageRead,
    rules: Rules,
    now: datetime,
    *,
    most: int = LIST_RECORDS.value,
) -> Generator[None, None, tuple[list[Record], Cursor]]:
    """The new records of one answer, and the cursor behind it; a breath after each `SLICE` of them.

    ``read`` is what the paginator read. Raises `PagingError` if the pages go round, `TooManyRecords` for more records,
    or deletions, than ``most``.
    """
    if len(read.items) > most:
        raise TooManyRecords(f"a page holds {len(read.items):,} records, and {most:,} are the most")
    cursor = replace(cursor, began=cursor.began or _clock_of(answer, now))
    border = set() if cursor.full else {digest for digest, _ in cursor.edge}
    latest: dict[str, Record] = {}  # by digest
    digests, gone = [], 0
    for number, raw in enumerate(read.items):
        if number and number % SLICE == 0:
            yield
        digests.append(digest := _digest(raw))
        cursor = _measured(cursor, raw, digest, rules)
        if digest not in border:
            latest.pop(digest, None)  # of two that are equal the later counts: the record may have been deleted between
            latest[digest] = _record(raw, rules, most)
            if (gone := gone + len(latest[digest].deleted)) > most:
                raise TooManyRecords(f"a page tells of more than {most:,} deletions")
    loop = cursor.loop.step(request, read._replace(items=digests))  # which stand for the records, and are short
    records = yield from _in_force(list(latest.values()), rules)
    provider_cursor = _provider_cursor(answer, read, rules)
    cursor = replace(
        cursor,
        loop=loop,
        next=read.next,
        provider_cursor=provider_cursor or cursor.provider_cursor,
        pages=cursor.pages + 1,
        records=cursor.records + len(records),
    )
    return records, cursor if cursor.next is not None else _ended(cursor, rules, now)


def _in_force(records: list[Record], rules: Rules) -> Generator[None, None, list[Record]]:
    """Without deletions that a later record of the key undoes, and without records that a later deletion undoes.

    Later by the time in each of them, as a feed may list the newest first; without it by their order. An event that
    tells of deletions stays. It undoes records, and they it, if its own key is that of what is gone; else the keys of
    records may be those of other things.
    """
    has_their_keys = rules.key in rules.deleted_key.split()
    if not any(one.gone or (has_their_keys and one.deleted) for one in records):
        return records
    latest: dict[str | None, tuple[bool, float | None]] = {}  # by key: whether it is gone, and since when
    for number, one in enumerate(records):
        if number and number % SLICE == 0:
            yield
        at, is_gone = instant(_position(one.raw, rules)), one.gone or (has_their_keys and bool(one.deleted))
        for key in one.deleted if is_gone else (one.key,):
            _, before = latest.get(key, (is_gone, None))
            if at is None or before is None or at >= before:
                latest[key] = is_gone, at
    in_force = []
    for one in records:
        if has_their_keys and one.deleted:
            in_force.append(one._replace(deleted=tuple(key for key in one.deleted if latest[key][0])))
        elif one.key is None or latest[one.key][0] == one.gone:
            in_force.append(one)
    return in_force


def refuse(cursor: Cursor, rejected: Iterable[str | None]) -> Cursor:
    """The cursor after some records of the page were rejected; None stands for one without a readable key."""
    keys = list(rejected)
    nameless = cursor.nameless + keys.count(None)
    cursor = replace(cursor, rejected=cursor.rejected + len(keys), nameless=nameless)
    # The page may have been the pass's last one.
    return replace(cursor, full_nameless=nameless) if cursor.full and cursor.full_pass == cursor.pass_id else cursor


def unchanged(cursor: Cursor, now: datetime) -> Cursor:
    """The provider says that nothing changed since the last pass (304)."""
    return replace(cursor, next=None, pages=cursor.pages + 1, completed_at=now, error=None, resets=0)


def restart(cursor: Cursor, why: str) -> Cursor:
    """Forget where the stream stands, because the provider refused the cursor: the next pass is a full one."""
    return replace(
        cursor, full=True, next=None, since=None, provider_cursor=None, newest=None, began=None, edge=(), fresh=(),
        loop=Loop(), resets=cursor.resets + 1, error=why,
    )  # fmt: skip


def _ended(cursor: Cursor, rules: Rules, now: datetime) -> Cursor:
    """The pass is over: where the next one begins."""
    since = _next_since(cursor, rules)
    edge: Edge = ()
    if rules.incremental is not None and rules.incremental.style == "filter" and since is not None:
        floor = (instant(since) or 0.0) - rules.overlap
        kept = dict(cursor.fresh) if cursor.full else {**dict(cursor.edge), **dict(cursor.fresh)}
        edge = tuple((digest, at) for digest, at in kept.items() if at >= floor)[-EDGE:]
    if cursor.full:
        cursor = replace(cursor, full_pass=cursor.pass_id, full_at=now, full_nameless=cursor.nameless)
    return replace(
        cursor, since=since, edge=edge, fresh=(), provider_cursor=None, newest=None, began=None, loop=Loop(), resets=0,
        completed_at=now, error=None,
    )  # fmt: skip


def _next_since(cursor: Cursor, rules: Rules) -> str | None:
    """The cursor of the next pass; an incremental pass that was told none keeps its own."""
    before = None if cursor.full else cursor.since
    incremental = rules.incremental
    if incremental is None:
        return None
    if incremental.style == "key":
        return cursor.newest if later(cursor.newest, before) else before
    if incremental.style != "filter":
        return cursor.provider_cursor or before
    at = instant(cursor.newest)
    if cursor.newest is None or at is None:
        return before
    # A record that was read early may have changed while the pass went on: not beyond the pass's beginning.
    newest = cursor.newest if cursor.began is None or at <= cursor.began else shifted(cursor.newest, cursor.began - at)
    return newest if later(newest, before) else before


def _measured(cursor: Cursor, raw: Any, digest: str, rules: Rules) -> Cursor:
    """The cursor with what this record tells about where the next pass begins."""
    value = _position(raw, rules)
    if value is None:
        return cursor
    newest = value if later(value, cursor.newest) else cursor.newest
    at = instant(value)
    if at is None or (rules.incremental is not None and rules.incremental.style == "key"):
        return replace(cursor, newest=newest)
    top = instant(newest) or at
    floor = min(top, cursor.began or top) - rules.overlap
    if at < floor:  # nor is it the newest
        return cursor
    fresh = (*cursor.fresh, (digest, at))
    if len(fresh) > 2 * EDGE:
        fresh = tuple(one for one in fresh if one[1] >= floor)[-EDGE:]
    return replace(cursor, newest=newest, fresh=fresh)


def _position(raw: Any, rules: Rules) -> str | None:
    """The time or the number in a record that a cursor is made of."""
    incremental = rules.incremental
    if incremental is None or incremental.style not in ("filter", "key"):
        return None
    value = next((str(v) for v in pick(raw, incremental.field) if _measurable(v)), None)
    return value if incremental.style == "key" or instant(value) is not None else None


def _measurable(value: Any) -> bool:
    """Whether a cursor can be made of it: a time, or an id, that a request and a row can carry."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return False
    try:
        return 0 < len(str(value).encode()) <= CURSOR.value
    except UnicodeEncodeError:  # half a character
        return False


def _record(raw: Any, rules: Rules, most: int) -> Record:
    key = next(_keys(raw, rules.key), None)
    if not _is_gone(raw, rules.deleted):
        return Record(raw, key, gone=False)
    if rules.deleted_key:  # an event, which tells of other records
        named = (name for path in rules.deleted_key.split() for name in _keys(raw, path))
        return Record(raw, key, gone=False, deleted=tuple(dict.fromkeys(islice(named, most + 1))))
    return Record(raw, key, gone=True, deleted=() if key is None else (key,))


def _keys(raw: Any, path: str) -> Iterator[str]:
    every = (one for value in pick(raw, path) for one in (value if isinstance(value, list) else [value]))
    return (str(v) for v in every if isinstance(v, (str, int)) and not isinstance(v, bool) and v != "")


def _is_gone(raw: Any, marker: str) -> bool:
    """Whether the record says that something was deleted: ``field`` has a value, or one that fits ``field=value``."""
    if not marker:
        return False
    path, equals, value = marker.partition("=")
    values = pick(raw, path)
    return (
        any(fnmatchcase(str(v), value) for v in values)
        if equals
        else any(v not in (None, False, "", [], {}) for v in values)
    )


def _provider_cursor(answer: AnswerFacts, read: PageRead, rules: Rules) -> str | None:
    """The cursor for the next pass, where this answer tells one."""
    incremental = rules.incremental
    if incremental is None or incremental.source == "before_pass":
        return read.resume
    if incremental.style == "conditional":
        mark = answer.headers.get("etag" if incremental.header.lower() == "if-none-match" else "last-modified", "")
        return mark if mark.isascii() and len(mark) <= CURSOR.value else None  # else no request of httpx's carries it
    if not incremental.cursor or incremental.source == "items" or (incremental.source == "last_page" and read.next):
        return read.resume
    return cursor_at(answer, incremental.cursor) or read.resume


def _clock_of(answer: AnswerFacts, now: datetime) -> float:
    """When the pass began, by the provider's clock if it tells it."""
    at = http_date(answer.headers.get("date", ""), now)
    return now.timestamp() - _OUR_CLOCK if at is None else at.timestamp()


def _digest(raw: Any) -> str:
    return sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()[:16]
