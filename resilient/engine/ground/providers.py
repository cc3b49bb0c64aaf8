"""The providers of an app by name; the provider that a resource key names; the providers that are installed.

Installed are the modules of `providers`, and those that third parties announce. A third party's package announces a
function that takes the app's options and returns a `Provider`, as an entry point:

    [project.entry-points."resilient.providers"]
    acme = "acme_resilient:provider"
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from resilient.core.accounts.tokens import EMPTY
from resilient.core.base.errors import InvalidInput, SetupError
from resilient.core.base.loggers import logger
from resilient.core.base.phrases import nearest
from resilient.core.base.resource_key import check_stored
from resilient.core.events import message as events
from resilient.core.gates.policy import Tenancy
from resilient.core.provider.facts import Provider

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from resilient.core.gates.rate_limit import Limit
    from resilient.core.provider.auth import OAuth2
    from resilient.wire.requests.pool import PoolSettings


log = logger("app")
_ACCOUNT: Final = 2  # segments of an account's key


def warn_of_roots(patterns: Iterable[str], providers: Collection[str]) -> None:
    """Log a warning for each pattern whose provider is nearly one of these: a misspelt pattern matches no resource."""
    for pattern in dict.fromkeys(patterns):
        root = pattern.partition("/")[0]
        if root not in providers and (hint := nearest(root, providers)):
            log.warning("pattern %r: this app has no provider %r%s", pattern, root, hint)


_PROXIES: Final = ("http", "https", "socks5", "socks5h")  # httpx's


def http_by_name(http: Any, providers: Mapping[str, Provider]) -> Mapping[str, PoolSettings]:
    """The value of `Resilient(http=...)` by provider; ``"*"`` stands for all others. Raises `SetupError`."""
    if http is None:
        return {}
    from resilient.wire.requests.pool import PoolSettings  # noqa: PLC0415 - httpx: only where it is set up

    by_name: dict[str, Any] = dict(http) if isinstance(http, Mapping) else {"*": http}
    for name, settings in by_name.items():
        if not isinstance(settings, PoolSettings):
            raise SetupError(f"http= takes PoolSettings, or a mapping to them, and not {type(settings).__name__}")
        if settings.proxy is not None and _scheme(settings.proxy) not in _PROXIES:  # not shown: it may hold a password
            raise SetupError(
                f"http={{{name!r}: PoolSettings(proxy=)}} takes an address such as http://proxy.example:3128"
            )
        if name != "*" and name not in providers:
            raise SetupError(f"http={{{name!r}: ...}}: no provider has this name{nearest(name, providers)}")
    return by_name


def _scheme(address: str) -> str:
    try:
        return urlsplit(address).scheme
    except ValueError:  # an IPv6 address without its bracket, for example
        return ""


def registry(providers: Iterable[Provider]) -> Mapping[str, Provider]:
    """Providers by name; raises `SetupError` for two of one name or something that is no provider."""
    by_name: dict[str, Provider] = {}
    for provider in providers:
        if not isinstance(provider, Provider):
            raise SetupError(f"{provider!r} is not a Provider: pass github.provider(...), not the module")
        if provider.name in by_name:
            raise SetupError(f"two providers are called {provider.name!r}: a resource key could mean either")
        by_name[provider.name] = provider
    return by_name


def limits_of(providers: Iterable[Provider]) -> dict[str, Sequence[Limit]]:
    """The limits of these providers and of their token endpoints, by key pattern."""
    limits: dict[str, Sequence[Limit]] = {}
    for p in providers:
        limits |= p.limit_patterns()
        if p.oauth is not None and p.oauth.limits:
            limits[f"{p.name}:token@*" if p.oauth.at_tenants else f"{p.name}:token"] = p.oauth.limits
    return limits


def caps_of(providers: Iterable[Provider]) -> dict[str, int]:
    """The concurrency caps of these providers, by key pattern."""
    return {pattern: cap for p in providers for pattern, cap in p.concurrency_patterns().items()}


def tenancies_of(providers: Iterable[Provider]) -> dict[str, Tenancy]:
    """The tenancy of each root; destinations of the outbox and token endpoints have nothing in common."""
    tenancies = {p.name: p.tenancy for p in providers}
    return {events.RESOURCE: Tenancy.APART, **{f"{name}:token": Tenancy.APART for name in tenancies}, **tenancies}


def provider_of(providers: Mapping[str, Provider], key: str) -> Provider:
    """The provider of a resource. Raises `InvalidInput` if the app does not list it."""
    name = check_stored(key).partition("/")[0]
    if (provider := providers.get(name)) is None:
        raise InvalidInput(f"{key}: no provider {name!r} is listed: Resilient(providers=[{name}.provider()])")
    return provider


def account_of(providers: Mapping[str, Provider], key: str) -> Provider:
    """The provider of an account's key. Raises `InvalidInput` for any other key."""
    provider, parts = provider_of(providers, key), check_stored(key).split("/")
    if len(parts) > _ACCOUNT:
        raise InvalidInput(f"{key}: credentials belong to an account: {'/'.join(parts[:2])}")
    if len(parts) < _ACCOUNT and not provider.single_account:
        raise InvalidInput(
            f"{key} is the whole provider: credentials belong to one account of it, such as {key}/main (if it has"
            f" no accounts at all: {key}.provider(single_account=True))"
        )
    return provider


def oauth_of(providers: Mapping[str, Provider], key: str, details: Mapping[str, str] = EMPTY) -> OAuth2:
    """The OAuth facts for an account. Raises `InvalidInput` if its provider has no OAuth, or is not listed."""
    provider = provider_of(providers, key)
    facts = provider.oauth_for(details)
    if facts is None:
        raise InvalidInput(f"provider {provider.name!r} has no OAuth: use add()")
    return facts


GROUP: Final = "resilient.providers"
OURS: Final = "providers"


def providers_by_name() -> dict[str, Callable[..., Provider]]:
    """The ``provider(...)`` function of each installed provider; a third party's wins over ours.

    Raises `SetupError` for an announced provider that cannot be imported, and where something else of that name hides
    the modules of `providers`; the message names it.
    """
    if hidden := hidden_by():
        raise SetupError(f"{hidden} hides the package 'providers' of resilient-engine: give it another name")
    makers: dict[str, Callable[..., Provider]] = {}
    package = importlib.import_module(OURS)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("_"):
            continue
        make = getattr(importlib.import_module(f"{OURS}.{module.name}"), "provider", None)
        if make is not None:  # else another distribution's module: see `also_installed_by`
            makers[module.name] = make
    for point in entry_points(group=GROUP):
        try:
            makers[point.name] = point.load()
        except Exception as error:
            raise SetupError(
                f"the provider {point.name!r} ({point.value}) cannot be loaded: {error}; repair or uninstall"
                " the package that announces it"
            ) from error
    return dict(sorted(makers.items()))


def hidden_by() -> str:
    """The path of another package or module `providers` that Python imports instead of ours; empty if there is none."""
    spec = importlib.util.find_spec(OURS)
    if spec is None:
        return ""
    places = [Path(place) for place in spec.submodule_search_locations or ()] or [Path(spec.origin or "")]
    own = Path(__file__).parents[3] / OURS
    return "" if own in places else str(places[0])


@cache
def also_installed_by() -> tuple[str, ...]:
    """Other distributions that install a package `providers` into the same place.

    Computed once a process: to read what every distribution installs takes a third of a second of CPU.
    """
    others = packages_distributions().get(OURS, [])
    return tuple(sorted({name for name in others if name != "resilient-engine"}))


def provider_named(name: str) -> Provider:
    """The facts of one installed provider, made without options. Raises `SetupError` if there is none of that name."""
    providers = providers_by_name()
    if name not in providers:
        raise SetupError(f"no provider is called {name!r}: there are {', '.join(providers)}")
    made = providers[name]()
    if not isinstance(made, Provider):
        raise SetupError(f"the provider {name!r} gives {type(made).__name__}, not a Provider")
    return made
