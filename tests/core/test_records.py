"""What is read of jobs and resources, as JSON: `--json` and the dashboard promise these forms."""

import json
import time
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest

from resilient.core.base.errors import FailureKind
from resilient.core.jobs.records import (
    NOT_LOADED,
    AttemptInfo,
    AuditInfo,
    Cancelled,
    Changed,
    Count,
    JobInfo,
    ResourceInfo,
    StoppedGroup,
    plain,
)

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
AT = datetime(2026, 3, 1, 14, 0, 0, 123_456, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("value", "json_value"),
    [
        (FailureKind.BUG, "bug"),
        (AT, "2026-03-01T12:00:00.123Z"),
        (datetime(2026, 3, 1, tzinfo=UTC), "2026-03-01T00:00:00.000Z"),
        (ID, str(ID)),
        ({1: ID, "at": {FailureKind.BUG: AT}}, {"1": str(ID), "at": {"bug": "2026-03-01T12:00:00.123Z"}}),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({ID}), [str(ID)]),
        ([AT, (ID, None)], ["2026-03-01T12:00:00.123Z", [str(ID), None]]),
        (Cancelled(cancelled=2), {"cancelled": 2, "requested": 0, "too_late": 0}),
        (1.5, 1.5),
        (None, None),
        (Cancelled, Cancelled),  # a class is no record
    ],
)
def test_a_value_in_types_of_json(value, json_value):
    assert plain(value) == json_value
    assert type(plain(value)) is type(json_value)


def test_times_are_in_utc_wherever_the_machine_stands(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert plain(AT) == "2026-03-01T12:00:00.123Z"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("record", [JobInfo, AttemptInfo, ResourceInfo, StoppedGroup, AuditInfo])
def test_a_record_has_every_field(record):
    values = {name: [AT] for name in record.__dataclass_fields__}
    assert record(**values).to_json() == {name: ["2026-03-01T12:00:00.123Z"] for name in values}


def test_what_a_list_does_not_load_is_left_out():
    values = {**dict.fromkeys(JobInfo.__dataclass_fields__), "payload": NOT_LOADED, "kind": "k"}
    shown = JobInfo(**values).to_json()
    assert shown == {name: value for name, value in values.items() if name != "payload"}
    assert json.dumps(shown)


def test_a_tally_has_zero_for_what_it_lacks():
    tally = Cancelled.of({"requested": 3, "of others": 1})
    assert (tally.cancelled, tally.requested, tally.too_late) == (0, 3, 0)
    assert tally.to_json() == {"cancelled": 0, "requested": 3, "too_late": 0}


def test_a_count_that_was_cut_off_says_so():
    assert [str(Count(7)), str(Count(7, more=True))] == ["7", "7+"]
    assert [(count, count.more) for count in (Count(7), Count(7, more=True))] == [(7, False), (7, True)]


def test_what_was_not_loaded_says_where_it_is():
    assert repr(NOT_LOADED) == "<not loaded: app.jobs.get(id) has it>"


def test_what_a_change_brought_to_many():
    changed = Changed(("a/1", "a/2"), queued=("a/2",))
    assert changed.to_json() == {"changed": 2, "keys": ["a/1", "a/2"], "queued": ["a/2"]}
    assert [len(changed), len(Changed())] == [2, 0]
    assert (bool(changed), bool(Changed())) == (True, False)
