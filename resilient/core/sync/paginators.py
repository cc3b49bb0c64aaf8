"""The ways in which APIs page, each as facts: where the next page is named, and how it is asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.body import pick
from resilient.core.base.bounds import STRUCTURED_FIELD, whole_number
from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import check_braces, check_paths, check_whole, explained_class, in_small_letters
from resilient.core.sync.paging import PageRequest, Paginator, PagingError, Value, checked_cursor, cursor_at

if TYPE_CHECKING:
    from resilient.core.base.exchange import AnswerFacts

_LINK: Final = re.compile(  # the words of a Link header; a quoted text may lack its end
    r'<([^<>]*)>|"((?:[^"\\]|\\.)*)(?:"|\\?\Z)|([;,=])|([^\s;,="<>]+)'
)
_DEEPEST: Final = 6  # levels at which a pageInfo is looked for


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class OnePage(Paginator):
    """All records at once."""

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> None:
        """There is no other."""


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHeader(Paginator):
    """``Link: <...>; rel="next"`` (RFC 8288)."""

    rel: str = "next"

    def _check(self) -> None:
        """See `Paginator`."""
        self._one_of("rel")

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:  # noqa: ARG002
        header = answer.headers.get("link", "")
        target = links(header).get(self.rel)
        if target is None and len(header) > STRUCTURED_FIELD.value:
            raise PagingError(
                f"the Link header is longer than {STRUCTURED_FIELD.value} characters: the rest is not read"
            )
        return None if target is None else request.at(target)


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class NextUrl(Paginator):
    """The next page's whole URL stands in the body, at ``url``."""

    url: str

    def _check(self) -> None:
        """See `Paginator`."""
        self._one_of("url")
        check_paths("NextUrl", self, "url")

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:  # noqa: ARG002
        target = cursor_at(answer, self.url)
        return None if target is None else request.at(target)


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class NextCursor(Paginator):
    """The body (``cursor``) or a ``header`` holds a cursor, which goes into ``query`` or into ``body``.

    ``path``: the pages after the first have a path of their own, such as Dropbox's ``.../continue``, and
    with ``alone`` are asked with nothing but the cursor.
    """

    cursor: str = ""
    header: str = ""
    query: str = ""
    body: str = ""
    path: str = ""
    alone: bool = False

    def _check(self) -> None:
        """See `Paginator`."""
        self._one_of("cursor", "header")
        self._one_of("query", "body")
        check_paths("NextCursor", self, "cursor")
        in_small_letters(self, "header")

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:  # noqa: ARG002
        cursor = _in_header(answer, self.header) if self.header else cursor_at(answer, self.cursor)
        return self.from_cursor(request, cursor) if cursor else None

    @property
    def _in_body(self) -> bool:
        """See `Paginator`."""
        return bool(self.body)

    def from_cursor(self, request: PageRequest, cursor: str) -> PageRequest:
        """The request that goes on at ``cursor``."""
        if self.path and not request.url.partition("?")[0].endswith(self.path):
            request = request.at(request.url.partition("?")[0].rstrip("/") + self.path)
        if self.query:
            if self.alone:
                request = request.at(request.url.partition("?")[0])
            return request.with_query(**{self.query: cursor})
        if self.alone:
            request = PageRequest(request.url, request.method, {}, request.headers)
        return request.with_body(self.body, cursor)


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class LastKey(Paginator):
    """The next page begins after the last record: its ``key`` goes into ``query``.

    Without ``more`` a page that is not full is the last one; ``page``: how many a full one has, if the
    request does not say it in ``size``.
    """

    key: str = "id"
    query: str = "starting_after"
    page: int | None = None

    def _check(self) -> None:
        """See `Paginator`."""
        self._one_of("key")
        self._one_of("query")
        check_paths("LastKey", self, "key")

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:
        if not items or (not self._more(answer) and len(items) < _full(self, request, self.page)):
            return None
        keys = pick(items[-1], self.key)
        if not keys or not isinstance(keys[0], (str, int)):
            raise PagingError(f"the last record has no {self.key!r}, after which the next page begins")
        return request.with_query(**{self.query: checked_cursor(keys[0], self.key)})


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class PageNumber(Paginator):
    """Pages are numbered in ``query``, from ``start``.

    The last one is known by ``pages`` (the path of how many there are) or ``header`` (the next number), else
    by a page that is not full: of ``page`` records, or as many as ``size`` asks for.
    """

    query: str = "page"
    start: int = 1
    pages: str = ""
    header: str = ""
    page: int | None = None

    def _check(self) -> None:
        """See `Paginator`."""
        self._one_of("query")
        if self.pages and self.header:
            self._one_of("pages", "header")
        check_paths("PageNumber", self, "pages")
        check_whole("PageNumber", "start", self.start, least=0)
        in_small_letters(self, "header")

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:
        if self.header:
            number = _in_header(answer, self.header)
            return request.with_query(**{self.query: number}) if number else None
        here = _number(request.query(self.query), self.start)
        pages = [n for n in pick(answer.body, self.pages) if isinstance(n, int)] if self.pages else []
        last = here - self.start + 1 >= pages[0] if pages else not items
        if last or (not pages and not self._more(answer) and len(items) < _full(self, request, self.page)):
            return None
        return request.with_query(**{self.query: here + 1})


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Offset(Paginator):
    """The next page begins at the number of records read so far, in ``query`` or in the ``body``.

    ``start``: the offset of the first; ``total``: the path of how many there are; ``page``: how many a full page has,
    if the request does not say it in ``size``. ``clause``: the offset stands in a query language's text, as
    ``STARTPOSITION {offset}``; ``query`` is the parameter with that text.
    """

    query: str = "offset"
    body: str = ""
    start: int = 0
    total: str = ""
    clause: str = ""
    page: int | None = None

    def _check(self) -> None:
        """See `Paginator`."""
        if self.clause and self.body:
            self._one_of("clause", "body")
        if not self.body:
            self._one_of("query")
        check_braces("Offset", "clause", self.clause, ("offset",))
        if self.clause and "{offset}" not in self.clause:
            raise InvalidInput(f"Offset(clause={self.clause!r}) has no place for the {{offset}}")
        check_paths("Offset", self, "total")
        check_whole("Offset", "start", self.start, least=0)

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:
        totals = [n for n in pick(answer.body, self.total) if isinstance(n, int)] if self.total else []
        at = self._here(request) + len(items)
        if not items or (totals and at - self.start >= totals[0]):
            return None
        if not totals and not self._more(answer) and len(items) < _full(self, request, self.page):
            return None
        if self.clause:
            return request.with_query(**{self.query: self._with_clause(request, at)})
        return request.with_body(self.body, at) if self.body else request.with_query(**{self.query: at})

    @property
    def _in_body(self) -> bool:
        """See `Paginator`."""
        return bool(self.body)

    def _here(self, request: PageRequest) -> int:
        if self.clause:
            match = self._pattern().search(request.query(self.query) or "")
            return _number(match[1] if match else None, self.start)
        offset = request.in_body(self.body) if self.body else request.query(self.query)
        return _number(offset, self.start)

    def _with_clause(self, request: PageRequest, at: int) -> str:
        text, clause = request.query(self.query) or "", self.clause.format(offset=at)
        pattern = self._pattern()
        return pattern.sub(clause, text) if pattern.search(text) else f"{text} {clause}"

    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.clause).replace(re.escape("{offset}"), "([0-9]+)"), re.IGNORECASE)


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class GraphQLPages(Paginator):
    """``pageInfo { hasNextPage endCursor }``; the cursor goes into ``variable``.

    ``connection``: its path below ``data``; without it the answer must have exactly one. Records are its
    ``nodes``, or the ``node`` of its ``edges``.
    """

    connection: str = ""
    variable: str = "after"

    def _check(self) -> None:
        """See `Paginator`."""
        self._one_of("variable")
        check_paths("GraphQLPages", self, "connection")

    def _next(self, request: PageRequest, answer: AnswerFacts, items: list[Any]) -> PageRequest | None:  # noqa: ARG002
        info = self._connection(answer)["pageInfo"]
        if info.get("hasNextPage") is False:
            return None
        cursor = info.get("endCursor")
        if not isinstance(cursor, str) or not cursor:
            raise PagingError("pageInfo has a next page but no endCursor: ask for both in the query")
        return request.with_body(f"variables.{self.variable}", checked_cursor(cursor, "endCursor"))

    def records(self, answer: AnswerFacts) -> list[Any]:
        """The connection's records."""
        connection = self._connection(answer)
        if isinstance(nodes := connection.get("nodes"), list):
            return nodes
        if isinstance(edges := connection.get("edges"), list):
            return [edge.get("node") for edge in edges if isinstance(edge, dict)]
        raise PagingError("the connection has neither nodes nor edges: ask for one of them in the query")

    def _connection(self, answer: AnswerFacts) -> dict[str, Any]:
        if self.connection:
            connections = [v for v in pick(answer.body, f"data.{self.connection}") if _pages(v)]
        else:
            connections = list(_connections(answer.body.get("data"))) if isinstance(answer.body, dict) else []
        if len(connections) != 1:
            raise PagingError(
                f"the answer has {len(connections)} connections with a pageInfo"
                f"{f' at {self.connection}' if self.connection else ': say connection='}"
            )
        one: dict[str, Any] = connections[0]
        return one


def links(header: str) -> dict[str, str]:
    """The targets of a Link header by relation (RFC 8288, 3); of several the first counts."""
    targets: dict[str, str] = {}
    target = name = ""
    before = ""  # the mark in front
    for match in _LINK.finditer(header[: STRUCTURED_FIELD.value]):
        if match[3]:
            before = match[3]
            target = "" if before == "," else target
        elif match[1] is not None:
            target, name = match[1], ""
        elif before == ";":
            name, before = (match[4] or "").lower(), ""
        elif before == "=" and name == "rel" and target:
            for rel in (match[2] or match[4] or "").lower().split():
                targets.setdefault(rel, target)
            name = ""
    return targets


def _full(paginator: Paginator, request: PageRequest, page: int | None) -> int:
    """How many records a full page has, as far as it is known; 1 asks until a page is empty.

    Never more than the provider gives: a request for more would make each of its pages the last one.
    """
    size = _number(paginator.size_of(request) if paginator.size else None, page or 1)
    return size if paginator.most is None else min(size, paginator.most)


def _number(value: Value | None, default: int) -> int:
    if isinstance(value, int):
        return value
    number = whole_number(value or "")
    return default if number is None else number


def _in_header(answer: AnswerFacts, name: str) -> str:
    """The cursor in a header; "" if there is none. Raises `PagingError`."""
    return checked_cursor(answer.headers.get(name, "").strip(), name)


def _pages(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("pageInfo"), dict)


def _connections(value: Any, depth: int = 0) -> list[dict[str, Any]]:
    """Every connection, the outermost only: a nested one is paged by a query of its own."""
    if not isinstance(value, dict) or depth > _DEEPEST:
        return []
    if _pages(value):
        return [value]
    return [connection for child in value.values() for connection in _connections(child, depth + 1)]
