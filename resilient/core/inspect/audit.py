"""What people and programs are shown of the audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.core.jobs.records import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class AuditInfo:
    """One change: who made it, through what (``dashboard``, ``command line``, ``program``), of what and why.

    ``outcome`` is what it brought, in numbers, or its ``error``; None: it was begun, and nobody knows how it ended.
    """

    id: int
    at: datetime
    who: str
    via: str
    action: str
    subject: str
    why: str | None
    outcome: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)
