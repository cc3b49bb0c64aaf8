"""The request for one page, as a value that can be stored and edited.

A sync that is killed goes on at the page it had not finished, so the next page's request is JSON: method,
URL, the body if it has one, and headers that are no secrets. Credentials are never part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

from resilient.core.errors import InvalidInput, ResilientError
from resilient.core.hosts import address, without_secrets
from resilient.core.misfit import explained_class
from resilient.core.plain_text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = str | int
_NONE: Final[Mapping[str, str]] = {}


class PagingError(ResilientError):
    """An answer does not page as its provider's facts say; going on would lose or repeat records."""


@explained_class
@dataclass(frozen=True, slots=True)
class PageRequest:
    """``url``: absolute when it is sent (see `on`); ``body``: JSON. The ``repr`` shows neither."""

    url: str = field(repr=False)
    method: str = "GET"
    body: Any = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE, repr=False)

    def on(self, base_url: str) -> Self:
        """With an absolute URL: a relative one below ``base_url``, also if it begins with a slash."""
        if urlsplit(self.url).netloc:
            return self
        return replace(self, url=f"{base_url.rstrip('/')}/{self.url.lstrip('/')}")

    def at(self, url: str) -> Self:
        """The request for another URL, which may be relative to this one's.

        Raises `PagingError` if it leads to another host: what an answer says must not send a sync anywhere.
        Plain HTTP to the same host is what a server behind a proxy writes: HTTPS stays.
        """
        try:
            target = urljoin(self.url, url)
            if "://" in target:
                address(target)
        except ValueError:  # also `InvalidInput`: what one client reads as this host another reads as that
            said = one_line(without_secrets(url[:300]))
            raise PagingError(
                f"the next page of {without_secrets(self.url)} is said to be at {said!r}: another host, or no URL"
            ) from None
        here, there = urlsplit(self.url), urlsplit(target)
        if here.scheme == "https" and there.scheme == "http" and there.port in (None, 80):
            there = there._replace(scheme="https", netloc=there.netloc.removesuffix(":80"))
        if (here.scheme, here.netloc.lower()) != (there.scheme, there.netloc.lower()):
            raise PagingError(
                f"the next page of {without_secrets(self.url)} is said to be at"
                f" {without_secrets(target)}, which is another host"
            )
        return replace(self, url=urlunsplit(there))

    def with_query(self, **values: Value | None) -> Self:
        """With parameters set, or removed for None; the others keep their place and spelling of value."""
        parts = urlsplit(self.url)
        kept = [pair for pair in parse_qsl(parts.query, keep_blank_values=True) if pair[0] not in values]
        added = [(name, str(value)) for name, value in values.items() if value is not None]
        return replace(self, url=urlunsplit(parts._replace(query=urlencode(kept + added))))

    def query(self, name: str) -> str | None:
        """The value of one parameter."""
        pairs = parse_qsl(urlsplit(self.url).query, keep_blank_values=True)
        return next((value for key, value in pairs if key == name), None)

    def with_body(self, path: str, value: Any) -> Self:
        """With one field of the JSON body set, or removed for None; ``path`` as ``variables.after``."""
        body = {} if self.body is None else self.body
        return replace(self, body=_set(body, path.split("."), value, path))

    def in_body(self, path: str) -> Any:
        """The value of one field of the body; None if it is not there."""
        value = self.body
        for name in path.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(name)
        return value

    @property
    def fingerprint(self) -> str:
        """The same for the same page, wherever its parameters stand."""
        parts = urlsplit(self.url)
        query = sorted(parse_qsl(parts.query, keep_blank_values=True))
        told = [self.method, parts.netloc, parts.path, query, self.body, sorted(self.headers.items())]
        return sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        doc: dict[str, Any] = {"url": self.url}
        if self.method != "GET":
            doc["method"] = self.method
        if self.body is not None:
            doc["body"] = self.body
        if self.headers:
            doc["headers"] = dict(self.headers)
        return doc

    @classmethod
    def from_json(cls, doc: Any) -> Self:
        """Read what `to_json` wrote. Raises `InvalidInput`."""
        if not isinstance(doc, dict) or not isinstance(doc.get("url"), str):
            raise InvalidInput("the stored page is none: reset the stream, so that it starts a full pass")
        return cls(doc["url"], doc.get("method", "GET"), doc.get("body"), doc.get("headers", _NONE))


def _set(body: Any, names: list[str], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise PagingError(f"the request's body has no place for {path!r}: it must be a JSON object")
    head, *rest = names
    changed = dict(body)
    if rest:
        changed[head] = _set(changed.get(head) or {}, rest, value, path)
    elif value is None:
        changed.pop(head, None)
    else:
        changed[head] = value
    return changed
