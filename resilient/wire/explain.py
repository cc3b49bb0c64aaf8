"""What an exception that left a handler means: `explain`, and the errors of HTTP clients it knows.

SDKs wrap what they catch, so the whole chain of causes, contexts and groups is searched. In order: a failure
of ours anywhere in the chain; the provider's own map of an SDK's errors; an HTTP client's error, ours or the
user's; the last answer of this execution that was no success, if no success followed; and only then the
user's bug. Of several in a group an ambiguous one wins: a lost request must not hide behind a lesser failure.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx

from resilient.core.budgets import Fields
from resilient.core.classify import Phase, classify, classify_error
from resilient.core.errors import JobFailure
from resilient.core.exchange import IDEMPOTENT, AnswerFacts, RequestFacts
from resilient.core.failure import Failure, FailureKind, at_scope
from resilient.core.provider import GENERIC
from resilient.wire.answer import KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from resilient.wire.trail import Trail

    Trails = Sequence[Trail | None]

# httpx's own classes, most specific first; its fork httpx2 has the same names.
_PHASES: Final = (
    ("PoolTimeout", Phase.POOL, "pool_timeout"),
    ("ConnectTimeout", Phase.CONNECT, "connect_timeout"),
    ("ConnectError", Phase.CONNECT, "connect_error"),
    ("ProxyError", Phase.CONNECT, "proxy_error"),
    ("UnsupportedProtocol", Phase.UNSENDABLE, "bad_url"),
    ("InvalidURL", Phase.UNSENDABLE, "bad_url"),
    ("LocalProtocolError", Phase.UNSENDABLE, "bad_request"),
    ("WriteTimeout", Phase.WRITE, "write_timeout"),
    ("WriteError", Phase.WRITE, "write_error"),
    ("ReadTimeout", Phase.READ, "read_timeout"),
    ("ReadError", Phase.READ, "read_error"),
    ("CloseError", Phase.READ, "read_error"),
    ("RemoteProtocolError", Phase.READ, "protocol_error"),
    ("DecodingError", Phase.UNREADABLE, "undecodable_answer"),
    ("TooManyRedirects", Phase.UNREADABLE, "too_many_redirects"),
    # requests, urllib3 and aiohttp
    ("SSLError", Phase.CONNECT, "tls_error"),
    ("ConnectTimeoutError", Phase.CONNECT, "connect_timeout"),
    ("ConnectionTimeoutError", Phase.CONNECT, "connect_timeout"),
    ("NewConnectionError", Phase.CONNECT, "connect_error"),
    ("ClientConnectorError", Phase.CONNECT, "connect_error"),
    ("ReadTimeoutError", Phase.READ, "read_timeout"),
    ("ServerTimeoutError", Phase.READ, "read_timeout"),
    ("SocketTimeoutError", Phase.READ, "read_timeout"),
    ("ServerDisconnectedError", Phase.READ, "read_error"),
    ("ClientOSError", Phase.READ, "read_error"),
    ("ClientPayloadError", Phase.READ, "read_error"),
    ("ChunkedEncodingError", Phase.READ, "read_error"),
    ("ProtocolError", Phase.READ, "protocol_error"),
    ("MaxRetryError", Phase.READ, "read_error"),
    ("Timeout", Phase.READ, "timeout"),
    ("ConnectionError", Phase.READ, "read_error"),
)
_BY_NAME: Final = {name: (phase, code) for name, phase, code in _PHASES}
_CLIENTS: Final = frozenset({"httpx", "httpx2", "requests", "urllib3", "aiohttp"})
_MOST: Final = 100  # exceptions of one chain


class Explained(NamedTuple):
    """A failure and the resource it concerns (None: by its scope on the job's own path)."""

    failure: Failure
    resource: str | None = None


def explain(error: BaseException, trail: Trail | None, now: datetime, *others: Trail) -> Explained:
    """What ``error`` means for the job.

    ``trail`` is the execution's that was used last, if it made any request; ``others`` are those of other resources.
    """
    every, trails = list(chain(error)), [trail, *others]
    for look in (_ours, _mapped, _http):
        found = [e for one in every if (e := look(one, trails, now)) is not None]
        if found:
            return next((e for e in found if e.failure.kind is FailureKind.AMBIGUOUS), found[0])
    if trail is not None and trail.last_failure is not None:
        return _at(trail.last_failure, trail.last_key)
    return Explained(Failure(FailureKind.BUG, code=type(error).__name__))


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, then what it was raised from or during, and the members of groups; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(seen) < _MOST:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        members = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        waiting[:0] = [*members, current.__cause__, current.__context__]


def note(error: BaseException, failure: Failure, asked: RequestFacts) -> None:
    """Leave on somebody else's exception what our call knows about it, for `explain` to find."""
    with contextlib.suppress(AttributeError):  # one with slots
        error._resilient = failure, asked  # type: ignore[attr-defined]  # noqa: SLF001 - nobody else's name


def by_transport(error: BaseException, *, repeatable: bool) -> Failure:
    """The failure of a request that ended with this error of an HTTP client."""
    if isinstance(error, JobFailure):
        return error.failure
    phase, code = known_phase(error) or (Phase.READ, "no_answer")
    return classify_error(phase, repeatable=repeatable, code=code)


# -- one exception -------------------------------------------------------------------------------------------


def _ours(error: BaseException, _t: Trails, _n: datetime) -> Explained | None:
    if isinstance(error, httpx.HTTPError):
        passage = _extensions(error).get(KEY)
        if passage is not None:
            failure = None if isinstance(error, JobFailure) else passage.failure
            failure = failure or by_transport(error, repeatable=passage.asked.repeatable)
            return _at(failure, passage.asked.key) if passage.asked.gated else Explained(_local(failure))
    noted = getattr(error, "_resilient", None)
    if noted is not None:
        failure, asked = noted
        return _at(failure, asked.key) if asked.gated else Explained(_local(failure))
    return Explained(error.failure, error.resource) if isinstance(error, JobFailure) else None


def _mapped(error: BaseException, trails: Trails, now: datetime) -> Explained | None:
    return next((told for one in trails if one is not None and (told := _mapped_by(one, error, now)) is not None), None)


def _mapped_by(trail: Trail, error: BaseException, now: datetime) -> Explained | None:
    provider = trail.provider
    if not provider.exceptions:
        return None
    for cls in type(error).__mro__:
        meaning = provider.exceptions.get(cls) or provider.exceptions.get(f"{cls.__module__}.{cls.__qualname__}")
        if meaning is None:
            continue
        told = meaning(error) if not isinstance(meaning, FailureKind) else meaning
        if isinstance(told, AnswerFacts):
            told = classify(told, _unknown_request(trail), provider, now)
        if isinstance(told, FailureKind):
            told = Failure(told, code=type(error).__name__)
        if told is not None:
            return _at(told, trail.conduct.resource_key)
    return None


def _http(error: BaseException, trails: Trails, now: datetime) -> Explained | None:
    """An error of a client that is not the job's own."""
    if not _is_client(error):
        return None
    trail = next((one for one in trails if _is_providers(error, one)), trails[0])
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) if response is None else getattr(response, "status_code", None)
    if isinstance(status, int):
        return _foreign_answer(error, status, error if response is None else response, trail, now)
    found = known_phase(error)
    if found is None:
        return None
    method = str(getattr(_request(error), "method", None) or "GET").upper()
    failure = classify_error(found[0], repeatable=method in IDEMPOTENT, code=found[1])
    return _theirs(failure, trail) if _is_providers(error, trail) else Explained(_local(failure))


def _foreign_answer(
    error: BaseException, status: int, response: Any, trail: Trail | None, now: datetime
) -> Explained | None:
    request = _request(error)
    asked = _unknown_request(trail, str(getattr(request, "method", None) or "GET").upper())
    try:
        body = response.json()
    except Exception:  # noqa: BLE001 - whatever a foreign client raises for a body that is none
        body = None
    facts = AnswerFacts(status, Fields.of(getattr(response, "headers", None) or {}), body=body)
    theirs = _is_providers(error, trail)
    failure = classify(facts, asked, GENERIC if trail is None or not theirs else trail.provider, now)
    if failure is None:
        return None
    return _theirs(failure, trail) if theirs else Explained(_local(failure))


def _theirs(failure: Failure, trail: Trail | None) -> Explained:
    return _at(failure, "" if trail is None else trail.conduct.resource_key)


def _local(failure: Failure) -> Failure:
    """A stranger's failure says nothing about the job's resource: no gate may close on it."""
    kind = failure.kind
    if kind in (FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH):
        kind = FailureKind.PERMANENT if kind is FailureKind.AUTH else FailureKind.TRANSIENT
    return Failure(kind, retry_in=failure.retry_in, code=failure.code, status=failure.status, counts_for_breaker=False)


def known_phase(error: object) -> tuple[Phase, str] | None:
    """Which phase an HTTP client's error belongs to, and a code for it; None for any other exception."""
    if not isinstance(error, BaseException) or not _is_client(error):
        return None
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in chain(error)):
        return Phase.TLS, "tls_verification"
    name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME), None)
    if name in (
        "ConnectionError",
        "MaxRetryError",
    ):  # requests' word for everything: what lies beneath knows more
        beneath = (
            known_phase(one)
            for one in (error.__cause__, error.__context__, getattr(error, "reason", None), *error.args)
            if one is not None
        )
        return next((found for found in beneath if found is not None), _BY_NAME[name])
    return None if name is None else _BY_NAME[name]


def _is_client(error: BaseException) -> bool:
    return any(cls.__module__.partition(".")[0] in _CLIENTS for cls in type(error).__mro__)


def _is_providers(error: BaseException, trail: Trail | None) -> bool:
    """Whether the failed request went to the job's provider (unknown counts as yes)."""
    url = getattr(_request(error), "url", None)
    if trail is None or url is None or not trail.origins.declared:
        return True
    parsed = httpx.URL(str(url))
    return trail.origins.holds(parsed.scheme, parsed.host, parsed.port)


def _unknown_request(trail: Trail | None, method: str = "POST") -> RequestFacts:
    key = "" if trail is None else trail.conduct.resource_key
    return RequestFacts(method, "", "", "", key=key, repeatable=method in IDEMPOTENT)


def _request(error: BaseException) -> Any:
    try:
        return getattr(error, "request", None) or getattr(error, "request_info", None)  # the latter: aiohttp
    except RuntimeError:  # httpx's property without a request
        return None


def _extensions(error: BaseException) -> Any:
    return getattr(_request(error), "extensions", {})


def _at(failure: Failure, key: str) -> Explained:
    return Explained(failure, at_scope(key, failure.scope) if key else None)
