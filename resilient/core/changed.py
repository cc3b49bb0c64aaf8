"""What a change from outside brought: how many jobs it changed, and why it left the others alone.

With ``dry_run`` the numbers say what would have happened. A number is True where it is not zero, so
``if not (await app.jobs.cancel(id)).cancelled: ...`` reads as it should.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self


@dataclass(frozen=True, slots=True)
class _Tally:
    """Numbers by name."""

    @classmethod
    def of(cls, tally: Mapping[str, int]) -> Self:
        """From what was counted."""
        return cls(**{f.name: tally.get(f.name, 0) for f in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """Every number under its own name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cancelled(_Tally):
    """``requested``: these run, and their workers were asked to stop them. ``too_late``: these were over."""

    cancelled: int = 0
    requested: int = 0
    too_late: int = 0


@dataclass(frozen=True, slots=True)
class Edited(_Tally):
    """``running`` and ``too_late`` (over) jobs were left alone.

    ``sent``: their old payload may have been sent under their idempotency key, and ``new_operation`` was not
    given.
    """

    edited: int = 0
    running: int = 0
    too_late: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Retried(_Tally):
    """What was left alone.

    ``not_finished``: still waiting or running. ``ambiguous``: their last request may have taken effect, and
    ``repeat_ambiguous`` was not given. ``duplicates``: another job holds their unique key by now. ``undone``: steps of
    workflows that turned around.
    """

    retried: int = 0
    not_finished: int = 0
    ambiguous: int = 0
    duplicates: int = 0
    undone: int = 0


@dataclass(frozen=True, slots=True)
class Discarded(_Tally):
    """Dead jobs that are cancelled now; the others were not dead."""

    discarded: int = 0
    not_dead: int = 0


@dataclass(frozen=True, slots=True)
class Deleted(_Tally):
    """Jobs that are gone; the others were not over."""

    deleted: int = 0
    not_finished: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """The resources that were changed, in the order of their keys.

    ``queued``: those of them that no worker had used yet: they were meant because jobs wait there.
    """

    keys: tuple[str, ...] = ()
    queued: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def to_json(self) -> dict[str, Any]:
        """The keys and their number."""
        return {"changed": len(self.keys), "keys": list(self.keys), "queued": list(self.queued)}
