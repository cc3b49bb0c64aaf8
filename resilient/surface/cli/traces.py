"""A traceback for people: the program's own frames, and of libraries' only how many and whose.

Where every frame is a library's, the last one stays: it says where. ``--json`` shows all of them.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Final

from resilient.core.phrases import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FRAME: Final = re.compile(r' *File "(?P<path>[^"]+)", line \d+')
_PACKAGE: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_STANDARD: Final = re.compile(r"[/\\]lib[/\\]python3[.\d]*[/\\](?!site-|dist-)|^<frozen ")
_OURS: Final = re.compile(r"[/\\]resilient[/\\](?:core|store|wire|engine|adapters|testing|surface)[/\\]")


def shortened(traceback: str) -> Iterator[str]:
    """Its lines, each run of libraries' frames as one."""
    for is_frames, frames in groupby(_parts(traceback), key=lambda part: _FRAME.match(part[0]) is not None):
        if is_frames:
            yield from _of_frames(list(frames))
        else:
            yield from (line for part in frames for line in part)


def _parts(traceback: str) -> Iterator[list[str]]:
    """A frame with its source, or a line of its own."""
    part: list[str] = []
    for line in traceback.splitlines():
        if part and _FRAME.match(part[0]) and line.startswith("    ") and not _FRAME.match(line):
            part.append(line)
            continue
        if part:
            yield part
        part = [line]
    if part:
        yield part


def _of_frames(frames: list[list[str]]) -> Iterator[str]:
    names = [_library(frame[0]) for frame in frames]
    if all(names):
        names[-1] = ""
    for (theirs, _), run in groupby(zip(map(bool, names), frames, names, strict=True), key=lambda one: (one[0], None)):
        members = list(run)
        if theirs:
            whose = ", ".join(dict.fromkeys(name for *_, name in members))
            yield f"  ... {counted(len(members), 'frame')} of {whose}"
        else:
            yield from _lines(frame for _, frame, _ in members)


def _lines(frames: Iterable[list[str]]) -> Iterator[str]:
    for frame in frames:
        yield from frame


def _library(line: str) -> str:
    """Whose frame it is; empty for the program's own."""
    found = _FRAME.match(line)
    path = found["path"] if found else ""
    if package := _PACKAGE.search(path):
        return package[1]
    if _STANDARD.search(path):
        return "Python"
    return "resilient" if _OURS.search(path) else ""
