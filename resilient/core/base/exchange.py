"""One request and its answer as plain values: what every floor may know about them.

Values of these classes never show secrets: URL, headers and bodies are left out of their ``repr``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.budgets import Fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.base.budgets import Budget

# RFC 9110, 9.2.2, and QUERY, its safe sibling with a body: repeating these has the effect of doing them once.
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "QUERY"})


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One request, before it is sent.

    ``key``: the resource it draws on (the job's, or one below it by the provider's route). ``name``: its
    ``op``, or method, path and ordinal; stable over retries. ``repeatable``: sending it twice has one effect
    (its method, the caller's word, or an idempotency key the provider honours). ``needs_mark``: it is not repeatable,
    so a mark must be committed before it is sent; the same holds for a key that `is_forgettable`. ``gated``: it goes to
    the provider. A request to a foreign host is not gated: it gets no credentials and no key, and only an open
    transaction refuses it. ``trusted``: it may carry credentials.
    """

    method: str
    url: str = field(repr=False)
    host: str
    path: str
    key: str = ""
    cost: float = 1.0
    name: str = ""
    repeatable: bool = True
    needs_mark: bool = False
    gated: bool = True
    trusted: bool = False
    idempotency_key: str | None = None
    key_life: float | None = None  # seconds for which the provider remembers the key
    key_of_grant: bool = False  # the provider forgets the key when the account is connected anew
    body_hash: str | None = None  # SHA-256; None for a body that is not in memory, and where nothing needs it
    body: bytes | None = field(default=None, repr=False)  # None if it is not in memory
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # without the credentials that the engine adds

    @property
    def marked(self) -> bool:
        """Whether its mark is committed before it is first sent: a repeat is not safe, or not for ever."""
        return self.needs_mark or self.is_forgettable

    @property
    def is_forgettable(self) -> bool:
        """Whether the provider forgets its key some day."""
        return self.key_life is not None or self.key_of_grant


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """One answer.

    ``body`` is the decoded JSON (None if there is none, or the classification did not need it), ``text`` the beginning
    of the body. ``cost`` is what the request really cost, ``budget`` the name of the one budget that it counted for,
    where the provider says so.
    """

    status: int
    headers: Fields = field(default_factory=Fields, repr=False)
    body: Any = field(default=None, repr=False)
    text: str = field(default="", repr=False)
    budgets: tuple[Budget, ...] = ()
    cost: float | None = None
    budget: str = ""
