"""A fleet in virtual time against one provider, to see what the rule of `core.gates.learnt` does with it.

As the engine: each process starts slowly on its own, the rate is drawn from one row, jobs are claimed only as far as
the state allows, reports come late. A minute takes a fraction of a second.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from resilient.core.gates import learnt
from resilient.core.gates.learnt import Answers, Refusal

SLOTS, REPORT, PROMPT, TOLD, LATE = (
    50,
    1.0,
    0.05,
    0.02,
    0.3,
)  # per process; seconds between reports; until others know; share of late steps


@dataclass
class Process:
    generation: int = 0
    cap: float = 1.0
    flying: int = 0
    jobs: int = 0
    accepted: int = 0
    peak: int = 0
    since: float = 0.0
    held: float = 0.0  # until then it rests by itself
    grown: float = 0.0


@dataclass
class Fleet:
    allowance: object
    seconds: float
    seed: int = 1
    processes: int = 2
    slots: int = SLOTS
    latency: float = 0.05
    claim: float = 0.015
    late: float = 0.0  # seconds, on average, by which three steps of ten are late, as on a busy machine
    state: learnt.Learnt | None = None
    log: list = field(default_factory=list)  # (time, accepted)
    executions: int = 0

    def __post_init__(self):
        self.rng, self.now, self.order = random.Random(self.seed), 0.0, itertools.count()
        self.heap, self.fleet = [], [Process() for _ in range(self.processes)]
        self.tat, self.until, self.since_rest, self.generations = 0.0, 0.0, 0.0, itertools.count(1)
        self.events = []
        self.woken = 0.0

    def push(self, at, what, *args):
        if self.late and what in (self.starts, self.sends, self.reports, self.ends) and self.rng.random() < LATE:
            at += self.rng.expovariate(1 / self.late)
        heapq.heappush(self.heap, (at, next(self.order), what, args))

    def run(self):
        for p in self.fleet:
            self.push(0.0, self.claims, p)
            self.push(REPORT * self.rng.random(), self.reports, p)
        while self.heap and self.heap[0][0] <= self.seconds:
            self.now, _, what, args = heapq.heappop(self.heap)
            what(*args)
        return self

    # -- claiming

    def room(self):
        """How many more jobs may run."""
        s, running = self.state, sum(p.jobs for p in self.fleet)
        if self.now < self.until:
            return 0
        room = 10**6
        if (most := learnt.allowance(s, self.now)) is not None:
            room = min(room, most - running)
        if s is not None and s.kind == "slots":
            room = min(room, s.slots - running)
        if s is not None and s.kind == "quota":
            room = min(room, int(s.quota - max(0.0, self.tat - self.now) / 2.0))
        if s is not None and s.kind == "rate":
            room = min(room, int(1 + (self.now - self.tat + 1.0) * s.rate), 2 + int(s.rate * 2) - running)
        return max(0, room)

    def claims(self, p):
        for _ in range(min(self.slots - p.jobs, self.room(), 8)):
            p.jobs += 1
            self.executions += 1
            self.push(self.now + self.claim, self.starts, p)
        if p.jobs < self.slots:
            wait = max(0.02, self.until - self.now) if self.room() == 0 else 0.005
            self.push(self.now + wait, self.claims, p)
        else:
            self.push(self.now + 0.02, self.claims, p)

    def known(self, p):
        """The process looks at the row."""
        generation = self.state.generation if self.state else 0
        if p.generation != generation and (self.state is None or self.now >= self.state.changed_at + TOLD):
            self.flush(p)
            p.generation, p.cap, p.since = generation, (p.cap if self.state is None else 1.0), self.now
        return self.now < self.until and self.now >= self.since_rest + TOLD

    def starts(self, p):
        if self.known(p) or self.now < p.held:
            p.jobs -= 1
            return
        if p.flying >= p.cap:
            if self.now - p.grown > 0.25:
                p.cap, p.grown = p.cap * 1.5, self.now
            self.push(self.now + 0.005, self.starts, p)
            return
        at, s = self.now, self.state
        if s is not None and s.kind in ("rate", "quota"):
            interval, size = (1 / s.rate, 1) if s.kind == "rate" else (max(2.0, 1), s.quota)
            fits = self.tat + (1 - size) * interval
            if fits > self.now + 2:
                p.jobs -= 1
                return
            at = max(at, fits)
            self.tat = max(self.tat, at) + interval
        p.flying += 1
        p.since = p.since or self.now
        self.push(at + self.rng.random() * 0.015, self.sends, p, s.generation if s else 0)

    def sends(self, p, drawn):
        stopped = self.known(p)
        if stopped or p.generation != drawn:
            p.flying -= 1
            if stopped:
                p.jobs -= 1
            else:  # drawn at a rate that holds no more
                self.push(self.now, self.starts, p)
            return
        latency = self.latency * self.rng.uniform(0.8, 1.2)
        self.push(self.now + 0.1 * latency, self.arrives, p, p.generation, p.flying, self.now, latency)

    def arrives(self, p, generation, flying, sent, latency):
        wait = self.allowance.ask(self.now)
        self.log.append((self.now, wait is None))
        if wait is None:
            self.push(sent + 0.9 * latency, self.allowance.leave, sent + 0.9 * latency)
        took = latency if wait is None else min(latency, 0.05)
        self.push(sent + took, self.answers, p, generation, flying, sent, wait)

    def answers(self, p, generation, flying, sent, wait):
        p.flying -= 1
        self.push(self.now + self.claim, self.ends, p)
        if wait is None:
            p.cap, p.grown = p.cap + 0.5, self.now
            if generation == p.generation:
                p.accepted += 1
                p.peak = max(p.peak, flying)
                ramp = learnt.allowance(self.state, self.now) is not None
                if self.state is not None and ramp:
                    self.push(self.now + PROMPT, self.flush, p)
            elif self.state is not None:
                self.report(Answers(generation, 1, 0))
            return
        p.held = self.now + (wait.seconds or 1)
        self.throttle(p, generation, sent, wait.seconds)

    def ends(self, p):
        p.jobs -= 1

    # -- learning

    def throttle(self, p, generation, sent, told):
        active = self.until > self.now
        if told is not None:
            if active and self.now + told <= self.until:
                return
            until = self.now + told + 1 + self.rng.random() * min(told * 0.1, 30)
        else:
            if active or sent <= self.since_rest:
                return
            rest = 2.0
            again = self.until and self.now - self.until < 60
            if again and self.state is not None and self.state.accepted + p.accepted == 0:
                rest = min(300, max(2, 2 * (self.until - self.since_rest)))
            until = self.now + rest / 2 * (1 + self.rng.random())
        if not active:
            self.since_rest = self.now
        if learnt.is_fresh(self.state, generation):
            took = generation == p.generation
            r = Refusal(
                generation, told, p.accepted if took else 0, min(self.now - p.since, 20.0), p.peak if took else 0
            )
            new = next(self.generations)
            before = self.state
            self.state = learnt.throttled(self.state, r, new, self.now, until)
            self.events.append((round(self.now, 2), told, r.accepted, before, self.state))
            if took:
                p.accepted = p.peak = 0
                p.generation, p.cap, p.since = new, 1.0, self.now
            self.tat = 0.0 if self.state.kind == "quota" else max(self.tat, self.now)
            if self.state.kind == "slots" and before and not before.strikes and before.accepted > 3 * before.slots:
                until = self.now + 0.25 * (1 + self.rng.random())
                self.state = learnt.replace(self.state, resumes_at=until)
        self.until = until

    def report(self, r):
        if self.state is not None:
            self.state = learnt.answered(self.state, r, self.now)

    def flush(self, p):
        if p.accepted and self.state is not None:
            self.report(Answers(p.generation, p.accepted, p.peak))
            p.accepted = p.peak = 0

    def reports(self, p):
        self.known(p)
        if self.state is not None:
            self.flush(p)
        elif self.now - p.since > 20:
            p.accepted, p.since = p.accepted * 10 // 20, self.now - 10
        self.push(self.now + REPORT, self.reports, p)

    # -- figures

    def figures(self):
        bad = [t for t, ok in self.log if not ok]
        first = bad[0] if bad else 0.0
        cold = sum(t <= first + 0.25 for t in bad)
        rest = [ok for t, ok in self.log if t > first + 0.25] if bad else []
        good = sum(ok for _, ok in self.log)
        return {
            "cold": cold,
            "later": rest.count(False) / len(rest) if rest else 0.0,
            "refused": len(bad),
            "good": good / self.allowance.total(self.seconds),
            "executions": self.executions / max(1, good),
        }
