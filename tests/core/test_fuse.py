"""When deaths are too many to be believed, and how often a probe asks."""

from __future__ import annotations

from datetime import timedelta

import pytest

from resilient.core.accounts import fuse


@pytest.mark.parametrize(
    ("dead", "well", "blows"),
    [
        (1, 0, False),
        (5, 0, False),  # five are believed, even if they are all there are
        (6, 0, True),
        (6, 293, True),
        (6, 294, False),  # two per cent exactly
        (20, 980, False),
        (21, 979, True),
        (2500, 100_000, True),
        (2000, 98_000, False),
    ],
)
def test_more_than_five_and_more_than_two_per_cent(dead, well, blows):
    assert fuse.blows(dead, well) is blows


@pytest.mark.parametrize("dead", [6, 7, 100, 2500])
def test_counting_no_further_than_enough_changes_nothing(dead):
    for well in (0, dead * 48, dead * 49 - 1, dead * 49, dead * 50, dead * 1000):
        assert fuse.blows(dead, min(well, fuse.count_limit(dead))) is fuse.blows(dead, well)


@pytest.mark.parametrize(("probed", "doubt"), [(False, timedelta(minutes=15)), (True, timedelta(hours=6))])
def test_a_doubt_ends_by_itself(probed, doubt):
    assert not fuse.is_over(doubt - timedelta(microseconds=1), probed=probed)
    assert fuse.is_over(doubt, probed=probed)


def test_probes_become_rarer():
    spans = [timedelta(seconds=s) for s in (0, 60, 90, 300, 599, 3600)]
    assert [fuse.probe_every(s).total_seconds() for s in spans] == [60, 60, 90, 300, 599, 600]
