"""A provider is facts: one third-party API on one screen, nothing to subclass.

Everything here is a frozen declaration that others read: `classify` the errors, `retry_after` the waits, the
gate the limits, the wire the hosts and keys. Facts have a date and a source, because providers change them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from datetime import date, timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypedDict, Unpack

from resilient.core.base.errors import Failure, FailureKind, InvalidInput, JobFailure, Snooze
from resilient.core.base.hosts import Origins, host_pattern, is_private, origin_of, without_secrets
from resilient.core.base.misfit import check_number, check_pattern, check_texts, check_word, explained_class, is_whole
from resilient.core.base.resource_key import has_dots
from resilient.core.events.webhook import Webhook
from resilient.core.gates.policy import Tenancy, tenancy_of
from resilient.core.gates.rate_limit import Limit
from resilient.core.gates.retry_after import STANDARD, WaitDialect
from resilient.core.provider.auth import URLS, ApiKey, Basic, Bearer, OAuth2
from resilient.core.provider.placeholders import (
    at_origin,
    check_placeholders,
    fill_header,
    fill_url,
    names_in,
    prefix_of,
)
from resilient.core.provider.rules import NONE, PERIODS, Errors
from resilient.core.sync.incremental import Incremental
from resilient.core.sync.paging import Paginator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.core.base.exchange import AnswerFacts, RequestFacts
    from resilient.core.provider.auth import Auth, ClientAuth


# -- batches ----------------------------------------------------------------------------------------------------------
#
# Endpoints that take several requests at once and answer each on its own: Microsoft Graph's ``$batch``. A batch of n
# parts is n requests: to the limits, to the gate, and to whoever has to know which of them failed.

_WAITS: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA})


@explained_class
@dataclass(frozen=True, slots=True)
class Part:
    """One request of a batch. ``url``: below the base URL, as ``/me/messages``; ``body``: JSON, or None for none."""

    method: str
    url: str
    body: Any = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """What came back for one part. ``status`` is None if a gate or limit kept it from being sent.

    ``failure``: what that means in the provider's dialect; None for success.
    """

    part: Part
    status: int | None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Any = field(default=None, repr=False)
    failure: Failure | None = None

    def raise_for_failure(self) -> None:
        """Raise what went wrong: `Snooze` for a part that was throttled, so that only its own job waits."""
        if self.failure is None:
            return
        if self.failure.kind in _WAITS:
            raise Snooze(self.failure.retry_in, until=self.failure.retry_at)
        text = f"{self.part.method} {self.part.url.partition('?')[0]} within a batch answered {self.status}"
        error = JobFailure(f"{text}: {self.failure.kind}", failure=self.failure)
        error.bare_message = text
        raise error


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEndpoint:
    """A JSON batch: ``POST path`` with ``{requests: [{id, method, url, headers, body}]}``.

    The answer is ``{responses: [{id, status, headers, body}]}``, in any order. ``path``: below the base URL;
    ``most``: parts in one batch; ``requests``, ``responses``: how the two lists are called. Raises `InvalidInput`.
    """

    path: str
    most: int = 20
    requests: str = "requests"
    responses: str = "responses"

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise InvalidInput(f"BatchEndpoint(path={self.path!r}): a path below the base URL, such as '/$batch'")
        if not is_whole(self.most):
            raise InvalidInput(f"BatchEndpoint(most={self.most!r}): how many parts one batch takes, from 1")


# -- the provider -----------------------------------------------------------------------------------------------------

METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "POST", "PUT", "PATCH", "DELETE", "QUERY"})
_NAME: Final = re.compile(r"[A-Za-z0-9._:@+-]+")
_OF_THE_CLIENT: Final = ("redirect_uri", "scopes", "authorize_params", "client_auth", "key_header")
_KINDS: Final[Mapping[str, tuple[type, ...]]] = MappingProxyType(
    {
        "waits": (WaitDialect,),
        "errors": (Errors,),
        "auth": (OAuth2, Bearer, ApiKey, Basic),
        "pagination": (Paginator,),
        "incremental": (Incremental,),
        "webhook": (Webhook,),
        "batch": (BatchEndpoint,),
    }
)
KeyLivesWith = Literal["account", "grant"]
_LEVELS: Final = MappingProxyType({"provider": "", "account": "/*"})


@explained_class
@dataclass(frozen=True, slots=True)
class Idempotency:
    """How the provider recognises a repeated request.

    ``header`` (or ``query``, a parameter) carries the key on ``methods``, where the request's path fits one
    of ``paths``. ``in_path``: neither does, the key is the last segment of the path, and the handler writes it.
    ``life``: seconds for which it is remembered; after that a repeat acts again. ``lives_with``: what remembers it,
    the ``account``, or the ``grant`` alone, so that it is forgotten once the account is connected anew. ``made_up``: a
    regular expression for keys that the provider's own SDK invents: new on each try, so they are replaced.
    ``quoted``: the header is a Structured Field String, as in the IETF draft. Raises `InvalidInput`.
    """

    header: str = "Idempotency-Key"
    query: str = ""
    methods: frozenset[str] = frozenset({"POST"})
    paths: tuple[str, ...] = ("*",)
    life: float | None = None
    made_up: str = ""
    quoted: bool = False
    in_path: bool = False
    lives_with: KeyLivesWith = "account"

    def __post_init__(self) -> None:
        check_texts("Idempotency", self, "methods", "paths")
        check_word("Idempotency", "lives_with", self.lives_with, KeyLivesWith)
        check_number("Idempotency", "life", self.life)
        check_pattern("Idempotency", "made_up", self.made_up)
        if not (self.header or self.query) or not self.methods or not self.paths:
            raise InvalidInput(
                "Idempotency(): say in which header= or query= the key goes, of which methods= and paths="
            )
        if self.in_path and (self.query or self.made_up or self.quoted):
            raise InvalidInput(
                "Idempotency(in_path=True): the handler writes the key into the path: leave out query=, made_up= and"
                " quoted="
            )
        if unknown := sorted(self.methods - METHODS):
            raise InvalidInput(f"Idempotency(methods=...): {unknown[0]!r} is none of {', '.join(sorted(METHODS))}")

    def covers(self, method: str, path: str) -> bool:
        """Whether the provider honours a key on this request."""
        fits = method in self.methods and any(fnmatchcase(path, pattern) for pattern in self.paths)
        return fits and not (self.in_path and path.endswith("/"))

    def fields(self, key: str) -> tuple[dict[str, str], dict[str, str]]:
        """The headers and the parameters of the URL that carry a key."""
        if self.in_path:
            return {}, {}
        if self.query:
            return {}, {self.query: key}
        return {self.header: f'"{key}"' if self.quoted else key}, {}

    def key_of(self, path: str, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """The key that a request carries; None if none. Names of ``headers`` are in lower case."""
        if self.in_path:
            return path.rpartition("/")[2]
        key = query.get(self.query) if self.query else headers.get(self.header.lower())
        return key.strip('"') if key else None


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Provider:
    """The facts of one third-party API. ``name`` is the first segment of its resource keys.

    ``base_url``: what relative URLs are joined to; with ``{placeholders}`` it is filled per account.
    ``hosts``: further hosts that may receive credentials: ``api.example.com``, ``*.example.com`` (HTTPS) or
    whole origins. ``private_hosts``: names and addresses that an account may give as its own host although they lead
    into a private network or speak plain HTTP (``*``: all); any other one must be public, and is connected to only at
    public addresses. ``single_account``: it has no accounts, so that its own name is the key of its only connection.
    ``anonymous``: requests of accounts without a connection are sent as they are; otherwise, where there is some
    ``auth``, such an account waits until it is connected.
    ``propagates_trace``: its own requests may carry the trace on, as ``traceparent``; others' tracing systems would.
    ``limits``, ``concurrency``: by level: ``provider``, ``account``, or ``account/<suffix>``,
    an endpoint as named by ``route``, which maps a request to (suffix, cost). ``cost``: what a request really
    cost, by its answer. ``waits``: how it says "come back later"; ``idempotency``: how it knows a repeat.
    ``reads``: requests that change nothing though their method says otherwise: ``"POST /v1/search"``, also patterns.
    ``whoami``: a harmless request that any of its credentials may send, by which a person tests an account:
    ``"GET /user"`` below the base URL, ``"GET https://api.example.com/me"`` at its host, or a GraphQL query,
    ``"{ viewer { id } }"``. ``graphql``: the path of the GraphQL endpoint. ``exceptions``: what an SDK's
    errors mean, by class or by dotted name: a kind, or a function to a kind, a `Failure`, the `AnswerFacts`
    it wraps, or None.

    ``title``: its name for people. ``auth``: the ways to get and send credentials, the usual one first.
    ``headers``: what every request carries; ``{placeholders}`` as in ``base_url``. ``pagination``,
    ``incremental``: by the part of the API that pages or reports changes that way, the usual one first.
    ``batch``: its endpoint for several requests at once. ``verified_on``, ``sources``: when and where these facts
    were read; ``unverified``: those from memory, as ``webhook`` or ``errors.rules: lock_timeout``. Raises
    `InvalidInput`.
    """

    name: str
    title: str = ""
    base_url: str = ""
    hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    single_account: bool = False
    anonymous: bool = False
    propagates_trace: bool = False
    limits: Mapping[str, Sequence[Limit]] = field(default_factory=lambda: NONE)
    concurrency: Mapping[str, int] = field(default_factory=lambda: NONE)
    waits: WaitDialect = STANDARD
    errors: Errors = field(default_factory=Errors)
    idempotency: Idempotency | None = None
    reads: tuple[str, ...] = ()
    whoami: str = ""
    graphql: str = "/graphql"
    route: Callable[[RequestFacts], tuple[str, float]] | None = None
    cost: Callable[[AnswerFacts], float | None] | None = None
    exceptions: Mapping[str | type[BaseException], Meaning] = field(default_factory=lambda: NONE)
    auth: tuple[Auth, ...] = ()
    headers: Mapping[str, str] = field(default_factory=lambda: NONE)
    pagination: Mapping[str, Paginator] = field(default_factory=lambda: NONE)
    incremental: Mapping[str, Incremental] = field(default_factory=lambda: NONE)
    webhook: Webhook | None = None
    batch: BatchEndpoint | None = None
    verified_on: date | None = None
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    floors: WaitDialect = field(init=False, repr=False, default=STANDARD)  # without budgets: told waits only
    budget_names: frozenset[str] = field(init=False, repr=False, default=frozenset())
    secret_params: frozenset[str] = field(init=False, repr=False, default=frozenset())  # of URLs: they carry a key
    placeholders: frozenset[str] = field(init=False, repr=False, default=frozenset())  # of `base_url` and `headers`
    tenancy: Tenancy = field(init=False, repr=False, default=Tenancy.SHARED)  # what its accounts' hosts have in common
    longest_window: float = field(init=False, repr=False, default=0.0)  # seconds; of its limits, budgets and quotas

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or has_dots(self.name):
            raise InvalidInput(
                f"{self.name!r} cannot name a provider: as the first segment of resource keys it has letters,"
                " digits and ._:@+- only, and is neither '.' nor '..', such as 'github'"
            )
        self._check_facts()
        if self.base_url and "{" not in self.base_url:
            origin_of(self.base_url)
        for host in self.hosts:
            host_pattern(host)
        for level in (*self.limits, *self.concurrency):
            _pattern(self.name, level)
        fields = ("limit", "remaining", "reset", "used", "combined")
        names = {getattr(f, name) for f in self.waits.budgets for name in fields}
        object.__setattr__(self, "budget_names", frozenset(names | {"ratelimit", "ratelimit-policy"}) - {""})
        object.__setattr__(self, "floors", replace(self.waits, budgets=()))
        keys = {one.query for one in self.auth if one.kind == "api_key" and one.query}
        object.__setattr__(self, "secret_params", frozenset(keys))
        object.__setattr__(self, "placeholders", names_in(self.base_url, *self.headers.values()))
        object.__setattr__(self, "tenancy", tenancy_of(self.base_url, confined=bool(self.hosts)))
        object.__setattr__(self, "longest_window", max(_windows(self), default=0.0))

    def _check_facts(self) -> None:
        """Refuse what nobody would understand. Raises `InvalidInput`."""
        check_texts("Provider", self, "hosts", "reads", "sources", "unverified")
        for url in (self.base_url, *self.headers.values()):
            check_placeholders(url)
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            each = value if isinstance(value, tuple) else value.values() if hasattr(value, "values") else (value,)
            for one in each:
                if one is not None and not isinstance(one, kinds):
                    types = " or ".join(kind.__name__ for kind in kinds)
                    if isinstance(value, (list, set, frozenset)):
                        raise InvalidInput(
                            f"provider {self.name!r}: {name}= takes a tuple, not a {type(value).__name__}"
                        )
                    raise InvalidInput(f"provider {self.name!r}: {name}= takes {types}, not {one!r}")
        for one in self.reads:
            if one.partition(" ")[0] not in METHODS or not one.partition(" ")[2]:
                raise InvalidInput(
                    f"provider {self.name!r}: reads={one!r}: write a method and a path, 'POST /v1/search'"
                )
        self._check_whoami()
        self._check_limits()
        self._check_functions()

    def _check_whoami(self) -> None:
        """Refuse a test request that could change something, or go elsewhere. Raises `InvalidInput`."""
        if not isinstance(self.whoami, str):
            raise InvalidInput(f"provider {self.name!r}: whoami= takes text, such as 'GET /user', not {self.whoami!r}")
        if not self.whoami or self.whoami.startswith("{"):
            return
        method, _, target = self.whoami.partition(" ")
        if method not in METHODS or not (target.startswith("/") or "://" in target):
            raise InvalidInput(
                f"provider {self.name!r}: whoami={self.whoami!r}: write a method and a path below the base URL"
                " ('GET /user'), or a GraphQL query ('{ viewer { id } }')"
            )
        if not target.startswith("/") and prefix_of(target) != prefix_of(self.base_url):
            raise InvalidInput(
                f"provider {self.name!r}: whoami={self.whoami!r} is at another host than {self.base_url!r}: credentials"
                " would go there"
            )
        url = self.base_url.rstrip("/") + target if target.startswith("/") else target
        path = url.removeprefix(prefix_of(url)).partition("?")[0]
        if method not in ("GET", "HEAD") and not self.is_read(method, path):
            raise InvalidInput(
                f"provider {self.name!r}: whoami={self.whoami!r} could change something: use GET or HEAD, or name it in"
                f" reads= ('{method} {path}')"
            )

    def whoami_at(self, base_url: str) -> tuple[str, str]:
        """The method and the whole URL of the test request of an account at ``base_url``; not of a GraphQL query."""
        method, _, target = self.whoami.partition(" ")
        if target.startswith("/"):
            return method, base_url.rstrip("/") + target
        return method, at_origin(target, prefix_of(base_url))

    def _whoami_below(self, base_url: str) -> str:
        """The test request at the host of another base URL, if it says where it goes."""
        method, _, target = self.whoami.partition(" ")
        if not self.whoami or self.whoami.startswith("{") or target.startswith("/"):
            return self.whoami
        return f"{method} {prefix_of(base_url)}{target.removeprefix(prefix_of(target))}"

    def _check_functions(self) -> None:
        """Refuse what cannot be called where a function is meant. Raises `InvalidInput`."""
        functions: tuple[tuple[str, Any], ...] = (("route", self.route), ("cost", self.cost))
        for name, function in functions:
            if function is not None and not callable(function):
                raise InvalidInput(f"provider {self.name!r}: {name}= takes a function, not {function!r}")
        meanings: Mapping[Any, Any] = self.exceptions
        for error, meaning in meanings.items():
            if not isinstance(meaning, FailureKind) and not callable(meaning):
                example = f"FailureKind.{FailureKind.TRANSIENT.name} or a function"
                raise InvalidInput(f"provider {self.name!r}: exceptions={{{error!r}: {meaning!r}}}: say {example}")

    def _check_limits(self) -> None:
        """Refuse limits and caps that are none. Raises `InvalidInput`."""
        for level, limits in self.limits.items():
            if isinstance(limits, Limit) or not all(isinstance(one, Limit) for one in limits):
                raise InvalidInput(f"provider {self.name!r}: limits={{{level!r}: ...}} takes a list of Limit(...)")
        for level, cap in self.concurrency.items():
            if not is_whole(cap):
                raise InvalidInput(
                    f"provider {self.name!r}: concurrency={{{level!r}: {cap!r}}}: a number of jobs, from 1"
                )

    @property
    def reads_success(self) -> bool:
        """Whether the body of a success has to be read: it may be an error, or tell what the request cost."""
        return self.errors.reads_success or self.cost is not None

    @property
    def oauth(self) -> OAuth2 | None:
        """How it grants access to others' accounts; None if it does not speak OAuth."""
        return next((way for way in self.auth if way.kind == "oauth2"), None)

    def filled(self, **values: str) -> Self:
        """These facts with some placeholders filled, in addresses and headers. Raises `InvalidInput`."""
        headers = {name: fill_header(text, values) or text for name, text in self.headers.items()}
        auth = tuple((self.oauth_for(values) or one) if one.kind == "oauth2" else one for one in self.auth)
        return replace(self, base_url=fill_url(self.base_url, values), headers=headers, auth=auth)

    def oauth_for(self, values: Mapping[str, str]) -> OAuth2 | None:
        """The OAuth facts of one account, its addresses checked; None without OAuth. See `check_address`.

        Client secret, codes and refresh tokens go there. Raises `InvalidInput`.
        """
        facts = self.oauth
        if facts is None:
            return None
        made = facts.filled(values)
        guards = [self.check_address(getattr(facts, name), getattr(made, name)) for name in URLS]
        return replace(made, guarded=True) if any(guards) else made

    def check_address(self, template: str, address: str) -> bool:
        """Whether only public addresses may be connected to there: an account chose the host.

        Such a host must be one of ``hosts``, where there are any, and is spoken to by HTTPS, unless it is one of
        ``private_hosts``. Raises `InvalidInput`.
        """
        if tenancy_of(template) is Tenancy.SHARED or not address or "{" in address:  # a token's answer may tell it
            return False
        scheme, host, port = origin_of(address)
        if tenancy_of(template) is not Tenancy.APART:
            return False
        if self.hosts and not self.origins().holds(scheme, host, port):
            raise InvalidInput(
                f"{without_secrets(address)!r} is not among the hosts of provider {self.name!r}"
                f" ({', '.join(self.hosts)}): declare its host, or secrets would go to a stranger"
            )
        if self.hosts or host in self.private_hosts or "*" in self.private_hosts:
            return False
        if scheme != "https" or is_private(host):
            raise InvalidInput(
                f"{without_secrets(address)!r}: an account's own host must be public and speak https; for development"
                f" and networks of your own: {self.name}.provider(private_hosts=({host!r},))"
            )
        return True

    def moved(self, origin: str) -> Self:
        """These facts on another origin, paths kept: an instance of one's own, or a test server."""
        made = self.signing_in_at(origin)
        base_url, whoami = at_origin(self.base_url, origin), self._whoami_below(origin)
        return replace(made, base_url=base_url, whoami=whoami, hosts=(origin,))

    def signing_in_at(self, origin: str) -> Self:
        """These facts with the OAuth addresses on another origin, such as a sandbox's."""
        auth = tuple(one.moved(origin) if one.kind == "oauth2" else one for one in self.auth)
        return replace(self, auth=auth)

    def base_url_for(self, values: Mapping[str, str]) -> str:
        """What relative URLs of an account are joined to; "" while a value is not known. Raises `InvalidInput`."""
        filled = fill_url(self.base_url, values)
        return "" if "{" in filled else filled

    def headers_for(self, values: Mapping[str, str]) -> dict[str, str]:
        """What every request of an account carries, but its credentials; none whose value is not known."""
        every = {name: fill_header(text, values) for name, text in self.headers.items()}
        return {name: text for name, text in every.items() if text is not None}

    def configured(self, client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Self:
        """These facts with an app's own words: its OAuth client, and whatever else differs for it.

        ``redirect_uri``, ``scopes``, ``authorize_params``, ``client_auth`` and ``key_header`` are the OAuth client's,
        ``headers`` are added to ours, of which they replace those of the same name, and the rest replaces fields of the
        same name. OAuth addresses at the origin of our ``base_url`` go with an app's own; ``sign_in_at`` is the origin
        of all of them, where they stand elsewhere. Raises `InvalidInput`.
        """
        rest: dict[str, Any] = dict(overrides)
        own: dict[str, Any] = {"client_id": client_id, "client_secret": client_secret}
        own |= {name: rest.pop(name) for name in _OF_THE_CLIENT if name in rest}
        auth = rest.pop("auth", None)
        if auth is None:
            auth = _following(self, rest.get("base_url", ""))
        if sign_in_at := rest.pop("sign_in_at", None):
            auth = replace(self, auth=auth).signing_in_at(sign_in_at).auth
        if any(own.values()):
            if not any(one.kind == "oauth2" for one in auth):
                raise InvalidInput(
                    f"provider {self.name!r} has no OAuth: {', '.join(sorted(k for k, v in own.items() if v))}"
                    " would go nowhere; its credentials belong to a connection"
                )
            client = {key: value for key, value in own.items() if value}
            auth = tuple(replace(one, **client) if one.kind == "oauth2" else one for one in auth)
        if unknown := sorted(set(rest) - {one.name for one in fields(self) if one.init}):
            names = ", ".join(sorted(Overrides.__annotations__))
            raise InvalidInput(f"provider {self.name!r}: {unknown[0]}= is none of {names}")
        if rest.get("base_url"):
            rest.setdefault("whoami", self._whoami_below(rest["base_url"]))
        if "headers" in rest:
            names_again = {name.lower() for name in rest["headers"]}
            others = {name: text for name, text in self.headers.items() if name.lower() not in names_again}
            rest["headers"] = {**others, **rest["headers"]}
        return replace(self, auth=auth, **rest)

    def limit_patterns(self) -> dict[str, Sequence[Limit]]:
        """The limits by key pattern, as `Policies` takes them."""
        return {_pattern(self.name, level): limits for level, limits in self.limits.items()}

    def concurrency_patterns(self) -> dict[str, int]:
        """The concurrency caps by key pattern."""
        return {_pattern(self.name, level): cap for level, cap in self.concurrency.items()}

    def origins(self, base_url: str | None = None) -> Origins:
        """Where credentials may go.

        An account's own ``base_url`` must be one of the declared origins, if there are any, and then stands
        for every pattern among them: another account's subdomain is a foreign host. Raises `InvalidInput`.
        """
        fixed = self.base_url if "{" not in self.base_url else ""
        return _origins(self.name, fixed, self.hosts, base_url or "")

    def is_read(self, method: str, path: str) -> bool:
        """Whether the provider declares that the request changes nothing (`reads`)."""
        return bool(self.reads) and any(fnmatchcase(f"{method} {path}", pattern) for pattern in self.reads)


def _following(provider: Provider, base_url: str) -> tuple[Auth, ...]:
    """The ways to get credentials where an app has another address."""
    here, there = prefix_of(provider.base_url), prefix_of(base_url)
    if not here or not there:
        return provider.auth
    return tuple(one.following(here, there) if one.kind == "oauth2" else one for one in provider.auth)


class Overrides(TypedDict, total=False):
    """What an app may say otherwise about a provider; the fields of `Provider` and of its `OAuth2`."""

    redirect_uri: str
    scopes: tuple[str, ...]
    authorize_params: Mapping[str, str]
    client_auth: ClientAuth
    key_header: Mapping[str, str]
    name: str
    base_url: str
    sign_in_at: str
    hosts: tuple[str, ...]
    private_hosts: tuple[str, ...]
    single_account: bool
    anonymous: bool
    propagates_trace: bool
    limits: Mapping[str, Sequence[Limit]]
    concurrency: Mapping[str, int]
    waits: WaitDialect
    errors: Errors
    idempotency: Idempotency | None
    headers: Mapping[str, str]
    whoami: str
    route: Callable[[RequestFacts], tuple[str, float]] | None
    exceptions: Mapping[str | type[BaseException], Meaning]
    auth: tuple[Auth, ...]


def _windows(provider: Provider) -> Iterator[float]:
    """The windows, in seconds, that the facts state: no budget takes longer to be full again."""
    yield from (limit.per for limits in provider.limits.values() for limit in limits)
    yield from (budget.window for budget in provider.waits.budgets if budget.window is not None)
    yield from (PERIODS[rule.wait.period] for rule in provider.errors.rules if rule.wait and rule.wait.period)


if TYPE_CHECKING:
    Meaning = FailureKind | Callable[[BaseException], FailureKind | Failure | AnswerFacts | None]

_origins: Final = lru_cache(maxsize=10_000)(Origins.of)  # asked for with every execution
GENERIC: Final = Provider(name="generic", verified_on=None)  # for keys whose first segment names no provider


def _pattern(name: str, level: str) -> str:
    head, slash, suffix = level.partition("/")
    if head not in _LEVELS or (slash and (head != "account" or not suffix)):
        raise InvalidInput(
            f"{level!r} is no level of provider {name!r}: use 'provider', 'account' or 'account/<suffix>'"
        )
    return name + _LEVELS[head] + slash + suffix


# -- facts age --------------------------------------------------------------------------------------------------------
#
# How old a provider's facts are: APIs change, so what was read long ago may no longer be true.

OLDEST: Final = timedelta(days=365)


def is_old(verified_on: date | None, today: date) -> bool:
    """Whether the facts were read more than a year before ``today``. Without a date nobody vouched for them at all."""
    return verified_on is not None and today - verified_on > OLDEST


def warning(provider: Provider, today: date) -> str:
    """What to tell a person about the age of the facts; "" while they are young enough."""
    if not is_old(provider.verified_on, today):
        return ""
    return f"the facts of {provider.name} were last checked on {provider.verified_on}, more than a year ago"
