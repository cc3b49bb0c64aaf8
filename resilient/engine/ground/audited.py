"""Who changes what through `app.*`: every method that changes something for people notes it (`@audited`).

The row is written before the change, in a transaction of its own, and settled with what the change brought; with
``session=`` both are in the caller's transaction, and there only if it commits. What the engine does by itself (jobs
enqueued, run and finished) leaves none, and neither does a dry run. No row holds a payload or a secret: of a call's
arguments only those are noted that say what is meant (`_MEANING`).

The dashboard and the command line note a change themselves, in their words (`engine/inspect/audit.py`); within that
the methods note nothing more.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from resilient.core.base.errors import DatabaseUnreachable, InvalidInput
from resilient.core.base.loggers import masked
from resilient.core.base.tracing import running
from resilient.store.inspect import audit as store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from sqlalchemy import Connection

    from resilient.engine.ground.sessions import CallersSession, Transactions
    from resilient.store.db.dialect import Dialect


class HasTransactions(Protocol):
    """A feature: all of them run what they do in transactions of this name."""

    _db: Transactions


A = TypeVar("A", bound=HasTransactions)
P = ParamSpec("P")
T = TypeVar("T")
if TYPE_CHECKING:
    Method = Callable[Concatenate[A, P], Coroutine[Any, Any, T]]
PROGRAM: Final = "program"


class Actor(NamedTuple):
    """Who changes things, why, and through what."""

    who: str
    why: str | None = None
    via: str = PROGRAM


_actor: Final[ContextVar[Actor | None]] = ContextVar("resilient_actor", default=None)
_is_noted: Final[ContextVar[bool]] = ContextVar("resilient_is_noted", default=False)


@contextmanager
def acting(who: str, why: str | None, via: str = PROGRAM) -> Iterator[None]:
    """Whose changes those within the block are."""
    if not isinstance(who, str) or not who:
        raise InvalidInput(f"acting({who!r}): say who it is, such as 'ann' or 'nightly cleanup'")
    token = _actor.set(Actor(who, why, via))
    try:
        yield
    finally:
        _actor.reset(token)


@contextmanager
def noted() -> Iterator[None]:
    """Changes within the block are noted already."""
    token = _is_noted.set(True)
    try:
        yield
    finally:
        _is_noted.reset(token)


def actor() -> Actor:
    """Who calls: as said by `acting`, else the handler that runs, else the program."""
    if (person := _actor.get()) is not None:
        return person
    job = running.get()
    return Actor(PROGRAM if job is None else f"handler {job.log_fields()['kind']}")


def audited(action: str) -> Callable[[Method[A, P, T]], Method[A, P, T]]:
    """A method of a feature that changes something, such as ``"jobs cancel"``; it has the feature's ``_db``."""

    def decorate(method: Method[A, P, T]) -> Method[A, P, T]:
        signature = inspect.signature(method)

        @wraps(method)
        async def call(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                words = signature.bind(self, *args, **kwargs).arguments
            except TypeError:  # it says so itself
                return await method(self, *args, **kwargs)
            change = partial(method, self, *args, **kwargs)
            return await noting(self._db, action, words, change, words.get("session"))

        call.__dict__["audited"] = action
        return call

    return decorate


async def noting(
    db: Transactions,
    action: str,
    words: Mapping[str, Any],
    change: Callable[[], Awaitable[T]],
    session: CallersSession = None,
) -> T:
    """Make a change that ``words`` describe, and note it."""
    whole = {**words, **words.get("criteria", {}), **words.get("bulk", {})}
    if _is_noted.get() or whole.get("dry_run"):
        return await change()
    who, why, via = actor()
    why = why or whole.get("reason")
    row = partial(store.begin, who=who, via=via, action=action, subject=meaning(whole), why=why)
    number = await _write(db, session, row)
    try:
        with noted():
            result = await change()
    except BaseException as error:
        if session is None:  # else it is for the caller's transaction, which may be broken
            text = masked(f"{type(error).__name__}: {error}")[:500]
            with contextlib.suppress(DatabaseUnreachable):  # what broke it off is said, not that this is away, too
                await _write(db, None, partial(store.settle, number=number, outcome={"error": text}))
        raise
    await _write(db, session, partial(store.settle, number=number, outcome=outcome(result)))
    return result


async def _write(db: Transactions, session: CallersSession, fn: Callable[[Connection, Dialect], T]) -> T:
    """In the caller's transaction or one of its own, over which no worker is woken."""
    return await (db.transaction(fn) if session is None else db.write(session, fn))


_MEANING: Final = (
    "which", "key", "name", "account", "provider", "stream", "pattern", "part", "workflow_id", "kind", "resource",
    "state", "gate", "error_code", "error_kind", "type", "destination", "since", "until", "older_than", "everything",
    "created_after", "created_before", "finished_after", "finished_before", "stopped_after", "stopped_before",
    "limits", "concurrency", "clear", "believed", "repeat_ambiguous", "new_operation", "rate", "limit",
)  # fmt: skip
_PLAIN: Final = frozenset({"which", "key", "name", "account", "provider", "stream", "pattern", "part", "workflow_id"})
MOST: Final = 20  # ids or words of one argument


def meaning(words: Mapping[str, Any]) -> str:
    """What a change is of, in words."""
    parts = []
    for name in _MEANING:
        value = words.get(name)
        if value is None or value is False or value == () or type(value).__name__ == "Unset":
            continue
        text = _text(value)
        parts.append(text if name in _PLAIN else f"{name} {text}")
    return ", ".join(part for part in parts if part)


def _text(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "name"):  # a filter
        return meaning({f.name: getattr(value, f.name) for f in fields(value)} | {"which": getattr(value, "ids", None)})
    if isinstance(value, Mapping):
        return meaning(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        texts = [_text(one) for one in value]
        more = f" and {len(texts) - MOST} more" if len(texts) > MOST else ""
        return " ".join(texts[:MOST]) + more
    return str(getattr(value, "name", value))


def outcome(result: Any) -> dict[str, Any]:
    """What a change brought, in numbers."""
    if isinstance(result, (bool, int)):
        return {"changed": int(result)}
    names = [f.name for f in fields(result)] if is_dataclass(result) else getattr(result, "_fields", ())
    numbers: dict[str, Any] = {}
    for name in names:
        value = getattr(result, name)
        if isinstance(value, (bool, int)):
            numbers[name] = value
        elif isinstance(value, tuple):
            numbers[name] = len(value)
    return numbers
