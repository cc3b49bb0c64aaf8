"""``{placeholders}`` in a provider's addresses and headers, filled with the values of one account.

A value must not change where a URL leads: in an address it is one label, host name or path segment, or, where
the placeholder begins the URL, a whole origin (``https://acme.my.example.com``). Curly brackets, slashes,
``@`` and the like in a value are refused, so that a shop called ``evil.test/`` gets no token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import InvalidInput
from resilient.core.base.hosts import origin_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:-]*")
_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9._:\[\]-]+")


def names_in(*texts: str) -> frozenset[str]:
    """The placeholders in ``texts``."""
    return frozenset(name for text in texts for name in _PLACEHOLDER.findall(text))


def check_placeholders(text: str) -> None:
    """Refuse braces that are no ``{placeholder}``: they would be sent as they are. Raises `InvalidInput`."""
    if "{" in (rest := _PLACEHOLDER.sub("", text)) or "}" in rest:
        raise InvalidInput(
            f"{text!r}: a placeholder is a name of letters, digits and _ in braces, such as {{account_id}}"
        )


def names_a_host(template: str) -> bool:
    """Whether the host of an address depends on an account's values."""
    authority = (template.partition("://")[2] or template).partition("/")[0]
    return _PLACEHOLDER.search(authority) is not None


def fill_url(template: str, values: Mapping[str, str]) -> str:
    """An address with its placeholders filled, as far as ``values`` has them. Raises `InvalidInput`."""
    return _PLACEHOLDER.sub(lambda match: _part(match, template, values), template)


def fill_header(template: str, values: Mapping[str, str]) -> str | None:
    """A header's value; None if ``values`` lack one of its placeholders."""
    if any(name not in values for name in names_in(template)):
        return None
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def at_origin(url: str, origin: str) -> str:
    """An address on another origin, its path kept; "" stays "". Raises `InvalidInput`."""
    origin_of(origin)
    return url and origin.rstrip("/") + url.removeprefix(prefix_of(url))


def prefix_of(url: str) -> str:
    """Scheme and host of an address, as they are written, with their placeholders."""
    scheme, slashes, rest = url.partition("://")
    host = (rest if slashes else url).partition("/")[0]
    return f"{scheme}://{host}" if slashes else host


def _part(match: re.Match[str], template: str, values: Mapping[str, str]) -> str:
    value = values.get(match[1])
    if value is None:
        return match[0]
    if match.start() == 0 and _ORIGIN.fullmatch(value.rstrip("/")):
        origin_of(value)
        return value.rstrip("/")
    if match.start() == 0 or not _PART.fullmatch(value) or ".." in value:
        raise InvalidInput(
            f"{value!r} cannot be the {match[1]} of {template}: give one name of letters, digits and ._~-"
            + (", or a whole origin such as https://acme.example.com" if match.start() == 0 else "")
        )
    return value
