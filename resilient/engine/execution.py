"""One execution of one claimed job: what is known about it while it runs.

It is also the handler's side door (`Side`): the job object delegates its client, calls and progress to it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from resilient.core import marks
from resilient.core.bounds import PROGRESS
from resilient.core.errors import JobFailure, LostLease, ResilientError, TransactionOpen
from resilient.core.failure import Failure, FailureKind
from resilient.core.outcomes import JobFacts
from resilient.engine import two_phase
from resilient.engine.away import patiently, patiently_sync
from resilient.engine.enqueue import Enqueued
from resilient.engine.pauses import Pausable
from resilient.engine.requests import Sender, SyncThrough, Through
from resilient.store import leases
from resilient.store.direct import direct
from resilient.wire.sockets import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from uuid import UUID

    from resilient.engine.app import Resilient
    from resilient.engine.batch_run import BatchRun
    from resilient.engine.enqueue import Ordered
    from resilient.engine.handler import Handler, Kind
    from resilient.engine.two_phase import Work
    from resilient.engine.worker import Worker
    from resilient.store.candidates import ClaimedJob
    from resilient.wire.trail import Trail

_CHANGING: Final = threading.Lock()
_NO_LINE: Final = Line()
FACTS_LAST: Final = 1.0  # seconds after its claim in which a job may start by what the claim has read of the gates


class Side(Sender, Protocol):
    """What a job object needs around it."""

    @property
    def app(self) -> Any:
        """The app."""

    @property
    def deps(self) -> Any:
        """What the app's handlers share."""

    @property
    def cancel_requested(self) -> bool:
        """Whether the handler should stop."""

    async def through(self, resource_key: str) -> Any:
        """Another resource."""

    def through_sync(self, resource_key: str) -> Any:
        """The same for threads."""

    def prepare(self) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed before the remote call."""

    def prepare_sync(self) -> AbstractContextManager[Any]:
        """The same for threads."""

    def complete(self) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed with the end of the job."""

    def complete_sync(self) -> AbstractContextManager[Any]:
        """The same for threads."""

    def after_commit(self, fn: Callable[[], Any]) -> None:
        """Call a function after that commit."""

    def then(
        self, kind: Kind[Any] | str, payload: Any, resource_key: str | None, options: Mapping[str, Any]
    ) -> Enqueued:
        """Enqueue a job with the end of this one."""

    async def progress(self, value: Any) -> None:
        """Save progress."""

    def progress_sync(self, value: Any) -> None:
        """The same for threads."""


class Execution(Pausable):
    """A claimed job between its claim and its finish."""

    # Most of it stays as it is here for most executions: a class attribute costs nothing to set.
    payload: Any = None  # decoded just before it starts
    run: BatchRun | None = None  # the call it shares with others
    work: Work | None = None  # its handler's transactions
    follow_ups: list[Ordered] | None = None  # jobs to enqueue if it succeeds
    since = 0.0  # loop time of its claim
    started = 0.0  # loop time; 0 until it starts
    task: asyncio.Task[Any] | None = None  # the slot that runs it
    thread = False  # its function runs in a thread, which cannot be interrupted
    future: asyncio.Future[Any] | None = None  # that thread's end
    cancelled_at = 0.0  # loop time; 0 if it was not told to end at once
    replaced = False  # another slot stands for the one it keeps
    aside = False  # it did not end: its slot went on without it, and its job stays claimed
    heard = False  # the handler was told that it should stop
    reason: str | None = None  # why it was interrupted: "timeout", "cancel", "stop" or "lost"
    lost = False  # the fence is gone: nothing this execution writes counts
    over = False  # its end was decided; a thread that goes on sends nothing more
    checkpointed = False  # saved progress of a sync since the claim
    transaction_open = False  # of the handler's: nothing may be sent
    answered = False  # some request of this execution was answered
    elected: tuple[tuple[str, int], ...] = ()  # circuits off its path that its requests probe, and generations
    asked = ""  # the resource whose trail was used last
    trails: Mapping[str, Trail] = MappingProxyType({})  # of its requests, by resource; each made with the first
    away: BaseException | None = None  # why the database does not serve, while it is waited for
    effect: str | None = None  # the latest request that took effect and would be done again by a repeat, by name
    _effects: Mapping[str, Any] = MappingProxyType({})  # its mark, which stays on the row until the finish
    _marks: Mapping[str, Any] = MappingProxyType({})  # of unanswered requests, by name
    _client: Any = None
    _marking: asyncio.Lock | None = None  # made with the first mark

    def __init__(self, worker: Worker, row: ClaimedJob, handler: Handler[Any, Any], probes: tuple[str, ...]) -> None:
        self.worker = worker
        self.row = row
        self.handler = handler
        self.id: UUID = row.id
        self.number: int = row.id.int  # what dicts know it by: hashing and comparing UUIDs is Python code
        self.resource_key = row.resource_key
        self.fence: int = row.version + 1  # the claim raised it
        self.probes = probes  # half-open resources this job tries out
        self.line = _NO_LINE  # what its thread waits for, once it has one
        if row.sent is not None:
            self._marks = marks.readable(row.sent)

    @property
    def waited(self) -> bool:
        """Whether what its claim has read of the gates may be out of date now that it starts."""
        return self.started - self.since > FACTS_LAST

    @property
    def app(self) -> Resilient:
        """See `Side`."""
        return self.worker.app

    @property
    def deps(self) -> Any:
        """See `Side`."""
        return self.worker.app.deps

    def facts(self) -> JobFacts:
        """What `decide` must know."""
        row = self.row
        return JobFacts(
            attempts=row.attempts,
            max_attempts=row.max_attempts,
            deferrals=row.deferrals,
            rescues=0 if self.checkpointed else row.rescues,
            expires_at=row.expires_at,
            sent=self.sent,
            safe_until=marks.safe_until(self._marks),
            cancel_requested=self.reason == "cancel",
            once_more=bool(row.once_more),
            resource_key=row.resource_key,
            can_reconcile=self.handler.reconcile is not None,
            checkpointed=self.checkpointed,
        )

    # -- Side -----------------------------------------------------------------------------------------------------

    @property
    def cancel_requested(self) -> bool:
        """See `Side`. A thread that was told so and returns has not ended its work."""
        self.heard = self.heard or self.reason is not None
        return self.heard

    def async_client(self) -> Any:
        """See `Side`."""
        if self._client is None:
            self._client = self.worker.wire.async_client(self.worker.wire.trail(self))
        return self._client

    def sync_client(self) -> Any:
        """See `Side`."""
        if self._client is None:
            self._client = self.worker.wire.sync_client(self.worker.wire.trail(self))
        return self._client

    def async_call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        """See `Side`."""
        return self.worker.wire.call(self.worker.wire.trail(self), method, url, words)

    def sync_call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        """See `Side`."""
        return self.worker.wire.sync_call(self.worker.wire.trail(self), method, url, words)

    async def progress(self, value: Any) -> None:
        """See `Side`."""
        self._require_no_transaction("progress")
        text, run = _progress_text(self.row.id, value), self.worker.app.database.transaction
        self.require_held(await patiently(self, partial(run, _progress, self.id, self.fence, text)))

    def progress_sync(self, value: Any) -> None:
        """See `Side`."""
        self._require_no_transaction("progress")
        text, run = _progress_text(self.row.id, value), self.worker.app.database.transaction_sync
        self.require_held(patiently_sync(self, partial(run, _progress, self.id, self.fence, text)))

    async def through(self, resource_key: str) -> Through:
        """See `Side`."""
        return Through(resource_key, await self.worker.wire.branch(self, resource_key))

    def through_sync(self, resource_key: str) -> SyncThrough:
        """See `Side`."""
        return SyncThrough(resource_key, self.worker.from_thread(self.worker.wire.branch(self, resource_key)))

    @property
    def sent(self) -> bool:
        """Whether a request is unanswered that must not be repeated."""
        return bool(self._marks) and marks.in_doubt(self._marks, self.worker.now())

    def doubt(self) -> str:
        """Why a request must not be repeated."""
        return marks.forgotten(self._marks, self.worker.now()) or "a request of an earlier execution is unanswered"

    def mark_of(self, name: str) -> dict[str, Any] | None:
        """The mark of an unanswered request."""
        return self._marks.get(name)

    def unmark(self, name: str, *, took_effect: bool = False) -> dict[str, Any] | None:
        """The outcome of a request is known; its row hears of it with its finish, so that this costs nothing.

        ``took_effect``: it was done, and has no key. Until the finish the row says that it may have been: whoever finds
        the job after a crash must not do it again.
        """
        known = None if self.over or self.lost else self._marks.get(name)
        if known is not None:
            self._set_mark(name, None)
            if took_effect:
                self.effect, self._effects = name, {name: known}
        return known

    @property
    def is_settled(self) -> bool:
        """Whether what its row says about its requests is only that some were answered."""
        return self.effect is not None and not self._marks and not (self._marking and self._marking.locked())

    def settle(self) -> None:
        """A checkpoint is committed: what was done before it is behind the job."""
        self.effect, self._effects = None, {}

    def remark(self, name: str, mark: dict[str, Any] | None) -> None:
        """It is not known after all."""
        if mark is not None:
            self._set_mark(name, mark)

    def _set_mark(self, name: str, mark: dict[str, Any] | None) -> None:
        with _CHANGING:  # answers are taken in by the threads that asked
            others = {k: v for k, v in self._marks.items() if k != name}
            self._marks = others if mark is None else {**others, name: mark}

    def prepare(self) -> AbstractAsyncContextManager[Any]:
        """See `Side`."""
        return two_phase.prepare(self)

    def prepare_sync(self) -> AbstractContextManager[Any]:
        """See `Side`."""
        return two_phase.prepare_sync(self)

    def complete(self) -> AbstractAsyncContextManager[Any]:
        """See `Side`."""
        return two_phase.complete(self)

    def complete_sync(self) -> AbstractContextManager[Any]:
        """See `Side`."""
        return two_phase.complete_sync(self)

    def after_commit(self, fn: Callable[[], Any]) -> None:
        """See `Side`."""
        two_phase.require_open(self).after.append(fn)

    def then(
        self, kind: Kind[Any] | str, payload: Any, resource_key: str | None, options: Mapping[str, Any]
    ) -> Enqueued:
        """See `Side`."""
        self.require_running()
        encode = self.app._encoder.encode  # noqa: SLF001 - the app's one encoder; it checks what enqueue checks
        ordered = encode(kind, payload, resource_key or self.resource_key, **options)
        self.app.foresight.look([ordered])
        self.follow_ups = [*(self.follow_ups or ()), ordered]
        return Enqueued(ordered.row.id, created=None)

    async def mark(self, name: str, mark: dict[str, Any]) -> None:
        """Commit the mark of one request before it is sent; raises `LostLease` if the fence is gone.

        One after the other: two requests at once must not write each other's mark away.
        """
        self._marking = self._marking or asyncio.Lock()
        async with self._marking:
            self.require_running()
            text = json.dumps({**self._effects, **self._marks, name: mark})
            run = self.worker.app.database.transaction
            self.require_held(await patiently(self, partial(run, _mark, self.id, self.fence, text)))
            self.require_running()
            self._set_mark(name, mark)

    @property
    def marks(self) -> dict[str, Any] | None:
        """The requests that are unanswered when it ends."""
        return dict(self._marks) or None

    def require_running(self) -> None:
        """Raises `LostLease` if nothing this execution does counts any more."""
        if self.over or self.lost:
            raise LostLease(f"job {self.id} ({self.row.kind}) is not run by this execution any more: it sends nothing")

    def take_thread(self, line: Line) -> None:
        """Its function is called in a thread, which waits on this line."""
        self.thread, self.line = True, line

    def require_time(self) -> None:
        """Raises `JobFailure` if its time is over: a thread that goes on sends nothing more."""
        if self.line.is_cut:
            raise JobFailure(
                f"job {self.id} ({self.row.kind}) has used up its time: it sends nothing more",
                failure=Failure(FailureKind.TIMEOUT),
            )

    def _require_no_transaction(self, word: str) -> None:
        if self.transaction_open:
            raise TransactionOpen(
                f"job {self.id} ({self.row.kind}) has a transaction open: {word} is written in another one, so save it"
                " before that one begins"
            )

    def require_held(self, held: bool) -> None:  # noqa: FBT001 - the answer of a conditional write
        """Raises `LostLease` if a write under the fence met nothing."""
        if not held:
            self.lost = True
            raise LostLease(
                f"job {self.id} ({self.row.kind}) is no longer held by worker {self.worker.id}: it was given to another"
                " one, so nothing more of this execution counts"
            )


def _progress_text(id_: Any, value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ResilientError(f"progress of job {id_} is not JSON: {error}") from None
    if len(text) > PROGRESS.value:
        raise ResilientError(f"progress of job {id_} has {len(text):,} bytes of JSON: {PROGRESS.value:,} at most")
    return text


@direct
def _progress(c: Any, d: Any, id_: UUID, fence: int, text: str) -> bool:
    return leases.set_progress_if_held(c, d, id_, fence, text, d.now(c))


@direct
def _mark(c: Any, d: Any, id_: UUID, fence: int, text: str) -> bool:
    return leases.mark_sent_if_held(c, d, id_, fence, text, d.now(c))
