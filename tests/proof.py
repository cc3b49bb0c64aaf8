"""`make proof`: what takes longer than a test run may, in pieces that resume, and one table at the end.

Each piece leaves a note in `.proof/`: the state of the code and the commit, its result, its figure and its seconds. A
piece that held is not run again for the same code; one that failed, or that was cut off, is. PIECES takes words: only
pieces whose names hold one of them. SCALE makes every piece longer or shorter: SCALE=0.01 tries them all in a few
minutes, under notes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOTES = ROOT / ".proof"
MODULE = [sys.executable, "-W", "ignore", "-m"]
# A test that waits for ever ends by the clock of pyproject.toml after minutes: here some last longer.
PYTEST = [*MODULE, "pytest", "-q", "-s", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=7200"]
SHARED = [*PYTEST, "--forks", "auto"]
WIDEST = 72  # characters of a figure
COUNTED = ("resilient", "providers", "tests")


class Piece(NamedTuple):
    """A name, the command that runs it, and what is added to its environment. It holds if it ends with 0."""

    name: str
    command: list[str]
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


def pieces(scale=1.0):
    """All of them, the quickest to find something first."""
    sys.path.insert(0, str(ROOT))
    import tests.store.acts  # noqa: F401 - it registers them
    from tests.benchmarks.bench_throttle import TARGETS
    from tests.fuzz.parsers import PARSERS
    from tests.mutation_rooms import ROOMS
    from tests.store.pairs import PLANS
    from tests.store.registry import ACTS, LONGEST

    yield Piece("docs: the site, without a warning", ["make", "docs"], {"STATE_OF_DOCS": state_of_the_docs()})
    yield Piece("lowest: the oldest libraries that are allowed", ["make", "lowest"])
    floors = [f"tests/{name}" for name in ("wire", "engine", "adapters", "testing")]
    yield Piece("uvloop: the engine on another event loop", [*PYTEST, *floors], {"RESILIENT_LOOP": "uvloop"})
    yield from rest()
    yield Piece("table: broken engines are found", [*MODULE, "tests.simulation.table"])
    programs = {"RESILIENT_PROGRAMS": str(max(40, int(20_000 * scale)))}
    yield Piece("features: programs of all of them", [*PYTEST, "tests/engine/test_features.py"], programs)
    for name in PARSERS:
        yield Piece(f"fuzz: {name}", [*MODULE, "tests.fuzz.run", name, "--seconds", f"{600 * scale:g}"])
    for room in ROOMS:
        yield Piece(f"mutation: {room}", [*MODULE, "tests.mutation", room])
    yield from chaos(scale)
    for first in range(0, 100_000, 5_000):
        last = first + max(1, int(5_000 * scale))
        yield Piece(f"simulation: from seed {first}", [*MODULE, "tests.simulation.run", "--seeds", f"{first}:{last}"])
    for name in ("sqlite", "postgresql"):
        jobs = [str(max(20, int(count * scale)) // 20 * 20) for count in (1_000_000, 100_000)]
        yield Piece(f"soak: {name}", [*MODULE, "tests.benchmarks.on_server", name, "bench_soak", *jobs])
    for name in ("postgresql", "sqlite"):
        size = [str(max(10, int(count * scale) // 10 * 10)) for count in (10_000_000, 100_000)]
        sizes = ["--jobs", size[0], "--stretch", size[1]]
        yield Piece(f"long: ten million jobs, {name}", [*MODULE, "tests.benchmarks.bench_long", name, *sizes])
    for name in TARGETS:
        shorter = f"{min(20.0, 1 / scale):g}"
        yield Piece(f"throttle: {name}", [*MODULE, "tests.benchmarks.bench_throttle", name, shorter])
    for plans in PLANS:
        for name in ACTS:
            test = f"tests/store/test_pairs.py::test_it_meets_the_others[{name}-{plans}]"
            yield Piece(f"pairs: {name} ({plans})", [*PYTEST, test], {"RESILIENT_PAIRS": "all"})
        for name in LONGEST:
            test = f"tests/store/test_pairs.py::test_three_meet[{name}-{plans}]"
            yield Piece(f"threes: {name} ({plans})", [*PYTEST, test], {"RESILIENT_PAIRS": "all"})


CHAOS = (  # name, file, seeds, seconds
    ("chaos: random", "random", range(1, 11), 25),
    ("chaos: random", "random", [11], 600),
    ("chaos: refreshers", "refreshers", (12, 13, 14), 120),
    ("chaos: outbox", "outbox", (15, 16, 17), 60),
)


def rest():
    """The tests that `make test` leaves out, by room: see tests/turns.py."""
    from tests.turns import ROOMS

    for room in ROOMS:
        yield Piece(f"rest: {room.removesuffix('.py')}", [*SHARED, "--turns=rest", f"tests/{room}"])


def chaos(scale):
    """Harm at every commit, and at random: the tests of `make test`, in full and for longer."""
    for name in ("sqlite", "postgresql"):
        command = [*PYTEST, "tests/chaos/test_every_cut.py", "-k", name]
        yield Piece(f"chaos: every cut, {name}", command, {"RESILIENT_CUTS": "all"})
    for name, file, seeds, seconds in CHAOS:
        for seed in seeds:
            more = {"RESILIENT_CHAOS_SEED": str(seed), "RESILIENT_CHAOS_SECONDS": f"{max(10, seconds * scale):g}"}
            yield Piece(f"{name}, seed {seed}", [*PYTEST, f"tests/chaos/test_{file}.py"], more)


def state_of_the_code(root=ROOT):
    """A name for the code as it is, committed or not."""
    digest = hashlib.sha256()
    for folder in COUNTED:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json") and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def state_of_the_docs(root=ROOT):
    """A name for what only the site is made of: the piece that builds it runs anew when a page changes."""
    paths = sorted(path for path in (root / "docs").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return hashlib.sha256(b"".join(path.read_bytes() for path in (root / "mkdocs.yml", *paths))).hexdigest()[:16]


def commit(root=ROOT):
    """The commit, with a plus if the files are not those of it."""
    command = ["git", "describe", "--always", "--dirty=+", "--match", "nothing"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "?"


class Runner:
    """Runs pieces, notes what came of each, and shows all of it."""

    def __init__(self, folder=NOTES, *, root=ROOT, say=None):
        self.folder, self.root, self.say = folder, root, say or say_at_once
        self.state, self.commit = state_of_the_code(root), commit(root)
        self.rows, self.failed = [], 0
        self._child = None

    def run(self, some):
        """These pieces; 1 if one failed."""
        for piece in some:
            note = self.noted(piece)
            if note is None:
                note = self._done(piece)
            self.rows.append((piece.name, note))
            self.failed += note["result"] != "held"
        self.show()
        return min(self.failed, 1)

    def noted(self, piece):
        """What is known of a piece: only if it held, with this code and this command."""
        try:
            note = json.loads(self._path(piece).read_text())
        except (OSError, ValueError):
            return None
        return note if note["result"] == "held" and note["code"] == self.state else None

    def show(self):
        """One table."""
        heads = ("piece", "result", "figure", "seconds", "commit")
        rows = [
            (name, note["result"], note["figure"], f"{note['seconds']:,.1f}", note["commit"])
            for name, note in self.rows
        ]
        widths = [max(len(row[n]) for row in (heads, *rows)) for n in range(len(heads))]
        for row in (heads, *rows):
            cells = [
                cell.rjust(w) if n == 3 else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            self.say("  ".join(cells).rstrip())
        self.say(f"{len(rows) - self.failed} of {len(rows)} pieces held")

    def end(self):
        """End the piece that runs, with all it started."""
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGTERM)
            try:
                self._child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._child.pid, signal.SIGKILL)

    def _done(self, piece):
        self._path(piece).unlink(missing_ok=True)
        began = time.monotonic()
        self._child = subprocess.Popen(
            piece.command, cwd=self.root, env=os.environ | piece.environment, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        said, _ = self._child.communicate()
        held = self._child.returncode == 0
        note = {
            "piece": piece.name,
            "code": self.state,
            "commit": self.commit,
            "result": "held" if held else "FAILED",
            "figure": figure(said),
            "seconds": round(time.monotonic() - began, 1),
        }
        self._keep(piece, note)
        if not held:
            self.say(said[-10_000:])
        self.say(f"{piece.name}: {note['result']} ({note['seconds']} s)")
        return note

    def _keep(self, piece, note):
        self.folder.mkdir(exist_ok=True)
        path = self._path(piece)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(note, indent=1))
        fresh.replace(path)  # a note is whole, or not there

    def _path(self, piece):
        same = json.dumps([piece.name, piece.command[1:], sorted(piece.environment.items())])
        return self.folder / f"{hashlib.sha256(same.encode()).hexdigest()[:16]}.json"


def figure(said):
    """The last line a piece printed, without what pytest draws around it."""
    lines = [line.strip(" =") for line in said.splitlines() if line.strip(" =")]
    last = lines[-1] if lines else ""
    with contextlib.suppress(ValueError, AttributeError):
        last = ", ".join(f"{value:,} {name}" for name, value in json.loads(last).items() if isinstance(value, int))
    return last if len(last) <= WIDEST else last[: WIDEST - 1] + "…"


def say_at_once(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def ended(*_):
    raise KeyboardInterrupt


def chosen(words, scale=1.0):
    """The pieces that these words mean. Exits where one means none: nothing is proved by nothing."""
    every = list(pieces(scale))
    if unknown := [word for word in words if not any(word in piece.name for piece in every)]:
        sorts = ", ".join(dict.fromkeys(piece.name.split(":")[0].split(",")[0] for piece in every))
        sys.exit(f"PIECES: no piece has {unknown[0]!r} in its name. There are: {sorts}")
    return [piece for piece in every if not words or any(word in piece.name for word in words)]


def main():
    chosen_pieces = chosen(os.environ.get("PIECES", "").split(), float(os.environ.get("SCALE") or 1))
    runner = Runner()
    signal.signal(signal.SIGTERM, ended)
    try:
        return runner.run(chosen_pieces)
    except KeyboardInterrupt:
        runner.end()
        runner.show()
        runner.say("cut off: make proof goes on from here")
        return 130


if __name__ == "__main__":
    about = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("make proof", description=__doc__, formatter_class=about).parse_args()
    sys.exit(main())
