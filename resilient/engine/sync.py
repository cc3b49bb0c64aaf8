"""A stream read page by page: written once, as a generator of steps, for coroutines and threads.

    pages        reads the cursor, asks for a page, yields it, and goes on only after its checkpoint
    checkpoint   one transaction: the user's rows, the cursor (if nobody moved it), the job's fence, commit
    sweep        the same, entered with something to do only after a complete full pass

What a page moves is known before its rows are written, so the cursor in the database never runs ahead of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from resilient.core.body import pick
from resilient.core.bounds import SCRUBBED_TEXT
from resilient.core.errors import InvalidInput, JobFailure, Permanent, ResilientError, Transient
from resilient.core.exchange import AnswerFacts
from resilient.core.failure import Failure, FailureKind
from resilient.core.hosts import without_params
from resilient.core.page_request import PagingError
from resilient.core.paginators import GraphQLPages
from resilient.core.plain_text import one_line
from resilient.core.sync import RESETS, begin, refuse, restart, take, unchanged
from resilient.engine import user_sessions
from resilient.engine.away import patiently, patiently_sync
from resilient.engine.streams import Page, Rejected, Stream, checked_params
from resilient.store import cursors, leases

if TYPE_CHECKING:
    from datetime import datetime

    import httpx
    from sqlalchemy.orm import Session

    from resilient.core.page_request import PageRequest
    from resilient.core.sync import Cursor, Record
    from resilient.engine.execution import Execution
    from resilient.store.cursors import Place

T = TypeVar("T")
_UNCHANGED: Final = 304


class Query(NamedTuple):
    """Run a store function in a transaction of its own."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


class Ask(NamedTuple):
    """Send a request; gives the response."""

    request: PageRequest


@dataclass(slots=True)
class Move:
    """What a checkpoint saves; ``done`` once it has."""

    place: Place
    cursor: Cursor
    done: bool = False


@dataclass(frozen=True, slots=True)
class Sweep(Generic[T]):
    """Delete what the last full pass did not see: the rows whose latest pass is before ``pass_id``."""

    session: T
    pass_id: int


Steps = Generator[Query | Ask | Page[Any], Any, None]


def walk(stream: Stream[Any], resource_key: str, params: dict[str, Any], hidden: frozenset[str] = frozenset()) -> Steps:
    """The pages of one pass; of a full one after it if the provider refuses the cursor.

    ``hidden``: parameters that carry a key. Providers repeat them in the address of the next page; rows keep none.
    """
    place = stream.place(resource_key, checked_params(stream, params))
    while True:
        cursor, now = yield Query(cursors.read, (place,))
        cursor = begin(cursor, now, stream.rules)
        try:
            yield from _pass(stream, place, cursor, params, hidden)
        except _Refused as refused:
            again = restart(refused.cursor, str(refused), refused=True)
            if not (yield Query(cursors.write_if_unmoved, (place, again, None, now))):
                raise _moved(place) from None
            if again.resets >= RESETS or refused.final:
                raise Permanent(
                    f"stream {stream.name!r} cannot be read: {refused}", code="reset_cursor"
                ) from refused.__cause__
            continue
        return


class _Refused(Exception):
    def __init__(self, why: str, cursor: Cursor, *, final: bool = False) -> None:
        self.cursor, self.final = cursor, final
        super().__init__(why)


def _pass(stream: Stream[Any], place: Place, cursor: Cursor, params: dict[str, Any], hidden: frozenset[str]) -> Steps:
    paginator = stream.pages_by(cursor)
    request = cursor.next
    if request is None:
        if stream.before is not None:
            cursor = replace(cursor, told=(yield from _told_before(stream, params)))
        request = stream.first(cursor, params)
    now: datetime | None = None
    while request is not None:
        response = yield Ask(request)
        answer = _answer(response, cursor, request)
        if answer.status == _UNCHANGED:
            records: list[Record] = []
            moved = unchanged(cursor, (yield Query(_clock, ())))
        else:
            if stream.rules.incremental is not None and stream.rules.incremental.style == "conditional":
                cursor = replace(cursor, full=True)  # what changed is told by showing everything
            request = replace(request, url=str(response.request.url)) if not _absolute(request) else request
            read = _read(paginator, request, answer)
            if now is None or read.next is None:  # a page in between needs no time: a round trip less
                now = yield Query(_clock, ())
            try:
                records, moved = take(cursor, request, answer, read, stream.rules, now)
            except PagingError as error:
                raise _Refused(str(error), cursor, final=True) from error
        if hidden and moved.next is not None:
            moved = replace(moved, next=replace(moved.next, url=without_params(moved.next.url, hidden)))
        page = _page(stream, place, records, moved)
        yield page
        if not page._move.done:  # noqa: SLF001 - its own
            raise ResilientError(
                f"the page of stream {stream.name!r} was not saved: write its rows in `async with"
                " job.checkpoint(page) as session:` before asking for the next one"
            )
        cursor = page._move.cursor  # noqa: SLF001
        request = cursor.next


def _page(stream: Stream[Any], place: Place, records: list[Record], moved: Cursor) -> Page[Any]:
    read = [(record, stream.read(record)) for record in records if not record.gone]
    rejected = [found for _, found in read if isinstance(found, Rejected)]
    moved = refuse(moved, [one.key for one in rejected]) if rejected else moved
    return Page(
        full=moved.full,
        pass_id=moved.pass_id,
        items=[found for _, found in read if not isinstance(found, Rejected)],
        deleted=[key for record in records for key in record.deleted],
        rejected=rejected,
        last=moved.next is None,
        stream=stream.name,
        _move=Move(place, moved),
    )


def _told_before(stream: Stream[Any], params: dict[str, Any]) -> Generator[Ask, Any, str | None]:
    assert stream.before is not None  # noqa: S101
    assert stream.incremental is not None  # noqa: S101
    response = yield Ask(stream.before(**params))
    response.raise_for_status()
    found = [v for v in pick(_json(response), stream.incremental.found) if isinstance(v, (str, int)) and v]
    if not found:
        raise Transient(f"stream {stream.name!r}: the answer before the pass has no {stream.incremental.found!r}")
    return str(found[0])


def _answer(response: httpx.Response, cursor: Cursor, request: PageRequest) -> AnswerFacts:
    """The answer as values. Raises the classified failure; `_Refused` if it is about the cursor."""
    if response.status_code == _UNCHANGED and not cursor.full:
        return AnswerFacts(_UNCHANGED)
    try:
        response.raise_for_status()
    except JobFailure as error:
        if error.failure.kind is not FailureKind.RESET_CURSOR:
            raise
        first = cursor.full and cursor.next is None
        del request
        raise _Refused("the provider refused the cursor", cursor, final=first) from error
    from resilient.wire.flow import fields  # noqa: PLC0415 - httpx and more, only where something is sent

    return AnswerFacts(response.status_code, fields(response.headers), body=_json(response))


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _read(paginator: Any, request: PageRequest, answer: AnswerFacts) -> Any:
    if isinstance(paginator, GraphQLPages) and pick(answer.body, "errors[].message"):
        said = str(pick(answer.body, "errors[].message")[0])[: SCRUBBED_TEXT.value]  # cut where secrets are masked
        raise Permanent(f"GraphQL error: {one_line(said)}", code="graphql_error")
    try:
        return paginator.read(request, answer)
    except PagingError as error:
        raise Transient(f"an answer is no page: {error}") from error


def _absolute(request: PageRequest) -> bool:
    return "://" in request.url


def _clock(c: Any, d: Any) -> datetime:
    now: datetime = d.now(c)
    return now


def _moved(place: Place) -> JobFailure:
    return JobFailure(
        f"the cursor of stream {place[1]!r} of {place[0]} was moved meanwhile, by a reset or another job: this job"
        " reads it again",
        failure=Failure(FailureKind.CONFLICT, code="cursor_moved"),
    )


# -- drivers -------------------------------------------------------------------------------------------------


async def pages(execution: Any, stream: Stream[T], params: dict[str, Any]) -> AsyncIterator[Page[T]]:
    """`walk` for coroutines."""
    client, database = execution.async_client(), execution.app.database
    steps = walk(stream, execution.resource_key, params, client.secret_params)
    result: Any = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration:
            return
        result = None
        if isinstance(step, Page):
            yield step
        elif isinstance(step, Ask):
            result = await client.request(**_words(step.request))
        else:
            result = await patiently(execution, partial(database.transaction, step.fn, *step.args))


def pages_sync(execution: Any, stream: Stream[T], params: dict[str, Any]) -> Iterator[Page[T]]:
    """`walk` for threads."""
    client, database = execution.sync_client(), execution.app.database
    steps = walk(stream, execution.resource_key, params, client.secret_params)
    result: Any = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration:
            return
        result = None
        if isinstance(step, Page):
            yield step
        elif isinstance(step, Ask):
            result = client.request(**_words(step.request))
        else:
            result = patiently_sync(execution, partial(database.transaction_sync, step.fn, *step.args))


def _words(request: PageRequest) -> dict[str, Any]:
    words: dict[str, Any] = {"method": request.method, "url": request.url, "extensions": {"idempotent": True}}
    if request.body is not None:
        words["json"] = request.body
    if request.headers:
        words["headers"] = dict(request.headers)
    return words


# -- checkpoints ---------------------------------------------------------------------------------------------


def _save(session: Session, execution: Execution, move: Move) -> None:
    """The last statements before the commit: the cursor, then the fence."""
    session.flush()
    c, d = session.connection(), execution.app.database.dialect
    now, cursor = d.now(c), move.cursor
    if not cursors.write_if_unmoved(c, d, move.place, cursor, execution.id, now):
        raise _moved(move.place)
    told = {"stream": move.place[1], "pass": cursor.pass_id, "pages": cursor.pages, "records": cursor.records}
    held = leases.checkpoint_if_held(
        c, d, execution.id, execution.fence, json.dumps(told), now, clear_sent=execution.is_settled
    )
    execution.require_held(held)


def _saved(execution: Execution, move: Move) -> None:
    move.done = True
    move.cursor = replace(move.cursor, version=move.cursor.version + 1)
    execution.checkpointed = True
    execution.settle()
    execution.started, execution.waited_before = time.monotonic(), 0.0  # the handler's time begins anew


def _move_of(page: Page[Any]) -> Move:
    move = page._move  # noqa: SLF001 - its own
    if not isinstance(move, Move) or move.done:
        raise InvalidInput(f"this page of stream {page.stream!r} was saved before: a page has one checkpoint")
    return move


@asynccontextmanager
async def checkpoint(execution: Any, page: Page[Any]) -> AsyncIterator[Any]:
    """The user's session; its rows, the cursor and the fence are committed together."""
    move = _move_of(page)
    async with user_sessions.opened(execution, lambda s: _save(s, execution, move)) as session:
        yield session
    _saved(execution, move)


@contextmanager
def checkpoint_sync(execution: Any, page: Page[Any]) -> Iterator[Any]:
    """`checkpoint` for threads."""
    move = _move_of(page)
    with user_sessions.opened_sync(execution, lambda s: _save(s, execution, move)) as session:
        yield session
    _saved(execution, move)


@asynccontextmanager
async def sweep(execution: Any, stream: Stream[Any], params: dict[str, Any]) -> AsyncIterator[Sweep[Any] | None]:
    """A `Sweep`, or None while nothing may be deleted."""
    place = stream.place(execution.resource_key, checked_params(stream, params))
    read = partial(execution.app.database.transaction, cursors.read, place)
    cursor, _ = await patiently(execution, read)
    if not cursor.may_sweep:
        yield None
        return
    move = Move(place, replace(cursor, swept_pass=cursor.full_pass))
    async with user_sessions.opened(execution, lambda s: _save(s, execution, move)) as session:
        yield Sweep(session, cursor.full_pass)
    _saved(execution, move)


@contextmanager
def sweep_sync(execution: Any, stream: Stream[Any], params: dict[str, Any]) -> Iterator[Sweep[Any] | None]:
    """`sweep` for threads."""
    place = stream.place(execution.resource_key, checked_params(stream, params))
    read = partial(execution.app.database.transaction_sync, cursors.read, place)
    cursor, _ = patiently_sync(execution, read)
    if not cursor.may_sweep:
        yield None
        return
    move = Move(place, replace(cursor, swept_pass=cursor.full_pass))
    with user_sessions.opened_sync(execution, lambda s: _save(s, execution, move)) as session:
        yield Sweep(session, cursor.full_pass)
    _saved(execution, move)
