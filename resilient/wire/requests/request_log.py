"""The requests of one execution: what is sent where, under which name and key, and how the last one ended.

The client's transport and `call` both take the facts of a request from here (`RequestLog.facts`) and note here how it
ended (`RequestLog.note`).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.errors import Failure, FailureKind, InvalidInput
from resilient.core.base.exchange import IDEMPOTENT, RequestFacts
from resilient.core.base.frames import Hidden
from resilient.core.base.resource_key import check_stored
from resilient.core.base.tracing import OFF, Tracing
from resilient.core.provider.facts import GENERIC, Provider
from resilient.core.provider.placeholders import names_in
from resilient.wire.requests.redact import notations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.wire.requests.hooks import Permit, RequestHooks


# -- names and keys ---------------------------------------------------------------------------------------------------
#
# The same in every execution of the job. A request is named by its ``op``, else by method, path and ordinal
# ("POST /v1/charges #2"). The ordinal counts requests whose outcome is known: one after a predecessor with an unknown
# outcome, with the same body or with the same key (an SDK's own retry), *is* that predecessor again and keeps its name.
# Bodies are not part of a name, because they often contain the time of day.

KEY_LENGTH: Final = 32  # hexadecimal digits; QuickBooks takes at most 50 characters
_NO_BODY: Final = "-"


class Names:
    """The names given out in one execution, each beginning with ``prefix``."""

    __slots__ = ("_bodies", "_count", "_made_up", "_open", "_prefix")

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._count: dict[str, int] = defaultdict(int)  # by stem: method and path
        self._open: dict[str, dict[str, str]] = {}  # stem -> names of requests with an unknown outcome -> body hash
        self._made_up: dict[str, str] = {}  # an SDK's key -> the name it stands for
        self._bodies: dict[str, str] = {}  # op -> body hash

    def of_op(self, op: str, body_hash: str | None) -> str:
        """The name of a request with an ``op``. Raises `InvalidInput` if two requests share one."""
        first_body = self._bodies.setdefault(op, body_hash or _NO_BODY)
        if first_body != (body_hash or _NO_BODY):
            raise InvalidInput(
                f"two different requests of this job are called op={op!r}: they would share a key;"
                f" name each for what it does, such as '{op}:2'"
            )
        return self._prefix + op

    def next(self, method: str, path: str, body_hash: str | None, made_up: str | None = None) -> str:
        """The name of a request without an ``op``."""
        stem = f"{self._prefix}{method} {path}"
        waiting = self._open.get(stem, {})
        name = self._made_up.get(made_up) if made_up is not None else None
        if name is None:
            name = next((n for n, body in waiting.items() if body == (body_hash or _NO_BODY)), None)
        if name is None:
            self._count[stem] += 1
            name = f"{stem} #{self._count[stem]}"
        waiting.pop(name, None)  # it is on its way again
        if made_up is not None:
            self._made_up[made_up] = name
        return name

    def reopen(self, name: str, body_hash: str | None) -> None:
        """Keep the name of a request whose outcome is unknown for the next one like it."""
        self._open.setdefault(name.rpartition(" #")[0], {})[name] = body_hash or _NO_BODY


def derive(base_key: str, name: str) -> str:
    """The idempotency key of the request ``name`` of the job with ``base_key``."""
    return hashlib.sha256(f"{base_key}\n{name}".encode()).hexdigest()[:KEY_LENGTH]


def hash_of(body: bytes | None) -> str | None:
    """SHA-256 of a body in memory."""
    return None if body is None else hashlib.sha256(body).hexdigest()


# -- the log ----------------------------------------------------------------------------------------------------------

_MOST_SECRETS: Final = 64  # of several tokens that were refreshed within one execution


class Target(NamedTuple):
    """The parts of a URL."""

    url: str
    scheme: str
    host: str
    port: int | None
    path: str


class RequestLog:
    """The requests of one execution to one resource, and what they share.

    ``base_url`` and ``headers``: the account's own, else the provider's. ``prefix`` keeps the names of its requests
    apart from those of other resources. Raises `InvalidInput` for an address that is not the provider's.
    """

    __slots__ = (
        "_account",
        "_guarded",
        "_kept",
        "base_url",
        "headers",
        "hooks",
        "is_unconnected",
        "last_failure",
        "last_key",
        "last_repeatable",
        "names",
        "origins",
        "own_headers",
        "provider",
        "secrets",
        "tracing",
    )  # fmt: skip

    def __init__(
        self,
        hooks: RequestHooks,
        provider: Provider = GENERIC,
        base_url: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        prefix: str = "",
        tracing: Tracing = OFF,
    ) -> None:
        self.tracing = tracing
        self.hooks, self.provider = hooks, provider
        self.origins = provider.origins(base_url)
        self.base_url = base_url or ("" if "{" in provider.base_url else provider.base_url)
        self._guarded = bool(self.base_url) and provider.check_address(provider.base_url, self.base_url)
        # The account had no connection when this was made, so its address, or some of its headers, are not here.
        self.is_unconnected = headers is None and bool(provider.placeholders)
        self.headers = provider.headers_for({}) if headers is None else headers
        self.own_headers = tuple((n.lower().encode(), n.encode(), v.encode()) for n, v in self.headers.items())
        self.names = Names(prefix)
        self.last_failure: Failure | None = None  # of the last answer, if no success followed
        self.last_key = hooks.resource_key  # the resource it concerned
        self.last_repeatable = True  # whether the last request may be sent again without a second effect
        self._account = at_account(hooks.resource_key)
        self._kept = Hidden()  # what the last request carried
        self.secrets = Hidden()  # what the account's requests carry, in every form an answer may echo

    def keep_secret(self, permit: Permit) -> None:
        """Remember the secrets that a request carries, so that they are masked in what is shown."""
        values = (*permit.headers.values(), *permit.params.values())
        if not values or values == self._kept:  # as nearly all requests of an execution
            return
        self._kept = Hidden(values)
        secrets = notations(values)
        if not secrets <= set(self.secrets):
            newest_first = dict.fromkeys((*sorted(secrets), *self.secrets))
            self.secrets = Hidden(list(newest_first)[:_MOST_SECRETS])

    @property
    def account(self) -> str:
        """The key of the account its requests are for."""
        return self._account

    def guards(self, host: str) -> bool:
        """Whether only public addresses may be connected to: the account chose the host, and where it leads."""
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
        hop: RequestFacts | None = None,
        trust: bool = True,
    ) -> RequestFacts:
        """Everything about a request that is known before it is sent.

        ``words`` are the caller's options: ``op``, ``idempotent``, ``idempotency_key``, ``cost``. ``hop``:
        the request whose redirect led here. Raises `InvalidInput`.
        """
        declared = self.origins.holds(target.scheme, target.host, target.port)
        request = RequestFacts(
            method, target.url, target.host, target.path, key=self.hooks.resource_key, body=body,
            gated=declared or not self.origins.declared, trusted=declared and trust, headers=headers,
        )  # fmt: skip
        changes = self._routed(request, words.get("cost"))
        keyed = self._takes_key(request, words)
        word = words.get("idempotent")
        reads = word or (word is None and self.provider.is_read(method, target.path))
        if reads and not words.get("idempotency_key"):
            keyed = False
        if keyed or not (reads or (word is None and method in IDEMPOTENT)):
            changes.update(self._named(request, words, hop, keyed=keyed))
        elif op := words.get("op"):
            changes["name"] = op
        return replace(request, **changes) if changes else request

    def _takes_key(self, request: RequestFacts, words: Mapping[str, Any]) -> bool:
        idem = self.provider.idempotency
        keyed = request.trusted and idem is not None and idem.covers(request.method, request.path)
        if words.get("idempotency_key") and idem is not None and idem.in_path:
            raise InvalidInput(
                f"idempotency_key: provider {self.provider.name!r} takes it as the last segment of the path, so write"
                f" it there: {request.method} {request.path}"
            )
        if words.get("idempotency_key") and not keyed:
            raise InvalidInput(
                f"idempotency_key: provider {self.provider.name!r} has none for {request.method} {request.path}; if the"
                " request may be repeated all the same, say so with extensions={'idempotent': True}"
            )
        return keyed

    def _named(
        self, request: RequestFacts, words: Mapping[str, Any], hop: RequestFacts | None, *, keyed: bool
    ) -> dict[str, Any]:
        """The name of a request and, if the provider takes one, its idempotency key."""
        idem = self.provider.idempotency
        body_hash, made_up, key = hash_of(request.body), None, words.get("idempotency_key")
        if keyed and idem is not None and idem.in_path:
            key = idem.key_of(request.path, {}, {})
        elif keyed and idem is not None and not key and idem.header:
            key = request.headers.get(idem.header)
            if key and idem.made_up and re.fullmatch(idem.made_up, key):
                key, made_up = None, key
        if hop is not None and hop.name and hop.method == request.method and hop.body_hash == body_hash:
            name = hop.name
        elif op := words.get("op"):
            name = self.names.of_op(op, body_hash)
        else:
            name = self.names.next(request.method, request.path, body_hash, made_up)
        if not keyed or idem is None:
            return {"name": name, "body_hash": body_hash, "repeatable": False, "needs_mark": True}
        key = key or derive(self.hooks.base_key, name)
        return {
            "name": name, "body_hash": body_hash, "idempotency_key": key, "key_life": idem.life,
            "key_of_grant": idem.lives_with == "grant",
        }  # fmt: skip

    def _routed(self, request: RequestFacts, cost: float | None) -> dict[str, Any]:
        """The resource and the cost of a request, where they are not the job's and 1."""
        changes: dict[str, Any] = {}
        if self.provider.route is not None and request.gated:
            suffix, changes["cost"] = self.provider.route(request)
            if suffix and not request.key.endswith("/" + suffix):
                changes["key"] = check_stored(f"{self._account}/{suffix}")
        if cost is not None:
            changes["cost"] = cost
        return changes

    def note(self, request: RequestFacts, failure: Failure | None) -> None:
        """Note the outcome of one sending."""
        self.last_repeatable = request.repeatable
        if request.gated:
            self.last_failure = failure
            if failure is not None:
                self.last_key = request.key

    def settle(self, request: RequestFacts, failure: Failure | None) -> None:
        """Note the outcome of a request after its last repeat; it is unknown after a failure that a repeat may heal."""
        if failure is not None and failure.kind is not FailureKind.PERMANENT:
            self.give_up(request)

    def give_up(self, request: RequestFacts) -> None:
        """Note that the outcome of a request is unknown: the next request like it is a repeat of it."""
        if request.needs_mark or request.idempotency_key:
            self.names.reopen(request.name, request.body_hash)

    def cut_off(self, permit: Permit, *, by_us: bool = False) -> None:
        """Note that an answer broke off after its outcome was noted: the next request like it is a repeat of it.

        ``by_us``: there was no room for its body, which says nothing about its server.
        """
        self.give_up(permit.request)
        self.hooks.cut_off(permit, by_us=by_us)


def at_account(key: str) -> str:
    """The account on the path of ``key``: its first two segments."""
    return "/".join(key.split("/", 2)[:2])
