"""Rounds: several statements in one round trip to PostgreSQL, through libpq's pipeline mode.

What a transaction costs is mostly its round trips: a claim made eight of them, each of which wakes two processes. A
round has any number of statements; the server runs them one after the other, each with a snapshot of its own, and
skips what follows one that fails. If the connection breaks in the middle, the round has failed; whether a COMMIT in it
was done is as unknown as with any COMMIT whose answer was lost.

Nothing here needs the next transaction to have the same session, so a pooler may stand in between that gives each
transaction another one: settings are those of the transaction, and with ``prepare_threshold=none`` nothing is
prepared. Else a statement is prepared when it is executed for the second time, in the same round.

psycopg's own pipeline mode has a cursor for each statement, which costs as much as the statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store.db.types import Rows, shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LINE: Final = "resilient.line"
_CANCEL: Final = 5.0  # seconds in which a statement that was cancelled has to end
_CANCELS: Final = 5  # a server ignores a cancel that comes while it reads the next message of a round
_SIGNALS: Final = 0.1  # seconds between two looks at signals, for synchronous callers
_MOST: Final = 1000  # statements that a connection prepares
_SYNC, _ERROR, _ABORTED, _TUPLES = 10, 7, 11, 2  # of libpq's ExecStatusType
_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)


class Query(NamedTuple):
    """One statement as each way to the driver takes it."""

    named: str  # psycopg's cursors: %(name)s
    has_params: bool  # else a % is a %
    numbered: bytes = b""  # libpq: $1
    names: tuple[str, ...] = ()  # of $1, $2, ...
    is_command: bool = False  # COMMIT and the like: nothing to plan, so nothing to prepare


@lru_cache(maxsize=1)
def is_supported() -> bool:
    """Whether this libpq has pipelines (14 and newer)."""
    import psycopg  # noqa: PLC0415 - the extra may be missing, and then nobody comes here

    return bool(psycopg.Pipeline.is_supported())


def line_of(driver: Any, info: dict[Any, Any]) -> Line:
    """The `Line` of a connection; ``info`` is the connection's in its pool."""
    line: Line | None = info.get(_LINE)
    if line is None or line.driver is not driver:
        line = info[_LINE] = Line(driver)
    return line


class Line:
    """What is kept of one connection of psycopg's: the adapters of its parameters, and its prepared statements."""

    __slots__ = ("_auto", "_count", "_prepared", "_transformer", "_uses", "driver", "libpq")

    def __init__(self, driver: Any) -> None:
        from psycopg.adapt import PyFormat, Transformer  # noqa: PLC0415 - the extra may be missing

        self.driver, self.libpq = driver, driver.pgconn
        self._transformer: Any = Transformer(driver)
        self._auto = [PyFormat.AUTO] * 99
        self._uses: dict[Any, int] = {}
        self._prepared: dict[Any, bytes] = {}
        self._count = 0

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, queries: Sequence[tuple[Query, Mapping[str, Any] | None]]) -> Exchange:
        """Send a round; its answers are to be read before anything else is done with the connection."""
        bound = [(query, *self._bind(query, params)) for query, params in queries]  # raises before anything is sent
        libpq, exchange = self.libpq, Exchange(self.libpq)
        libpq.enter_pipeline_mode()
        for query, values, types, formats in bound:
            if (name := self._name(query, types, exchange)) is None:
                libpq.send_query_params(query.numbered, values, types, formats, 0)
            else:
                libpq.send_query_prepared(name, values, formats, 0)
            exchange.keys.append(None)
        libpq.pipeline_sync()
        return exchange

    def _bind(self, query: Query, params: Mapping[str, Any] | None) -> tuple[Any, Any, Any]:
        if not query.names:
            return None, (), None
        values = [params[name] for name in query.names] if params is not None else []
        transformer = self._transformer
        return transformer.dump_sequence(values, self._auto[: len(values)]), transformer.types, transformer.formats

    def _name(self, query: Query, types: Any, exchange: Exchange) -> bytes | None:
        """The name of the prepared statement, which this round may prepare; None: it is run without one."""
        if query.is_command:
            return None
        key = query.numbered, types
        name: bytes | None = self._prepared.get(key) or exchange.prepared.get(key)
        if name is not None or (threshold := self.driver.prepare_threshold) is None:
            return name
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        if uses <= threshold or self._count >= _MOST:
            return None
        self._count += 1
        name = exchange.prepared[key] = b"resilient_%d" % self._count
        self.libpq.send_prepare(name, query.numbered, types or None)
        exchange.keys.append(key)
        return name

    # -- waiting -------------------------------------------------------------------------------------------------

    async def answers(self, exchange: Exchange) -> list[Any]:
        """Wait for the answers; cancelled, cancel the statement that runs and wait for its end."""
        wait = _Wait(exchange)
        try:
            wait.start()
            await wait.over  # a cancellation cancels it, and nothing else
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # what is not over then is given up with the connection
                over = wait.anew()
                for _ in range(_CANCELS):
                    await self.driver.cancel_safe(timeout=_CANCEL)
                    if (await asyncio.wait([over], timeout=_CANCEL / _CANCELS))[0]:
                        break
                over.result()
                self._take(exchange)
            raise
        finally:
            wait.stop()
        return self._take(exchange)

    def wait(self, exchange: Exchange) -> list[Any]:
        """`answers` for synchronous callers."""
        with _Selector() as selector:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            selector.register(self.libpq.socket, both if self.libpq.flush() else selectors.EVENT_READ)
            try:
                while not exchange.read():
                    for key, events in selector.select(_SIGNALS):
                        if events & selectors.EVENT_WRITE and not self.libpq.flush():
                            selector.modify(key.fileobj, selectors.EVENT_READ)
            except KeyboardInterrupt:
                with contextlib.suppress(Exception):
                    self.driver.cancel_safe(timeout=_CANCEL)
                raise
        return self._take(exchange)

    # -- taking the answers --------------------------------------------------------------------------------------

    def _take(self, exchange: Exchange) -> list[Any]:
        """The answers to the statements; raises the first that is an error, as psycopg would."""
        if exchange.is_broken:
            self.libpq.finish()
        else:
            self.libpq.exit_pipeline_mode()
        answers = []
        for key, answer in zip(exchange.keys, exchange.answers, strict=False):
            if answer.status in (_ERROR, _ABORTED):
                raise _error(answer, self.driver)
            if key is None:
                answers.append(answer)
            else:
                self._prepared[key] = exchange.prepared[key]
        return answers

    def load(self, answer: Any, query: Query, rows: Rows) -> None:
        """Read an answer into ``rows``."""
        rows.rowcount = -1 if answer.command_tuples is None else answer.command_tuples
        if answer.status == _TUPLES and answer.ntuples:
            transformer = self._transformer
            transformer.set_pgresult(answer)
            rows[:] = transformer.load_rows(0, answer.ntuples, _maker(query, answer))


class Exchange:
    """A round that was sent, and the answers so far."""

    __slots__ = ("_last", "answers", "is_broken", "keys", "libpq", "prepared")

    def __init__(self, libpq: Any) -> None:
        self.libpq = libpq
        self.keys: list[Any] = []  # of what was sent: of a statement to prepare, else None
        self.prepared: dict[Any, bytes] = {}  # name by key
        self.answers: list[Any] = []
        self.is_broken = False  # the server ended the session
        self._last: Any = None

    @property
    def place(self) -> int:
        """The number, from 0, of the first statement that was not executed."""
        number = 0
        for key, answer in zip(self.keys, self.answers, strict=False):
            if answer.status in (_ERROR, _ABORTED):
                break
            number += key is None
        return number

    def read(self) -> bool:
        """Read what is there; True once the round is over. Raises the driver's error if the connection is gone."""
        libpq = self.libpq
        libpq.consume_input()
        while not libpq.is_busy():
            answer = libpq.get_result()
            if answer is None:
                if self._last is None:
                    return False
                self.answers.append(self._last)
                self._last = None
            elif answer.status == _SYNC:
                return True
            else:
                self._last = answer
                if answer.status == _ERROR and _is_fatal(answer):
                    self.answers.append(answer)
                    self.is_broken = True
                    return True
        return False


class _Wait:
    """Reads an exchange's answers as the loop finds that they are there."""

    __slots__ = ("_error", "_exchange", "_has_ended", "_libpq", "_loop", "_number", "_writes", "over")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._libpq = exchange, exchange.libpq
        self._loop, self._number = asyncio.get_running_loop(), exchange.libpq.socket
        self._writes = self._has_ended = False
        self._error: Exception | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Begin to read, and to write what the socket has not taken."""
        self._loop.add_reader(self._number, self._read)
        if self._libpq.flush():
            self._writes = True
            self._loop.add_writer(self._number, self._write)

    def anew(self) -> asyncio.Future[None]:
        """Another future, after the first was cancelled; reading goes on."""
        self.over = self._loop.create_future()
        self.over.add_done_callback(_look_at)
        if self._has_ended:
            self._settle()
        return self.over

    def stop(self) -> None:
        """Look at the socket no more: libpq may have closed it, and its number may be another's soon."""
        if self._number >= 0:
            number, self._number = self._number, -1
            with contextlib.suppress(OSError):  # closed already, and the kernel knows it no more
                self._loop.remove_reader(number)
            if self._writes:
                with contextlib.suppress(OSError):
                    self._loop.remove_writer(number)

    def _end(self, error: Exception | None) -> None:
        """The exchange is over; ``error`` is raised where it is waited for."""
        self._has_ended, self._error = True, error
        if not self.over.done():
            self._settle()
        self.stop()

    def _settle(self) -> None:
        if self._error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(self._error)

    def _read(self) -> None:
        try:
            if not self._exchange.read():
                return
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._end(error)
        else:
            self._end(None)

    def _write(self) -> None:
        try:
            is_pending = self._libpq.flush()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._end(error)  # libpq has closed the socket: nothing would ever call `_read`
            return
        if not is_pending:
            self._loop.remove_writer(self._number)


def _look_at(over: asyncio.Future[None]) -> None:
    """Nobody may ask what became of a cancelled exchange: no log line about that."""
    if not over.cancelled():
        over.exception()


def _is_fatal(answer: Any) -> bool:
    """Whether the server ends the session with this error, or libpq has lost it: nothing more will come."""
    from psycopg.pq import DiagnosticField  # noqa: PLC0415 - the extra may be missing

    severity = answer.error_field(DiagnosticField.SEVERITY_NONLOCALIZED)
    return severity is None or severity in (b"FATAL", b"PANIC")


def _error(answer: Any, driver: Any) -> Exception:
    from psycopg import errors  # noqa: PLC0415 - the extra may be missing

    encoding = "utf-8" if driver.closed else driver.info.encoding
    error: Exception = errors.error_from_result(answer, encoding=encoding)
    return error


_makers: Final[dict[bytes, tuple[int, Callable[[Any], Any]]]] = {}


def _maker(query: Query, answer: Any) -> Callable[[Any], Any]:
    """A function that makes a named tuple of a row: in C, and kept by statement."""
    width, make = _makers.get(query.numbered, (0, None))
    if make is None or width != answer.nfields:
        width = answer.nfields
        names = tuple(answer.fname(n).decode() for n in range(width))
        make = partial(tuple.__new__, shape(names))
        if len(_makers) < 4 * _MOST:
            _makers[query.numbered] = width, make
    return make
