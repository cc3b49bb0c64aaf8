"""Paginators: each reads an answer and makes the next request. They are facts of a provider, and send nothing.

A page ends a stream only if the answer says so. A missing cursor beside "there is more", a missing list and a
repeated page are errors, because a sync that ends early deletes the records it did not read. The last page may state
where the next pass begins (`PageRead.resume`): a delta link, a sync token.

    paginator.read(request, answer) -> PageRead(items, next, resume)

`Loop` detects pages that repeat in a circle: it keeps one fingerprint and replaces it at every power of two (Brent's
algorithm), so that it needs a few bytes in a stored cursor, however long the stream is.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self
from urllib.parse import SplitResult, parse_qsl, unquote_plus, urlencode, urljoin, urlsplit, urlunsplit

from resilient.core.base.body import pick
from resilient.core.base.bounds import CURSOR
from resilient.core.base.errors import InvalidInput, ResilientError
from resilient.core.base.hosts import PORTS, address, without_secrets
from resilient.core.base.misfit import check_paths, check_word, explained_class, is_whole
from resilient.core.base.numbers import json_text
from resilient.core.base.phrases import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.base.exchange import AnswerFacts

# -- page request -----------------------------------------------------------------------------------------------------
#
# The request for one page, as a value that can be stored and edited.
#
# A sync that is killed goes on at the page it had not finished, so the next page's request is JSON: method,
# URL, the body if it has one, and headers that are no secrets. Credentials are never part of it.

Value = str | int
_NONE: Final[Mapping[str, str]] = {}


class PagingError(ResilientError):
    """An answer does not page as its provider's facts say; going on would lose or repeat records."""


@explained_class
@dataclass(frozen=True, slots=True)
class PageRequest:
    """The request for one page. The ``repr`` shows no URL, body or header.

    ``url``: absolute, or below the account's base URL (`on`); ``body``: JSON, or None for none; ``headers``: none that
    are secret, because they are stored. Raises `InvalidInput`.
    """

    url: str = field(repr=False)
    method: str = "GET"
    body: Any = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE, repr=False)

    def __post_init__(self) -> None:
        if self.body is not None:
            try:
                json_text(self.body)
            except ValueError as error:
                raise InvalidInput(f"the body of {self.method} {without_secrets(self.url)}: {error}") from None
            except TypeError:  # the request says it, when it is sent
                pass

    def on(self, base_url: str) -> Self:
        """The request with an absolute URL: a relative one goes below ``base_url``, also if it begins with a slash."""
        if urlsplit(self.url).netloc:
            return self
        return replace(self, url=f"{base_url.rstrip('/')}/{self.url.lstrip('/')}")

    def at(self, url: str) -> Self:
        """The request for another URL, which may be relative to this one's.

        Raises `PagingError` if it leads to another host: an answer must not send a sync elsewhere. Plain HTTP to the
        same host becomes HTTPS again: servers behind a proxy write it.
        """
        if len(url) > CURSOR.value:
            raise PagingError(
                f"the address of the page after {without_secrets(self.url)} has {len(url):,} characters:"
                f" more than {CURSOR.value:,} are no address"
            )
        try:
            target = urljoin(self.url, url)
            if "://" in target:
                address(target)
        except ValueError:  # also `InvalidInput`: HTTP clients would read different hosts out of it
            shown = one_line(without_secrets(url[:300]))
            raise PagingError(
                f"the next page of {without_secrets(self.url)} is said to be at {shown!r}: another host, or no URL"
            ) from None
        here, there = urlsplit(self.url), urlsplit(target)
        if here.scheme == "https" and there.scheme == "http" and there.port in (None, 80):
            there = there._replace(scheme="https", netloc=there.netloc.removesuffix(":80"))
        if _origin(here) != _origin(there):
            raise PagingError(
                f"the next page of {without_secrets(self.url)} is said to be at"
                f" {without_secrets(target)}, which is another host"
            )
        return replace(self, url=urlunsplit(there))

    def with_query(self, **values: Value | None) -> Self:
        """The request with parameters set, or removed for None; the others stay as they are written."""
        parts = urlsplit(self.url)
        kept = [one for one in parts.query.split("&") if one and unquote_plus(one.partition("=")[0]) not in values]
        added = [urlencode({name: str(value)}) for name, value in values.items() if value is not None]
        return replace(self, url=urlunsplit(parts._replace(query="&".join(kept + added))))

    def query(self, name: str) -> str | None:
        """The value of one parameter."""
        pairs = parse_qsl(urlsplit(self.url).query, keep_blank_values=True)
        return next((value for key, value in pairs if key == name), None)

    def with_body(self, path: str, value: Any) -> Self:
        """The request with one field of its JSON body set, or removed for None; ``path`` as ``variables.after``."""
        body = {} if self.body is None else self.body
        try:
            return replace(self, body=_set(body, path.split("."), value, path))
        except InvalidInput as error:
            raise PagingError(f"the next page cannot be asked for: {error}") from None

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
        """A digest that is the same for the same page, in whatever order its parameters are."""
        parts = urlsplit(self.url)
        query = sorted(parse_qsl(parts.query, keep_blank_values=True, errors="surrogateescape"))
        identity = [self.method, parts.netloc, parts.path, query, self.body, sorted(self.headers.items())]
        return sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]

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


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of an address, whether or not it spells the default port."""
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)


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


# -- paging -----------------------------------------------------------------------------------------------------------


class PageRead(NamedTuple):
    """One page, as read. ``next`` is None on the last page; ``resume``: where the next pass begins."""

    items: list[Any]
    next: PageRequest | None
    resume: str | None = None


class Loop(NamedTuple):
    """What detects pages in a circle. ``kept``: the fingerprint of a request; ``until``: the step that replaces it."""

    kept: str = ""
    steps: int = 0
    until: int = 1
    page: str = ""  # the digest of the last page with items

    def step(self, request: PageRequest, read: PageRead) -> Loop:
        """The loop after one more page. Raises `PagingError` if its request or its items came before."""
        page = _digest(read.items) if read.items else ""
        if page and page == self.page and read.next is not None:
            raise PagingError("two pages in a row hold the same records: the server does not go on")
        fingerprint = request.fingerprint
        if fingerprint == self.kept or (read.next is not None and read.next.fingerprint == fingerprint):
            raise PagingError(f"the pages go round: after {self.steps} the same one is asked for again")
        if self.steps + 1 >= self.until:
            return Loop(fingerprint, self.steps + 1, self.until * 2, page or self.page)
        return Loop(self.kept, self.steps + 1, self.until, page or self.page)


Absent = Literal["error", "empty"]
_HALF: Final = re.compile("[\\ud800-\\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paginator(ABC):
    """What all have in common.

    ``items``: the path of the page's records ("" if the body is the list); ``absent``: whether a page
    without that path is an empty one (Google's) or an error. ``more``: the path of a flag that says whether
    there are further pages; ``done``: of one that says that there are none. ``resume``: the path of the
    cursor for the next pass, told on the last page. ``size``: the parameter that asks for a page's size, and
    ``most``: the largest one, in records. Raises `InvalidInput`.
    """

    items: str = ""
    absent: Absent = "error"
    more: str = ""
    done: str = ""
    resume: str = ""
    size: str = ""
    most: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_word(name, "absent", self.absent, Absent)
        check_paths(name, self, "items", "more", "done", "resume")
        for count in ("most", "page"):
            value = getattr(self, count, None)
            if value is not None and not is_whole(value):
                raise InvalidInput(f"{name}({count}={value!r}): a number of records, from 1")
        if self.more and self.done:
            raise InvalidInput(f"{name}(more={self.more!r}, done={self.done!r}): one flag says whether it goes on")
        self._check()

    def _check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse facts of one's own that make no sense. Raises `InvalidInput`."""

    def _one_of(self, *names: str) -> None:
        """Refuse none and several of the facts that exclude each other. Raises `InvalidInput`."""
        present = [name for name in names if getattr(self, name)]
        if len(present) != 1:
            every = " or ".join(f"{name}=" for name in names)
            raise InvalidInput(f"{type(self).__name__}(): say {every}, not {' and '.join(present) or 'none of them'}")

    def first(self, request: PageRequest) -> PageRequest:
        """The request for the first page: as large as the provider allows, unless the caller said a size."""
        if not self.size or self.most is None or self.size_of(request) is not None:
            return request
        if self._in_body:
            return request.with_body(self.size, self.most)
        return request.with_query(**{self.size: self.most})

    def read(self, request: PageRequest, answer: AnswerFacts) -> PageRead:
        """The page's records and the next request. Raises `PagingError`."""
        items = self.records(answer)
        following = None if self._ends(answer) else self._next(request, answer, items)
        if following is None and self._more(answer):
            raise PagingError(
                f"{self.more or self.done!r} says that there are more pages, but {type(self).__name__} finds"
                " no way there"
            )
        return PageRead(items, following, None if following is not None else cursor_at(answer, self.resume))

    def records(self, answer: AnswerFacts) -> list[Any]:
        """The page's records. Raises `PagingError` if the answer has no list where it should be."""
        values = pick(answer.body, self.items)
        lists = [value for value in values if isinstance(value, list)]
        if lists:
            return [item for one in lists for item in one]
        if answer.status == 204 or (self.absent == "empty" and isinstance(answer.body, dict)):  # noqa: PLR2004 - no content
            return []
        raise PagingError(f"the answer has no list of records at {self.items or 'its top'!r}")

    @abstractmethod
    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:
        """The next request; None on the last page."""

    @property
    def _in_body(self) -> bool:
        """Whether the request says in its body where a page begins."""
        return False

    def size_of(self, request: PageRequest) -> Any:
        """How many records a request asks for; None if it does not say."""
        return request.in_body(self.size) if self._in_body else request.query(self.size)

    def _ends(self, answer: AnswerFacts) -> bool:
        return False in _flags(answer, self.more) or True in _flags(answer, self.done)

    def _more(self, answer: AnswerFacts) -> bool:
        return True in _flags(answer, self.more) or False in _flags(answer, self.done)


def cursor_at(answer: AnswerFacts, path: str, *, least: int = 1) -> str | None:
    """The cursor at ``path``: text that is not empty, or a number from ``least``; None if there is none.

    Raises `PagingError` for anything else.
    """
    none = (None, "", 0) if least else (None, "")
    values = [value for value in pick(answer.body, path) if value not in none] if path else []
    if not values:
        return None
    return checked_cursor(values[0], path)


def checked_cursor(cursor: Any, place: str) -> str:
    """What an answer has at ``place``, as text that a request and a row can carry. Raises `PagingError`."""
    if isinstance(cursor, bool) or not isinstance(cursor, (str, int)):
        raise PagingError(f"{place!r} is {type(cursor).__name__} where a cursor should be")
    if len(text := str(cursor)) > CURSOR.value:
        raise PagingError(f"{place!r} has {len(text):,} characters: more than {CURSOR.value:,} are no cursor")
    if _HALF.search(text):
        raise PagingError(f"{place!r} holds half a character where a cursor should be, and no request can carry it")
    return text


def _flags(answer: AnswerFacts, path: str) -> list[bool]:
    return [value for value in pick(answer.body, path) if isinstance(value, bool)] if path else []


def _digest(items: list[Any]) -> str:
    return sha256(json.dumps(items, sort_keys=True, default=str).encode()).hexdigest()[:16]
