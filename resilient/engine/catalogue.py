"""Every provider that is installed, by name: the modules of `providers`, and what third parties announce.

A third party's package names a function that takes what an app may say and gives a `Provider`:

    [project.entry-points."resilient.providers"]
    acme = "acme_resilient:provider"
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Final

from resilient.core.errors import SetupError
from resilient.core.provider import Provider

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP: Final = "resilient.providers"
OURS: Final = "providers"


def providers_by_name() -> dict[str, Callable[..., Provider]]:
    """The ``provider(...)`` function of each installed provider; a third party's wins over ours.

    Raises `SetupError` for an announced provider that cannot be imported, and where something else of that name hides
    the modules of `providers`; the message names it.
    """
    if hidden := hidden_by():
        raise SetupError(f"{hidden} hides the package 'providers' of resilient-engine: give it another name")
    found: dict[str, Callable[..., Provider]] = {}
    package = importlib.import_module(OURS)
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            found[module.name] = importlib.import_module(f"{OURS}.{module.name}").provider
    for point in entry_points(group=GROUP):
        try:
            make = point.load()
        except (ImportError, AttributeError) as error:
            raise SetupError(
                f"the provider {point.name!r} ({point.value}) cannot be loaded: {error}; repair or uninstall"
                " the package that announces it"
            ) from error
        found[point.name] = make
    return dict(sorted(found.items()))


def hidden_by() -> str:
    """What Python takes for the package `providers` instead of ours, as a path; empty if it is ours."""
    spec = importlib.util.find_spec(OURS)
    if spec is None:
        return ""
    places = [Path(place) for place in spec.submodule_search_locations or ()] or [Path(spec.origin or "")]
    mine = Path(__file__).parents[2] / OURS
    return "" if mine in places else str(places[0])


def also_installed_by() -> list[str]:
    """Other distributions that install a package of that name, into the same place."""
    others = packages_distributions().get(OURS, [])
    return sorted({name for name in others if name != "resilient-engine"})


def provider_named(name: str) -> Provider:
    """One installed provider's facts, without an app's own words. Raises `SetupError`."""
    known = providers_by_name()
    if name not in known:
        raise SetupError(f"no provider is called {name!r}: there are {', '.join(known)}")
    made = known[name]()
    if not isinstance(made, Provider):
        raise SetupError(f"the provider {name!r} gives {type(made).__name__}, not a Provider")
    return made
