"""The failure that an exception which left a handler means (`explain`), and the errors of HTTP clients.

SDKs wrap what they catch, so the whole chain of causes, contexts and groups is searched. The first of these decides: a
failure that the engine raised or noted; the provider's own map of an SDK's errors; another HTTP client's error; the
last answer of this execution, if it was no success; and only then a bug of the handler. Of several in the chain an
ambiguous one wins, because a request without an answer must not be hidden by another failure.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx

from resilient.core.base.budgets import Fields
from resilient.core.base.errors import Failure, FailureKind, JobFailure, at_scope, chain
from resilient.core.base.exchange import IDEMPOTENT, AnswerFacts, RequestFacts
from resilient.core.provider.classify import LEAST, Phase, classify, classify_error
from resilient.core.provider.facts import GENERIC
from resilient.wire.requests.answer import KEY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from resilient.wire.requests.request_log import RequestLog

    RequestLogs = Sequence[RequestLog | None]

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
    ("MissingSchema", Phase.UNSENDABLE, "bad_url"),
    ("InvalidSchema", Phase.UNSENDABLE, "bad_url"),
    ("NonHttpUrlClientError", Phase.UNSENDABLE, "bad_url"),
    ("LocationParseError", Phase.UNSENDABLE, "bad_url"),
    ("InvalidHeader", Phase.UNSENDABLE, "bad_request"),
    ("SSLError", Phase.CONNECT, "tls_error"),
    ("ClientHttpProxyError", Phase.CONNECT, "proxy_error"),
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
    ("HttpProcessingError", Phase.READ, "protocol_error"),
    ("ProtocolError", Phase.READ, "protocol_error"),
    ("MaxRetryError", Phase.READ, "read_error"),
    ("Timeout", Phase.READ, "timeout"),
    ("ConnectionError", Phase.READ, "read_error"),
)
_OTHERS: Final = frozenset({"ClientHttpProxyError", "HttpProcessingError"})
_BY_NAME: Final = {name: (phase, code) for name, phase, code in _PHASES}
_CLIENTS: Final = frozenset({"httpx", "httpx2", "requests", "urllib3", "aiohttp"})


class Explained(NamedTuple):
    """A failure and the resource it concerns (None: by its scope on the job's own path)."""

    failure: Failure
    resource: str | None = None


def explain(error: BaseException, request_log: RequestLog | None, now: datetime, *others: RequestLog) -> Explained:
    """The failure that ``error`` means for the job.

    ``request_log`` is the one that the execution used last, None if it made no request; ``others`` belong to other
    resources.
    """
    every, request_logs = list(chain(error)), [request_log, *others]
    for explain_one in (_own, _mapped, _http):
        explanations = [e for one in every if (e := explain_one(one, request_logs, now)) is not None]
        if explanations:
            return next((e for e in explanations if e.failure.kind is FailureKind.AMBIGUOUS), explanations[0])
    if request_log is not None and request_log.last_failure is not None:
        return _at(request_log.last_failure, request_log.last_key)
    return Explained(Failure(FailureKind.BUG, code=type(error).__name__))


def note(error: BaseException, failure: Failure, request: RequestFacts) -> None:
    """Attach the failure and the request of a call to an exception of another library, for `explain`."""
    with contextlib.suppress(AttributeError):  # one with slots
        error._resilient = failure, request  # type: ignore[attr-defined]  # noqa: SLF001 - nobody else's name


def by_transport(error: BaseException, *, repeatable: bool) -> Failure:
    """The failure of a request that ended with this error of an HTTP client."""
    if isinstance(error, JobFailure):
        return error.failure
    phase, code = phase_of(error) or (Phase.READ, "no_answer")
    return classify_error(phase, repeatable=repeatable, code=code)


# -- one exception -------------------------------------------------------------------------------------------


def _own(error: BaseException, _logs: RequestLogs, _now: datetime) -> Explained | None:
    if isinstance(error, httpx.HTTPError):
        state = _extensions(error).get(KEY)
        if state is not None:
            failure = None if isinstance(error, JobFailure) else state.failure
            failure = failure or by_transport(error, repeatable=state.facts.repeatable)
            return _at(failure, state.facts.key) if state.facts.gated else Explained(_local(failure))
    noted = getattr(error, "_resilient", None)
    if noted is not None:
        failure, request = noted
        return _at(failure, request.key) if request.gated else Explained(_local(failure))
    return Explained(error.failure, error.resource) if isinstance(error, JobFailure) else None


def _mapped(error: BaseException, request_logs: RequestLogs, now: datetime) -> Explained | None:
    every = (_mapped_by(one, error, now) for one in request_logs if one is not None)
    return next((one for one in every if one is not None), None)


def _mapped_by(request_log: RequestLog, error: BaseException, now: datetime) -> Explained | None:
    provider = request_log.provider
    if not provider.exceptions:
        return None
    for cls in type(error).__mro__:
        meaning = provider.exceptions.get(cls) or provider.exceptions.get(f"{cls.__module__}.{cls.__qualname__}")
        if meaning is None:
            continue
        result = meaning(error) if not isinstance(meaning, FailureKind) else meaning
        if isinstance(result, AnswerFacts):
            result = classify(result, _unknown_request(request_log), provider, now)
        if isinstance(result, FailureKind):
            result = Failure(result, code=type(error).__name__)
        if result is not None:
            return _at(result, request_log.hooks.resource_key)
    return None


def _http(error: BaseException, request_logs: RequestLogs, now: datetime) -> Explained | None:
    """The failure of an error of another HTTP client than the job's."""
    if not _is_client(error):
        return None
    request_log = next((one for one in request_logs if _is_providers(error, one)), request_logs[0])
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) if response is None else getattr(response, "status_code", None)
    if isinstance(status, int) and status >= LEAST and not _has_other_status(error):
        meaning = _foreign_answer(error, status, error if response is None else response, request_log, now)
        if meaning is not None:
            return meaning  # otherwise it is no failure by itself: the last of too many redirects
    phase = phase_of(error)
    if phase is None:
        return None
    method = getattr(_request(error), "method", None)
    if method is None:  # of a body that was streamed, say: it may be that of the last request
        repeatable = request_log is None or request_log.last_repeatable
    else:
        repeatable = str(method).upper() in IDEMPOTENT
    failure = classify_error(phase[0], repeatable=repeatable, code=phase[1])
    return _of_provider(failure, request_log) if _is_providers(error, request_log) else Explained(_local(failure))


def _foreign_answer(
    error: BaseException, status: int, response: Any, request_log: RequestLog | None, now: datetime
) -> Explained | None:
    request = _unknown_request(request_log, str(getattr(_request(error), "method", None) or "GET").upper())
    try:
        body = response.json()
    except Exception:  # noqa: BLE001 - whatever a foreign client raises for a body that is none
        body = None
    facts = AnswerFacts(status, Fields.of(getattr(response, "headers", None) or {}), body=body)
    is_providers = _is_providers(error, request_log)
    failure = classify(
        facts, request, GENERIC if request_log is None or not is_providers else request_log.provider, now
    )
    if failure is None:
        return None
    return _of_provider(failure, request_log) if is_providers else Explained(_local(failure))


def _has_other_status(error: BaseException) -> bool:
    """Whether the status of aiohttp's error is not the server's: of an answer that cannot be read, or of a proxy."""
    return any(cls.__name__ in _OTHERS for one in (error, error.__cause__) for cls in type(one).__mro__)


def _of_provider(failure: Failure, request_log: RequestLog | None) -> Explained:
    return _at(failure, "" if request_log is None else request_log.hooks.resource_key)


def _local(failure: Failure) -> Failure:
    """The failure of a request to a foreign host, changed so that it closes no gate of the job's resource."""
    kind = failure.kind
    if kind in (FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH):
        kind = FailureKind.PERMANENT if kind is FailureKind.AUTH else FailureKind.TRANSIENT
    return Failure(kind, retry_in=failure.retry_in, code=failure.code, status=failure.status, counts_for_breaker=False)


def phase_of(error: object) -> tuple[Phase, str] | None:
    """Which phase an HTTP client's error belongs to, and a code for it; None for any other exception."""
    if not isinstance(error, BaseException) or not _is_client(error):
        return None
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in chain(error)):
        return Phase.TLS, "tls_verification"
    name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME), None)
    if name == "InvalidHeader" and not _is_callers(error):
        return _BY_NAME["HttpProcessingError"]
    if name in (
        "ConnectionError",
        "MaxRetryError",
    ):  # requests raises it for everything: its cause says more
        beneath = (
            phase_of(one)
            for one in (error.__cause__, error.__context__, getattr(error, "reason", None), *error.args)
            if one is not None
        )
        return next((phase for phase in beneath if phase is not None), _BY_NAME[name])
    return None if name is None else _BY_NAME[name]


def _is_callers(error: BaseException) -> bool:
    """Whether a bad header is the request's. Requests also calls that of an answer so, which urllib3 refuses."""
    inner = next((one for one in error.args if isinstance(one, BaseException)), error)
    return type(inner).__module__.startswith("requests.")


def _is_client(error: BaseException) -> bool:
    return any(cls.__module__.partition(".")[0] in _CLIENTS for cls in type(error).__mro__)


def _is_providers(error: BaseException, request_log: RequestLog | None) -> bool:
    """Whether the failed request went to the job's provider; also true if that is unknown."""
    url = getattr(_request(error), "url", None)
    if request_log is None or url is None or not request_log.origins.declared:
        return True
    try:
        parsed = httpx.URL(str(url))
    except httpx.InvalidURL:  # too long, say: other clients take what httpx refuses
        return True
    return request_log.origins.holds(parsed.scheme, parsed.host, parsed.port)


def _unknown_request(request_log: RequestLog | None, method: str = "POST") -> RequestFacts:
    key = "" if request_log is None else request_log.hooks.resource_key
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
