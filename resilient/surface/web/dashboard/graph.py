"""A workflow as a drawing: steps in layers, each to the right of those it waits for, with its undo below it.

A step's layer is the length of its longest path from the beginning; within a layer steps are ordered by the median
position of those they wait for, so that few edges cross. The list of steps on the page is the text alternative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from resilient.core.base.phrases import plain
from resilient.surface.web.dashboard.words import SIGNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOST: Final = 120  # steps that are drawn; the list below has all
_LONGEST: Final = 22  # characters of a name
_BOX: Final = (188, 44)  # width and height in pixels
_UNDO: Final = (176, 44)
_ACROSS: Final = 64  # pixels between two layers
_DOWN: Final = 22  # between two steps of a layer
_MARGIN: Final = 12  # around the drawing


@dataclass(frozen=True, slots=True)
class Place:
    """The upper left corner of a step's box."""

    x: int
    y: int


def layers(steps: Sequence[Any]) -> list[list[Any]]:
    """The steps by layer. A step waits only for earlier ones; those that were deleted are ignored."""
    depth: dict[str, int] = {}
    for step in steps:
        depth[step.name] = max((depth[name] + 1 for name in step.after if name in depth), default=0)
    rows: list[list[Any]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for step in steps:
        rows[depth[step.name]].append(step)
    rank: dict[str, float] = {}
    for row in rows:
        row.sort(key=lambda step: _median([rank[name] for name in step.after if name in rank]))
        rank |= {step.name: n / max(len(row), 1) for n, step in enumerate(row)}
    return rows


def _median(ranks: list[float]) -> float:
    return sorted(ranks)[len(ranks) // 2] if ranks else 0.0


def draw(steps: Sequence[Any], url: Callable[[str], str]) -> Markup:
    """The drawing; empty for a workflow of one step, and for one with more than `MOST`."""
    if not 1 < len(steps) <= MOST:
        return Markup("")
    columns = layers(steps)
    high = _BOX[1] + _DOWN + (_UNDO[1] if any(step.undo for step in steps) else 0)
    tallest = max(len(one) for one in columns)
    places: dict[str, Place] = {}
    for n, column in enumerate(columns):
        top = (tallest - len(column)) * high // 2
        for m, step in enumerate(column):
            places[step.name] = Place(_MARGIN + n * (_BOX[0] + _ACROSS), _MARGIN + top + m * high)
    width = 2 * _MARGIN + len(columns) * (_BOX[0] + _ACROSS) - _ACROSS
    height = 2 * _MARGIN + tallest * high - _DOWN
    edges = [_edge(places[name], places[step.name], step) for step in steps for name in step.after if name in places]
    boxes = [_step(step, places[step.name], url) for step in steps]
    words = f"{len(steps)} steps in {len(columns)} layers; the list below says the same in words."
    return Markup(
        '<div class="wide" tabindex="0" role="region" aria-label="Graph of the steps"><svg class="graph" role="group"'
        ' aria-labelledby="graph-title" width="{0}" height="{1}" viewBox="0 0 {0} {1}">'
        '<title id="graph-title">{2}</title>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>{3}{4}</svg></div>'
    ).format(width, height, words, Markup("").join(edges), Markup("").join(boxes))


def _edge(source: Place, target: Place, step: Any) -> Markup:
    x1, y1 = source.x + _BOX[0], source.y + _BOX[1] // 2
    x2, y2 = target.x, target.y + _BOX[1] // 2
    bend = (x1 + x2) // 2
    waits = " waits" if _state(step) == "blocked" else ""
    return Markup('<path class="edge{0}" d="M{1} {2}C{3} {2} {3} {4} {5} {4}" marker-end="url(#tip)"/>').format(
        waits, x1, y1, bend, y2, x2
    )


def _step(step: Any, place: Place, url: Callable[[str], str]) -> Markup:
    state = _state(step)
    box = _box(place, _BOX, url(f"/jobs/{step.job_id}"), state, step.name, f"{SIGNS.get(state, '●')} {state}")
    if not step.undo:
        return box
    below = Place(place.x + _BOX[0] - _UNDO[0], place.y + _BOX[1])
    state = str(getattr(step.undo_state, "value", step.undo_state) or "not begun")
    address = url(f"/jobs/{step.undo_job_id}") if step.undo_job_id else None
    return box + _box(below, _UNDO, address, f"undo {state}", f"↶ {step.undo}", f"{SIGNS.get(state, '●')} {state}")


def _state(step: Any) -> str:
    return str(getattr(step.state, "value", step.state) or "deleted")


def _box(place: Place, size: tuple[int, int], address: str | None, state: str, name: str, below: str) -> Markup:
    text = plain(name)
    longest = _LONGEST * size[0] // _BOX[0]
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    classes = " ".join(f"n-{''.join(c if c.isalnum() else '-' for c in one)}" for one in state.split(" ", 1))
    values: Mapping[str, object] = {
        "classes": classes, "x": place.x, "y": place.y, "width": size[0], "height": size[1], "left": place.x + 10,
        "first": place.y + 18, "second": place.y + 36, "text": text, "below": below, "full": plain(name),
    }  # fmt: skip
    drawing = Markup(
        '<g class="node {classes}"><title>{undo}{full}: {below}</title><rect x="{x}" y="{y}" width="{width}"'
        ' height="{height}" rx="6"/><text x="{left}" y="{first}" class="name">{text}</text><text x="{left}"'
        ' y="{second}">{below}</text></g>'
    ).format(**values, undo="undo " if size == _UNDO else "")
    return drawing if address is None else Markup('<a href="{0}">{1}</a>').format(address, drawing)
