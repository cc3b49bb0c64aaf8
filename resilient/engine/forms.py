"""Events as rows: what all of one class, and all of one destination, have in common is worked out once.

`publish` runs inside business transactions, so it checks only what differs from one event to the next: its data, key,
subject and size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from uuid_utils.compat import uuid7

from resilient.core.errors import InvalidInput, SetupError
from resilient.core.events import RESOURCE
from resilient.core.message import Envelope
from resilient.engine.enqueue import Ordered, checked_name
from resilient.engine.event import Event
from resilient.engine.relay import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.engine.enqueue import Encoder
    from resilient.engine.handler import Kind
    from resilient.store.jobs import NewJob
    from resilient.wire.publishers.base import Destination

_A_KEY: Final = "a key"


class Form(NamedTuple):
    """One class of events at one app: its text, and where its route leads (None: it has none)."""

    envelope: Envelope
    route: tuple[str, ...] | None


class _Model(NamedTuple):
    """A job for one destination, without its id, payload and key."""

    kind: Kind[str]
    plain: NewJob
    in_order: NewJob


class Forms:
    """The forms of one app, made when they are first used. ``routes`` are checked already."""

    def __init__(
        self,
        encoder: Encoder,
        destinations: Mapping[str, Destination],
        routes: Mapping[type[Event], tuple[str, ...]],
        source: str,
    ) -> None:
        self._encoder, self._destinations, self._routes, self._source = encoder, destinations, routes, source
        self._forms: dict[type[Event], Form] = {}
        self._models: dict[str, _Model] = {}

    def of(self, event: Event) -> Form:
        """The form of an event; raises `InvalidInput` for what is none, or has no type."""
        kind = type(event)
        if (form := self._forms.get(kind)) is None:
            if not isinstance(event, Event) or not kind.event_type:
                raise InvalidInput(f"{kind.__name__} is no event: write `class {kind.__name__}(Event, type='...')`")
            routed = (self._routes[one] for one in kind.__mro__ if one in self._routes)
            envelope = Envelope(kind.event_type, kind.event_version, self._source)
            form = self._forms[kind] = Form(envelope, next(routed, None))
        return form

    def ordered(self, names: Sequence[str], text: str, key: str | None, tags: str | None = None) -> list[Ordered]:
        """An event as a job for each destination. Raises `InvalidInput` for a key, `PayloadTooLarge` for a text."""
        found = []
        if key is not None:
            checked_name("ordering_key", key)
        for name in names:
            kind, plain, in_order = self._models.get(name) or self._model(name)
            self._encoder.text(kind, text)  # its size
            if key is None:
                row = plain._replace(id=uuid7(), payload=text, tags=tags)
            else:
                row = in_order._replace(id=uuid7(), payload=text, ordering_key=key, tags=tags)
            found.append(Ordered(row))
        return found

    def _model(self, name: str) -> _Model:
        kind, policy = self._encoder.kind_of(PREFIX + name), self._destinations[name].when_dead
        row = self._encoder.encode(kind, "", f"{RESOURCE}/{name}", ordering_key=_A_KEY, ordering_policy=policy).row
        plain = row._replace(ordering_key=None, ordering_policy=None)
        model = self._models[name] = _Model(kind, plain, row)
        return model


def checked_routes(
    routes: Mapping[type[Event], Sequence[str]] | None, destinations: Mapping[str, Destination]
) -> dict[type[Event], tuple[str, ...]]:
    """Routes as given, checked; raises `SetupError`."""
    found: dict[type[Event], tuple[str, ...]] = {}
    for kind, names in (routes or {}).items():
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            raise SetupError(f"routes= maps classes of events to destinations, and {kind!r} is no Event")
        try:
            found[kind] = known(names, destinations, f"the route of {kind.__name__}")
        except InvalidInput as error:
            raise SetupError(str(error)) from None
    return found


def known(names: Sequence[str], destinations: Mapping[str, Destination], whose: str) -> tuple[str, ...]:
    """Names of destinations, each once; raises `InvalidInput` for one that is not declared."""
    given = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    if missing := [name for name in given if name not in destinations]:
        declared = ", ".join(sorted(destinations)) or "none"
        raise InvalidInput(f"{whose} names destination {missing[0]!r}, which is not declared; known are: {declared}")
    return given
