"""Simulate: ``python -m tests.simulation.run --seeds 0:1000``. A failing seed prints its history, shrunk.

It starts itself anew with a fixed PYTHONHASHSEED, because the order of a set must not differ between two runs of a seed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


def template(folder):
    """A file with the schema and the log of every step."""
    from resilient.store import schema
    from resilient.store.database import Database
    from tests.simulation import judge

    path = folder / "template.db"
    database = Database(f"sqlite:///{path}")
    schema.upgrade_sync(database)
    judge.setup(database)
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
    """Run a plan; (broken rules, notes, digest of everything that was seen)."""
    from resilient.store.database import Database
    from tests.simulation.judge import judge
    from tests.simulation.loop import Stuck
    from tests.simulation.system import System
    from tests.simulation.world import World

    path = folder / "run.db"
    for old in folder.glob("run.*"):
        old.unlink()
    shutil.copy(folder / "template.db", path)
    system = System(plan.seed)
    bugs = None
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
        lines = [json.dumps(line, sort_keys=True) for line in [*world.log, *world.arrivals]]
        digest = hashlib.sha256("\n".join([*system.notes, *lines]).encode()).hexdigest()[:16]
        world.database.close_sync()
        system._probe.close()
    return broken, system.notes, digest, world


def shrunk(plan, folder, deadline):
    """A smaller plan that fails, too."""
    smaller = True
    while smaller and time.time() < deadline:
        smaller = False
        for part in (*plan.faults, *reversed(plan.batches)):
            less = plan.without(batches=(part,), faults=(part,))
            if simulate(less, folder)[0]:
                plan, smaller = less, True
            if time.time() > deadline:
                break
    return plan


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100", help="FROM:TO, or one")
    parser.add_argument("--mutant", default="")
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds")
    parser.add_argument("--digests", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation.run", *sys.argv[1:]],
                  {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)})  # fmt: skip
    begin, _, end = options.seeds.partition(":")
    seeds = range(int(begin), int(end) if end else int(begin) + 1)
    import resilient.testing  # noqa: F401 - everything that a run may import
    from tests.simulation import mutants
    from tests.simulation import world as _  # noqa: F401
    from tests.simulation.plan import drawn

    logging.getLogger("resilient").setLevel(logging.DEBUG if options.verbose else logging.ERROR)
    logging.getLogger("resilient").propagate = options.verbose
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # tasks of killed processes are never awaited
    if options.verbose:
        logging.basicConfig(level=logging.DEBUG)
    if options.mutant:
        mutants.MUTANTS[options.mutant]()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    failed, work, faults, started = [], [], [], time.time()
    with tempfile.TemporaryDirectory(dir=place) as folder:
        template(Path(folder))
        gc.freeze()
        for seed in seeds:
            plan = drawn(seed)
            broken, notes, digest, world = simulate(plan, Path(folder))
            work.append(plan.jobs)
            faults.append(len(plan.faults))
            if options.digests:
                print(seed, digest)
            if not broken:
                continue
            failed.append(seed)
            print(f"seed {seed}: {broken[0]}", flush=True)
            if options.first:
                if options.shrink:
                    plan = shrunk(plan, Path(folder), time.time() + options.shrink)
                    broken, notes, digest, world = simulate(plan, Path(folder))
                print(json.dumps({"batches": plan.batches, "faults": plan.faults}, default=vars, indent=1))
                print("\n".join(notes))
                print("\n".join(broken))
                break
    print(json.dumps({"seeds": len(seeds), "failed": failed, "jobs": sum(work), "fewest_jobs": min(work),
                      "faults": sum(faults), "fewest_faults": min(faults), "seconds": round(time.time() - started, 1)}))  # fmt: skip
    sys.stdout.flush()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what killed processes have to say at the end
    os._exit(bool(failed))


if __name__ == "__main__":
    main()
