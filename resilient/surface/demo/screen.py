"""The demo's face: a live screen on a terminal, plain lines everywhere else (and with ``--plain``)."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, Self

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from resilient.surface.demo import accounts
from resilient.surface.demo.events import gate

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console, RenderableType

    from resilient.surface.demo.view import Snapshot

_EVENTS: Final = 12  # lines of events on the screen
_PLAIN_EVERY: Final = 3.0  # seconds between two lines of progress
_WAITING: Final = ("ready", "scheduled", "blocked")
_NUMBERS: Final = ("waiting", "running", "done", "dead")
_ROOM_FOR_STORIES: Final = 132  # columns of the terminal


class Screen(Protocol):
    """Where a run is shown."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the terminal as it was."""

    def say(self, line: str) -> None:
        """Something happened."""

    def show(self, snapshot: Snapshot) -> None:
        """How things stand."""


def screen(console: Console, *, plain: bool) -> Screen:
    """A live screen if ``console`` is a terminal and ``plain`` is not asked for."""
    return PlainScreen(console) if plain or not console.is_terminal else LiveScreen(console)


class PlainScreen:
    """One line per event, a line of progress now and then; reads well in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._next = 0.0

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing to restore."""

    def say(self, line: str) -> None:
        """Print it, with the seconds since the start."""
        elapsed = time.monotonic() - self._began
        self._console.print(f"{elapsed:6.1f} s  {line}", soft_wrap=True, markup=False, highlight=False)

    def show(self, snapshot: Snapshot) -> None:
        """Print a line of progress if the last one is a while ago."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _PLAIN_EVERY
        waiting = {k: n for k in snapshot.states if (n := sum(snapshot.states[k][s] for s in _WAITING))}
        backlog = ", ".join(f"{key} {n}" for key, n in sorted(waiting.items()))
        self.say(f"{snapshot.finished} of {snapshot.jobs} done" + (f"; waiting: {backlog}" if backlog else ""))


class LiveScreen:
    """A table of accounts over the latest events."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._console = console
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._began = time.monotonic()
        self._snapshot: Snapshot | None = None

    def __enter__(self) -> Self:
        """Take the terminal."""
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give the terminal back, leaving the last state on it."""
        self._live.stop()
        if self._snapshot is not None:
            self._console.print(self._picture(self._snapshot))

    def say(self, line: str) -> None:
        """Add it to the events."""
        self._events.append(f"{time.monotonic() - self._began:5.1f} s  {line}")
        if self._snapshot is not None:
            self._live.update(self._picture(self._snapshot))

    def show(self, snapshot: Snapshot) -> None:
        """Draw the table again."""
        self._snapshot = snapshot
        self._live.update(self._picture(snapshot))

    def _picture(self, snapshot: Snapshot) -> RenderableType:
        done, jobs = snapshot.finished, max(1, snapshot.jobs)
        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(total=jobs, completed=done, width=40),
            f"{done} of {jobs} done, {snapshot.total('running')} running on {len(snapshot.running)} workers",
        )
        return Group(
            head,
            _table(snapshot, self._console.width),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in self._events),
        )


def _table(snapshot: Snapshot, width: int) -> Table:
    """Gate, backlog and progress of each account; the story, which never changes, only where there is room."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    names = ("account", "gate", "story") if width >= _ROOM_FOR_STORIES else ("account", "gate")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right", min_width=len(name))
    for key in sorted(snapshot.states):
        count = snapshot.states[key]
        state = gate(snapshot.resources.get(key), snapshot.now)
        color = "green" if state == "flows" else "yellow" if state.startswith("told") else "red"
        words = (key, Text(state, style=color), accounts.story(key))[: len(names)]
        numbers = (sum(count[s] for s in _WAITING), count["running"], count["succeeded"], count["dead"])
        table.add_row(*words, *map(str, numbers))
    return table
