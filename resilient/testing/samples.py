"""What a provider's own answers look like, as values: the tables its contract is checked against."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from resilient.core.budgets import Fields, budgets
from resilient.core.exchange import IDEMPOTENT, AnswerFacts, RequestFacts
from resilient.core.failure import FailureKind, Scope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.core.page_request import PageRequest
    from resilient.core.provider import Provider

NOW: Final = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)  # when every sample was received
_NONE: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer and what it must mean.

    ``about`` names it; ``kind``: the failure it is, None for success. ``body``: JSON, or text. ``on``: the
    request, as ``"POST /path"``; ``sent``: its JSON body. ``repeatable``: whether that request has one effect
    however often it is sent (None: by its method and the provider's idempotency key). ``wait``: the seconds
    it tells, None for none, ``...`` if that is not the point. ``key``: the suffix its route must give.
    """

    about: str
    status: int
    kind: FailureKind | None
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)
    on: str = "GET /"
    sent: Any = None
    scope: Scope = Scope.ACCOUNT
    wait: Any = ...
    repeatable: bool | None = None
    key: str | None = None

    def answer(self, provider: Provider | None = None) -> AnswerFacts:
        """As the wire hands it on."""
        fields = Fields.of(self.headers)
        text = self.body if isinstance(self.body, str) else "" if self.body is None else json.dumps(self.body)
        left = budgets(fields, NOW, fields=provider.waits.budgets) if provider is not None else ()
        body = None if isinstance(self.body, str) else self.body
        return AnswerFacts(self.status, fields, body=body, text=text, budgets=left)

    def asked(self, provider: Provider) -> RequestFacts:
        """The request it answers, as the wire describes it."""
        method, _, target = self.on.partition(" ")
        path = urlsplit(target).path
        keyed = provider.idempotency is not None and provider.idempotency.covers(method, path)
        safe = method in IDEMPOTENT or keyed or provider.is_read(method, path)
        sent = None if self.sent is None else json.dumps(self.sent).encode()
        return RequestFacts(
            method, target, "api.example.com", path, key=f"{provider.name}/account", body=sent,
            repeatable=safe if self.repeatable is None else self.repeatable,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """A good answer of the token endpoint, and what it must be read as.

    ``token``, ``refresh_token`` ("" if it has none); ``lasts``: seconds until the token ends, None if nothing says so;
    ``values``: what is kept of it for the connection.
    """

    about: str
    body: Any
    token: str
    refresh_token: str = ""
    lasts: float | None = None
    values: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class Page:
    """One page: ``asks``: what its request must contain, as ``"after=abc"`` (in URL or body); its answer."""

    asks: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class Pages:
    """A whole pass. ``of``: which pagination; ``items``: how many records all pages have together."""

    of: str
    first: PageRequest
    pages: Sequence[Page]
    items: int
    resume: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)  # what a stream says otherwise, such as items=


@dataclass(frozen=True, slots=True)
class Hook:
    """A genuine delivery, signed with ``secret`` by something other than the code under test."""

    secret: str
    body: bytes
    headers: Mapping[str, str]
    url: str = "https://hooks.example.com/in"
    at: datetime = NOW
    delivery: str = ""  # the id it carries


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Sample answers of one provider.

    ``throttled``: in each shape it uses. ``refused``: permission errors, which no waiting heals. ``expired``:
    an access token that needs a refresh. ``reset``: a cursor it no longer accepts; where it has no such answer,
    ``no_reset`` says why. ``others``: whatever else its rules decide. ``dead_grant``: of the token endpoint;
    ``token_errors``: its other answers; ``tokens``: its good ones. ``pages``: each pagination to its end.
    """

    throttled: Sequence[Sample]
    refused: Sequence[Sample]
    expired: Sequence[Sample] = ()
    reset: Sequence[Sample] = ()
    no_reset: str = ""
    others: Sequence[Sample] = ()
    dead_grant: Sequence[Sample] = ()
    token_errors: Sequence[Sample] = ()
    tokens: Sequence[Token] = ()
    pages: Sequence[Pages] = ()
    hooks: Sequence[Hook] = ()

    def answers(self) -> tuple[Sample, ...]:
        """Every sample of the API itself."""
        return (*self.throttled, *self.refused, *self.expired, *self.reset, *self.others)
