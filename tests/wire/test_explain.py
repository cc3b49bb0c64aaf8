"""What an exception that left a handler means."""

import asyncio
import subprocess
import sys
import types

import aiohttp
import httpx
import pytest

from resilient import (
    Ambiguous,
    AnswerFacts,
    Errors,
    Failure,
    Permanent,
    Provider,
    ResourceStopped,
    Rule,
    Scope,
    Throttled,
)
from resilient.core.base.errors import FailureKind as K
from resilient.core.base.errors import chain
from resilient.core.base.exchange import RequestFacts
from resilient.wire.requests.explain import Explained, explain
from resilient.wire.requests.request_log import RequestLog
from tests.helpers import LIMIT


def raised(fn):
    try:
        fn()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked at
        return error
    pytest.fail("did not raise")


def kind(error, request_log=None, now=None):
    return explain(error, request_log, now).failure.kind


class VendorError(Exception):
    pass


async def test_an_sdk_that_wraps_our_failure(client, hooks):
    response = await client().get("/x?status=429&h=retry-after:9")

    def handler():
        try:
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise VendorError("wrapped") from error

    told = explain(raised(handler), None, hooks.now())
    assert (told.failure.kind, told.failure.retry_in, told.resource) == (K.THROTTLED, 9, "api/acct")


async def test_an_sdk_that_hides_the_cause(client, hooks):
    response = await client().get("/x?status=503")

    def handler():
        try:
            response.raise_for_status()
        except httpx.HTTPStatusError:
            raise VendorError("hidden") from None

    assert kind(raised(handler)) is K.TRANSIENT


async def test_a_connection_error_of_our_client_in_an_sdk_error(client, hooks, closed_port):
    api = client()
    with pytest.raises(httpx.ConnectError) as caught:
        await api.post(f"http://127.0.0.1:{closed_port}/")
    error = VendorError()
    error.__context__ = caught.value
    assert kind(error, api.request_log, hooks.now()) is K.TRANSIENT


async def test_what_the_handler_raises_itself_wins_over_what_came_back(client, hooks):
    api = client()
    await api.get("/x?status=503")
    assert kind(Permanent("no"), api.request_log, hooks.now()) is K.PERMANENT
    assert kind(Throttled(retry_after=3), api.request_log, hooks.now()) is K.THROTTLED


async def test_the_last_answer_that_no_success_followed(client, hooks, provider):
    api = client(provider(route=lambda _: ("search", 1.0)))
    assert kind(VendorError(), api.request_log, hooks.now()) is K.BUG
    await api.get("/x?status=429&h=retry-after:9")
    told = explain(VendorError(), api.request_log, hooks.now())
    assert (told.failure.kind, told.resource) == (K.THROTTLED, "api/acct")
    await api.get("/x")
    assert kind(VendorError(), api.request_log, hooks.now()) is K.BUG


async def test_a_failure_about_an_endpoint_names_it(client, hooks, provider):
    errors = Errors(rules=(Rule(K.THROTTLED, status=429, scope=Scope.ENDPOINT),))
    api = client(provider(route=lambda _: ("search", 1.0), errors=errors))
    response = await api.get("/x?status=429")
    told = explain(raised(response.raise_for_status), api.request_log, hooks.now())
    assert told == Explained(response.extensions["resilient"], "api/acct/search")


def test_everything_else_is_the_users_bug(hooks):
    told = explain(ValueError("x"), None, hooks.now())
    assert told.failure == Failure(K.BUG, code="ValueError")
    assert kind(ConnectionError("the database, perhaps")) is K.BUG
    assert kind(TimeoutError()) is K.BUG
    assert kind(RuntimeError("x")) is K.BUG


# -- the provider's own map ----------------------------------------------------------------------------------


class RateLimited(VendorError):
    wait = 7


MAPPED = Provider(
    name="api",
    exceptions={
        f"{__name__}.RateLimited": lambda e: Failure(K.THROTTLED, retry_in=e.wait),
        VendorError: lambda e: AnswerFacts(int(str(e))) if str(e).isdigit() else None,
        KeyError: K.PERMANENT,
    },
    errors=Errors(rules=(Rule(K.QUOTA, status=499),)),
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RateLimited(), K.THROTTLED), (VendorError("499"), K.QUOTA), (VendorError("503"), K.TRANSIENT),
     (VendorError("?"), K.BUG), (KeyError("x"), K.PERMANENT), (ValueError(), K.BUG)],
)  # fmt: skip
def test_a_providers_map_of_exceptions(hooks, error, expected):
    from resilient.wire.requests.request_log import RequestLog

    assert kind(error, RequestLog(hooks, MAPPED), hooks.now()) is expected


def test_the_map_is_asked_for_wrapped_errors_too(hooks):
    from resilient.wire.requests.request_log import RequestLog

    error = ValueError("x")
    error.__cause__ = RateLimited()
    told = explain(error, RequestLog(hooks, MAPPED), hooks.now()).failure
    assert (told.kind, told.retry_in) == (K.THROTTLED, 7)


# -- groups and chains ---------------------------------------------------------------------------------------


def test_a_lost_request_does_not_hide_in_a_group():
    group = ExceptionGroup("tasks", [Permanent("a"), ValueError(), ExceptionGroup("more", [Ambiguous()])])
    assert kind(group) is K.AMBIGUOUS
    assert kind(ExceptionGroup("tasks", [ValueError(), Permanent("a")])) is K.PERMANENT


async def test_a_task_group(client, hooks):
    async def work():
        (await client().get("/x?status=422")).raise_for_status()

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(work())
    assert kind(caught.value, None, hooks.now()) is K.PERMANENT


def test_chains_end_even_if_they_go_in_circles():
    one, two = ValueError("1"), ValueError("2")
    one.__cause__, two.__cause__ = two, one
    assert list(chain(one)) == [one, two]
    assert kind(one) is K.BUG


def test_a_stopped_resource_is_found_through_an_sdks_wrapping():
    error = VendorError()
    error.__cause__ = ResourceStopped("api/acct", "cooldown")
    assert any(isinstance(one, ResourceStopped) for one in chain(error))


# -- clients that are not ours -------------------------------------------------------------------------------


async def test_the_users_own_httpx_client(hooks, server, closed_port):
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=LIMIT) as theirs:
        response = await theirs.get("/x?status=429&h=retry-after:9")
        told = explain(raised(response.raise_for_status), None, hooks.now()).failure
        assert (told.kind, told.retry_in, told.code) == (K.THROTTLED, 9, "http_429")
        for method, expected in (("GET", K.TRANSIENT), ("POST", K.AMBIGUOUS)):
            with pytest.raises(httpx.ReadTimeout) as caught:
                await theirs.request(method, "/x?hold=1", timeout=httpx.Timeout(LIMIT, read=0.1))
            assert kind(caught.value) is expected
        with pytest.raises(httpx.ConnectError) as refused:
            await theirs.post(f"http://127.0.0.1:{closed_port}/")
        assert kind(refused.value) is K.TRANSIENT


async def test_a_strangers_failure_closes_no_gate_of_ours(hooks, client, provider, stranger):
    api = client(provider())
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT) as theirs:
        response = await theirs.get(f"{stranger.url}/x?status=429&h=retry-after:9")
    told = explain(raised(response.raise_for_status), api.request_log, hooks.now()).failure
    assert (told.kind, told.retry_in, told.counts_for_breaker) == (K.TRANSIENT, 9, False)
    through_ours = await api.get(f"{stranger.url}/x?status=401")
    told = explain(raised(through_ours.raise_for_status), api.request_log, hooks.now())
    assert told.failure.kind is K.AUTH or told.failure.kind is K.PERMANENT


def foreign(module, name, bases=(Exception,), **attributes):
    """An exception class as another library would define it."""
    return type(name, bases, {"__module__": module, **attributes})


Requests = types.SimpleNamespace(method="POST", url="https://api.example.com/x")


@pytest.mark.parametrize(
    ("module", "name", "method", "expected", "code"),
    [
        ("requests.exceptions", "ConnectTimeout", "POST", K.TRANSIENT, "connect_timeout"),
        ("requests.exceptions", "ReadTimeout", "POST", K.AMBIGUOUS, "read_timeout"),
        ("requests.exceptions", "ReadTimeout", "GET", K.TRANSIENT, "read_timeout"),
        ("requests.exceptions", "ConnectionError", "POST", K.AMBIGUOUS, "read_error"),
        ("httpx2", "ReadTimeout", "POST", K.AMBIGUOUS, "read_timeout"),
        ("httpx2", "ConnectError", "POST", K.TRANSIENT, "connect_error"),
        ("aiohttp.client_exceptions", "ServerTimeoutError", None, K.TRANSIENT, "read_timeout"),
        ("aiohttp.client_exceptions", "ClientConnectorError", "POST", K.TRANSIENT, "connect_error"),
        ("urllib3.exceptions", "NewConnectionError", "POST", K.TRANSIENT, "connect_error"),
        ("other", "ReadTimeout", "POST", K.BUG, "ReadTimeout"),
    ],
)
def test_clients_known_by_their_names(module, name, method, expected, code):
    error = foreign(module, name)()
    if method is not None:
        error.request = types.SimpleNamespace(method=method, url="https://api.example.com/x")
    told = explain(error, None, None).failure
    assert (told.kind, told.code) == (expected, code)


def test_a_url_that_is_too_long_for_httpx_is_explained_all_the_same(hooks):
    request_log = RequestLog(hooks, Provider(name="api", base_url="https://api.example.com"))
    error = foreign("aiohttp.client_exceptions", "ClientResponseError", status=414, headers=None)()
    error.request_info = types.SimpleNamespace(method="GET", url="https://api.example.com/?ids=" + "7" * 70_000)
    told = explain(error, request_log, hooks.now()).failure
    assert (told.kind, told.code) == (K.PERMANENT, "http_414")


def test_requests_calls_everything_a_connection_error():
    refused = foreign("urllib3.exceptions", "NewConnectionError")()
    error = foreign("requests.exceptions", "ConnectionError")(refused)
    error.request = types.SimpleNamespace(method="POST", url="https://api.example.com/x")
    assert kind(error) is K.TRANSIENT


def test_answers_of_other_clients(hooks):
    class Response:  # like requests', false if it is an error
        status_code, headers = 429, {"Retry-After": "9"}

        def __bool__(self):
            return False

        def json(self):
            raise ValueError("none")

    error = foreign("requests.exceptions", "HTTPError")()
    error.response = Response()
    told = explain(error, None, hooks.now()).failure
    assert (told.kind, told.retry_in) == (K.THROTTLED, 9)
    error = foreign("aiohttp.client_exceptions", "ClientResponseError", status=503, headers=None)()
    error.request_info = types.SimpleNamespace(method="GET", url="https://api.example.com/x")
    assert kind(error, None, hooks.now()) is K.TRANSIENT


def test_no_foreign_client_is_imported():
    script = "import resilient, resilient.adapters, resilient.testing, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"requests", "aiohttp", "httpx2", "uvicorn"} & set(ran.stdout.split())


async def test_a_proxys_refusal_and_an_unreadable_answer_are_no_words_of_the_server(hooks, rude):
    """By aiohttp both have a status: the proxy's, and one that aiohttp made up. Nothing went through the proxy."""

    async def behave(_reader, writer):
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0, 1\r\n\r\n" if is_odd else PROXYS)
        await writer.drain()

    log = RequestLog(hooks)
    for is_odd, expected in ((True, (K.AMBIGUOUS, "protocol_error")), (False, (K.TRANSIENT, "proxy_error"))):
        async with rude(behave) as (url, _), aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await session.post(url if is_odd else "https://api.example/x", proxy=None if is_odd else url)
        log.last_repeatable = False
        failure = explain(caught.value, log, hooks.now()).failure
        assert (failure.kind, failure.code) == expected


PROXYS = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(("repeatable", "expected"), [(True, K.TRANSIENT), (False, K.AMBIGUOUS)])
def test_an_error_without_a_request_is_about_the_last_one(hooks, repeatable, expected):
    log = RequestLog(hooks)
    log.note(RequestFacts("POST", "", "", "", repeatable=repeatable), None)
    assert kind(aiohttp.ClientPayloadError("it broke off"), log) is expected
