"""The names of token endpoints, which are resources of their own."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import InvalidInput
from resilient.core.base.hosts import origin_of

if TYPE_CHECKING:
    from resilient.core.provider.auth import OAuth2

_LONGEST: Final = 200  # characters of a key


def token_key(name: str, facts: OAuth2 | None, filled: OAuth2 | None) -> str:
    """The resource key of an account's token endpoint; ``facts``: the provider's, before they were ``filled``.

    Each host is a resource of its own where accounts name the host: its failures stop only accounts at that host.
    """
    if facts is None or filled is None or not facts.at_tenants:
        return f"{name}:token"
    try:
        _, host, port = origin_of(filled.refresh_url or filled.token_url)
    except InvalidInput:  # the account has no value for it
        return f"{name}:token"
    text = f"{name}:token@{host}:{port}"
    if len(text) > _LONGEST or not text.isascii() or "[" in text:
        text = f"{name}:token@{hashlib.sha256(host.encode()).hexdigest()[:32]}:{port}"
    return text
