"""docs/reference-providers.md is what the docstrings say, and those name every argument."""

import re

import pytest

from tests import reference

FACTS = [name for names in reference.CLASSES for name in names]


def test_what_is_checked_in_is_what_is_made():
    assert reference.WHERE.read_text() == reference.page(), "run: python -m tests.reference"


@pytest.mark.parametrize("name", FACTS)
def test_every_argument_is_explained(name):
    cls = reference.named(name)
    if hasattr(cls, "__members__"):
        return
    said = " ".join(base.__doc__ or "" for base in cls.__mro__[:-1])
    missing = [arg for arg, _, _ in reference.arguments(cls) if not re.search(rf"``{arg}\b|\b{arg}=", said)]
    assert not missing


def test_its_words_are_there():
    text = reference.WHERE.read_text()
    for word in (
        '"form", "json"',
        '"last_page", "every_page", "before_pass", "items"',
        '"never", "marked", "separate"',
    ):
        assert word in text
