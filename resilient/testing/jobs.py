"""Jobs without a database, to call a handler with: ``await sync_issues(testing.job(SyncIssues(repo="a/b")))``.

What the handler does to its job is recorded on the `Bench` behind it: progress, requests it asked to admit. Its
``client`` is the one you give (``httpx.AsyncClient(transport=httpx.MockTransport(...))``, or a plain one for respx).
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

import httpx
from uuid_utils.compat import uuid7

from resilient.core.base.bounds import ANSWER_BODIES
from resilient.core.base.errors import NoResult, SetupError
from resilient.engine.ground.encoder import Enqueued
from resilient.engine.ground.sessions import Transactions
from resilient.engine.jobs.workflows import results_of
from resilient.engine.run.job import BaseJob, Batch, Job, SyncBatch, SyncJob, backend_of
from resilient.wire.requests.body_budget import Reservation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from uuid import UUID

    from resilient.engine.ground.kinds import Kind

P = TypeVar("P")


@dataclass(slots=True)
class Bench:
    """What stands behind a job that no worker runs; `bench_of` finds it."""

    app: Any = None
    deps: Any = None
    cancel_requested: bool = False
    client: httpx.AsyncClient | httpx.Client | None = None
    results: Mapping[str, Any] | None = None  # of earlier steps, by kind or name
    progress_saved: list[Any] = field(default_factory=list)
    calls: list[FakeCall] = field(default_factory=list)
    went_through: list[str] = field(default_factory=list)
    session: Any = None  # what `prepare` and `complete` give
    followed: list[Followed] = field(default_factory=list)  # what `then` was told
    after: list[Callable[[], Any]] = field(default_factory=list)  # what `after_commit` was told
    is_sync: bool = False  # the job is a plain handler's

    def __getattr__(self, name: str) -> Any:
        """What only a worker's jobs have: streams, and steps within `complete`."""
        raise AttributeError(f"a job that resilient.testing made has no {name}: {_WORKER}")

    def http_client(self) -> Any:
        """The client of the test, or a plain one without a base URL."""
        if self.client is None and self.is_sync:
            self.client = httpx.Client(event_hooks={"request": [lambda one: _require_address(one, "httpx.Client")]})
        elif self.client is None:

            async def check(request: httpx.Request) -> None:
                _require_address(request, "httpx.AsyncClient")

            self.client = httpx.AsyncClient(event_hooks={"request": [check]})
        return self.client

    def admitted_call(self, method: str, url: str, words: Mapping[str, Any]) -> FakeCall:
        """Admit and remember a foreign request."""
        self.calls.append(FakeCall(method, url, dict(words)))
        return self.calls[-1]

    async def through(self, resource_key: str) -> Bench:
        """The same client and calls, remembered as those of another resource."""
        self.went_through.append(resource_key)
        return self

    @asynccontextmanager
    async def prepare(self) -> AsyncIterator[Any]:
        """The test's session."""
        yield _SESSION if self.session is None else self.session

    @asynccontextmanager
    async def complete(self) -> AsyncIterator[Any]:
        """The test's session; the test commits it."""
        yield _SESSION if self.session is None else self.session

    def after_commit(self, fn: Callable[[], Any]) -> None:
        """Remember what is to be called."""
        self.after.append(fn)

    def then(
        self, kind: Kind[Any] | str, payload: Any, resource_key: str | None, options: Mapping[str, Any]
    ) -> Enqueued:
        """Remember a follow-up job."""
        name = kind if isinstance(kind, str) else kind.kind
        self.followed.append(Followed(name, payload, resource_key, dict(options)))
        return Enqueued(uuid7(), created=None)

    @property
    def work(self) -> None:
        """Its transactions are the test's business."""

    def require_held(self, c: Any, d: Any) -> None:
        """It is held."""

    async def results_of(self, job_id: UUID, step: Any) -> list[Any]:
        """The test's results; without any, those of its app."""
        if self.results is not None:
            return self._result_of(self.results, step)
        return await results_of(Transactions(self.app.ground, here=self.is_sync), self.app.kinds, job_id, step)

    def _result_of(self, results: Mapping[str, Any], step: Any) -> list[Any]:
        name = step if isinstance(step, str) else getattr(step, "kind", None) or step.name
        if name not in results:
            raise NoResult(f"this job was given no result of {name!r}, as if that step had not succeeded")
        result = results[name]
        return list(result) if isinstance(result, list) else [result]

    async def progress(self, value: Any) -> None:
        """Remember what was saved."""
        self.progress_saved.append(value)


def _require_address(request: httpx.Request, client: str) -> None:
    if not request.url.is_absolute_url:
        raise SetupError(
            f"{request.method} {request.url.path}: this job was made without a client, so nothing says where that is:"
            f" testing.job(..., client={client}(transport=..., base_url=...))"
        )


class _Missing:
    """Stands for what a job was made without; any use of it raises an error that names it."""

    def __init__(self, word: str, needed: str) -> None:
        self._word, self._needed = word, needed

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"this job was made without {self._word}: {self._needed}")


_SESSION: Final = _Missing("a session", "testing.job(..., session=...)")
_WORKER: Final = "run the handler by a worker on a database (see `drain` in docs/testing.md)"
_APP: Final = _Missing("an app", f"testing.job(..., app=...), or results=... for result_of; or {_WORKER}")


class Followed(NamedTuple):
    """A follow-up job that a handler asked for; ``resource_key`` None: its own job's."""

    kind: str
    payload: Any
    resource_key: str | None
    options: dict[str, Any]


@dataclass(slots=True)
class FakeCall(AbstractAsyncContextManager["FakeCall"], AbstractContextManager["FakeCall"]):
    """A request that a handler asked to admit, and what it reported."""

    method: str
    url: str
    words: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    reported: tuple[int, Any, Any] | None = None
    failure: None = None
    trusted: bool = True
    reads_success: bool = False
    renewed: bool = False
    repeatable: bool = False

    def make_reservation(self) -> Reservation:
        """Room for the body of its answer, as a job's."""
        return Reservation("test/account", ANSWER_BODIES.value)

    def report(self, status: int, headers: Any = (), body: Any = None) -> None:
        """Remember what came back."""
        self.reported = (status, headers, body)

    def cut_off(self, error: BaseException, *, by_us: bool = False) -> None:
        """Nobody waits for its outcome."""

    def raise_for_failure(self) -> None:
        """Nothing is classified here."""

    async def __aenter__(self) -> Self:
        """Admitted."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to do."""

    def __enter__(self) -> Self:
        """Admitted."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to do."""


def job(
    payload: P,
    *,
    kind: str = "test",
    resource_key: str = "test/account",
    attempt: int = 1,
    execution: int = 1,
    tags: Mapping[str, str] | None = None,
    deps: Any = None,
    app: Any = None,
    client: httpx.AsyncClient | None = None,
    session: Any = None,
    results: Mapping[str, Any] | None = None,
    id: UUID | None = None,  # noqa: A002 - the job's own word
) -> Job[P]:
    """A job for an ``async def`` handler. ``results`` of earlier steps of its workflow are by kind or name."""
    return Job(
        **_fields(
            payload,
            kind,
            resource_key,
            attempt,
            execution,
            tags,
            id,
            Bench(_APP if app is None else app, deps, client=client, session=session, results=results),
        )
    )


def sync_job(
    payload: P,
    *,
    kind: str = "test",
    resource_key: str = "test/account",
    attempt: int = 1,
    execution: int = 1,
    tags: Mapping[str, str] | None = None,
    deps: Any = None,
    app: Any = None,
    client: httpx.Client | None = None,
    session: Any = None,
    results: Mapping[str, Any] | None = None,
    id: UUID | None = None,  # noqa: A002 - the job's own word
) -> SyncJob[P]:
    """A job for a plain handler."""
    return SyncJob(
        **_fields(
            payload,
            kind,
            resource_key,
            attempt,
            execution,
            tags,
            id,
            Bench(_APP if app is None else app, deps, client=client, session=session, results=results, is_sync=True),
        )
    )


def batch(payloads: Iterable[P], **options: Any) -> Batch[P]:
    """A batch for an ``async def`` batch handler; ``options`` as for `job`. Its ``failed`` and ``succeeded`` tell."""
    return Batch([job(payload, **options) for payload in payloads], _unheard)


def sync_batch(payloads: Iterable[P], **options: Any) -> SyncBatch[P]:
    """A batch for a plain batch handler; ``options`` as for `sync_job`."""
    return SyncBatch([sync_job(payload, **options) for payload in payloads], _unheard)


def _unheard(job: BaseJob[Any], error: BaseException | None, result: Any) -> None:
    """The batch itself remembers."""


def bench_of(job: BaseJob[Any]) -> Bench:
    """What stands behind a job made here."""
    backend = backend_of(job)
    if not isinstance(backend, Bench):
        raise TypeError(f"{job!r} was not made by resilient.testing")
    return backend


def _fields(
    payload: Any,
    kind: str,
    resource_key: str,
    attempt: int,
    execution: int,
    tags: Mapping[str, str] | None,
    id_: UUID | None,
    bench: Bench,
) -> dict[str, Any]:
    id_ = id_ or uuid7()
    return {
        "id": id_, "kind": kind, "payload": payload, "resource_key": resource_key, "attempt": attempt,
        "execution": execution, "idempotency_key": str(id_), "tags": dict(tags or {}), "backend": bench,
    }  # fmt: skip


# -- clock ------------------------------------------------------------------------------------------------------------
#
# A clock that moves only when told: ``Resilient(Database(url, clock=clock.now), ...)``, then ``clock.advance(60)``.

START: Final = datetime(2030, 1, 1, 12, tzinfo=UTC)


class FakeClock:
    """Tells a time you set."""

    def __init__(self, start: datetime = START) -> None:
        self.time = start

    def now(self) -> datetime:
        """The time, aware UTC."""
        return self.time

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> datetime:
        """Move forward; returns the new time."""
        self.time += timedelta(seconds=seconds, minutes=minutes, hours=hours, days=days)
        return self.time

    def set(self, time: datetime) -> None:
        """Jump."""
        self.time = time
