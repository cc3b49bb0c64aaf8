"""What is stored about one resource: the key that may be erased, and how many rows were."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import InvalidInput
from resilient.core.base.resource_key import check_stored
from resilient.core.jobs.records import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

_ENGINES: Final = ("outbox",)  # roots of the engine's own resources
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Erased:
    """How many rows about a resource were deleted, or with ``dry_run`` would be, by table."""

    resource_key: str
    rows: Mapping[str, int] = field(default_factory=dict)
    dry_run: bool = False

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.rows.values())

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return {**fields_of(self), "rows": dict(self.rows)}


def checked(key: str) -> str:
    """``key``, if it names an account or something below one. Raises `BadResourceKey` or `InvalidInput`."""
    root, _, below = check_stored(key).partition("/")
    if not below:
        raise InvalidInput(f"{key!r} is a provider, with all of its accounts: name one account, such as {key}/acct-7")
    if root in _ENGINES:
        raise InvalidInput(f"{key!r} is a destination of events, and no account: `resilient prune` deletes events")
    return key


def refusal(key: str, jobs: list[UUID], workflows: list[UUID]) -> str | None:
    """Why a resource cannot be erased now, and what to do; None if it can."""
    if jobs:
        names = ", ".join(map(str, jobs[:_SHOWN]))
        return f"jobs of {key} are running ({names}): wait for them (timeout=, --wait), or cancel them first"
    if workflows:
        names = ", ".join(map(str, workflows[:_SHOWN]))
        return f"workflows with steps of {key} are not over ({names}): wait for them, or cancel them first"
    return None
