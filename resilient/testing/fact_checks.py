"""What a declaration cannot refuse by itself: facts that are missing, not dated, or without their counterpart."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from resilient.core.errors import InvalidInput
from resilient.core.policy import Policies
from resilient.core.provider import Provider

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

_WHOLE: Final = re.compile(r"\{\w+\}")  # each account at a host of its own
_FIELDS: Final = frozenset(field.name for field in fields(Provider))


def fact_problems(provider: Provider, now: datetime) -> Iterator[str]:
    """What is missing, malformed or not dated."""
    yield from _origin_problems(provider)
    yield from _date_problems(provider, now)
    yield from _limit_problems(provider)


def _origin_problems(provider: Provider) -> Iterator[str]:
    if not provider.title:
        yield "title: give its name for people"
    if not provider.base_url:
        yield "base_url: give the API's address"
    elif not provider.base_url.startswith(("https://", "{")):
        yield f"base_url: {provider.base_url!r} is not https"
    for host in provider.hosts:
        if host.startswith("http:"):
            yield f"hosts: {host!r} is not https"
    host = provider.base_url.partition("//")[2].partition("/")[0]
    if "{" in host and not _WHOLE.fullmatch(host) and not provider.hosts:
        yield "hosts: the host differs per account, so declare its pattern, such as '*.example.com'"
    oauth = provider.oauth
    if oauth is not None and oauth.client_id:
        yield "auth: a client's id belongs to the app, not to the facts"


def _date_problems(provider: Provider, now: datetime) -> Iterator[str]:
    if provider.verified_on is None or provider.verified_on > now.date():
        yield "verified_on: say on which day these facts were read"
    if not provider.sources or any(not source.strip() for source in provider.sources):
        yield "sources: say where these facts were read"
    for name in provider.unverified:
        head = re.split(r"[.:\[ ]", name, maxsplit=1)[0]
        if head not in _FIELDS:
            yield f"unverified: {name!r} does not begin with a field of Provider, such as 'webhook'"


def _limit_problems(provider: Provider) -> Iterator[str]:
    try:
        policies = Policies(provider.limit_patterns(), provider.concurrency_patterns())
        policies.for_key(f"{provider.name}/account")
    except InvalidInput as error:
        yield f"limits: {error}"
    if any(level.startswith("account/") for level in provider.limits) and provider.route is None:
        yield "limits: an endpoint's limits need route=, or no request draws them"
