"""Garbage collection while a worker has a process of its own."""

from __future__ import annotations

import gc

import pytest

from resilient.engine.ground import garbage as collector


@pytest.fixture(autouse=True)
def _thresholds():
    before = gc.get_threshold()
    gc.unfreeze()  # what tests froze when they were collected
    yield
    gc.set_threshold(*before)
    gc.freeze()


def test_it_is_rare_while_the_worker_runs_and_as_before_afterwards():
    gc.set_threshold(*collector._DEFAULTS)
    with collector.rare_collections():
        assert gc.get_threshold() == collector.THRESHOLDS
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == collector._DEFAULTS
    assert gc.get_freeze_count() == 0


def test_thresholds_of_the_application_are_kept():
    gc.set_threshold(1234, 5, 6)
    with collector.rare_collections():
        assert gc.get_threshold() == (1234, 5, 6)
        assert gc.get_freeze_count() == 0


def test_what_the_application_froze_stays_frozen():
    """A server that forks its workers freezes first, so that they share its memory."""
    gc.set_threshold(*collector._DEFAULTS)
    gc.freeze()
    count = gc.get_freeze_count()
    with collector.rare_collections():
        assert gc.get_threshold() == collector.THRESHOLDS
        assert gc.get_freeze_count() <= count
    assert 0 < gc.get_freeze_count() <= count
