"""Printing: tables for people, JSON for programs; jobs and resources as people read them.

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

from resilient.core.base.phrases import brief, counted, error_line, in_json, one_line, rough, span, when
from resilient.core.base.phrases import plain as shown
from resilient.core.gates.admission import error_shut, hand_shut
from resilient.core.inspect.names import meaning
from resilient.core.inspect.why import CREDENTIALS_ENDS, credentials_end, credentials_remedy
from resilient.core.jobs.records import plain
from resilient.core.jobs.states import TERMINAL, JobState
from resilient.surface.cli.exits import shortened
from resilient.surface.cli.hints import hinted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from resilient.core.events.message import EventInfo
    from resilient.core.inspect.why import Why
    from resilient.core.jobs.records import AttemptInfo, JobInfo, ResourceInfo, StoppedGroup


GAP: Final = 2
_NARROW: Final = 20  # characters: less is no column to break a text into
STYLES: Final = {
    "ready": "cyan", "running": "blue", "scheduled": "yellow", "blocked": "magenta", "succeeded": "green",
    "dead": "bold red", "cancelled": "dim", "well": "green", "probe": "yellow", "probe due": "yellow",
    "circuit": "bold red", "circuit open": "bold red", "isolated": "bold red", "cooldown": "yellow",
    "paused": "yellow", "auth": "bold red",
}  # fmt: skip


class _Screen(Console):
    """A console that raises when its reader has gone, instead of ending the process as a failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Row:
    """One line of a table: its cells, and a remark below them (cut to the line, unless ``whole``).

    ``folded``: what stands before the remark where columns are folded.
    """

    def __init__(self, *cells: object, remark: str = "", folded: str = "", whole: bool = False) -> None:
        self.cells = ["" if cell is None else shown(str(cell)).replace("\n", " ") for cell in cells]
        self.remark, self.folded, self.whole = shown(remark), shown(folded), whole

    def fold(self, columns: Sequence[int]) -> Row:
        """The same row with these columns moved into the line below it."""
        kept = [cell for n, cell in enumerate(self.cells) if n not in columns]
        remark = ": ".join(part for part in (self.folded, self.remark) if part)
        return Row(*kept, remark=remark, whole=self.whole)


class Output:
    """Where a command prints."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        console: Console | None = None,
        errors: Console | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.as_json, self.options = as_json, dict(options or {})  # options: see `hints`
        self.console = console or _Screen(highlight=False, markup=False, soft_wrap=True)
        self.errors = errors or _Screen(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def json(self, value: Any, indent: int | None = 2) -> None:
        """One JSON document; only ASCII where the screen or file is not in Unicode."""
        file = self.console.file
        is_unicode = (getattr(file, "encoding", None) or "utf").lower().startswith("utf")
        file.write(in_json(json.dumps(plain(value), ensure_ascii=not is_unicode, indent=indent)) + "\n")

    def say(self, text: str = "", style: str = "", end: str = "\n") -> None:
        """A line for people; with ``--json`` nothing."""
        if not self.as_json:
            self.console.print(shown(hinted(text, self.options)), style=style or None, end=end)

    def result(self, text: str) -> None:
        """The result of a command, alone on standard output."""
        self.console.print(shown(text))

    def remark(self, text: str) -> None:
        """A line on standard error, for people whose programs read the rest."""
        self.errors.print(shown(hinted(text, self.options)))

    def error(self, text: str) -> None:
        """One line on standard error."""
        self.errors.print(Text("error: ", style="bold red"), Text(one_line(hinted(text, self.options))), sep="")

    def heading(self, text: str) -> None:
        """The title of a part."""
        self.say()
        self.say(text, style="bold")

    def table(
        self, headers: Sequence[str], rows: Iterable[Row], *, right: Iterable[int] = (), folds: Sequence[int] = ()
    ) -> None:
        """Aligned columns: numbers, in ``right``, to the right. What does not fit is folded, then cut.

        ``folds``: the columns that go below their row; after that the widest columns of text are cut.
        """
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
        """A sentence, broken between words on a terminal; line breaks in the text itself are escaped."""
        pad, text = " " * indent, one_line(hinted(text, self.options))
        lines = [pad + text]
        if self.console.is_terminal:
            lines = textwrap.wrap(
                text, self.console.width, initial_indent=pad, subsequent_indent=pad + "  ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
        for line in lines:
            self.say(line, style=style)

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Names and values, without the empty ones."""
        texts = [(name, shown(str(value))) for name, value in pairs if value not in (None, "")]
        width = max((len(name) for name, _ in texts), default=0)
        for name, value in texts:
            text = Text(f"{name:{width}}  ", style="dim")
            text.append(self._wrapped(value, width + 2), style=STYLES.get(value, "not dim"))
            self.console.print(text)

    def _wrapped(self, value: str, indent: int) -> str:
        """A value beside its name, each of its lines under its beginning; on a terminal broken between words."""
        room = self.console.width - indent
        if not self.console.is_terminal or len(value) <= room or room < _NARROW:
            lines = value.split("\n")
        else:
            lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
        return ("\n" + " " * indent).join(lines)

    def confirm(self, question: str, *, yes: bool, dry_run: bool = True) -> bool:
        """Ask before much is changed, on standard error; without a terminal ``--yes`` is needed.

        ``dry_run``: whether the command can also only count.
        """
        if yes:
            return True
        if not sys.stdin.isatty():
            self.error(f"{question} Say --yes to do it{', or --dry-run to only count' if dry_run else ''}.")
            return False
        self.errors.print(Text(one_line(f"{question} [y/N]")), end=" ")
        try:
            answer = input()
        except EOFError:  # Ctrl-D
            self.errors.print()
            return False
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


JOB_HEADERS = ("ID", "STATE", "WHEN", "KIND", "RESOURCE")
JOB_FOLDS = (3, 4)
RESOURCE_HEADERS = ("RESOURCE", "STATE", "ENDS", "WAITING", "RUNNING")
GROUP_HEADERS = ("PROVIDER", "GATE", "RESOURCES", "WAITING", "SINCE", "ENDS")


def job_row(job: JobInfo, now: datetime) -> Row:
    """One job of a list, with its latest error below it."""
    folded = f"{job.kind} on {job.resource_key}"
    return Row(
        job.id, job.state.value, when_of(job, now), job.kind, job.resource_key, remark=_remark(job), folded=folded
    )


def when_of(job: JobInfo | EventInfo, now: datetime) -> str:
    """When it runs, since when it runs or waits, or when it ended; in a few characters."""
    if job.state in TERMINAL and job.finished_at:
        return f"{rough((now - job.finished_at).total_seconds())} ago"
    if job.state == JobState.RUNNING and job.started_at:
        return f"for {rough((now - job.started_at).total_seconds())}"
    if job.state == JobState.SCHEDULED and job.run_at > now:
        return f"in {rough((job.run_at - now).total_seconds(), nearest=True)}"
    since = job.created_at if job.state == JobState.BLOCKED else max(job.run_at, job.created_at)
    if job.state == JobState.SCHEDULED:
        return f"due {rough((now - since).total_seconds())}"
    return f"for {rough((now - since).total_seconds())}"


def _remark(job: JobInfo) -> str:
    if not job.last_error or job.state == JobState.SUCCEEDED:
        return ""
    return f"{_attempts(job)}: {error_line(job.last_error_kind, job.last_error_code, job.last_error)}"


def _attempts(job: JobInfo) -> str:
    return (
        f"{job.attempts} of {counted(job.max_attempts, 'attempt')}"
        if job.max_attempts
        else counted(job.attempts, "attempt")
    )


def show_job(out: Output, job: JobInfo, attempts: Sequence[AttemptInfo], why: Why, now: datetime) -> None:
    """Everything about one job."""
    out.fields(
        [
            ("id", job.id),
            ("kind", job.kind),
            ("resource", job.resource_key),
            ("state", job.state.value),
            (
                "attempts",
                f"{_attempts(job)}, {counted(job.executions, 'execution')}, {counted(job.deferrals, 'deferral')}",
            ),
            ("rescues", job.rescues or None),
            ("priority", job.priority or None),
            ("created", when(job.created_at, now)),
            ("run at", when(job.run_at, now)),
            ("started", job.started_at and when(job.started_at, now)),
            ("finished", job.finished_at and when(job.finished_at, now)),
            ("expires", job.expires_at and when(job.expires_at, now)),
            ("worker", job.locked_by),
            ("unique key", job.unique_key),
            ("ordering key", job.ordering_key and f"{job.ordering_key} (number {job.order_no})"),
            ("idempotency key", job.idempotency_key),
            ("tags", ", ".join(f"{k}={v}" for k, v in (job.tags or {}).items())),
            ("unanswered", _compact(job.sent)),
            ("progress", _compact(job.progress)),
            ("payload", _compact(job.payload) or "null"),
            ("result", _compact(job.result)),
        ]
    )
    show_why(out, why, now)
    if attempts:
        out.heading("What happened")
        for one in attempts:
            _show_attempt(out, one, now)
    if (latest := next((one for one in reversed(attempts) if one.traceback), None)) is not None:
        out.heading(f"Traceback of execution {latest.execution}")
        for line in shortened(latest.traceback or ""):
            out.say(f"  {line}", style="dim")


def _show_attempt(out: Output, one: AttemptInfo, now: datetime) -> None:
    took = f", took {span(one.duration)}" if one.duration is not None and one.duration >= 1 else ""
    charged = "" if one.charged else ", not charged"
    out.say(f"  {one.execution}. {when(one.finished_at, now)}: {one.decision}{charged}{took}")
    if one.message:
        on = f" [{one.resource_key}]" if one.resource_key else ""
        out.paragraph(f"{error_line(one.kind, one.code, one.message)}{on}", indent=5, style="dim")
    if one.next_at is not None and one.next_at > now:
        out.say(f"     next try {when(one.next_at, now)}", style="dim")


def say_why(out: Output, why: Why) -> None:
    """The reasons alone."""
    for reason in why.reasons:
        out.paragraph(reason.text)


_NOT_SERVED: Final = ("no_worker", "unknown_kind", "unserved_resource")  # reasons that do not end with time


def show_why(out: Output, why: Why, now: datetime) -> None:
    """The reasons, one sentence each."""
    out.heading("Why")
    for reason in why.reasons:
        out.paragraph(reason.text, indent=2)
    if why.until is not None and len(why.reasons) > 1 and not any(one.code in _NOT_SERVED for one in why.reasons):
        out.paragraph(f"Nothing known stops it after {when(why.until, now)}.", indent=2)


def resource_row(info: ResourceInfo, now: datetime) -> Row:
    """One resource of a list."""
    if info.until is not None:
        until = f"in {rough((info.until - now).total_seconds(), nearest=True)}"
    else:
        until = _end_of(info.gate, info.code)
    remark = ""
    if info.last_error and error_shut(info.gate, info.code, info.since, info.last_error_at):
        remark = error_line(info.last_error_kind, info.last_error_code, info.last_error)
    if info.paused_reason and hand_shut(info.gate, info.code):
        remark = info.paused_reason
    if info.gate == "auth" and info.code in CREDENTIALS_ENDS:
        remark = "; ".join(filter(None, (credentials_remedy(info.key, info.code), remark)))
    remark = remark or meaning(info.key)
    return Row(info.key, state_of(info), until, f"{info.waiting:,}", f"{info.running:,}", remark=remark)


_END: Final = {"pause": "by hand", "breaker": "by hand"}


def _end_of(gate: str | None, code: str | None) -> str:
    """What ends a stop that does not end with time."""
    return credentials_end(code) if gate == "auth" else _END.get(gate or "", "")


def state_of(info: ResourceInfo) -> str:
    """One or two words for what stops a resource."""
    if info.gate == "breaker":
        return {"probing": "probe", "isolated": "isolated"}.get(info.code or "", "circuit open")
    if info.gate == "auth" and info.code in CREDENTIALS_ENDS:
        return f"auth ({info.code})"
    if info.gate is not None:
        return {"pause": "paused"}.get(info.gate, info.gate)
    return "well" if info.breaker == "closed" else "probe due"


def group_row(group: StoppedGroup, now: datetime) -> Row:
    """One group of stopped resources; an example and the code stand below."""
    since = f"{rough((now - group.since).total_seconds())} ago" if group.since else ""
    until = _ends(group, now)
    example = f"such as {group.example}" + (f", job {group.example_job}" if group.example_job else "")
    code = f" ({group.code})" if group.code else ""
    error = f": {brief(group.last_error, 60)}" if group.last_error else ""
    error += f"; {brief(group.reason, 60)}" if group.reason else ""
    if group.gate == "auth" and group.code in CREDENTIALS_ENDS:
        error += f"; {credentials_remedy(group.example, group.code)}"
    gate = _GATE.get(group.gate, group.gate)
    waiting = f"{group.waiting:,}{'+' if group.waiting.more else ''}"
    return Row(group.provider, gate, group.resources, waiting, since, until, remark=example + code + error, whole=True)


def _ends(group: StoppedGroup, now: datetime) -> str:
    """When the group's stops end, first and last; or what ends them."""
    if group.until is None:
        return _end_of(group.gate, group.code)
    last, first = rough((group.until - now).total_seconds(), nearest=True), ""
    if group.first_until is not None:
        first = rough((group.first_until - now).total_seconds(), nearest=True)
    return f"in {last}" if first in ("", last) else f"in {first} to {last}"


_GATE = {"breaker": "circuit", "pause": "paused"}


def _compact(value: Any) -> str:
    if value is None:
        return ""
    text = in_json(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 2_000 else text[:2_000] + f"… ({len(text):,} characters; --json shows all)"  # noqa: PLR2004
