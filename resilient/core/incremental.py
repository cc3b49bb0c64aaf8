"""How a provider tells what changed since last time: facts about its cursors.

A cursor is either told by the provider (a token, a link) or made from what was read (the newest time stamp).
Made ones must overlap: two records of one second, or of one minute where the provider counts in minutes, are
otherwise lost at the border. Most ways do not show deletions; `deletions` says so, because a sync that does
not know it keeps what is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resilient.core.errors import InvalidInput

Style = Literal["filter", "token", "link", "key", "conditional"]
Taken = Literal["last_page", "every_page", "before_pass", "items"]
Deletions = Literal["never", "marked", "separate", "webhook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incremental:
    """One way to ask for changes.

    ``style``: ``filter`` (changed since a time), ``token`` and ``link`` (the provider's own cursor), ``key``
    (ids after the last one), ``conditional`` (a header; unchanged gives 304). ``query``, ``body``,
    ``header``: where the cursor is sent; ``form``: how, as ``updated >= "{cursor}"``. ``found``: the path
    where it is read; ``taken``: when: on the last page, on each, from the items, or, where the answer has
    none, by a request ``before_pass``. ``field``: the item's field that a filter compares.

    ``precision``: seconds the provider counts in, so that far back the next pass begins. ``life``: seconds
    after which a cursor may be refused. ``deletions``: ``marked`` in the feed (``deleted``: the field that
    marks them, or ``field=value``),
    to be read ``separate``ly, told by ``webhook`` only, or ``never``. Raises `InvalidInput`.
    """

    style: Style
    query: str = ""
    body: str = ""
    header: str = ""
    form: str = "{cursor}"
    found: str = ""
    taken: Taken = "items"
    field: str = ""
    precision: float = 1.0
    life: float | None = None
    deletions: Deletions = "never"
    deleted: str = ""

    def __post_init__(self) -> None:
        made = self.style in ("filter", "key")
        if made and not self.field:
            raise InvalidInput(f"Incremental(style={self.style!r}) needs field=, which its cursor is made of")
        if not made and self.style != "conditional" and not self.found:
            raise InvalidInput(f"Incremental(style={self.style!r}) needs found=, where its cursor is read")
        if "{cursor}" not in self.form:
            raise InvalidInput(f"Incremental(form={self.form!r}) has no place for the {{cursor}}")
        if self.deletions == "marked" and not self.deleted:
            raise InvalidInput("Incremental(deletions='marked') needs deleted=, the field that marks them")
