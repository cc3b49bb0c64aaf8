"""Every parser of what strangers write: it refuses or reads, in linear time and memory.

What is kept in `corpus` is tried each time, stretched as well, and Hypothesis adds some. `make proof PIECES=fuzz` goes
on for ten minutes with each.
"""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.measure import STRETCHED, Fault, measured, stretched, tried
from tests.fuzz.parsers import PARSERS, Parser
from tests.fuzz.run import CORPUS, KEPT, MOST, Fuzz, changed, corpus_of, smaller

SLOW = 20  # microseconds a character: many providers read the same
EACH = pytest.mark.parametrize("name", PARSERS)


@EACH
def test_what_is_kept_is_read_within_its_bounds(name):
    kept = corpus_of(name)
    assert kept
    for text in kept:
        tried(PARSERS[name], text)
    size = 4_000 if PARSERS[name].micros > SLOW else STRETCHED
    for text in random.Random(name).sample(kept, min(3, len(kept))):
        for one in stretched(text, size)[:1]:
            measured(PARSERS[name], one)


@EACH
@given(st.data())
@settings(max_examples=25)
def test_whatever_stands_there_is_read_or_refused(name, data):
    words = st.lists(st.sampled_from([*PARSERS[name].words, *corpus_of(name)]), max_size=20).map("".join)
    tried(PARSERS[name], data.draw(words | st.text(max_size=100)))


def test_the_corpus_is_small_and_belongs_to_somebody():
    files = sorted(CORPUS.glob("*"))
    assert {one.stem for one in files} == set(PARSERS)
    assert all(len(json.loads(one.read_text())) <= MOST for one in files)
    assert all(len(text) <= KEPT for one in files for text in json.loads(one.read_text()))
    assert sum(one.stat().st_size for one in files) < 300_000


def raises(text):
    if re.search("a[bc]*d", text):
        raise KeyError(text)


def hoards(text):
    return [text[:n] for n in range(len(text))]


def repeats(text):
    return sum(1 for n in range(0, len(text), 8) for _ in text[n:])


@pytest.mark.parametrize(
    ("run", "words", "micros", "says"),
    # The bound on time of one that hoards is out of reach: it is found by its memory on a slow machine, too.
    [(raises, "abcd", 3.0, "KeyError"), (hoards, "abc", 1e6, "bytes for"), (repeats, "abc", 3.0, "ms for")],
    ids=["raises", "hoards", "repeats"],
)
def test_a_parser_that_fails_is_found(run, words, micros, says, monkeypatch):
    monkeypatch.setitem(PARSERS, "broken", Parser(run, tuple(words), micros=micros))
    fuzz = Fuzz("broken", 1)
    with pytest.raises(Fault, match=says):  # noqa: PT012 - the first or any later
        fuzz.begin()
        for _ in range(500):
            fuzz.pool = []  # tests are no lines of the engine, so nothing they reach is new
            fuzz.take(changed(fuzz.dice, "ab", words, ["ab"]))


def test_a_failing_input_is_made_smaller():
    assert smaller(Parser(raises, ()), "xx" * 30 + "abbbcd" + "y" * 20) == "ad"
