"""The providers of an app, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core import events
from resilient.core.errors import SetupError
from resilient.core.provider import Provider
from resilient.core.tenancy import Tenancy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.core.limit import Limit


def registry(providers: Iterable[Provider]) -> Mapping[str, Provider]:
    """Providers by name; raises `SetupError` for two of one name or something that is no provider."""
    found: dict[str, Provider] = {}
    for provider in providers:
        if not isinstance(provider, Provider):
            raise SetupError(f"{provider!r} is not a Provider: pass github.provider(...), not the module")
        if provider.name in found:
            raise SetupError(f"two providers are called {provider.name!r}: a resource key could mean either")
        found[provider.name] = provider
    return found


def limits_of(providers: Iterable[Provider]) -> dict[str, Sequence[Limit]]:
    """Their limits by key pattern, those of token endpoints too."""
    found: dict[str, Sequence[Limit]] = {}
    for p in providers:
        found |= p.limit_patterns()
        if p.oauth is not None and p.oauth.limits:
            found[f"{p.name}:token@*" if p.oauth.at_tenants else f"{p.name}:token"] = p.oauth.limits
    return found


def caps_of(providers: Iterable[Provider]) -> dict[str, int]:
    """Their concurrency caps by key pattern."""
    return {pattern: cap for p in providers for pattern, cap in p.concurrency_patterns().items()}


def tenancies_of(providers: Iterable[Provider]) -> dict[str, Tenancy]:
    """What the keys below each root have in common; the destinations of the outbox, and token endpoints: nothing."""
    known = {p.name: p.tenancy for p in providers}
    return {events.RESOURCE: Tenancy.APART, **{f"{name}:token": Tenancy.APART for name in known}, **known}
