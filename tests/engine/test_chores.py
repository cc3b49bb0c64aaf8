"""Housekeeping: a chore that fails, today or always, keeps no other from being done."""

from __future__ import annotations

import pytest

from resilient import DatabaseUnreachable, Job, Resilient, Retention, handler
from resilient.engine.ground.chores import do_all


@handler("nothing")
async def nothing(job: Job[None]) -> None:
    pass


async def test_each_is_done_and_the_first_error_is_raised_with_the_others_in_its_notes():
    done = []

    def chore(name, error=None):
        async def do():
            done.append(name)
            if error is not None:
                raise error

        return do

    first = ValueError("one")
    with pytest.raises(ValueError, match="one") as raised:
        await do_all([chore("a"), chore("b", first), chore("c", KeyError("two")), chore("d")])
    assert (done, raised.value) == (["a", "b", "c", "d"], first)
    assert first.__notes__ == ["and then KeyError: 'two'"]


async def test_a_database_that_is_away_ends_it():
    async def away():
        raise DatabaseUnreachable("gone")

    async def other():
        raise AssertionError("it would wait for the database, too")

    with pytest.raises(DatabaseUnreachable):
        await do_all([away, other])


async def test_old_rows_go_although_alerts_cannot_be_looked_at(database, clock, monkeypatch):
    """The chore before it fails each time; the worker's and the app's are one list."""
    async with Resilient(database, handlers=[nothing], retention=Retention(succeeded="1d")) as app:
        await app.enqueue(nothing, resource_key="k/1")
        await app.worker().drain()
        clock.advance(days=2)

        async def fail():
            raise ValueError("spoilt")

        monkeypatch.setattr(app.alerts, "keep_house", fail)
        for keep_house in (app.worker().sweeper.chores, app.keep_house):
            with pytest.raises(ValueError, match="spoilt"):
                await keep_house()
        assert await app.jobs.count() == 0
