"""`make proof`: what takes longer than a test run may, in pieces that resume, and one table at the end.

A piece that held is noted in `.proof/` under the state of the code, and not run again for it; what failed is. PIECES
takes words: only pieces whose names hold one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTES = ROOT / ".proof"
PYTEST = ["pytest", "-q", "-s", "-p", "no:cacheprovider"]


def pieces():
    """Names, and what runs them: a module of Python with its arguments, and the environment."""
    sys.path.insert(0, str(ROOT))
    import tests.store.acts  # noqa: F401 - it registers them
    from tests.store.pairs import PLANS
    from tests.store.registry import ACTS

    for plans in PLANS:
        for name in ACTS:
            test = f"tests/store/test_pairs.py::test_it_meets_the_others[{name}-{plans}]"
            yield f"pairs: {name} ({plans})", [*PYTEST, test], {"RESILIENT_PAIRS": "all"}
    for seed in range(1, 11):
        yield f"chaos: seed {seed}", [*PYTEST, "tests/chaos/test_random.py"], {"RESILIENT_CHAOS_SEED": str(seed)}
    for first in range(0, 100_000, 5_000):
        seeds = f"{first}:{first + 5_000}"
        yield f"simulation: seeds {seeds}", ["tests.simulation.run", "--seeds", seeds], {}


def state_of_the_code():
    """A name for the code as it is, committed or not."""
    digest = hashlib.sha256()
    for folder in ("resilient", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def say(text):
    """At once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main():
    notes = NOTES / f"{state_of_the_code()}.json"
    known = json.loads(notes.read_text()) if notes.exists() else {}
    words = os.environ.get("PIECES", "").split()
    rows, failed = [], 0
    for name, arguments, environment in pieces():
        if words and not any(word in name for word in words):
            continue
        if name not in known:
            began = time.monotonic()
            command = [sys.executable, "-W", "ignore", "-m", *arguments]
            done = subprocess.run(
                command, check=False, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
            )
            seconds, held = round(time.monotonic() - began, 1), done.returncode == 0
            if held:
                known[name] = seconds
                NOTES.mkdir(exist_ok=True)
                notes.write_text(json.dumps(known, indent=1))
            else:
                failed += 1
                say(done.stdout[-8_000:] + done.stderr[-2_000:])
            say(f"{name}: {'held' if held else 'FAILED'} ({seconds} s)")
        rows.append((name, f"{known[name]} s" if name in known else "FAILED"))
    width = max((len(name) for name, _ in rows), default=0)
    say("\n".join(f"{name:<{width}}  {what}" for name, what in rows))
    say(f"{len(rows) - failed} of {len(rows)} pieces held")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
