"""One part of a batch fails as a request of its own does."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from resilient.core.base.errors import Failure, FailureKind, JobFailure, Snooze
from resilient.core.provider.facts import Part, PartAnswer

AT = datetime(2030, 1, 1, tzinfo=UTC)
PART = Part("GET", "/me?key=canary&to=?")


def test_a_part_that_went_well():
    assert PartAnswer(PART, 200).raise_for_failure() is None


@pytest.mark.parametrize("kind", [FailureKind.THROTTLED, FailureKind.QUOTA])
@pytest.mark.parametrize(("wait", "delay", "until"), [({"retry_in": 5}, 5, None), ({"retry_at": AT}, None, AT)])
def test_only_the_job_of_a_throttled_part_waits(kind, wait, delay, until):
    with pytest.raises(Snooze) as caught:
        PartAnswer(PART, 429, failure=Failure(kind, **wait)).raise_for_failure()
    assert (caught.value.delay, caught.value.until) == (delay, until)


def test_any_other_fault_says_what_it_answered():
    failure = Failure(FailureKind.PERMANENT, status=404)
    with pytest.raises(JobFailure) as caught:
        PartAnswer(PART, 404, failure=failure).raise_for_failure()
    assert str(caught.value) == "GET /me within a batch answered 404: permanent"
    assert caught.value.bare_message == "GET /me within a batch answered 404"
    assert caught.value.failure is failure
