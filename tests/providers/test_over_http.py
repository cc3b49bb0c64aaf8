"""The sample answers once more, through a job's own client and httpx: what the gate is told about each."""

import json
import runpy
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import respx

from resilient import providers_by_name
from resilient.wire.requests.client import build_async_client
from resilient.wire.requests.hooks import Permit
from resilient.wire.requests.pool import Pool, PoolSettings
from resilient.wire.requests.request_log import RequestLog

TABLES = Path(__file__).with_name("dialects")
NAMES = sorted(path.stem for path in TABLES.glob("*.py"))
ACCOUNT = {"instance_url": "https://acme.my.salesforce.com", "homeserver": "matrix.example", "region": "eu-west-1"}


class Recorder:
    """The engine's side: lets everything through and keeps what it is told."""

    resource_key, base_key = "x/acme", "job"

    def __init__(self, name):
        self.resource_key = f"{name}/acme"
        self.told = []
        self.keys = []

    def now(self):
        return datetime(2026, 11, 1, 12, 0, tzinfo=UTC)

    async def admit(self, asked):
        self.keys.append(asked.key)
        return Permit(asked, headers={"Authorization": "Bearer canary"})

    def is_late(self, _permit):
        return False

    async def mark(self, _permit):
        pass

    def clear(self, _permit, *, took_effect):
        pass

    async def answered(self, _permit, _answer, failure):
        self.told.append(failure)

    async def connection(self, _account):
        return None

    async def refreshed(self, _permit, _failure):
        return False

    def abandoned(self, _permit):
        raise AssertionError


def of_account(name):
    provider = providers_by_name()[name]()
    return provider.filled(**{known: ACCOUNT.get(known, "acme") for known in provider.placeholders})


@pytest.mark.parametrize("name", NAMES)
@respx.mock
async def test_each_sample_over_http(name):
    provider = of_account(name)
    origin = httpx.URL(provider.base_url).copy_with(raw_path=b"/")
    dialect = runpy.run_path(str(TABLES / f"{name}.py"))["DIALECT"]
    pool = Pool(PoolSettings(tries=1))
    for sample in dialect.answers():
        hooks = Recorder(name)
        client = build_async_client(RequestLog(hooks, provider), pool, str(origin))
        method, _, target = sample.on.partition(" ")
        plain = isinstance(sample.body, str)
        content = sample.body if plain else "" if sample.body is None else json.dumps(sample.body)
        headers = {"Content-Type": "text/html" if plain else "application/json"} | dict(sample.headers)
        route = respx.route(method=method).mock(httpx.Response(sample.status, content=content, headers=headers))
        response = await client.request(method, target, json=sample.sent)
        assert route.calls.last.request.headers["Authorization"] == "Bearer canary"
        (failure,) = hooks.told
        assert (failure and failure.kind) is sample.kind, sample.about
        if sample.kind is not None:
            with pytest.raises(httpx.HTTPStatusError):
                response.raise_for_status()
        if sample.key:
            assert hooks.keys == [f"{name}/acme/{sample.key}"]
        respx.clear()
    await pool.aclose()


@pytest.mark.parametrize("name", NAMES)
@respx.mock
async def test_credentials_stay_at_home(name):
    """Neither another account's host nor a look-alike gets a token."""
    provider = of_account(name)
    hooks, pool = Recorder(name), Pool(PoolSettings(tries=1))
    client = build_async_client(RequestLog(hooks, provider, provider.base_url), pool, provider.base_url)
    route = respx.route().mock(httpx.Response(200, json={}))
    host = httpx.URL(provider.base_url).host
    for stranger in (f"{host}.evil.test", f"evil{host}", host.replace("acme", "other") if "acme" in host else "e.test"):
        await client.get(f"https://{stranger}/")
        assert "Authorization" not in route.calls.last.request.headers, stranger
    await client.get("/")
    assert route.calls.last.request.headers["Authorization"] == "Bearer canary"
    await pool.aclose()
