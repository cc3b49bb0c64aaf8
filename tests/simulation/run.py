"""Simulate: ``python -m tests.simulation.run --seeds 0:1000``. A failing seed prints its history, shrunk.

``--keep NAME`` writes the shrunk run into `kept`, whose runs are regressions: `test_what_failed_once_holds`.
It starts itself anew with a fixed PYTHONHASHSEED: the order of a set must not differ between two runs of a seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import resilient.testing  # noqa: F401 - everything that a run may import is there before it begins
from resilient.store.db import schema
from resilient.store.db.database import Database
from tests.simulation.judge import judge, setup
from tests.simulation.loop import Stuck, collect
from tests.simulation.mutants import MUTANTS
from tests.simulation.plan import Plan, drawn
from tests.simulation.system import System
from tests.simulation.world import World

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "kept"
HANGS = 200.0  # seconds; a run takes a fifth of one
MEMORY = ["/dev/shm"]  # noqa: S108 - files in memory, where there are such


class Run(NamedTuple):
    """How a run ended: broken rules, what happened for people, and the log of all steps and requests."""

    broken: list[str]
    notes: list[str]
    log: list[dict]

    def digest(self):
        """What identifies it."""
        lines = [json.dumps(line, sort_keys=True) for line in self.log]
        return hashlib.sha256("\n".join([*self.notes, *lines]).encode()).hexdigest()[:16]


def template(folder):
    """A file with the schema and the log of every step."""
    path = folder / "template.db"
    database = Database(f"sqlite:///{path}")
    schema.upgrade_sync(database)
    setup(database)
    database.close_sync()
    return path


class Bugs(logging.Handler):
    """What the engine says of itself at level ERROR."""

    def __init__(self, world):
        super().__init__(logging.ERROR)
        self.world = world

    def emit(self, record):
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self.world.bugs.append(text)


def simulate(plan, folder):
    """Run a plan and judge it."""
    run = _run(plan, folder)
    if plan.seed % 100 == 0:
        gc.unfreeze()  # what they have dropped since
    collect()
    gc.freeze()  # what caches keep of it is not looked through again after each of the next thousand
    return run


def _run(plan, folder):
    path = folder / "run.db"
    for old in folder.glob("run.*"):
        old.unlink()
    shutil.copy(folder / "template.db", path)
    system = System(plan.seed)
    with system.installed():
        world = World(system, plan, path)
        world.bugs = []
        bugs = Bugs(world)
        logging.getLogger("resilient").addHandler(bugs)
        world.database = Database(f"sqlite:///{path}", clock=system.now)
        system.watch(path)
        try:
            system.loop.run_until_complete(world.run())
        except Stuck as error:
            world.errors.append(f"J1 {error}")
        except Exception as error:  # noqa: BLE001 - a finding
            world.errors.append("".join(traceback.format_exception(error)))
        finally:
            logging.getLogger("resilient").removeHandler(bugs)
        broken = judge(world)
        world.database.close_sync()
        system._probe.close()
    return Run(broken, system.notes, [*world.log, *world.arrivals])


def shrunk(plan, folder, deadline):
    """A smaller plan that fails, too."""
    smaller = True
    while smaller and time.time() < deadline:
        smaller = False
        for part in (*plan.faults, *reversed(plan.batches)):
            less = plan.without(batches=(part,), faults=(part,))
            if simulate(less, folder).broken:
                plan, smaller = less, True
            if time.time() > deadline:
                break
    return plan


def repeatable():
    """Begin anew where the order of sets would differ between two runs of a seed."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.simulation.run", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)})  # noqa: S606


def quiet():
    """Only what the engine says of faults of its own is heard; tasks of killed processes are never awaited."""
    logging.getLogger("resilient").setLevel(logging.ERROR)
    logging.getLogger("resilient").propagate = False
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def report(plan, folder, seconds, keep):
    """The history of a failing run, made smaller first, and kept under a name."""
    plan = shrunk(plan, folder, time.time() + seconds) if seconds else plan
    run = simulate(plan, folder)
    if keep:
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{keep}.json").write_text(json.dumps(plan.to_json(), indent=1) + "\n")
    parts = [*plan.batches, *plan.faults]
    return "\n".join(["what it does:", *map(str, parts), "what happened:", *run.notes, "broken:", *run.broken])


def hang(seed):
    """Say where a run stands that does not end."""
    say(f"seed {seed} hangs")
    faulthandler.dump_traceback()
    os._exit(3)


def kept():
    """Runs that failed once, by name."""
    return [(path.stem, Plan.from_json(json.loads(path.read_text()))) for path in sorted(KEPT.glob("*.json"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FROM:TO, or one")
    parser.add_argument("--mutant", default="", help="break the engine on purpose: see mutants.py")
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for making the first failing run smaller")
    parser.add_argument("--keep", default="", help="a name for the first failing run, made smaller")
    parser.add_argument("--kept", action="store_true", help="run those that failed once, instead of seeds")
    parser.add_argument("--digests", action="store_true", help="print what identifies each run")
    options = parser.parse_args()
    repeatable()
    quiet()
    begin, _, end = options.seeds.partition(":")
    if options.mutant:
        MUTANTS[options.mutant]()
    runs, plans, began = {}, [], time.time()
    with tempfile.TemporaryDirectory(dir=next(filter(os.path.isdir, MEMORY), None)) as place:
        folder = Path(place)
        template(folder)
        gc.freeze()
        seeds = range(int(begin), int(end or int(begin) + 1))
        for seed, plan in kept() if options.kept else ((seed, drawn(seed)) for seed in seeds):
            plans.append(plan)
            timer = threading.Timer(HANGS, hang, [seed])
            timer.daemon = True
            timer.start()
            run = simulate(plan, folder)
            timer.cancel()
            runs[seed] = bool(run.broken)
            if options.digests:
                say(f"{seed} {run.digest()}")
            if run.broken:
                say(f"seed {seed}: {run.broken[0]}")
                if sum(runs.values()) == 1 and options.shrink:
                    say(report(plan, folder, options.shrink, options.keep))
                if options.first:
                    break
    say(
        json.dumps(
            {
                "seeds": len(runs),
                "failed": [seed for seed, is_broken in runs.items() if is_broken],
                "jobs": sum(plan.jobs for plan in plans),
                "fewest_jobs": min(plan.jobs for plan in plans),
                "faults": sum(len(plan.faults) for plan in plans),
                "fewest_faults": min(len(plan.faults) for plan in plans),
                "seconds": round(time.time() - began, 1),
            }
        )
    )
    os._exit(any(runs.values()))  # without what killed processes would still say


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
