"""Whether a provider's facts are well formed, without asking anybody: addresses, names, dates, expressions."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from resilient.core.auth import OAuth2
from resilient.core.body import pick
from resilient.core.errors import InvalidInput
from resilient.core.policy import Policies
from resilient.core.provider import Provider

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from resilient.core.rules import Errors

_WHOLE: Final = re.compile(r"\{\w+\}")  # each account at a host of its own
_FIELDS: Final = frozenset(field.name for field in fields(Provider))


def fact_problems(provider: Provider, now: datetime) -> Iterator[str]:
    """What is missing, malformed or not dated."""
    yield from _origin_problems(provider)
    yield from _date_problems(provider, now)
    yield from _limit_problems(provider)
    yield from _batch_problems(provider)
    every = [
        ("errors", provider.errors),
        *((f"auth.{a.kind}", a.errors) for a in provider.auth if isinstance(a, OAuth2)),
    ]
    for where, errors in every:
        yield from (f"{where}: {problem}" for problem in _dialect_problems(errors))
    for name, _ in provider.waits.hints:
        if name != name.lower():
            yield f"waits: the header {name!r} must be in lower case"
    for budget in provider.waits.budgets:
        names = (budget.limit, budget.remaining, budget.reset, budget.used, budget.combined, budget.named_by)
        if any(name != name.lower() for name in names):
            yield f"waits: the headers of the budget {budget.name!r} must be in lower case"
    for name, paginator in provider.pagination.items():
        for path in (paginator.items, paginator.more, paginator.done, paginator.resume):
            yield from (f"pagination {name!r}: {problem}" for problem in _path_problems(path))


def _batch_problems(provider: Provider) -> Iterator[str]:
    if provider.batch is not None and (not provider.batch.path.startswith("/") or provider.batch.most < 1):
        yield f"batch: {provider.batch.path!r} must be a path below the base URL, and most at least 1"


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


def _dialect_problems(errors: Errors) -> Iterator[str]:
    for path in (*errors.code, *errors.message):
        yield from _path_problems(path)
    for rule in errors.rules:
        for path in rule.where:
            yield from _path_problems(path)
        texts = [*rule.header.values(), rule.text, rule.wait.text if rule.wait else ""]
        yield from (problem for text in texts for problem in _pattern_problems(text))
    yield from _pattern_problems(errors.code_text)
    yield from _pattern_problems(errors.code_form)


def _path_problems(path: str) -> Iterator[str]:
    try:
        pick({}, path)
    except InvalidInput as error:
        yield str(error)


def _pattern_problems(text: str) -> Iterator[str]:
    try:
        re.compile(text)
    except re.error as error:
        yield f"{text!r} is no regular expression: {error}"
