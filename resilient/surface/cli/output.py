"""Printing: tables for people, JSON for programs, one voice for both.

A table is laid out by hand rather than by rich: ids must stay whole (they are copied), on a narrow terminal some
columns fold into the line below their row, and a remark about a row stands there too, so that 80 columns suffice. What
goes into a file or pipe is never cut.
"""

from __future__ import annotations

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from resilient.core.plain_text import in_json, one_line
from resilient.core.plain_text import plain as shown
from resilient.core.records import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GAP: Final = 2
_NARROW: Final = 20  # characters: less is no column to break a text into
STYLES: Final = {
    "ready": "cyan", "running": "blue", "scheduled": "yellow", "blocked": "magenta", "succeeded": "green",
    "dead": "bold red", "cancelled": "dim", "well": "green", "probe": "yellow", "probe due": "yellow",
    "circuit": "bold red", "circuit open": "bold red", "isolated": "bold red", "cooldown": "yellow",
    "paused": "yellow", "auth": "bold red",
}  # fmt: skip


class _Screen(Console):
    """A console that tells who called it that its reader has gone, instead of ending the process as a failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Row:
    """One line of a table: its cells, and a remark below them (cut to the line, unless it is wanted ``whole``)."""

    def __init__(self, *cells: object, remark: str = "", folded: str = "", whole: bool = False) -> None:
        self.cells = ["" if cell is None else shown(str(cell)) for cell in cells]
        self.remark, self.folded, self.whole = shown(remark), shown(folded), whole

    def fold(self, columns: Sequence[int]) -> Row:
        """The same row with these columns told in the line below it."""
        kept = [cell for n, cell in enumerate(self.cells) if n not in columns]
        remark = ": ".join(part for part in (self.folded, self.remark) if part)
        return Row(*kept, remark=remark, whole=self.whole)


class Output:
    """Where a command prints."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None, errors: Console | None = None) -> None:
        self.as_json = as_json
        self.console = console or _Screen(highlight=False, markup=False, soft_wrap=True)
        self.errors = errors or _Screen(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def json(self, value: Any) -> None:
        """One JSON document."""
        self.console.file.write(in_json(json.dumps(plain(value), ensure_ascii=False, indent=2)) + "\n")

    def say(self, text: str = "", style: str = "") -> None:
        """A line for people; programs see nothing of it."""
        if not self.as_json:
            self.console.print(shown(text), style=style or None)

    def error(self, text: str) -> None:
        """One line on standard error."""
        self.errors.print(Text("error: ", style="bold red"), Text(one_line(text)), sep="")

    def heading(self, text: str) -> None:
        """The title of a part."""
        self.say()
        self.say(text, style="bold")

    def table(
        self, headers: Sequence[str], rows: Iterable[Row], *, right: Iterable[int] = (), folds: Sequence[int] = ()
    ) -> None:
        """Aligned columns. Where they do not fit, ``folds`` go below their row; then text columns are cut."""
        rows, numeric = list(rows), set(right)
        widths = _widths(headers, rows)
        room = self.console.width if self.console.is_terminal else 0
        if folds and room and _total(widths) > room:
            headers = [header for n, header in enumerate(headers) if n not in folds]
            rows = [row.fold(folds) for row in rows]
            numeric = {n - sum(fold < n for fold in folds) for n in numeric}
            widths = _widths(headers, rows)
        if room:
            _shrink(widths, room, numeric)
            widths[0] -= max(0, min(_total(widths) - room, widths[0] - GAP))
        self.say(_line(headers, widths, numeric), style="bold")
        for row in rows:
            text, cells = Text(), row.cells
            if len(cells[0]) > widths[0]:  # it is copied, so it stays whole: on a line of its own
                self.console.print(Text(cells[0]))
                cells = ["", *cells[1:]]
            for n, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                text.append(_fit(cell, width, right=n in numeric), style=STYLES.get(cell, ""))
                text.append(" " * GAP)
            text.rstrip()
            self.console.print(text)
            if row.remark and row.whole:
                self.paragraph(row.remark, indent=2, style="dim")
            elif row.remark:
                self.say(_cut("  " + row.remark, room), style="dim")

    def paragraph(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """A sentence, broken between words on a terminal."""
        pad = " " * indent
        lines = [pad + text]
        if self.console.is_terminal:
            lines = textwrap.wrap(
                text, self.console.width, initial_indent=pad, subsequent_indent=pad + "  ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
        for line in lines:
            self.say(line, style=style)

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Names and values, the empty ones left out."""
        told = [(name, shown(str(value))) for name, value in pairs if value not in (None, "")]
        width = max((len(name) for name, _ in told), default=0)
        for name, value in told:
            text = Text(f"{name:{width}}  ", style="dim")
            text.append(self._wrapped(value, width + 2), style=STYLES.get(value, "not dim"))
            self.console.print(text)

    def _wrapped(self, value: str, indent: int) -> str:
        """A value beside its name: on a terminal broken between words, under its beginning."""
        room = self.console.width - indent
        if not self.console.is_terminal or len(value) <= room or room < _NARROW:
            return value
        lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
        return ("\n" + " " * indent).join(lines)

    def confirm(self, question: str, *, yes: bool, dry_run: bool = True) -> bool:
        """Ask before much is changed; without a person there, ``--yes`` must have been said.

        ``dry_run``: whether the command can also only count.
        """
        if yes:
            return True
        if not sys.stdin.isatty():
            self.error(f"{question} Say --yes to do it{', or --dry-run to only count' if dry_run else ''}.")
            return False
        answer = self.console.input(f"{question} [y/N] ")
        return answer.strip().lower() in ("y", "yes")


def _widths(headers: Sequence[str], rows: Sequence[Row]) -> list[int]:
    return [max(len(header), *(len(row.cells[n]) for row in rows), 0) for n, header in enumerate(headers)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _shrink(widths: list[int], room: int, numeric: set[int]) -> None:
    """Make the columns fit by cutting the widest of those that may be cut, the first never."""
    while _total(widths) > room:
        cuttable = [n for n in range(1, len(widths)) if n not in numeric and widths[n] > 8]  # noqa: PLR2004
        if not cuttable:
            return
        widths[max(cuttable, key=lambda n: widths[n])] -= 1


def _line(cells: Sequence[str], widths: Sequence[int], numeric: set[int]) -> str:
    fitted = (_fit(c, w, right=n in numeric) for n, (c, w) in enumerate(zip(cells, widths, strict=True)))
    return (" " * GAP).join(fitted).rstrip()


def _fit(cell: str, width: int, *, right: bool) -> str:
    cell = _cut(cell, width)
    return cell.rjust(width) if right else cell.ljust(width)


def _cut(text: str, width: int) -> str:
    """At most ``width`` characters, on one line; 0: uncut."""
    text = text.replace("\n", " ")
    return text if not width or len(text) <= width else text[: width - 1] + "…"
