"""How a provider tells what changed since last time: facts about its cursors.

A cursor is either told by the provider (a token, a link) or made from what was read (the newest time stamp).
Made ones must overlap: two records of one second, or of one minute where the provider counts in minutes, are
otherwise lost at the border. Most ways do not show deletions; `deletions` says so, because a sync that does
not know it keeps what is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resilient.core.body import pick
from resilient.core.errors import InvalidInput
from resilient.core.misfit import explained_class
from resilient.core.words import check_braces, check_number, check_paths, check_word

Style = Literal["filter", "token", "link", "key", "conditional"]
Taken = Literal["last_page", "every_page", "before_pass", "items"]
Deletions = Literal["never", "marked", "separate", "webhook"]


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Incremental:
    """One way to ask for changes.

    ``style``: ``filter`` (changed since a time), ``token`` and ``link`` (the provider's own cursor), ``key``
    (ids after the last one), ``conditional`` (a header; unchanged gives 304). ``query``, ``body``,
    ``header``: where the cursor is sent; ``form``: how, as ``updated >= "{cursor}"``. ``found``: the path
    where it is read; ``taken``: when: on the last page, on each, from the items, or, where the answer has
    none, by a request ``before_pass``. ``field``: the item's field that a filter compares.

    ``precision``: seconds the provider counts in, so that far back the next pass begins. ``life``: seconds
    after which a cursor may be refused. ``deletions``: ``marked`` in the feed, to be read ``separate``ly, told by
    ``webhook`` only, or ``never``. ``deleted``: the field that marks them, or ``field=value``, with ``*`` in the
    value. ``deleted_key``: the paths, separated by a space, of the keys of what is gone, where the record only tells
    of it, as an event does. Raises `InvalidInput`.
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
    deleted_key: str = ""

    def __post_init__(self) -> None:
        check_word("Incremental", "style", self.style, Style)
        check_word("Incremental", "taken", self.taken, Taken)
        check_word("Incremental", "deletions", self.deletions, Deletions)
        check_number("Incremental", "precision", self.precision, above=False)
        check_number("Incremental", "life", self.life)
        check_braces("Incremental", "form", self.form, ("cursor",))
        check_paths("Incremental", self, "found")
        made = self.style in ("filter", "key")
        if made and not self.field:
            raise InvalidInput(f"Incremental(style={self.style!r}) needs field=, which its cursor is made of")
        if not made and self.style != "conditional" and not self.found:
            raise InvalidInput(f"Incremental(style={self.style!r}) needs found=, where its cursor is read")
        places = [name for name in ("query", "body", "header") if getattr(self, name)]
        if len(places) > 1 or (not places and self.style in ("filter", "token", "key", "conditional")):
            raise InvalidInput(
                f"Incremental(style={self.style!r}): say where its cursor is sent with one of query=, body=, header=,"
                f" not with {' and '.join(places) or 'none'}"
            )
        if made and self.taken != "items":
            raise InvalidInput(
                f"Incremental(style={self.style!r}, taken={self.taken!r}): its cursor is made of the 'items'"
            )
        if self.style in ("token", "link") and self.taken == "items":
            raise InvalidInput(
                f"Incremental(style={self.style!r}): say taken='last_page', 'every_page' or 'before_pass', for its"
                " cursor is told, not made of the items"
            )
        if "{cursor}" not in self.form:
            raise InvalidInput(f"Incremental(form={self.form!r}) has no place for the {{cursor}}")
        if (self.deleted or self.deleted_key) and self.deletions != "marked":
            raise InvalidInput(f"Incremental(deletions={self.deletions!r}): deleted= is for deletions='marked'")
        for path in self.deleted_key.split():
            pick(None, path)  # raises for what is no path
        if self.deletions == "marked" and not self.deleted:
            raise InvalidInput("Incremental(deletions='marked') needs deleted=, the field that marks them")
