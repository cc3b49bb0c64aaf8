"""One execution's way through its provider: what is sent where, under which name and key, and what came last.

The client's transport and `call` both ask the trail what a request is (`Trail.facts`) and tell it what became
of it (`Trail.note`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.errors import InvalidInput
from resilient.core.exchange import IDEMPOTENT, RequestFacts
from resilient.core.failure import Failure, FailureKind
from resilient.core.placeholders import names_in
from resilient.core.provider import GENERIC, Provider
from resilient.core.resource_key import check
from resilient.wire.echoes import Hidden, forms
from resilient.wire.names import Names, derive, hash_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.wire.conduct import Conduct, Permit

_UNKNOWN: Final = Failure(FailureKind.AMBIGUOUS)
_MOST_SECRETS: Final = 64  # of several tokens that were refreshed within one execution


class Target(NamedTuple):
    """The parts of a URL."""

    url: str
    scheme: str
    host: str
    port: int | None
    path: str


class Trail:
    """What an execution knows about its requests.

    ``base_url`` and ``headers``: the account's own, else the provider's. ``prefix`` keeps the names of its requests
    apart from those of other resources. Raises `InvalidInput` for an address that is not the provider's.
    """

    __slots__ = (
        "_account", "_guarded", "base_url", "conduct", "headers", "last_failure", "last_key", "names", "origins",
        "own_headers", "provider", "secrets",
    )  # fmt: skip

    def __init__(
        self,
        conduct: Conduct,
        provider: Provider = GENERIC,
        base_url: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        prefix: str = "",
    ) -> None:
        self.conduct, self.provider = conduct, provider
        self.origins = provider.origins(base_url)
        self.base_url = base_url or ("" if "{" in provider.base_url else provider.base_url)
        self._guarded = bool(self.base_url) and provider.check_address(provider.base_url, self.base_url)
        self.headers = provider.headers_for({}) if headers is None else headers
        self.own_headers = tuple((n.lower().encode(), n.encode(), v.encode()) for n, v in self.headers.items())
        self.names = Names(prefix)
        self.last_failure: Failure | None = None  # of the last answer, if no success followed
        self.last_key = conduct.resource_key  # the resource it concerned
        self._account = at_account(conduct.resource_key)
        self.secrets = Hidden()  # what the account's requests carry, in every form an answer may echo

    def keep_secret(self, permit: Permit) -> None:
        """Take in what a request carries, so that nothing which is shown contains it."""
        found = forms((*permit.headers.values(), *permit.params.values()))
        if not found <= set(self.secrets):
            every = sorted({*self.secrets, *found}, key=len, reverse=True)
            self.secrets = Hidden(every[:_MOST_SECRETS])

    @property
    def account(self) -> str:
        """The key of the account its requests are for."""
        return self._account

    @property
    def lacks_address(self) -> bool:
        """Whether the account's connection, which would tell it, is not known."""
        return not self.base_url and "{" in self.provider.base_url

    def guards(self, host: str) -> bool:
        """Whether only public addresses may be connected to: the account chose its own host, and what that names."""
        return self._guarded and host not in self.provider.private_hosts

    def without_address(self) -> str:
        """Why a relative URL leads nowhere."""
        missing = ", ".join(sorted(names_in(self.provider.base_url)))
        if self.provider is GENERIC:
            name = self._account.partition("/")[0]
            return f"the app has no provider {name!r}, so no base URL: list it in Resilient(providers=[...])"
        if not missing:
            return f"provider {self.provider.name!r} has no base URL to join a relative one to: give a whole URL"
        return (
            f"the address of {self._account} is not known: its connection has no {missing}"
            f" (app.connections.add({self._account!r}, ..., details={{...}}))"
        )

    def facts(
        self,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        body: bytes | None,
        words: Mapping[str, Any],
        *,
        before: RequestFacts | None = None,
        trust: bool = True,
    ) -> RequestFacts:
        """Everything about a request that is known before it is sent.

        ``words`` are what the caller said: ``op``, ``idempotent``, ``idempotency_key``, ``cost``. ``before``:
        the request this one repeats or was redirected from. Raises `InvalidInput`.
        """
        declared = self.origins.holds(target.scheme, target.host, target.port)
        asked = RequestFacts(
            method, target.url, target.host, target.path, key=self.conduct.resource_key, body=body,
            gated=declared or not self.origins.declared, trusted=declared and trust, headers=headers,
        )  # fmt: skip
        changes = self._routed(asked, words.get("cost"))
        keyed = self._takes_key(asked, words)
        word = words.get("idempotent")
        reads = word or (word is None and self.provider.is_read(method, target.path))
        if reads and not words.get("idempotency_key"):
            keyed = False
        if keyed or not (reads or (word is None and method in IDEMPOTENT)):
            changes.update(self._named(asked, words, before, keyed=keyed))
        elif op := words.get("op"):
            changes["name"] = op
        return replace(asked, **changes) if changes else asked

    def _takes_key(self, asked: RequestFacts, words: Mapping[str, Any]) -> bool:
        idem = self.provider.idempotency
        keyed = asked.trusted and idem is not None and idem.covers(asked.method, asked.path)
        if words.get("idempotency_key") and not keyed:
            raise InvalidInput(
                f"idempotency_key: provider {self.provider.name!r} has none for {asked.method} {asked.path}; if the"
                " request may be repeated all the same, say so with extensions={'idempotent': True}"
            )
        return keyed

    def _named(
        self, asked: RequestFacts, words: Mapping[str, Any], before: RequestFacts | None, *, keyed: bool
    ) -> dict[str, Any]:
        """Its name and, if the provider takes one, its key."""
        idem = self.provider.idempotency
        body_hash, made_up, key = hash_of(asked.body), None, words.get("idempotency_key")
        if keyed and idem is not None and not key and idem.header:
            key = asked.headers.get(idem.header)
            if key and idem.made_up and re.fullmatch(idem.made_up, key):
                key, made_up = None, key
        if before is not None and before.name and before.method == asked.method and before.body_hash == body_hash:
            name = before.name
        elif op := words.get("op"):
            name = self.names.given(op, body_hash)
        else:
            name = self.names.next(asked.method, asked.path, body_hash, made_up)
        if not keyed:
            return {"name": name, "body_hash": body_hash, "repeatable": False, "needs_mark": True}
        key = key or derive(self.conduct.base_key, name)
        life = None if idem is None else idem.life
        return {"name": name, "body_hash": body_hash, "idempotency_key": key, "key_life": life}

    def _routed(self, asked: RequestFacts, cost: float | None) -> dict[str, Any]:
        """Its resource and cost, where they are not the job's and 1."""
        changes: dict[str, Any] = {}
        if self.provider.route is not None and asked.gated:
            suffix, changes["cost"] = self.provider.route(asked)
            if suffix and not asked.key.endswith("/" + suffix):
                changes["key"] = check(f"{self._account}/{suffix}")
        if cost is not None:
            changes["cost"] = cost
        return changes

    def note(self, asked: RequestFacts, failure: Failure | None) -> None:
        """Take in the outcome of a request."""
        if asked.needs_mark or asked.idempotency_key:
            self.names.settle(asked.name, asked.body_hash, failure)
        if asked.gated:
            self.last_failure = failure
            if failure is not None:
                self.last_key = asked.key

    def give_up(self, asked: RequestFacts) -> None:
        """Nobody waited for the outcome of a request: the next one like it is the same one again."""
        if asked.needs_mark or asked.idempotency_key:
            self.names.settle(asked.name, asked.body_hash, _UNKNOWN)

    def cut_off(self, permit: Permit) -> None:
        """The answer broke off after it was noted: whoever sends the same again sends the same request."""
        self.give_up(permit.asked)
        self.conduct.cut_off(permit)


def at_account(key: str) -> str:
    """The account on the path of ``key``: its first two segments."""
    return "/".join(key.split("/", 2)[:2])
