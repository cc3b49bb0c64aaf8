"""The span of one sending of a request (HTTP semantic conventions, `SCHEMA_URL`).

A repeat and a redirect are sendings of their own, counted by ``http.request.resend_count``. Paths, and hosts that are
not written in the provider's facts, are what customers choose: only ``Tracing(tenants=True)`` records them, and
then without user, password, query values and the account's secrets.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from resilient.core.base.hosts import PORTS, without_secrets
from resilient.core.base.loggers import MASK
from resilient.core.base.tracing import TRACEPARENT
from resilient.core.provider.facts import METHODS
from resilient.wire.requests.redact import scrub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.base.errors import Failure
    from resilient.core.base.exchange import RequestFacts
    from resilient.core.base.tracing import Span
    from resilient.wire.requests.request_log import RequestLog

_OTHER: Final = "_OTHER"  # the conventions' word for a method that is none
_CLIENT_ERROR: Final = 400


def begin(request_log: RequestLog, request: RequestFacts, resends: int = 0) -> Span | None:
    """The span of a request that is about to be sent; None while nobody collects spans."""
    tracing = request_log.tracing
    if tracing.tracer() is None:
        return None
    name = request.method if request.method in METHODS else "HTTP"
    return tracing.request(name, partial(_described, request_log, request, resends))


def _described(request_log: RequestLog, request: RequestFacts, resends: int) -> dict[str, Any]:
    method = request.method if request.method in METHODS else _OTHER
    attributes: dict[str, Any] = {"http.request.method": method, **_where(request_log, request)}
    attributes["resilient.provider"] = request_log.provider.name if request.trusted else ""
    if method is _OTHER:
        attributes["http.request.method_original"] = request.method[:20]
    if resends:
        attributes["http.request.resend_count"] = resends
    if request_log.tracing.tenants:
        attributes["resilient.resource_key"] = request.key
    return {name: value for name, value in attributes.items() if value != ""}


def _where(request_log: RequestLog, request: RequestFacts) -> dict[str, Any]:
    scheme, port = request.url.partition("://")[0], _port(request.url)
    whole = {"server.port": port or PORTS.get(scheme, 0)}
    if request_log.tracing.tenants:
        url = scrub(without_secrets(request.url), request_log.secrets)
        return {**whole, "server.address": request.host, "url.full": url}
    host = _declared(request_log, request)
    shown = f"{scheme}://{host}{'' if port is None else f':{port}'}/{MASK}"
    return {**whole, "server.address": host, "url.full": shown}


def _port(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:  # no port that there is; the request fails for that, and not for its span
        return None


def _declared(request_log: RequestLog, request: RequestFacts) -> str:
    """The host as the provider's facts write it."""
    provider = request_log.provider
    if not request.trusted:
        return MASK
    template, own = _authority(provider.base_url), _authority(request_log.base_url)
    if "{" in template:
        return template if own.rpartition(":")[0] == request.host or own == request.host else MASK
    return request.host if request.host in {_host(template), *map(_host, provider.hosts)} else MASK


def _authority(url: str) -> str:
    return url.rpartition("://")[2].partition("/")[0].lower()


def _host(origin: str) -> str:
    return _authority(origin).partition(":")[0]


def propagated(span: Span | None, request_log: RequestLog, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that carry the trace on, where the provider's facts allow that and the program has set none."""
    if span is None or not request_log.provider.propagates_trace or TRACEPARENT in headers:
        return {}
    return span.headers()


def end(
    span: Span | None,
    *,
    status: int | None = None,
    version: bytes = b"",
    failure: Failure | None = None,
    error: BaseException | None = None,
) -> None:
    """End the span with what came back."""
    if span is None or not span.is_recorded:
        return
    kind = None if failure is None else failure.kind.value
    span.note({"http.response.status_code": status, "resilient.error_kind": kind})
    if version.startswith(b"HTTP/"):
        span.note({"network.protocol.version": version[5:].decode("ascii", "replace")})
    if error is not None:
        span.fail(type(error).__qualname__)
    elif status is not None and status >= _CLIENT_ERROR:
        span.fail(str(status))
    elif failure is not None:
        span.fail(failure.kind.value)
    span.end()
