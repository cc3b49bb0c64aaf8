"""Fuzz one parser: ``python -m tests.fuzz.run PARSER --seconds 600 [--keep]``.

It changes inputs of the corpus at random and keeps those that reach lines of the engine which none before reached. Each
of these is stretched, too, and held against the parser's bounds of time and memory. What breaks a parser is made
smaller, printed, and the exit status is 1. ``--keep`` writes a small corpus back: as few inputs as reach what all of
them reached.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from tests.fuzz.measure import Fault, measured, shown, stretched, tried
from tests.fuzz.parsers import PARSERS

CORPUS = Path(__file__).parent / "corpus"
ENGINE = str(Path(__file__).parents[2] / "resilient")
LONGEST = 2_000  # characters of an input that is changed
KEPT = 400  # characters of an input that may stand in the corpus
MOST = 40  # inputs of one parser in the corpus
ODD = ["", "\x00", "\x7f", "\x85", "\xff", "\u0130", "\u202e", "\ud800", "٣", "0", "-", "9" * 40, " ", "\n", "\\"]


def corpus_of(name):
    """The inputs that are kept for a parser."""
    path = CORPUS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def reached(parser, text):
    """The lines of the engine that an input reaches. Raises `Fault`."""
    lines = set()

    def local(frame, event, _):
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def entered(frame, *_):
        return local if frame.f_code.co_filename.startswith(ENGINE) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        tried(parser, text)
    finally:
        sys.settrace(before)
    return lines


def changed(dice, text, words, others):
    """An input a little, or much, different."""
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        at = dice.randint(0, len(text))
        deed = dice.randrange(7)
        if deed < 3:
            text = text[:at] + dice.choice(words) + text[at:]
        elif deed == 3:
            text = text[:at] + text[at + dice.randint(1, 20) :]
        elif deed == 4:
            part = text[at : at + dice.randint(1, 30)]
            text = text[:at] + part * dice.randint(1, 8) + text[at:]
        elif deed == 5 and others:
            other = dice.choice(others)
            text = text[:at] + other[dice.randint(0, len(other)) :]
        else:
            text = text[:at] + (dice.choice(ODD) if dice.random() < 0.5 else chr(dice.randrange(256))) + text[at + 1 :]
    return text[:LONGEST]


def smaller(parser, text):
    """An input that breaks the parser in some way, too, as short as a few passes make it."""
    size = max(1, len(text) // 2)
    while size:
        at = 0
        while at < len(text):
            less = text[:at] + text[at + size :]
            try:
                measured(parser, less)
                at += size
            except Fault:
                text = less
        size //= 2
    return text


class Fuzz:
    """One parser under way."""

    def __init__(self, name, seed):
        self.name, self.parser, self.dice = name, PARSERS[name], random.Random(seed)
        self.pool, self.lines, self.tries, self.slowest = [], set(), 0, 0.0

    def begin(self):
        """What is kept, and each word alone."""
        for text in ["", *corpus_of(self.name), *self.parser.words]:
            self.take(text)

    def go_on(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            others = [text for text, _ in self.pool]
            self.take(changed(self.dice, self.dice.choice(others), self.parser.words, others))

    def take(self, text):
        """Try an input; keep it if it reaches anything new. Raises `Fault`, with the shortest input."""
        self.tries += 1
        try:
            lines = reached(self.parser, text)
            if lines <= self.lines and self.pool:
                return
            for one in (text, *stretched(text)):
                self.slowest = max(self.slowest, measured(self.parser, one).seconds)
        except Fault as fault:
            raise Fault(f"{fault}\nsmallest: {shown(smaller(self.parser, text))}") from fault
        self.lines |= lines
        self.pool.append((text, lines))

    def keep(self):
        """The corpus: as few and short inputs as reach all of the lines."""
        short, kept = [(text, lines) for text, lines in self.pool if len(text) <= KEPT], []
        left = set().union(*(lines for _, lines in short))
        while left and len(kept) < MOST:
            text, lines = max(short, key=lambda one: (len(one[1] & left), -len(one[0])))
            left -= lines
            kept.append(text)
        CORPUS.mkdir(exist_ok=True)
        (CORPUS / f"{self.name}.json").write_text(json.dumps(sorted(kept), indent=0) + "\n")


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parser", choices=PARSERS)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options.add_argument("--keep", action="store_true")
    given = options.parse_args()
    fuzz = Fuzz(given.parser, given.seed)
    try:
        fuzz.begin()
        fuzz.go_on(given.seconds)
    except Fault as fault:
        say(f"{given.parser}, seed {given.seed}: {fault}")
        return 1
    if given.keep:
        fuzz.keep()
    say(f"{fuzz.tries:,} inputs, {len(fuzz.lines)} lines, slowest {fuzz.slowest * 1e3:.1f} ms, seed {given.seed}")
    return 0


def say(text):
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
