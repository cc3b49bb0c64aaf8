"""Kinds of jobs as values: `Kind`, the name and shape of what is enqueued, and `Handler`, what runs it.

Both sides import them from here: those that enqueue, and the worker. `handler.py` makes a `Handler` from a function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_origin,
)

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import from_json

from resilient.core.base.errors import BadPayload, InvalidInput, SetupError
from resilient.core.base.misfit import check_whole, explained_class
from resilient.core.base.numbers import SIGNS, beside, lost_number
from resilient.core.jobs.backoff import Retry
from resilient.core.jobs.records import Redaction, check_redaction, is_sealed, redacted
from resilient.engine.ground.sealing import UNSAID, broken_rules

if TYPE_CHECKING:
    from collections.abc import Callable

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
R = TypeVar("R")
Mode: TypeAlias = Literal["staged", "atomic"]
_BOTH: Final[dict[str, Any]] = {"by_alias": True, "by_name": True}  # how a program may name the fields of a payload
_KIND: Final = re.compile(r"[A-Za-z0-9._:@+-]{1,255}")
DEFAULT_TIMEOUT: Final = 300.0
DEFAULT_RETRY: Final = Retry()
_UNTYPED: Final[TypeAdapter[Any]] = TypeAdapter(Any)


class HasPayload(Protocol[P_co]):
    """A `Job` or a `SyncJob`."""

    @property
    def payload(self) -> P_co:
        """What was enqueued."""


def name_of(kind: Kind[Any] | str) -> str:
    """The name of a kind that is meant by its name or its declaration."""
    return kind.kind if isinstance(kind, Kind) else kind


def adapter_of(model: Any) -> TypeAdapter[Any]:
    """What checks values of a model. Raises `InvalidInput` for what is no type at all."""
    try:
        return TypeAdapter(model)
    except (PydanticUserError, TypeError, AttributeError, KeyError) as error:
        if isinstance(model, type) or get_origin(model) is not None:  # then pydantic's words are about it
            raise
        raise InvalidInput(
            f"model= takes a pydantic model, a dataclass or any other type, such as dict[str, int]; not the value of a"
            f" {type(model).__name__}"
        ) from error


def value_of(adapter: TypeAdapter[Any], stored: Any) -> Any:
    """A model's value from decoded JSON that was stored, validated as JSON: there a strict model takes a time as text.

    ``stored`` may hold values of Python's own, if an upgrade made them.
    """
    return _from_json(adapter, stored, by_alias=not _is_ambiguous(adapter), by_name=True)


def result_of(adapter: TypeAdapter[Any], stored: Any) -> Any:
    """A handler's result from decoded JSON. Its computed fields are stored too: a model that forbids extras takes it.

    Raises `ValidationError` for what is no such result.
    """
    try:
        return value_of(adapter, stored)
    except ValidationError as error:
        rest = json.loads(json.dumps(stored))
        for one in error.errors(include_url=False, include_context=False, include_input=False):
            if one["type"] == "extra_forbidden":
                _leave_out(rest, one["loc"])
        value = None if rest == stored else value_of(adapter, rest)
        if rest == stored or json.loads(_UNTYPED.dump_json(value)) != stored:
            raise
        return value


def _leave_out(document: Any, place: Sequence[int | str]) -> None:
    """Delete what stands at a place of decoded JSON, if something does."""
    *before, last = place
    for step in before:
        if step in document if isinstance(document, dict) else isinstance(document, list) and isinstance(step, int):
            document = document[step]
        # else it names a part of the model, such as one of several types
    if isinstance(document, dict):
        document.pop(last, None)


def value_of_foreign(adapter: TypeAdapter[Any], raw: Any) -> Any:
    """The same from what a provider sent: its fields are named as the model says."""
    return _from_json(adapter, raw)


def _from_json(
    adapter: TypeAdapter[Any], value: Any, *, by_alias: bool | None = None, by_name: bool | None = None
) -> Any:
    try:
        text: str | bytes = json.dumps(value)
    except (ValueError, RecursionError):
        return adapter.validate_python(value, by_alias=by_alias, by_name=by_name)
    except TypeError:  # values of Python's own
        try:
            text = _UNTYPED.dump_json(value)
        except ValueError:
            return adapter.validate_python(value, by_alias=by_alias, by_name=by_name)
    return adapter.validate_json(text, by_alias=by_alias, by_name=by_name)


@lru_cache(maxsize=1_024)
def _is_ambiguous(adapter: TypeAdapter[Any]) -> bool:
    """Whether one field's alias is another one's name. What is stored is then read by names alone.

    Else by aliases too: a program that does not know the model stores what it was given.
    """
    return _has_ambiguous_alias(adapter.core_schema)


def _has_ambiguous_alias(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        fields = schema.get("fields")
        named: list[tuple[str, Any]] = list(fields.items()) if isinstance(fields, Mapping) else []
        if isinstance(fields, Sequence):  # of a dataclass
            named = [(one["name"], one) for one in fields if isinstance(one, Mapping) and "name" in one]
        names = {name for name, _ in named}
        if any(_first_names(one.get("validation_alias")) & (names - {name}) for name, one in named):
            return True
        return any(map(_has_ambiguous_alias, schema.values()))
    return isinstance(schema, (list, tuple)) and any(map(_has_ambiguous_alias, schema))


def _first_names(alias: Any) -> set[str]:
    """The names that an alias of pydantic's core schema begins with: a text, a path, or several paths."""
    if isinstance(alias, str):
        return {alias}
    return set().union(*map(_first_names, alias)) if isinstance(alias, list) else set()


def json_fault(text: str, plain: Callable[[], Any]) -> str | None:
    """What is wrong with JSON text: it cannot be read again, or a number is lost (infinity, NaN); None if nothing is.

    ``plain`` gives what was serialized, as dicts, lists and plain values.
    """
    if len(text) > _READABLE:
        try:
            from_json(text, cache_strings="none")
        except ValueError as error:
            return f"it could not be read again ({error}): {_LIMITS}"
    is_suspect = _NULL in text or _NAN in text or _INFINITY in text or _NONE in text  # a third of the time of `any`
    return lost_number(plain(), text) if is_suspect else None


def mask_fault(text: str, plain: Callable[[], Any]) -> str | None:
    """What is wrong with JSON text if pydantic wrote stars in it for a secret, else None. ``plain`` as above."""
    if _STARS not in text:
        return None
    for place, value, written in beside(plain(), text):
        if written == _STARS and hasattr(value, "get_secret_value"):
            at = ".".join(map(str, place)) or "the value"
            return f"{at} is a secret, of which pydantic writes stars: give it a field_serializer that tells it"
    return None


_STARS: Final = "**********"
_NULL, _NAN, _INFINITY, _NONE = SIGNS
_READABLE: Final = 400  # characters of a text that is too short for what a reader refuses, and a writer does not
_LIMITS: Final = "a whole number has at most 4,300 digits, and lists and objects stand in each other 200 deep at most"


@explained_class
@dataclass(frozen=True, eq=False)
class Kind(Generic[P]):
    """One kind of job: its name and the shape of its payload.

    ``version`` is stored with every payload; ``upgrade(payload, version)`` turns an older stored payload (decoded JSON)
    into the present shape. ``sealed``: its payloads are stored encrypted, by the keys that credentials are stored
    under. ``redact``: what views hide of them, as field names, paths or a function; see docs/security.md.
    """

    kind: str
    model: Any = None
    version: int = 1
    upgrade: Callable[[Any, int], Any] | None = None
    max_attempts: int | None = None
    sealed: bool = field(default=False, kw_only=True)
    redact: Redaction | None = field(default=None, kw_only=True)
    _adapter: TypeAdapter[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise SetupError(
                f"{self.kind!r} is not a handler kind: use letters, digits and ._:@+-, such as 'mail.send'"
            )
        check_whole(f"handler {self.kind!r}", "version", self.version, least=0)
        check_redaction(self.kind, self.redact)
        object.__setattr__(self, "_adapter", _UNTYPED if self.model is None else adapter_of(self.model))

    def encode(self, payload: Any) -> str:
        """Check a payload against the model and return it as JSON text; raises `BadPayload`."""
        try:
            checked = payload if self.model is None else self._adapter.validate_python(payload, **_BOTH)
            text = self._adapter.dump_json(checked, by_alias=False, round_trip=True).decode()
            if checked is None or isinstance(checked, str):
                return text
            plain = partial(self._adapter.dump_python, checked, by_alias=False, round_trip=True, warnings=False)
            problem = json_fault(text, plain) or mask_fault(text, plain)
        except ValidationError as error:
            raise BadPayload(
                f"payload of {self.kind!r} does not fit its model: {self._misfit(payload, error)}"
            ) from None
        except ValueError as error:  # PydanticSerializationError: not JSON
            why = UNSAID if self.sealed else error
            raise BadPayload(f"payload of {self.kind!r} is not JSON: {why}") from None
        if problem is not None:
            raise BadPayload(f"payload of {self.kind!r} is not JSON: {UNSAID if self.sealed else problem}")
        return text

    def _misfit(self, payload: Any, error: ValidationError) -> str:
        """What is wrong with a payload; one of another class altogether is named, because its fields say little."""
        if self.sealed:
            return broken_rules(error.errors(include_input=False, include_url=False))
        within = any(e["loc"] for e in error.errors(include_input=False, include_url=False))
        if within or payload is None or type(payload).__module__ == "builtins" or not isinstance(self.model, type):
            return _brief(error)
        return f"it takes {_named(self.model)}, not {_named(type(payload))}"

    def decode(self, text: str | None, version: int) -> P:
        """A stored payload back as the model; raises `BadPayload`."""
        try:
            if version != self.version and self.upgrade is not None:
                upgraded = self.upgrade(_UNTYPED.validate_json(text or "null"), version)
                return cast("P", value_of(self._adapter, upgraded))
            return cast(
                "P",
                self._adapter.validate_json(text or "null", by_alias=not _is_ambiguous(self._adapter), by_name=True),
            )
        except ValidationError as error:
            raise BadPayload(
                f"stored payload (version {version}) does not fit the model of {self.kind!r}:"
                f" {self._misfit(None, error)}"
            ) from None

    def view(self, payload: Any) -> Any:
        """What people are shown of a stored payload (decoded JSON)."""
        return payload if is_sealed(payload) else redacted(payload, self.redact)


@explained_class
@dataclass(frozen=True, eq=False)
class Handler(Kind[P], Generic[P, R]):
    """A user's function for one kind of job, and how it is to be run."""

    fn: Callable[[Any], Any] = field(default=lambda _job: None, repr=False)
    retry: Retry = DEFAULT_RETRY
    timeout: float | None = DEFAULT_TIMEOUT  # seconds an execution may take; None: no limit
    reconcile: Callable[[Any], Any] | None = None
    is_async: bool = True
    batch: int | None = None  # how many jobs of one resource a call takes at most; None: one, as a `Job`
    mode: Mode = "staged"
    anonymous: bool = False

    def __call__(self, job: HasPayload[P] | Sequence[HasPayload[P]]) -> Any:
        """Run the function itself; that of a batch handler takes a `Batch`."""
        return self.fn(job)


def _named(model: type[Any]) -> str:
    return f"{model.__module__}.{model.__qualname__}".removeprefix("builtins.")


_RULES: Final = {"union_tag_invalid": "its tag is none of those that are expected"}  # pydantic's words quote the value


def _brief(error: ValidationError) -> str:
    """The first few problems, by place and rule; never the values (they may be secrets)."""
    first = error.errors(include_input=False, include_url=False)[:3]
    problems = [": ".join(filter(None, (".".join(map(str, e["loc"])), _RULES.get(e["type"], e["msg"])))) for e in first]
    more = error.error_count() - len(problems)
    return "; ".join(problems) + (f" (and {more} more)" if more > 0 else "")


def by_kind(handlers: Any) -> Mapping[str, Handler[Any, Any]]:
    """Handlers by kind; raises `SetupError` for two of one kind or something that is no handler."""
    handlers_by_kind: dict[str, Handler[Any, Any]] = {}
    for h in handlers:
        if not isinstance(h, Handler):
            raise SetupError(f"{h!r} is not a handler: decorate it with @handler('some.kind')")
        if h.kind in handlers_by_kind:
            raise SetupError(f"two handlers are declared for kind {h.kind!r}: give one another name")
        handlers_by_kind[h.kind] = h
    return handlers_by_kind
