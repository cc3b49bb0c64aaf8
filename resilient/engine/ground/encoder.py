"""Enqueueing: from arguments to rows, which `jobs/queue.py` writes.

`Foresight` says once in the log what an enqueue will come to, where the app can see it already. Nothing is refused:

- A resource key whose first part is almost the name of a provider (``hubspott/a1``): its requests have no address.
- A kind that is not among the app's handlers: it waits until a worker that has it runs. An app that lists no handlers
  is one that only enqueues, and says nothing; ``kinds=`` lists those that other programs run.

A warning and no refusal, because both may be meant: a resource may have any name, and another program's workers other
handlers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypedDict, get_args
from uuid import UUID, SafeUUID

from pydantic import TypeAdapter
from uuid_utils import uuid7

from resilient.core.base import resource_key as keys
from resilient.core.base.errors import BadPayload, InvalidInput, NaiveDatetime, PayloadTooLarge, UnknownKind
from resilient.core.base.instants import in_utc
from resilient.core.base.loggers import logger
from resilient.core.base.misfit import STORABLE, explained_class, is_number, is_whole
from resilient.core.base.phrases import nearest
from resilient.core.jobs.records import SEALED, START, is_sealed, without_sealed
from resilient.engine.ground import sealing
from resilient.engine.ground.garbage import no_collections
from resilient.engine.ground.kinds import Handler, Kind
from resilient.store.accounts.secrets import KeyRing
from resilient.store.jobs.columns import NewJob
from resilient.store.jobs.filters import as_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from resilient.core.base.tracing import Tracing


OnConflict = Literal["keep", "replace", "raise"]
WhileRunning = Literal["drop", "once_more"]
UniqueUntil = Literal["start", "finish"]
OrderingPolicy = Literal["block", "skip"]
OnDead = Literal["cancel", "wait", "run"]


class HasId(Protocol):
    """An `Enqueued`, a `Step`, a `JobInfo`, a `Job`."""

    @property
    def id(self) -> UUID:
        """The job's."""


Blocker: TypeAlias = "UUID | str | HasId"


class StepOptions(TypedDict, total=False):
    """The options of a workflow's step: see `Resilient.enqueue`."""

    priority: int
    delay: timedelta | float | None
    run_at: datetime | None
    expires_at: datetime | None
    expires_in: timedelta | float | None
    max_attempts: int | None
    idempotency_key: str | None
    ordering_key: str | None
    ordering_policy: OrderingPolicy
    tags: Mapping[str, str] | None


class JobOptions(StepOptions, total=False):
    """The options of a job: see `Resilient.enqueue`."""

    unique_key: str | None
    unique_until: UniqueUntil
    on_conflict: OnConflict
    while_running: WhileRunning
    after: Blocker | Iterable[Blocker]
    on_dead: OnDead


PRIORITIES: Final = range(-100, 101)
MAX_TAGS: Final = 20
MAX_BLOCKERS: Final = 1_000
MAX_NAME: Final = 255
MAX_TAG_NAME: Final = 64


class Enqueued(NamedTuple):
    """What an enqueue brought: the job's id and whether it is new.

    ``created`` is False if a job with the same unique key was kept (then ``id`` is that job's), and None if the job has
    a unique or ordering key and is written when the caller's transaction commits.
    """

    id: UUID
    created: bool | None = True


class JobRequest(NamedTuple):
    """One job as asked for, checked and encoded."""

    row: NewJob
    on_conflict: OnConflict = "keep"
    while_running: WhileRunning = "drop"
    after: tuple[UUID, ...] = ()
    on_dead: OnDead = "cancel"

    @property
    def waits_for_commit(self) -> bool:
        """Whether it is written last: it makes other transactions wait, or belongs to one that does."""
        return self.row.unique_key is not None or self.row.ordering_key is not None or bool(self.after)


@explained_class
@dataclass(frozen=True, slots=True)
class Item:
    """One job of `enqueue_many`, when more than its payload differs. ``None`` takes what the call says."""

    payload: Any = None
    resource_key: str | None = None
    priority: int | None = None
    delay: timedelta | float | None = None
    run_at: datetime | None = None
    expires_at: datetime | None = None
    unique_key: str | None = None
    ordering_key: str | None = None
    after: Iterable[Blocker] | None = None
    tags: Mapping[str, str] | None = None

    def options(self) -> dict[str, Any]:
        """What it says beside payload and resource key."""
        values = _OPTIONS_OF(self)
        if values == _NO_OPTIONS:
            return {}
        return {name: value for name, value in zip(_ITEM_OPTIONS, values, strict=True) if value is not None}


_ITEM_OPTIONS: Final = ("priority", "delay", "run_at", "expires_at", "unique_key", "ordering_key", "after", "tags")
_OPTIONS_OF: Final = attrgetter(*_ITEM_OPTIONS)
_NO_OPTIONS: Final = (None,) * len(_ITEM_OPTIONS)


class Encoder:
    """Checks and encodes what is enqueued, for one app."""

    def __init__(self, kinds: Mapping[str, Kind[Any]], max_payload: int, ring: KeyRing | None = None) -> None:
        """``max_payload`` in bytes. Raises `InvalidInput`."""
        if not is_whole(max_payload):
            raise InvalidInput(f"max_payload={max_payload!r}: give a whole number of bytes")
        self._kinds, self.max_payload, self._ring = kinds, max_payload, ring or KeyRing()

    def kind_of(self, what: Kind[Any] | str) -> Kind[Any]:
        """The declaration of a kind; raises `UnknownKind` for a name this app does not know."""
        if isinstance(what, Kind):
            return what
        if (kind := self._kinds.get(what)) is None:
            names = ", ".join(sorted(self._kinds)) or "none"
            raise UnknownKind(
                f"no handler is declared for kind {what!r}{nearest(str(what), self._kinds)}; this app knows: {names}."
                " List it in Resilient(handlers=[...]) or declare it with Kind(...)"
            )
        return kind

    def encode(
        self,
        what: Kind[Any] | str,
        payload: Any,
        resource_key: str,
        *,
        priority: int = 0,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        expires_in: timedelta | float | None = None,
        max_attempts: int | None = None,
        unique_key: str | None = None,
        unique_until: UniqueUntil = "start",
        on_conflict: OnConflict = "keep",
        while_running: WhileRunning = "drop",
        idempotency_key: str | None = None,
        ordering_key: str | None = None,
        ordering_policy: OrderingPolicy = "block",
        after: Blocker | Iterable[Blocker] = (),
        on_dead: OnDead = "cancel",
        tags: Mapping[str, str] | None = None,
        **unknown: Any,
    ) -> JobRequest:
        """Check every argument; raises `InvalidInput` (one of its kinds) and writes nothing."""
        kind = self.kind_of(what)
        if unknown:
            raise InvalidInput(_no_option(kind, next(iter(unknown))))
        keys.check(resource_key)
        if not is_whole(priority, PRIORITIES[0], PRIORITIES[-1]):
            raise InvalidInput(f"priority must be a whole number from -100 to 100, not {priority!r}")
        seconds, run_at = _start(delay, run_at)
        expires_at, within = _expiry(expires_at, expires_in)
        if max_attempts is not None and not is_whole(max_attempts, most=2**31 - 1):
            raise InvalidInput(f"max_attempts must be at least 1 and less than 2**31, not {max_attempts!r}")
        _check_order(ordering_key, priority)
        _check_words(
            on_dead=on_dead,
            on_conflict=on_conflict,
            while_running=while_running,
            unique_until=unique_until,
            ordering_policy=ordering_policy,
        )
        if unique_key is None:
            _check_no_conflict(on_conflict=on_conflict, while_running=while_running)
        blockers = _blockers(after)
        text = self.text(kind, payload)
        row = NewJob(
            id=new_id(),
            kind=kind.kind,
            resource_key=resource_key,
            payload=text,
            payload_version=kind.version,
            priority=priority,
            delay=seconds,
            run_at=run_at,
            expires_at=expires_at,
            expires_in=within,
            max_attempts=max_attempts or _default_attempts(kind),
            unique_key=_name("unique_key", unique_key),
            unique_until=unique_until if unique_key is not None else None,
            idempotency_key=_name("idempotency_key", idempotency_key),
            tags=_tags(tags),
            ordering_key=_name("ordering_key", ordering_key),
            ordering_policy=ordering_policy if ordering_key is not None else None,
            followed=bool(blockers),
            waits=len(blockers),
        )
        return JobRequest(row, on_conflict, while_running, blockers, on_dead)

    def text(self, kind: Kind[Any], payload: Any) -> str:
        """A payload as it is stored; raises `BadPayload` or `PayloadTooLarge`, and `SetupError` without a key."""
        text = kind.encode(payload)
        if len(text) > self.max_payload // 4 and (size := len(text.encode())) > self.max_payload:
            raise PayloadTooLarge(
                f"payload of {kind.kind!r} has {size:,} bytes, more than max_payload={self.max_payload:,}:"
                " store the data elsewhere and enqueue a reference"
            )
        if kind.sealed:
            return sealing.seal(self._ring, kind.kind, text)
        if text.startswith(START):
            raise BadPayload(f"payload of {kind.kind!r}: the name {SEALED!r} is the engine's own")
        return text

    def unseal(self, kind: str, text: str) -> str:
        """A sealed payload's JSON text. Raises `BadPayload`, and `KeyNotHereError`."""
        return sealing.unseal(self._ring, kind, text)

    def view(self, kind: str, payload: Any) -> Any:
        """What people are shown of a stored payload, as far as this app declares the kind."""
        shown = payload if (declared := self._kinds.get(kind)) is None else declared.view(payload)
        return without_sealed(shown)

    def is_hidden(self, kind: str, payload: Any) -> bool:
        """Whether people are shown less than what is stored."""
        declared = self._kinds.get(kind)
        return is_sealed(payload) or (declared is not None and (declared.sealed or declared.redact is not None))

    def encode_many(
        self, what: Kind[Any] | str, payloads: Iterable[Any], resource_key: str | None, options: Mapping[str, Any]
    ) -> list[JobRequest]:
        """Like `encode` for each payload or `Item`; what they have in common is checked once."""
        kind = self.kind_of(what)
        if "after" in options:
            options = {**options, "after": _blockers(options["after"])}
        items = list(payloads)
        if len(items) > 1 and options.get("idempotency_key") is not None:
            raise InvalidInput(
                f"idempotency_key={options['idempotency_key']!r:.42} for {len(items)} jobs: a provider would take the"
                " requests of all but the first for repeats; leave it out, or enqueue them one by one"
            )
        with no_collections():
            return self._encode_all(kind, items, resource_key, options)

    def _encode_all(
        self, kind: Kind[Any], payloads: Sequence[Any], resource_key: str | None, options: Mapping[str, Any]
    ) -> list[JobRequest]:
        model: JobRequest | None = None
        rest: tuple[Any, ...] = ()
        requests: list[JobRequest] = []
        shared = options
        if options.get("unique_key") is None and any(
            isinstance(p, Item) and p.unique_key is not None for p in payloads
        ):
            shared = {name: value for name, value in options.items() if name not in _CONFLICTS}  # for those without
        for payload in payloads:
            value, key = payload, resource_key
            if isinstance(payload, Item):
                value, key = payload.payload, payload.resource_key or resource_key
                own = payload.options()
                if own:
                    also = shared if payload.unique_key is None else options
                    requests.append(self.encode(kind, value, key or "", **{**also, **own}))
                    continue
            if model is None:
                model = self.encode(kind, value, key or "", **shared)
                requests.append(model)
                rest = model[1:]
                continue
            row = model.row.like(new_id(), keys.check(key or ""), self.text(kind, value))
            requests.append(JobRequest(row, *rest))
        return requests


def new_id() -> UUID:
    """An id of a job: later ones are greater. Half the time of `uuid_utils.compat`, a third of `UUID(int=...)`."""
    id_ = object.__new__(UUID)
    object.__setattr__(id_, "int", uuid7().int)
    object.__setattr__(id_, "is_safe", _UNKNOWN)
    return id_


_UNKNOWN: Final = SafeUUID.unknown


def with_trace(requests: list[JobRequest], tracing: Tracing) -> list[JobRequest]:
    """The same jobs with the caller's trace context, if there is one."""
    document = tracing.document()
    if document is None:
        return requests
    return [one._replace(row=one.row._replace(trace=document)) for one in requests]


def _default_attempts(kind: Kind[Any]) -> int | None:
    return kind.retry.max_attempts if isinstance(kind, Handler) else kind.max_attempts


def _no_option(kind: Kind[Any], word: str) -> str:
    hint, options = nearest(word, _OPTIONS), ", ".join(_OPTIONS)
    return f"enqueueing {kind.kind!r}: there is no option {word!r}{hint}; there are {options}"


_OPTIONS: Final = tuple(
    name for name, p in inspect.signature(Encoder.encode).parameters.items() if p.kind is p.KEYWORD_ONLY
)


def _seconds(name: str, value: timedelta | float | None) -> float | None:
    """Seconds; raises `InvalidInput` for anything but a number or a timedelta, from 0 to ten years."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif is_number(value):
        seconds = float(value)
    else:
        raise InvalidInput(
            f"{name} must be a number of seconds (300) or a timedelta (timedelta(minutes=5)), not {value!r:.42}"
        )
    if not 0 <= seconds < 10 * 366 * 86400:
        raise InvalidInput(f"{name} must be between 0 and ten years, in seconds or as a timedelta, not {value!r}")
    return seconds


def _start(delay: timedelta | float | None, run_at: datetime | None) -> tuple[float | None, datetime | None]:
    seconds = _seconds("delay", delay)
    if run_at is not None and seconds is not None:
        raise InvalidInput("give delay or run_at, not both")
    return seconds, None if run_at is None else aware("run_at", run_at)


def _expiry(at: datetime | None, within: timedelta | float | None) -> tuple[datetime | None, float | None]:
    seconds = _seconds("expires_in", within)
    if at is not None and seconds is not None:
        raise InvalidInput("give expires_at or expires_in, not both")
    return None if at is None else aware("expires_at", at), seconds


def aware(name: str, value: datetime) -> datetime:
    """A datetime with a zone, in UTC; raises `NaiveDatetime` for one without."""
    if not isinstance(value, datetime) or value.tzinfo is None or value.utcoffset() is None:
        raise NaiveDatetime(f"{name}={value!r} has no time zone: write datetime.now(timezone.utc) or add tzinfo")
    return in_utc(value)


def _name(what: str, value: str | None) -> str | None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()):
        raise InvalidInput(f"{what} must be 1 to 255 printable characters, not {value!r:.42}")
    return value


_WORDS: Final = {
    "on_dead": get_args(OnDead),
    "on_conflict": get_args(OnConflict),
    "while_running": get_args(WhileRunning),
    "unique_until": get_args(UniqueUntil),
    "ordering_policy": get_args(OrderingPolicy),
}


def _check_words(**options: str) -> None:
    for name, word in options.items():
        words = _WORDS[name]
        if word not in words:
            others = ", ".join(f'"{one}"' for one in words[:-1])
            raise InvalidInput(f'{name} must be {others} or "{words[-1]}", not {word!r}')


_CONFLICTS: Final = ("on_conflict", "while_running")


def _check_no_conflict(**options: str) -> None:
    for name, word in options.items():
        if word != _WORDS[name][0]:
            raise InvalidInput(f'{name}="{word}" is about jobs of one unique_key: give unique_key=, or leave it out')


def _check_order(ordering_key: str | None, priority: int) -> None:
    if ordering_key is not None and priority:
        raise InvalidInput(
            f"priority={priority} with ordering_key={ordering_key!r}: jobs of one ordering key run in the order of"
            " their commits; leave out one of the two"
        )


def _blockers(after: Blocker | Iterable[Blocker]) -> tuple[UUID, ...]:
    """The ids of those it waits for, each once."""
    blockers: list[Any] = (
        list(after) if isinstance(after, Iterable) and not isinstance(after, (str, Enqueued)) else [after]
    )
    ids = tuple(
        dict.fromkeys(as_id(one if isinstance(one, (UUID, str)) else getattr(one, "id", one)) for one in blockers)
    )
    if len(ids) > MAX_BLOCKERS:
        raise InvalidInput(
            f"a job waits for at most {MAX_BLOCKERS:,} others, not {len(ids):,}: let some wait in between"
        )
    return ids


def checked_name(what: str, value: str) -> str:
    """1 to 255 printable characters; else `InvalidInput`."""
    return _name(what, value) or ""


def _tags(tags: Mapping[str, str] | None) -> str | None:
    if not tags:
        return None
    if not isinstance(tags, Mapping):
        raise InvalidInput(f"tags are names with their values, such as {{'customer': '7'}}, not {tags!r:.42}")
    if len(tags) > MAX_TAGS:
        raise InvalidInput(f"a job takes at most {MAX_TAGS} tags, not {len(tags)}")
    for name, value in tags.items():
        is_text = isinstance(name, str) and isinstance(value, str)
        if not is_text or not 0 < len(name) <= MAX_TAG_NAME or len(value) > MAX_NAME:
            raise InvalidInput(
                f"tag {name!r} must be text of at most 255 characters under a name of at most 64, not {value!r}"
            )
        if not STORABLE.fullmatch(name + value):
            raise InvalidInput(f"tag {name!r} has a character that no database stores (NUL, half a pair): {value!r}")
    text: str = _JSON.dump_json(dict(tags)).decode()
    return text


_JSON: Final[TypeAdapter[Any]] = TypeAdapter(Any)


log = logger("app")
MOST: Final = 1_000  # names that are remembered: where each account is a name of its own, the rest is not looked at


class Foresight:
    """Looks at the jobs and accounts of one app before they are written.

    ``place``: called with each resource key that a program names; raises `InvalidInput` for one that lives elsewhere.
    """

    place: Callable[[str], None] | None = None

    def __init__(self, declared: Mapping[str, Kind[Any]], providers: Collection[str], *, runs: bool) -> None:
        """``declared`` are its handlers and its ``kinds=``; ``runs``: it has handlers of its own."""
        self._declared, self._providers, self._runs = declared, providers, runs
        self._kinds, self._names = set(declared), set(providers)

    def look(self, requests: Iterable[JobRequest]) -> None:
        """Warn of what was not warned of before. Raises `InvalidInput` for a resource that lives elsewhere."""
        checked = ""
        for one in requests:
            row = one.row
            if row.resource_key != checked:
                self.look_at(checked := row.resource_key)
            if row.kind not in self._kinds:
                self._kind(row.kind)
            name = row.resource_key.partition("/")[0]
            if name not in self._names:
                self._name(name, row.resource_key)

    def look_at(self, resource_key: str) -> None:
        """Raise `InvalidInput` for a resource that lives elsewhere."""
        if self.place is not None:
            self.place(resource_key)

    def _kind(self, kind: str) -> None:
        if len(self._kinds) < MOST:
            self._kinds.add(kind)
            if self._runs:
                log.warning(
                    "%r is not among the handlers of this app: its jobs wait until a worker that has it runs. List it"
                    " in Resilient(handlers=[...]), or in kinds=[...] if another program's workers run it",
                    kind,
                )

    def _name(self, name: str, key: str) -> None:
        if len(self._names) < MOST:
            self._names.add(name)
            if hint := nearest(name, self._providers):
                log.warning(
                    "resource key %r: this app has no provider %r, so requests of its jobs have no address%s",
                    key,
                    name,
                    hint,
                )
