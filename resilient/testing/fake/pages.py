"""Lists of records behind one path, in pages as the provider's paginator expects them, with changes and deletions.

Every cursor is ``g<generation>-<since>-<start>``, so the generation shows which are too old. A paginator
that knows the last page by its not being full gets pages as large as it asks for; others at most ``size`` records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode

from resilient.core.base.body import pick
from resilient.core.base.errors import InvalidInput
from resilient.core.sync.incremental import instant, shifted
from resilient.core.sync.paginators import (
    GraphQLPages,
    LastKey,
    LinkHeader,
    NextCursor,
    NextUrl,
    Offset,
    OnePage,
    PageNumber,
)
from resilient.core.sync.paging import PageRequest
from resilient.testing.fake.answers import plain, put
from resilient.testing.fake.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.sync.incremental import Incremental
    from resilient.core.sync.paging import Paginator
    from resilient.testing.fake.server import Seen

_CURSOR: Final = re.compile(r"g(\d+)-(\d*)-(\d+)")
_LINKED: Final = "cursor"  # the parameter of links of our own making
_FULL: Final = (LastKey, PageNumber, Offset)


class Place(NamedTuple):
    """Where a page begins: which generation of cursors, changes since which version (None: all), at which record."""

    generation: int
    since: int | None
    start: int

    def __str__(self) -> str:
        return f"g{self.generation}-{'' if self.since is None else self.since}-{self.start}"


@dataclass(slots=True, eq=False)
class Records:
    """One list. Change it with `put` and `delete`; ``loops``: its first page leads to itself.

    Deleted records are in the changes if the feed marks them (``deletions="marked"``), and never in the whole list.
    """

    path: str
    paginator: Paginator
    incremental: Incremental | None = None
    size: int = 100
    key: str = "id"
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    loops: bool = False
    generation: int = 1
    version: int = 0
    rows: dict[str, tuple[int, Any]] = field(default_factory=dict)  # by key: version and record
    gone: dict[str, tuple[int, Any]] = field(default_factory=dict)  # by key: since which version, and what says so

    def put(self, *items: Any) -> None:
        """Add records, or change those with the same key."""
        for item in items:
            self.version += 1
            name = self._key_of(item)
            self.gone.pop(name, None)
            self.rows[name] = (self.version, item)

    def delete(self, *keys: Any) -> None:
        """Delete records. Raises `InvalidInput` if the feed is to mark them, but no change that it shows can do so."""
        for name in map(str, keys):
            mark = self._mark(name)
            self.version += 1
            self.rows.pop(name, None)
            self.gone[name] = self.version, mark

    def refuse_cursors(self) -> None:
        """Refuse, from now on, every cursor issued so far."""
        self.generation += 1

    @property
    def token(self) -> str:
        """The cursor where the next incremental pass begins, for APIs that give it before a pass."""
        return str(Place(self.generation, self.version, 0))

    def covers(self, path: str) -> bool:
        """Whether a path is of this list."""
        further = self.paginator.path if isinstance(self.paginator, NextCursor) else ""
        return path == self.path or (bool(further) and path == self.path + further)

    def answer(self, call: Seen, origin: str) -> Reply | None:
        """One page; None for a cursor that is refused."""
        request = PageRequest(f"{origin}{call.path}?{urlencode(call.query)}", call.method, call.json)
        if self._unchanged(call):
            return Reply(304)
        place = self._place(request)
        if place is None:
            return None
        items = self._since(request, call, place)
        page = items[: self._page(request)] if self.loops else items[place.start : place.start + self._page(request)]
        end = place.start + len(page)
        following = Place(self.generation, place.since, 0 if self.loops else end)
        last = not (self.loops or end < len(items))
        return self._written(request, page, None if last else following, len(items), place)

    # -- what is asked for -----------------------------------------------------------------------------------

    def _key_of(self, item: Any) -> str:
        values = pick(item, self.key)
        return str(values[0]) if values else f"#{self.version}"

    def _unchanged(self, call: Seen) -> bool:
        how = self.incremental
        return how is not None and how.style == "conditional" and call.headers.get(how.header.lower()) == self._tag

    @property
    def _tag(self) -> str:
        return f'"{self.version}"'

    def _place(self, request: PageRequest) -> Place | None:
        """Where the page begins; None if the request's cursor is too old or was never issued."""
        start = 0
        if isinstance(self.paginator, _FULL):
            start = self._numbered(request)
        for name in self._cursors(request):
            match = _CURSOR.fullmatch(name)
            if match is None or int(match[1]) != self.generation:
                return None
            return Place(self.generation, int(match[2]) if match[2] else None, int(match[3]) or start)
        return Place(self.generation, None, start)

    def _cursors(self, request: PageRequest) -> list[str]:
        texts = [request.query(_LINKED)]
        made = self.incremental if self.incremental and self.incremental.style in ("token", "link") else None
        for one in (self.paginator if isinstance(self.paginator, NextCursor) else None, made):
            if one is not None:
                texts += [request.query(one.query) if one.query else None]
                texts += [request.in_body(one.body) if one.body else None]
        if isinstance(self.paginator, GraphQLPages):
            texts.append(request.in_body(f"variables.{self.paginator.variable}"))
        return [str(text) for text in texts if text]

    def _numbered(self, request: PageRequest) -> int:
        p = self.paginator
        if isinstance(p, LastKey):
            after, keys = request.query(p.query), [str((pick(item, p.key) or [""])[0]) for item in self._all()]
            return keys.index(after) + 1 if after in keys else 0
        if isinstance(p, PageNumber):
            return max(0, _int(request.query(p.query), p.start) - p.start) * self._page(request)
        assert isinstance(p, Offset)  # noqa: S101 - the last of three
        if p.clause:
            pattern = re.escape(p.clause).replace(re.escape("{offset}"), "([0-9]+)")
            match = re.search(pattern, request.query(p.query) or "", re.IGNORECASE)
            return (int(match[1]) if match else p.start) - p.start
        return _int(request.in_body(p.body) if p.body else request.query(p.query), p.start) - p.start

    def _page(self, request: PageRequest) -> int:
        p = self.paginator
        if isinstance(p, OnePage):
            return len(self.rows) + len(self.gone) + 1
        size = (request.in_body(p.size) or request.query(p.size)) if p.size else None
        if size and isinstance(p, _FULL) and not (p.more or getattr(p, "total", "") or getattr(p, "pages", "")):
            return _int(size, self.size)
        return min(_int(size, self.size), self.size)

    def _all(self) -> list[Any]:
        return [item for _, item in self.rows.values()]

    def _since(self, request: PageRequest, call: Seen, place: Place) -> list[Any]:
        """The records of this pass."""
        how = self.incremental
        if place.since is not None:
            return self._changed(place.since)
        if how is None or how.style not in ("filter", "key"):
            return self._all()
        cursor = request.query(how.query) if how.query else request.in_body(how.body) if how.body else None
        cursor = cursor or (call.headers.get(how.header.lower()) if how.header else None)
        pattern = re.escape(how.form).replace(re.escape("{cursor}"), "(.+?)")
        match = re.search(f"{pattern}$", str(cursor)) if cursor else None
        if match is None:
            return self._all()
        least, after = match[1], how.style == "key"
        return [item for item in self._changed(0) if _least(item, how.field, least, after=after)]

    def _changed(self, since: int) -> list[Any]:
        """What changed since a version, and then what is gone."""
        changes = [item for version, item in self.rows.values() if version > since]
        return changes + [mark for version, mark in self.gone.values() if version > since and mark is not None]

    def _mark(self, key: str) -> Any:
        """A deleted record, as the feed shows it; None if it does not."""
        how = self.incremental
        if how is None or how.deletions != "marked":
            return None
        name, _, value = how.deleted.partition("=")
        made = put(put({}, self.key, key), name, plain(value) if value else True)
        if how.deleted_key:
            made = put(made, how.deleted_key.split()[0], key)
        return put(made, how.field, self._later(key, how.field)) if how.style in ("filter", "key") else made

    def _later(self, key: str, path: str) -> Any:
        """A time that is not before any record's, spelled as the record's that is deleted, or as the last one's."""
        rows = [self.rows[key][1]] if key in self.rows else self._all()[-1:]
        spelled = next(iter(value for row in rows for value in pick(row, path)[:1]), self.now().isoformat())
        at = instant(str(spelled))
        if at is None or self.incremental is None or self.incremental.style == "key":
            raise InvalidInput(
                f"{self.path}: changes are asked for by {path!r}, which is no time here, so that none can tell of a"
                " deletion: leave incremental= out, and the record is missing in the next full pass"
            )
        instants = [instant(str(value)) for row in self._all() for value in pick(row, path)[:1]]
        text = shifted(str(spelled), max(self.now().timestamp(), *(one or 0.0 for one in instants), at) - at)
        return text if isinstance(spelled, str) else type(spelled)(text)

    # -- what is answered ------------------------------------------------------------------------------------

    def _written(
        self, request: PageRequest, page: list[Any], following: Place | None, total: int, place: Place
    ) -> Reply:
        p, reply = self.paginator, Reply()
        if isinstance(p, GraphQLPages):
            info = {"hasNextPage": following is not None, "endCursor": None if following is None else str(following)}
            reply.body = put({}, f"data.{p.connection or 'records'}", {"nodes": page, "pageInfo": info})
            return reply
        body: Any = put({}, p.items, page)
        if p.more:
            body = put(body, p.more, following is not None)
        if p.done:
            body = put(body, p.done, following is None)
        if following is None:
            body = self._ended(body)
        elif (how := self.incremental) is not None and how.source == "every_page" and how.cursor:
            body = put(body, how.cursor, str(following))
        reply.body = self._pointed(request, body, following, reply.headers, total, place)
        if self.incremental is not None and self.incremental.style == "conditional":
            reply.headers["etag"] = self._tag
        return reply

    def _ended(self, body: Any) -> Any:
        """The body of the last page, with the cursor of the next pass."""
        how, p = self.incremental, self.paginator
        paths = [p.resume]
        if how is not None and how.style in ("token", "link") and how.source in ("last_page", "every_page"):
            paths.append(how.cursor)
        linked = isinstance(p, NextUrl) or (how is not None and how.style == "link")
        for path in dict.fromkeys(paths):
            if path:
                body = put(body, path, f"{self.path}?{urlencode({_LINKED: self.token})}" if linked else self.token)
        return body

    def _pointed(
        self,
        request: PageRequest,
        body: Any,
        following: Place | None,
        headers: dict[str, str],
        total: int,
        place: Place,
    ) -> Any:
        p = self.paginator
        if isinstance(p, Offset) and p.total:
            return put(body, p.total, total)
        if isinstance(p, PageNumber):
            if p.pages:
                body = put(body, p.pages, -(-total // self._page(request)))
            if p.header:
                here = place.start // self._page(request) + p.start
                headers[p.header] = "" if following is None else str(here + 1)
            return body
        if following is None:
            return body
        link = request.with_query(**{_LINKED: str(following)}).url
        if isinstance(p, LinkHeader):
            headers["link"] = f'<{link}>; rel="{p.rel}"'
        elif isinstance(p, NextUrl):
            body = put(body, p.url, link)
        elif isinstance(p, NextCursor) and p.header:
            headers[p.header] = str(following)
        elif isinstance(p, NextCursor):
            body = put(body, p.cursor, str(following))
        return body


def _int(text: Any, default: int) -> int:
    return int(text) if text is not None and str(text).isdigit() else default


def _least(item: Any, path: str, least: str, *, after: bool) -> bool:
    values = pick(item, path)
    if not values:
        return True
    value = values[0]
    try:
        here, border = (float(value), float(least))
    except (TypeError, ValueError):
        return str(value) > least if after else str(value) >= least
    return here > border if after else here >= border
