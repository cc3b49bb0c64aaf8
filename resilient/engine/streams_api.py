"""`app.streams`: where sync streams stand, and letting them be read anew. `app.sync.streams`: synchronous."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core import resource_key
from resilient.core.errors import InvalidInput
from resilient.core.misfit import explained_calls
from resilient.engine.sessions import CallersSession, Face, Transactions, blocking
from resilient.engine.streams import Stream
from resilient.store import cursors

if TYPE_CHECKING:
    import builtins
    from typing import Any

    from sqlalchemy import Connection

    from resilient.core.sync import CursorInfo
    from resilient.engine.app import Resilient
    from resilient.store.dialect import Dialect


@explained_calls("app.streams")
class Streams:
    """Streams of one app. Raises `BadResourceKey` for what is no key or pattern."""

    def __init__(self, app: Resilient, *, here: bool = False) -> None:
        self._app, self._db = app, Transactions(app, here=here)

    @property
    def sync(self) -> SyncStreams:
        """The same for synchronous programs."""
        return SyncStreams(Streams(self._app, here=True))

    async def list(
        self,
        stream: Stream[Any] | str | None = None,
        pattern: str | None = None,
        *,
        part: str | None = None,
        session: CallersSession = None,
    ) -> builtins.list[CursorInfo]:
        """Where streams stand: all that were ever read, or those of one name, resource pattern and part."""
        return await self._db.read(session, cursors.page, _name(stream), _pattern(pattern), part)

    async def reset(
        self,
        stream: Stream[Any] | str,
        pattern: str | None = None,
        *,
        part: str | None = None,
        reason: str = "reset by hand",
        session: CallersSession = None,
    ) -> int:
        """Let the next pass be a full one; returns how many cursors there were.

        A job in the middle of a pass notices at its next checkpoint, which is refused, and reads the cursor again.
        """
        return await self._db.write(session, _reset, _name(stream), _pattern(pattern), part, reason)

    async def forget(
        self,
        stream: Stream[Any] | str | None = None,
        pattern: str | None = None,
        *,
        part: str | None = None,
        session: CallersSession = None,
    ) -> int:
        """Forget where streams stand, of accounts that are gone for good; returns how many cursors there were.

        Raises `InvalidInput` if neither a stream nor resources are named.
        """
        if stream is None and pattern is None:
            raise InvalidInput("this would forget every stream: name one, or a resource pattern")
        return await self._db.write(session, _forget, _name(stream), _pattern(pattern), part)


class SyncStreams(Face[Streams]):
    """`Streams` for synchronous programs: the same methods, without ``await``."""

    list = blocking(Streams.list)
    reset = blocking(Streams.reset)
    forget = blocking(Streams.forget)


def _name(stream: Stream[Any] | str | None) -> str | None:
    return stream.name if isinstance(stream, Stream) else stream


def _pattern(pattern: str | None) -> str | None:
    return None if pattern is None else resource_key.check_pattern(pattern)


def _reset(c: Connection, d: Dialect, stream: str | None, pattern: str | None, part: str | None, reason: str) -> int:
    found = cursors.page(c, d, stream, pattern, part)
    return cursors.reset(c, d, [(one.resource_key, one.stream, one.part) for one in found], reason)


def _forget(c: Connection, d: Dialect, stream: str | None, pattern: str | None, part: str | None) -> int:
    found = cursors.page(c, d, stream, pattern, part)
    return cursors.forget(c, d, [(one.resource_key, one.stream, one.part) for one in found])
