"""Paginators: read an answer, make the next request. They never send, and what they are is facts.

A page ends a stream only if the answer says so: a missing cursor beside "there is more", a list that is not
there, a page that came before are errors, because a sync that ends early deletes what it did not see. The
last page may tell where the next pass begins (`PageRead.resume`): a delta link, a sync token.

    paginator.read(request, answer) -> PageRead(items, next, resume)

`Loop` notices that pages go round: it keeps one fingerprint and renews it at every power of two (Brent's
algorithm), so that it is a few bytes in a stored cursor however long the stream is.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from resilient.core.body import pick
from resilient.core.bounds import CURSOR
from resilient.core.errors import InvalidInput
from resilient.core.page_request import PageRequest, PagingError
from resilient.core.words import check_paths, check_word

if TYPE_CHECKING:
    from resilient.core.exchange import AnswerFacts


class PageRead(NamedTuple):
    """What one answer says. ``next`` is None on the last page; ``resume``: where the next pass begins."""

    items: list[Any]
    next: PageRequest | None
    resume: str | None = None


class Loop(NamedTuple):
    """What was seen of a stream, to notice that it goes round."""

    kept: str = ""
    steps: int = 0
    until: int = 1
    page: str = ""  # the digest of the last page with items

    def step(self, request: PageRequest, read: PageRead) -> Loop:
        """Take in one page. Raises `PagingError` if its request or its items came before."""
        page = _digest(read.items) if read.items else ""
        if page and page == self.page and read.next is not None:
            raise PagingError("two pages in a row hold the same records: the server does not go on")
        asked = request.fingerprint
        if asked == self.kept or (read.next is not None and read.next.fingerprint == asked):
            raise PagingError(f"the pages go round: after {self.steps} the same one is asked for again")
        if self.steps + 1 >= self.until:
            return Loop(asked, self.steps + 1, self.until * 2, page or self.page)
        return Loop(self.kept, self.steps + 1, self.until, page or self.page)


Absent = Literal["error", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paginator(ABC):
    """What all have in common.

    ``items``: the path of the page's records ("" if the body is the list); ``absent``: whether a page
    without that path is an empty one (Google's) or an error. ``more``: the path of a flag that says whether
    there are further pages; ``done``: of one that says that there are none. ``resume``: the path of the
    cursor for the next pass, told on the last page. ``size``: the parameter that asks for a page's size, and
    ``most``: the largest one.
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
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidInput(f"{name}({count}={value!r}): a number of records, from 1")
        if self.more and self.done:
            raise InvalidInput(f"{name}(more={self.more!r}, done={self.done!r}): one flag says whether it goes on")
        self._check()

    def _check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse facts of one's own that make no sense. Raises `InvalidInput`."""

    def _one_of(self, *names: str) -> None:
        """Refuse none and several of the facts that exclude each other. Raises `InvalidInput`."""
        given = [name for name in names if getattr(self, name)]
        if len(given) != 1:
            every = " or ".join(f"{name}=" for name in names)
            raise InvalidInput(f"{type(self).__name__}(): say {every}, not {' and '.join(given) or 'none of them'}")

    def first(self, request: PageRequest) -> PageRequest:
        """The request for the first page: as large as the provider allows, unless the caller said a size."""
        if not self.size or self.most is None or self._size_of(request) is not None:
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
        found = pick(answer.body, self.items)
        lists = [value for value in found if isinstance(value, list)]
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

    def _size_of(self, request: PageRequest) -> Any:
        return request.in_body(self.size) if self._in_body else request.query(self.size)

    def _ends(self, answer: AnswerFacts) -> bool:
        return False in _flags(answer, self.more) or True in _flags(answer, self.done)

    def _more(self, answer: AnswerFacts) -> bool:
        return True in _flags(answer, self.more) or False in _flags(answer, self.done)


def cursor_at(answer: AnswerFacts, path: str) -> str | None:
    """The cursor at ``path``: text that is not empty, or a number from 1. Raises `PagingError` for anything else."""
    found = [value for value in pick(answer.body, path) if value not in (None, "", 0)] if path else []
    if not found:
        return None
    cursor = found[0]
    if isinstance(cursor, bool) or not isinstance(cursor, (str, int)) or len(str(cursor)) > CURSOR.value:
        raise PagingError(f"{path!r} is {type(cursor).__name__} where a cursor should be")
    return str(cursor)


def _flags(answer: AnswerFacts, path: str) -> list[bool]:
    return [value for value in pick(answer.body, path) if isinstance(value, bool)] if path else []


def _digest(items: list[Any]) -> str:
    return sha256(json.dumps(items, sort_keys=True, default=str).encode()).hexdigest()[:16]
