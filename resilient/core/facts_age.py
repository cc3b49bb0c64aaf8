"""How old a provider's facts are: APIs change, so what was read long ago may no longer be true."""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from resilient.core.provider import Provider

OLDEST: Final = timedelta(days=365)


def is_old(verified_on: date | None, today: date) -> bool:
    """Whether the facts were read more than a year before ``today``. Without a date nobody vouched for them at all."""
    return verified_on is not None and today - verified_on > OLDEST


def warning(provider: Provider, today: date) -> str:
    """What to tell a person about the age of the facts; "" while they are young enough."""
    if not is_old(provider.verified_on, today):
        return ""
    return f"the facts of {provider.name} were last checked on {provider.verified_on}, more than a year ago"
