"""Which hosts a provider's credentials may go to.

An origin is scheme, host and port. A host written alone means HTTPS on its default port; ``*.example.com``
means every host below example.com, never example.com itself. HTTP is for origins that say so (a test server
on this machine).
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_plus, urlsplit

from resilient.core.errors import InvalidInput

Origin = tuple[str, str, int]
PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"(?:\*\.)?[A-Za-z0-9_.-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")
_MOST_KNOWN: Final = 1024
# A password may hold what ends a host, unless it looks like a port.
_LOGIN: Final = re.compile(r"(://)[^\s/:@]*:(?!\d{1,5}(?:[/?#]|$))[^\s@]*@")


def origin_of(url: str) -> Origin:
    """The origin of an absolute HTTP URL. Raises `InvalidInput`."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme not in PORTS or not host:
        raise InvalidInput(f"{without_secrets(url)!r} is no URL of an API: write 'https://api.example.com/v1'")
    return scheme, host, port or PORTS[scheme]


def host_pattern(text: str) -> Origin:
    """A declared host as an origin, in which the host may start with ``*.``. Raises `InvalidInput`."""
    if "://" in text:
        return origin_of(text)
    if not _HOST.fullmatch(text):
        raise InvalidInput(f"{text!r} is no host: write 'api.example.com', '*.example.com' or 'http://127.0.0.1:8000'")
    scheme, host, port = origin_of(f"https://{text.removeprefix('*.')}")
    return scheme, "*." + host if text.startswith("*.") else host, port


def without_secrets(url: str) -> str:
    """A URL for people: without user, password, query values and fragment."""
    head, query, rest = _LOGIN.sub(r"\1", url).partition("?")
    scheme, found, tail = head.partition("://")
    if found:
        authority, slash, path = tail.partition("/")
        head = f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
    if not query:
        return head.partition("#")[0]
    names = [part.partition("=")[0] for part in rest.partition("#")[0].split("&") if part]
    return f"{head}?{'&'.join(f'{name}=…' for name in names)}"


def without_params(url: str, names: frozenset[str]) -> str:
    """``url`` without some parameters of its query: those that carry a key."""
    head, mark, rest = url.partition("?")
    if not mark or not names:
        return url
    query, hash_, fragment = rest.partition("#")
    kept = [part for part in query.split("&") if unquote_plus(part.partition("=")[0]) not in names]
    return head + ("?" + "&".join(kept) if kept else "") + hash_ + fragment


class Origins:
    """A set of origins and patterns. ``declared`` is false if there are none, so that nothing is known."""

    __slots__ = ("_exact", "_known", "_patterns", "declared")

    def __init__(self, exact: frozenset[Origin], patterns: tuple[Origin, ...]) -> None:
        self._exact, self._patterns = exact, patterns
        self._known: dict[Origin, bool] = {}
        self.declared = bool(exact or patterns)

    @classmethod
    def of(cls, name: str, base_url: str, hosts: tuple[str, ...], own: str = "") -> Origins:
        """The declared origins; ``own`` is the account's own base URL (see `Provider.origins`)."""
        listed = [host_pattern(host) for host in hosts] + ([origin_of(base_url)] if base_url else [])
        patterns = tuple(o for o in listed if o[1].startswith("*."))
        exact = frozenset(o for o in listed if not o[1].startswith("*."))
        if not own:
            return cls(exact, patterns)
        mine = origin_of(own)
        if listed and not cls(exact, patterns).holds(*mine):
            raise InvalidInput(
                f"{without_secrets(own)!r} is not among the hosts of provider {name!r}"
                f" ({', '.join(hosts) or base_url}): declare its host, or credentials would go to a stranger"
            )
        return cls(exact | {mine}, ())

    def holds(self, scheme: str, host: str, port: int | None) -> bool:
        """Whether a request to there may carry credentials."""
        origin = (scheme, host.lower(), port or PORTS.get(scheme, 0))
        known = self._known.get(origin)
        if known is None:
            known = origin in self._exact or any(
                origin[0] == s and origin[2] == p and origin[1].endswith(h[1:]) for s, h, p in self._patterns
            )
            if len(self._known) < _MOST_KNOWN:
                self._known[origin] = known
        return known
