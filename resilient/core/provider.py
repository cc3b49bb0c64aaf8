"""A provider is facts: one third-party API on one screen, nothing to subclass.

Everything here is a frozen declaration that others read: `classify` the errors, `retry_after` the waits, the
gate the limits, the wire the hosts and keys. Facts have a date and a source, because providers change them.

Paths into a JSON body are written ``error.code``, ``errors[0].code``, ``errors[].extensions.code`` (every
one), ``data.*.userErrors`` (under any name) and ``error['.tag']``. Rules are asked in order and the first that
fits decides, so the narrow ones stand first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypedDict, Unpack

from resilient.core.errors import InvalidInput
from resilient.core.hosts import Origins, host_pattern, origin_of
from resilient.core.instants import Word
from resilient.core.placeholders import at_origin, fill_header, fill_url, names_in
from resilient.core.retry_after import STANDARD, WaitDialect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import date

    from resilient.core.auth import Auth, ClientAuth, OAuth2
    from resilient.core.exchange import AnswerFacts, RequestFacts
    from resilient.core.failure import Failure, FailureKind, Scope
    from resilient.core.incremental import Incremental
    from resilient.core.paging import Paginator
    from resilient.core.parts import BatchEndpoint
    from resilient.core.policy import Limit
    from resilient.core.webhook import Webhook

NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
_NAME: Final = re.compile(r"[A-Za-z0-9._:@+-]+")
_STEP: Final = re.compile(r"\[(?:(\d+)|'([^']*)')?\]|([^.\[\]]+)")
_MOST: Final = 100  # items of one list that are looked at
MESSAGES: Final = ("error.message", "message", "error_description", "errors[0].message", "detail", "title")
_OF_THE_CLIENT: Final = ("redirect_uri", "scopes", "authorize_params", "client_auth", "key_header")
_LEVELS: Final = MappingProxyType({"provider": "", "account": "/*"})


@dataclass(frozen=True, slots=True)
class Wait:
    """Where one error says how long to wait, before the provider's general `WaitDialect` is asked.

    ``header`` and ``body`` (a path) name a field in the dialect ``word``; ``text`` is a pattern whose group
    ``value`` is one; ``seconds`` computes it from the JSON body. Told nothing: ``fallback`` seconds, or the
    start of the next ``period`` (UTC), which is when such a budget is full again.
    """

    header: str = ""
    body: str = ""
    text: str = ""
    word: Word = Word.AUTO
    seconds: Callable[[Any], float | None] | None = None
    fallback: float | None = None
    period: Literal["", "hour", "day", "month"] = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of an error dialect: if all that is stated fits, the answer is a failure of ``kind``.

    ``kind``: None says that it is none at all. ``status``: one, several, or a range; without it the rule fits
    every answer from 400 up, so a rule about a 200 names it. ``code``: patterns (``*``) of which one fits one
    of the codes found by `Errors`. ``where``: body paths and their values (``...`` stands for any but a
    missing, null, false or empty one). ``header``: names and regular expressions. ``text``: a regular
    expression within the body. ``json``: whether the body is JSON. ``path``: a pattern of the request's path.
    """

    kind: FailureKind | None
    status: int | range | tuple[int, ...] | None = None
    code: str | tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=lambda: NONE)
    header: Mapping[str, str] = field(default_factory=lambda: NONE)
    text: str = ""
    json: bool | None = None
    path: str = ""
    scope: Scope | None = None
    wait: Wait | None = None
    counts_for_breaker: bool | None = None
    provider_wide: bool | None = None

    def fits_status(self, status: int) -> bool:
        """Whether the rule speaks about this status."""
        if self.status is None:
            return status >= 400  # noqa: PLR2004 - HTTP's own border of failure
        return status == self.status if isinstance(self.status, int) else status in self.status


@dataclass(frozen=True, slots=True)
class Errors:
    """An error dialect: where codes and messages are, and what they mean.

    ``code``, ``message``: body paths, the first that is there names the error. ``code_header``: a header with
    a code; ``code_text``: a regular expression whose first group is a code in a body that is no JSON;
    ``code_form``: one whose first group is the part of a found code that matters.
    """

    code: tuple[str, ...] = ()
    message: tuple[str, ...] = MESSAGES
    code_header: str = ""
    code_text: str = ""
    code_form: str = ""
    rules: tuple[Rule, ...] = ()
    reads_success: bool = field(init=False, default=False)  # a 2xx may be an error: its JSON has to be read

    def __post_init__(self) -> None:
        found = any(rule.kind and any(rule.fits_status(s) for s in range(200, 300)) for rule in self.rules)
        object.__setattr__(self, "reads_success", found)


@dataclass(frozen=True, slots=True)
class Idempotency:
    """How the provider recognises a repeated request.

    ``header`` (or ``query``, a parameter) carries the key on ``methods``, where the request's path fits one
    of ``paths``. ``life``: seconds for which it is remembered; after that a repeat acts again. ``made_up``: a
    regular expression for keys that the provider's own SDK invents: new on each try, so they are replaced.
    ``quoted``: the header is a Structured Field String, as in the IETF draft.
    """

    header: str = "Idempotency-Key"
    query: str = ""
    methods: frozenset[str] = frozenset({"POST"})
    paths: tuple[str, ...] = ("*",)
    life: float | None = None
    made_up: str = ""
    quoted: bool = False

    def covers(self, method: str, path: str) -> bool:
        """Whether the provider honours a key on this request."""
        return method in self.methods and any(fnmatchcase(path, pattern) for pattern in self.paths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Provider:
    """The facts of one third-party API. ``name`` is the first segment of its resource keys.

    ``base_url``: what relative URLs are joined to; with ``{placeholders}`` it is filled per account.
    ``hosts``: further hosts that may receive credentials: ``api.example.com``, ``*.example.com`` (HTTPS) or
    whole origins. ``limits``, ``concurrency``: by level: ``provider``, ``account``, or ``account/<suffix>``,
    an endpoint as named by ``route``, which maps a request to (suffix, cost). ``cost``: what a request really
    cost, by its answer. ``reads``: requests that change nothing though their method says otherwise: ``"POST
    /v1/search"``, also patterns. ``graphql``: the path of the GraphQL endpoint. ``exceptions``: what an SDK's
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
    limits: Mapping[str, Sequence[Limit]] = field(default_factory=lambda: NONE)
    concurrency: Mapping[str, int] = field(default_factory=lambda: NONE)
    waits: WaitDialect = STANDARD
    errors: Errors = Errors()
    idempotency: Idempotency | None = None
    reads: tuple[str, ...] = ()
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

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInput(
                f"{self.name!r} cannot name a provider: as the first segment of resource keys it has letters,"
                " digits and ._:@+- only, such as 'github'"
            )
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

    @property
    def reads_success(self) -> bool:
        """Whether the body of a success has to be read: it may be an error, or tell what the request cost."""
        return self.errors.reads_success or self.cost is not None

    @property
    def oauth(self) -> OAuth2 | None:
        """How it grants access to others' accounts; None if it does not speak OAuth."""
        return next((found for found in self.auth if found.kind == "oauth2"), None)

    def filled(self, **values: str) -> Self:
        """These facts with some placeholders filled, in addresses and headers. Raises `InvalidInput`."""
        headers = {name: fill_header(text, values) or text for name, text in self.headers.items()}
        auth = tuple(one.filled(values) if one.kind == "oauth2" else one for one in self.auth)
        return replace(self, base_url=fill_url(self.base_url, values), headers=headers, auth=auth)

    def moved(self, origin: str) -> Self:
        """These facts on another origin, paths kept: an instance of one's own, or a test server."""
        made = self.signing_in_at(origin)
        return replace(made, base_url=at_origin(self.base_url, origin), hosts=(origin,))

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
        the rest replaces fields of the same name. Raises `InvalidInput`.
        """
        rest: dict[str, Any] = dict(overrides)
        own: dict[str, Any] = {"client_id": client_id, "client_secret": client_secret}
        own |= {name: rest.pop(name) for name in _OF_THE_CLIENT if name in rest}
        auth = rest.pop("auth", self.auth)
        if any(own.values()):
            if not any(one.kind == "oauth2" for one in auth):
                raise InvalidInput(
                    f"provider {self.name!r} has no OAuth: {', '.join(sorted(k for k, v in own.items() if v))}"
                    " would go nowhere; its credentials belong to a connection"
                )
            given = {key: value for key, value in own.items() if value}
            auth = tuple(replace(one, **given) if one.kind == "oauth2" else one for one in auth)
        return replace(self, auth=auth, **rest)

    def limit_patterns(self) -> dict[str, Sequence[Limit]]:
        """The limits by key pattern, as `Policies` takes them."""
        return {_pattern(self.name, level): found for level, found in self.limits.items()}

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
        """Whether the request changes nothing, by the provider's word."""
        return bool(self.reads) and any(fnmatchcase(f"{method} {path}", pattern) for pattern in self.reads)


class Overrides(TypedDict, total=False):
    """What an app may say otherwise about a provider; the fields of `Provider` and of its `OAuth2`."""

    redirect_uri: str
    scopes: tuple[str, ...]
    authorize_params: Mapping[str, str]
    client_auth: ClientAuth
    key_header: Mapping[str, str]
    name: str
    base_url: str
    hosts: tuple[str, ...]
    limits: Mapping[str, Sequence[Limit]]
    concurrency: Mapping[str, int]
    waits: WaitDialect
    errors: Errors
    idempotency: Idempotency | None
    headers: Mapping[str, str]
    route: Callable[[RequestFacts], tuple[str, float]] | None
    exceptions: Mapping[str | type[BaseException], Meaning]
    auth: tuple[Auth, ...]


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


@lru_cache(maxsize=4096)
def _steps(path: str) -> tuple[str | int | None, ...]:
    """``errors[].code`` as ``("errors", None, "code")``. Raises `InvalidInput`."""
    steps: list[str | int | None] = []
    at = 0
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            raise InvalidInput(f"{path!r} is no path into a body: write error.code, errors[0].code, errors[].code")
        index, quoted, name = found.groups()
        steps.append(name or quoted or (int(index) if index is not None else None))
        at = found.end() + (path[found.end() : found.end() + 1] == ".")
    return tuple(steps)


def pick(body: Any, path: str) -> list[Any]:
    """Every value at ``path`` in a JSON body; none where the body has another shape."""
    found = [body]
    for step in _steps(path):
        if step is None:
            found = [item for value in found if isinstance(value, list) for item in value[:_MOST]]
        elif isinstance(step, int):
            found = [value[step] for value in found if isinstance(value, list) and step < len(value)]
        elif step == "*":
            found = [item for value in found if isinstance(value, dict) for item in list(value.values())[:_MOST]]
        else:
            found = [value[step] for value in found if isinstance(value, dict) and step in value]
    return found


def hidden(body: Any, path: str) -> Any:
    """A copy of a JSON body in which what stands at ``path`` is empty text."""
    return _emptied(body, _steps(path))


def _emptied(value: Any, steps: tuple[str | int | None, ...]) -> Any:
    if not steps:
        return ""
    step, rest = steps[0], steps[1:]
    if isinstance(value, list) and not isinstance(step, str):  # one of a list hides the same in all of it
        return [_emptied(item, rest) for item in value]
    if isinstance(value, dict) and step in value:
        return {name: _emptied(item, rest) if name == step else item for name, item in value.items()}
    return value
