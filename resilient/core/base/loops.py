"""What there is once for each event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Loop(Protocol):
    """An event loop, as far as it matters here."""

    def is_closed(self) -> bool:
        """Whether it runs nothing any more."""


class PerLoop(Generic[T]):
    """A value for each event loop that is open.

    Not by weak references: semaphores, futures and tasks refer to the loop that somebody has waited on, so a value that
    holds one would keep its own key alive.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[Loop, T] = {}

    def of(self, loop: Loop) -> T:
        """The value of a loop; those of loops that were closed are dropped when a new loop comes."""
        if (value := self._values.get(loop)) is None:
            for closed in [one for one in list(self._values) if one.is_closed()]:
                self._values.pop(closed, None)  # another thread may have been here
            value = self._values.setdefault(loop, self._make())
        return value
