"""``python -m tests.benchmarks.bench_throttle METER [SCALE]``: the engine against a limit nobody declared.

Ends with 1 if a figure misses its target. The targets are for a machine with nothing else to do: a place that a process
reaches too late is not used.
"""

import json
import sys
from typing import NamedTuple

from resilient.surface.bench.throttle import throttle


class Target(NamedTuple):
    """Refused at first, share of refusals later, share of what is allowed, executions of a job after the cold phase."""

    cold: int
    later: float
    goodput: float
    executions: float = 1.1
    fairness: float = 0.0


TARGETS = {
    "sliding": Target(10, 0.01, 0.90),
    "bucket": Target(30, 0.03, 0.97),
    "told": Target(0, 0.0, 0.99),
    "fixed": Target(60, 0.02, 0.97),
    "once": Target(8, 0.005, 0.93),
    "changes": Target(15, 0.01, 0.80),
    "silent": Target(15, 0.02, 0.75),
    "application": Target(100, 0.005, 0.90, fairness=0.95),
    "hour": Target(100, 0.003, 0.99),
    "stray": Target(1, 0.0, 0.0),
    "shared": Target(15, 0.02, 0.85),
}


def misses(figures, target):
    """What falls short, by name."""
    most = {"cold": target.cold, "later_share": target.later, "executions_later": target.executions}
    least = {"goodput": target.goodput, "fairness": target.fairness}
    over = [name for name, bound in most.items() if (figures.get(name) or 0) > bound]
    return over + [name for name, bound in least.items() if figures.get(name) is not None and figures[name] < bound]


def main():
    name, scale = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    figures = throttle(None, name, scale=scale, rivals=False)["engine"]
    figures.pop("each_second")
    short = misses(figures, TARGETS[name])
    sys.stdout.write(f"{json.dumps(figures)}\n{name}: {'misses ' + ', '.join(short) if short else 'holds'}\n")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
