"""A provider's facts in words for people, and as JSON for programs."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from datetime import date
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from resilient.core.auth import OAuth2, Rotation
from resilient.core.phrases import figure, length, span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.core.limit import Limit
    from resilient.core.provider import Provider, Rule

_SECRET: Final = frozenset({"client_secret"})
_ROTATION: Final = {
    Rotation.NONE: "the refresh token stays the same",
    Rotation.OLD_KEPT: "a refresh gives a new refresh token, the old one goes on working",
    Rotation.GRACE: "a refresh gives a new refresh token; the old one can be replayed",
    Rotation.SINGLE_USE: "a refresh token is dead once it was used",
}


def described(value: Any) -> Any:
    """Facts as JSON: what differs from the defaults, functions by their name, no secrets."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = {}
        for one in fields(value):
            found = getattr(value, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            if one.name not in _SECRET and one.repr and (found != default or one.name == "kind"):
                shown[one.name] = described(found)
        return shown
    if hasattr(value, "items"):
        return {str(key): described(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [described(one) for one in value]
    if callable(value):
        value = f"{value.__module__}.{value.__name__}"
    if isinstance(value, (Enum, date)):
        return value.value if isinstance(value, Enum) else value.isoformat()
    return "..." if value is ... else value


def limits_in_words(provider: Provider) -> str:
    """The limits and the cap of one account."""
    told = [_limit(limit) for limit in provider.limits.get("account", ())]
    if cap := provider.concurrency.get("account"):
        told.append(f"{cap} at once")
    if not told and any(level.startswith("account/") for level in provider.limits):
        return "by endpoint"
    return ", ".join(told) or "not published"


def facts_of(provider: Provider) -> Iterator[tuple[str, list[str]]]:
    """Headings and their lines."""
    yield "Addresses", [provider.base_url, *(f"also {host}" for host in provider.hosts), *_headers(provider)]
    yield "Credentials", [line for auth in provider.auth for line in _auth(auth)] or ["signed by the vendor's SDK"]
    yield "Limits", list(_limits(provider)) or ["not published"]
    yield "Errors", [*(_rule(rule) for rule in provider.errors.rules), "everything else by its status"]
    yield "Repeats", [_idempotency(provider)]
    yield "Pages", _kinds(provider.pagination) or ["none"]
    yield "Changes", [_change(name, one) for name, one in provider.incremental.items()] or ["none"]
    yield "Webhooks", list(_webhook(provider)) or ["none"]
    yield "Read in", list(provider.sources)
    if provider.unverified:
        yield "Not verified", list(provider.unverified)


def _headers(provider: Provider) -> list[str]:
    return [f"every request carries {name}: {value}" for name, value in provider.headers.items()]


def _auth(auth: Any) -> Iterator[str]:
    if not isinstance(auth, OAuth2):
        yield auth.kind.replace("_", " ")
        return
    yield f"oauth2, {' or '.join(auth.flows) or 'a refresh token of its own login'}"
    yield f"tokens from {auth.token_url}; the client says who it is by {auth.client_auth}; PKCE: {auth.pkce}"
    if auth.refreshes:
        lasts = span(auth.lifetime) if auth.lifetime else "as long as the answer says"
        grace = f" for {span(auth.grace)}" if auth.grace else ""
        yield f"access tokens last {lasts}; {_ROTATION[auth.rotation]}{grace}"
    else:
        yield "tokens do not expire, and there is nothing to refresh"


def _limits(provider: Provider) -> Iterator[str]:
    for level, found in provider.limits.items():
        yield f"{level}: {', '.join(_limit(limit) for limit in found)}"
    for level, cap in provider.concurrency.items():
        yield f"{level}: {cap} at once"
    for budget in provider.waits.budgets:
        read = [name for name in (budget.remaining, budget.used, budget.combined) if name]
        if read:
            yield f"what is left is told in {', '.join(read)}"


def _limit(limit: Limit) -> str:
    burst = f" (burst {figure(limit.burst)})" if limit.burst else ""
    return f"{figure(limit.rate)} per {length(limit.per)}{burst}"


def _rule(rule: Rule) -> str:
    status = rule.status
    if isinstance(status, range):
        said = f"{status.start}-{status.stop - 1}"
    else:
        said = ", ".join(str(one) for one in ((status,) if isinstance(status, int) else status or ("any error",)))
    code = (rule.code,) if isinstance(rule.code, str) else rule.code
    parts = [f"code {' | '.join(code)}"] if code else []
    parts += [f"{path} = {'anything' if wanted is ... else wanted!r}" for path, wanted in rule.where.items()]
    parts += [f"{name}: {pattern}" for name, pattern in rule.header.items()]
    parts += [f"text {rule.text!r}"] if rule.text else []
    parts += [f"on {rule.path}"] if rule.path else []
    parts += ["no JSON"] if rule.json is False else []
    scope = f" of the {rule.scope}" if rule.scope else ""
    return f"{said}{' with ' if parts else ''}{', '.join(parts)}: {rule.kind or 'success'}{scope}"


def _idempotency(provider: Provider) -> str:
    found = provider.idempotency
    if found is None:
        return "it takes no idempotency key"
    place = f"parameter {found.query}" if found.query else found.header
    life = f"for {span(found.life)}" if found.life else "for a time that is not documented"
    return f"{place} on {', '.join(sorted(found.methods))} {', '.join(found.paths)}, remembered {life}"


def _kinds(found: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {type(one).__name__}" for name, one in found.items()]


def _change(name: str, one: Any) -> str:
    place = one.query or one.body or one.header or "its address"
    deleted = {"never": "not told", "marked": f"marked by {one.deleted}"}.get(one.deletions, one.deletions)
    return f"{name}: {one.style}, sent in {place}; deletions: {deleted}"


def _webhook(provider: Provider) -> Iterator[str]:
    found = provider.webhook
    if found is None:
        return
    for one in found.signatures:
        yield f"{one.header}: {one.scheme} of {one.signed}, {one.encoding}"
    if not found.signatures:
        yield f"not signed; the agreed token stands in {found.token}"
    if found.delivery:
        yield f"a repeat carries the same {found.delivery}"
