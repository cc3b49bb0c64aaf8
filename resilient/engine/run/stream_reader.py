"""A stream read page by page: written once, as coroutines, which a handler's thread drives to their end on the spot.

    pages        reads the cursor, asks for a page, yields it, and goes on only after its checkpoint
    checkpoint   one transaction: the user's rows, the cursor (if nobody moved it), the job's fence, commit
    sweep        the same, entered with something to do only after a complete full pass

The cursor after a page is known before its rows are written, and committed with them: it never runs ahead of them.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from resilient.core.base.body import pick
from resilient.core.base.bounds import LIST_RECORDS, PAGE_PARTS, PAGE_RECORDS, SCRUBBED_TEXT
from resilient.core.base.errors import (
    Failure,
    FailureKind,
    InvalidInput,
    JobFailure,
    Permanent,
    ResilientError,
    Transient,
)
from resilient.core.base.exchange import AnswerFacts
from resilient.core.base.hosts import without_params
from resilient.core.base.phrases import one_line
from resilient.core.jobs.outcomes import CONTINUATIONS
from resilient.core.sync.paginators import GraphQLPages, OnePage
from resilient.core.sync.paging import PagingError, cursor_at
from resilient.core.sync.stream import RESETS, SLICE, TooManyRecords, begin, refuse, restart, take_in_slices, unchanged
from resilient.engine.run.execution import patiently
from resilient.engine.run.two_phase import committed_session
from resilient.engine.sync import Page, Rejected, Stream, checked_params
from resilient.store import sync as cursors
from resilient.store.jobs import leases

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
    from datetime import datetime

    import httpx
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from resilient.core.sync.paging import PageRequest
    from resilient.core.sync.stream import Cursor, Record
    from resilient.engine.run.execution import Execution, WorkerLoop
    from resilient.store.db.dialect import Dialect
    from resilient.store.sync import Place

T = TypeVar("T")
R = TypeVar("R")
_UNCHANGED: Final = 304
_GONE: Final = 410
_OPENINGS: Final = (b"{", b"[")
_PARTS: Final = 100  # objects and lists that a record may have
_MANY: Final = 10_000  # objects and lists that take a while to decode
_DIGITS: Final = 10  # of a page's size, and more than any has
_UNKNOWN_PAGE: Final = frozenset({400, 404, 422})  # what providers without a rule for it answer to an old page token


@dataclass(slots=True)
class Move:
    """What a checkpoint saves: the cursor behind its page; and whether it has."""

    place: Place
    cursor: Cursor
    is_saved: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class UnsavedPage(Page[Any]):
    """A page with what its checkpoint saves."""

    move: Move = field(compare=False)


@dataclass(frozen=True, slots=True)
class Sweep(Generic[T]):
    """Delete what the last full pass did not see: the rows whose latest pass is before ``pass_id``."""

    session: T
    pass_id: int


class Reader(Generic[T]):
    """Reads one stream for one execution. ``client``: that of its handler, for coroutines or for threads."""

    def __init__(self, execution: Execution, client: Any, stream: Stream[T], params: dict[str, Any]) -> None:
        self._execution, self._client, self._stream, self._params = execution, client, stream, params

    async def pages(self) -> AsyncGenerator[Page[T], None]:
        """The pages of one pass. If the provider refuses the cursor, a full pass begins, and its pages follow.

        None if an earlier execution of this job read the pass to its end.
        """
        stream = self._stream
        place = stream.place(self._execution.resource_key, checked_params(stream, self._params))
        while True:
            cursor, now = await self._query(cursors.read, place)
            if await self._is_pass_over(place, cursor):
                return
            cursor = begin(cursor, now, stream.rules)
            try:
                async for page in self._pass(place, cursor):
                    yield page
            except _Refused as refusal:
                again = restart(refusal.cursor, str(refusal))
                if not await self._query(cursors.write_if_unmoved, place, again, None, now):
                    raise _cursor_moved(place) from None
                if again.resets >= RESETS or refusal.final:
                    raise Permanent(
                        f"stream {stream.name!r} cannot be read: {refusal}", code="reset_cursor"
                    ) from refusal.__cause__
                continue
            return

    async def _is_pass_over(self, place: Place, cursor: Cursor) -> bool:
        """Whether an earlier execution of this job read the pass to its end, and this one continues the same operation.

        Only the first `pages` of an execution asks: a second one reads a new pass.
        """
        execution = self._execution
        is_first, execution.passes = place not in execution.passes, execution.passes | {place}
        if not is_first or execution.row.executions < 1 or cursor.completed_at is None or cursor.next is not None:
            return False
        decisions = await self._query(cursors.decisions_since, place, execution.id, cursor.execution)
        return bool(decisions) and CONTINUATIONS.issuperset(decisions)

    async def _query(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a store function in a transaction of its own."""
        db = self._execution.db
        return await patiently(self._execution, partial(db.transaction, fn, *args), db.rest)

    async def _now(self) -> datetime:
        now: datetime = await self._query(_clock)
        return now

    async def _ask(self, request: PageRequest) -> httpx.Response:
        """Send a request."""
        response = self._client.request(**_words(request))
        answer: httpx.Response = await response if inspect.isawaitable(response) else response
        return answer

    async def _pass(self, place: Place, cursor: Cursor) -> AsyncGenerator[UnsavedPage, None]:
        stream = self._stream
        secret_params = self._client.secret_params  # repeated in the next page's address: no row keeps them
        paginator = stream.pages_by(cursor)
        request, is_stored = cursor.next, cursor.next is not None
        if request is None:
            if stream.before is not None:
                cursor = replace(cursor, provider_cursor=await self._cursor_before_pass())
            request = stream.first(cursor, self._params)
        now: datetime | None = None
        while request is not None:
            response = await self._ask(request)
            with _named(place, cursor):
                answer = _answer(response, cursor, paginator, is_stored=is_stored)
            is_stored = False
            if answer.status == _UNCHANGED:
                records: list[Record] = []
                after = unchanged(cursor, await self._now())
            else:
                if stream.rules.incremental is not None and stream.rules.incremental.style == "conditional":
                    cursor = replace(cursor, full=True)  # a feed that changed is sent whole
                request = replace(request, url=str(response.request.url)) if not _absolute(request) else request
                read = _read(paginator, request, answer)
                # a page in between needs no time: a round trip less
                now = await self._now() if now is None or read.next is None else now
                most = _most_records(paginator, request)
                steps = take_in_slices(cursor, request, answer, read, stream.rules, now, most=most)
                with _named(place, cursor):
                    records, after = await self._breathe_through(steps)
            if secret_params and after.next is not None:
                after = replace(after, next=replace(after.next, url=without_params(after.next.url, secret_params)))
            page = await self._breathe_through(_page(stream, place, records, after))
            yield page
            if not page.move.is_saved:
                raise ResilientError(
                    f"the page of stream {stream.name!r} was not saved: write its rows in `async with"
                    " job.checkpoint(page) as session:` before asking for the next one"
                )
            cursor = page.move.cursor
            request = cursor.next

    async def _breathe_through(self, steps: Generator[None, None, R]) -> R:
        """What steps come to; between them the event loop serves other jobs (a handler's thread holds up none)."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                value: R = end.value
                return value
            if self._execution.handler.is_async:
                await asyncio.sleep(0)

    async def _cursor_before_pass(self) -> str | None:
        """The cursor as the request before the pass (`Stream.before`) names it."""
        stream = self._stream
        assert stream.before is not None  # noqa: S101
        assert stream.incremental is not None  # noqa: S101
        response = await self._ask(stream.before(**self._params))
        response.raise_for_status()
        path = stream.incremental.cursor
        try:
            cursor = cursor_at(AnswerFacts(response.status_code, body=_json(response)), path, least=0)
        except PagingError as error:
            raise Transient(f"stream {stream.name!r}: in the answer before the pass {error}") from error
        if cursor is None:
            raise Transient(f"stream {stream.name!r}: the answer before the pass has no {path!r}")
        return cursor


class _Refused(Exception):
    """The provider refuses the cursor; ``final``: a new pass would end in the same way."""

    def __init__(self, why: str, cursor: Cursor, *, final: bool = False) -> None:
        self.cursor, self.final = cursor, final
        super().__init__(why)


def _page(
    stream: Stream[Any], place: Place, records: list[Record], after: Cursor
) -> Generator[None, None, UnsavedPage]:
    """The page for the handler; a breath after each `SLICE` of its records."""
    read = []
    for number, record in enumerate(records):
        if number and number % SLICE == 0:
            yield
        if not record.gone:
            read.append((record, stream.read(record)))
    rejected = [item for _, item in read if isinstance(item, Rejected)]
    after = refuse(after, [one.key for one in rejected]) if rejected else after
    return UnsavedPage(
        full=after.full,
        pass_id=after.pass_id,
        items=[item for _, item in read if not isinstance(item, Rejected)],
        deleted=[key for record in records for key in record.deleted],
        rejected=rejected,
        last=after.next is None,
        stream=stream.name,
        move=Move(place, after),
    )


def _answer(response: httpx.Response, cursor: Cursor, paginator: Any, *, is_stored: bool) -> AnswerFacts:
    """The answer as values; ``is_stored``: to a request that an earlier execution left.

    Raises the classified failure; `_Refused` if it is about the cursor. That of a stored request may be: the stream
    begins anew, but once until a pass ends, because a page that can never be read would cost a whole pass each time.
    Raises `TooManyRecords` for a page that is not decoded, because nothing else would run meanwhile.
    """
    if response.status_code == _UNCHANGED and not cursor.full:
        return AnswerFacts(_UNCHANGED)
    try:
        response.raise_for_status()
    except JobFailure as error:
        kind, status = error.failure.kind, response.status_code
        if kind is FailureKind.PERMANENT and status in _UNKNOWN_PAGE and is_stored and not cursor.resets:
            raise _Refused(f"the provider answered {status} to the stored next page", cursor) from error
        if kind is FailureKind.PERMANENT and status == _GONE and (not cursor.full or cursor.next is not None):
            raise _Refused("the provider answered 410 to the cursor", cursor) from error
        if kind is not FailureKind.RESET_CURSOR:
            raise
        first = cursor.full and cursor.next is None
        raise _Refused("the provider refused the cursor", cursor, final=first) from error
    from resilient.wire.requests.flow import fields  # noqa: PLC0415 - httpx and more, only where something is sent

    parts, most = sum(map(response.content.count, _OPENINGS)), max(PAGE_PARTS.value, _PARTS * (paginator.most or 0))
    if parts > most:
        raise TooManyRecords(f"a page holds {parts:,} JSON objects and lists, and {most:,} are the most")
    with _no_garbage() if parts > _MANY else nullcontext():
        return AnswerFacts(response.status_code, fields(response.headers), body=_json(response))


@contextmanager
def _no_garbage() -> Iterator[None]:
    """A block without Python's collector, which would take most of the time: it looks through all that is decoded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def _read(paginator: Any, request: PageRequest, answer: AnswerFacts) -> Any:
    if isinstance(paginator, GraphQLPages) and pick(answer.body, "errors[].message"):
        message = str(pick(answer.body, "errors[].message")[0])[: SCRUBBED_TEXT.value]  # cut where secrets are masked
        raise Permanent(f"GraphQL error: {one_line(message)}", code="graphql_error")
    try:
        return paginator.read(request, answer)
    except PagingError as error:
        raise Transient(f"an answer is no page: {error}") from error


def _most_records(paginator: Any, request: PageRequest) -> int:
    """How many records an answer may hold: as many as were asked for, or as the paginator says, and some in any case.

    The request may be one that an answer told us: what it asks for is believed as far as a list without pages.
    """
    if isinstance(paginator, OnePage):
        return max(LIST_RECORDS.value, paginator.most or 0)
    text = str(paginator.size_of(request)) if paginator.size else ""
    size = int(text) if text.isascii() and text.isdecimal() and len(text) < _DIGITS else 0
    return max(PAGE_RECORDS.value, min(size, LIST_RECORDS.value), paginator.most or 0)


@contextmanager
def _named(place: Place, cursor: Cursor) -> Iterator[None]:
    """What is wrong with a page, as the failure of its stream."""
    try:
        yield
    except TooManyRecords as error:
        raise Permanent(
            f"stream {place[1]!r} of {place[0]} cannot be read: {error}: ask for smaller pages"
            " (`resilient sync reset` where a pass is under way), or say most= in the stream's paginator",
            code="page_too_large",
        ) from error
    except PagingError as error:
        raise _Refused(str(error), cursor, final=True) from error


def _absolute(request: PageRequest) -> bool:
    return "://" in request.url


def _clock(c: Any, d: Any) -> datetime:
    now: datetime = d.now(c)
    return now


def _cursor_moved(place: Place) -> JobFailure:
    return JobFailure(
        f"the cursor of stream {place[1]!r} of {place[0]} was moved meanwhile, by a reset or another job: this job"
        " reads it again",
        failure=Failure(FailureKind.CONFLICT, code="cursor_moved"),
    )


def _words(request: PageRequest) -> dict[str, Any]:
    words: dict[str, Any] = {"method": request.method, "url": request.url, "extensions": {"idempotent": True}}
    if request.body is not None:
        words["json"] = request.body
    if request.headers:
        words["headers"] = dict(request.headers)
    return words


# -- checkpoints ---------------------------------------------------------------------------------------------


def _save(session: Session, execution: Execution, move: Move, *, swept: bool = False) -> None:
    """The last statements before the commit: the cursor, then the fence. ``swept``: nothing was read."""
    session.flush()
    c, database = session.connection(), execution.context.ground.database
    with database.named_errors():
        is_held = _write(c, database.dialect, execution, move, swept=swept)
    execution.require_held(is_held)


def _write(c: Connection, d: Dialect, execution: Execution, move: Move, *, swept: bool) -> bool:
    """Write cursor and progress; whether the job is still held."""
    now, cursor = d.now(c), move.cursor if swept else replace(move.cursor, execution=execution.row.executions + 1)
    if not cursors.write_if_unmoved(c, d, move.place, cursor, None if swept else execution.id, now, keep_job=swept):
        raise _cursor_moved(move.place)
    progress = {"stream": move.place[1], "pass": cursor.pass_id, "pages": cursor.pages, "records": cursor.records}
    return leases.checkpoint_if_held(
        c, d, execution.id, execution.fence, json.dumps(progress), now, clear_sent=execution.is_settled
    )


def _note_saved(execution: Execution, move: Move, loop: WorkerLoop) -> None:
    """Note that a checkpoint is committed; the handler's time begins anew."""
    move.is_saved = True
    move.cursor = replace(move.cursor, version=move.cursor.version + 1)
    execution.checkpointed = True
    execution.settle()
    if execution.handler.is_async:
        execution.begin_time_anew()
    else:
        loop.call_soon(execution.begin_time_anew)


def _move_of(page: Page[Any]) -> Move:
    if not isinstance(page, UnsavedPage):
        raise InvalidInput("a checkpoint saves a page that job.pages(...) gave: this one was made by the program")
    if page.move.is_saved:
        raise InvalidInput(f"this page of stream {page.stream!r} was saved before: a page has one checkpoint")
    return page.move


@asynccontextmanager
async def checkpoint(execution: Execution, page: Page[Any], loop: WorkerLoop) -> AsyncIterator[Any]:
    """The user's session; its rows, the cursor and the fence are committed together."""
    move = _move_of(page)
    async with committed_session(execution, lambda s: _save(s, execution, move)) as session:
        yield session
    _note_saved(execution, move, loop)


@asynccontextmanager
async def sweep(
    execution: Execution, stream: Stream[Any], params: dict[str, Any], loop: WorkerLoop
) -> AsyncIterator[Sweep[Any] | None]:
    """A `Sweep`, or None while nothing may be deleted."""
    place = stream.place(execution.resource_key, checked_params(stream, params))
    db = execution.db
    cursor, _ = await patiently(execution, partial(db.transaction, cursors.read, place), db.rest)
    if not cursor.may_sweep:
        yield None
        return
    move = Move(place, replace(cursor, swept_pass=cursor.full_pass))
    async with committed_session(execution, lambda s: _save(s, execution, move, swept=True)) as session:
        yield Sweep(session, cursor.full_pass)
    _note_saved(execution, move, loop)
