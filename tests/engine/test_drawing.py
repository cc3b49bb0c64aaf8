"""The draws of one worker: what they wait for, what comes back of them, what becomes of it where something fails."""

import asyncio
import contextlib
import sys

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from resilient import DatabaseUnreachable, Limit, ResourceStopped
from resilient.core.base.instants import FAR
from resilient.engine.gates import drawing
from resilient.store.gates import limits
from tests.helpers import LIMIT


def tat(database, key="p/a", name="r"):
    return database.transaction_sync(limits.read, [key])[key][name].tat


@contextlib.contextmanager
def hold(database, key):
    """As a program does that resets an account and does not commit yet."""
    with database.sync_engine.connect() as c:
        c.execute(sa.text("DELETE FROM resilient_rate_limit WHERE resource_key = :key"), {"key": key})
        yield


@pytest.fixture
async def drawer(clock, database):
    """A `Drawing` of its own, by the test's clock."""
    one = drawing.Drawing(database, lambda: clock.now().timestamp(), clock.now, lambda: 0.5)
    yield one
    await one.close()


async def test_a_connection_that_opens_slowly_makes_no_other_path_wait(clock, drawer):
    slow, other = ((f"p/{name}", Limit(100, 1, burst=100, name="r")) for name in "ab")
    place = await drawer.draw((slow,), 1)
    clock.advance(3)
    assert drawer.is_late(place)
    again = await drawer.draw_again(place)
    assert again.send_at == pytest.approx(clock.now().timestamp() + 1, abs=1e-3)  # it may be as slow again
    place = await drawer.draw((other,), 1)
    assert place.send_at == pytest.approx(clock.now().timestamp(), abs=1e-3)


async def test_commits_that_are_slow_make_the_draws_of_every_path_early(clock, database, drawer, monkeypatch):
    one, other = ((f"p/{name}", Limit(100, 1, burst=100, name="r")) for name in "ab")
    real = database.transaction

    async def slow(*args):
        result = await real(*args)
        clock.advance(0.4)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", slow)
        place = await drawer.draw((one,), 1)
        assert drawer.is_late(place)
        assert not drawer.is_late(await drawer.draw_again(place))
        assert not drawer.is_late(await drawer.draw((other,), 1))


async def test_no_unit_is_kept_beyond_its_lease(clock, database, drawer, monkeypatch):
    """A path that leases anew holds units of the new lease alone: older ones were counted in a moment that is past."""
    limit, leased, spent, real = Limit(1000, 10, burst=1000, name="r"), [], 12, database.transaction
    began = clock.now().timestamp()

    async def transaction(fn, *args):
        drawn = await real(fn, *args)
        leased.extend(one.leased for one in drawn)
        return drawn

    monkeypatch.setattr(database, "transaction", transaction)
    for _ in range(spent):
        await drawer.draw((("p/a", limit),), 1)
    for cost in (12, 23, 34):  # each more than what a lease holds
        clock.advance(0.09)  # the lease lasts for 0.1
        await drawer.draw((("p/a", limit),), cost)
        spent += cost
    assert leased[-1] > 0
    assert tat(database) == pytest.approx(began + (spent + leased[-1]) * limit.interval, abs=1e-3)
    count = len(leased)
    await drawer.draw((("p/a", limit),), leased[-1] + 1)
    assert len(leased) == count + 1


async def test_saving_does_not_wait_for_draws_that_never_end(clock, database, drawer, monkeypatch):
    """On a busy worker there is always a request that waits for the next transaction."""
    limit, now, real, others = Limit(100, 1, burst=100, name="r"), clock.now().timestamp(), database.transaction, []

    async def transaction(fn, *args):
        if fn is limits.draw:
            path = ((f"p/{len(others)}", Limit(1, "1h", name="r")),)
            others.append(asyncio.create_task(drawer.draw(path, 1)))
        return await real(fn, *args)

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", transaction)
        place = await drawer.draw((("p/a", limit),), 1)
        async with asyncio.timeout(LIMIT):
            drawer.settle(place, 5)
            drawer.observe(limits.Observation("p/b", limit, 3, now + 60, now))
            await drawer.flush()
            drawer.settle(place, 4)
            await drawer.close()
    await asyncio.gather(*others)
    assert tat(database) == pytest.approx(now + 10 * limit.interval, abs=1e-6)
    assert database.transaction_sync(limits.read, ["p/b"])["p/b"]["r"].remaining == 3


async def test_limits_that_a_program_holds_stop_no_other(clock, postgres_database):
    """It resets an account, and does not commit yet; a settlement of that account waits."""
    drawer = drawing.Drawing(postgres_database, lambda: clock.now().timestamp(), clock.now, lambda: 0.5)
    held, free = ((((key, Limit(10, "1h", burst=10, name="r")),)) for key in ("p/a", "p/b"))
    place = await drawer.draw(held, 1)
    at = clock.now().timestamp()
    with postgres_database.sync_engine.begin() as c:
        c.execute(sa.text("DELETE FROM resilient_rate_limit WHERE resource_key = 'p/a'"))
        async with asyncio.timeout(LIMIT / 5):
            drawer.settle(place, 2)
            asked = await asyncio.gather(
                drawer.draw(held, 1), drawer.draw(free, 1), drawer.draw((*held, *free), 1), return_exceptions=True
            )
            drawer.observe(limits.Observation("p/a", held[0][1], 5, at + 60, at))
            with pytest.raises(DBAPIError):
                await drawer.flush()
    assert [getattr(one, "gate", None) for one in asked] == ["database", None, "database"]
    await drawer.draw(held, 1)
    await drawer.flush()
    states = postgres_database.transaction_sync(limits.read, ["p/a", "p/b"])
    drawn = {key: round((one["r"].tat - at) / held[0][1].interval) for key, one in states.items()}
    assert drawn == {"p/a": 3, "p/b": 1}
    assert states["p/a"]["r"].remaining == 5
    await drawer.close()


@pytest.mark.parametrize("way", ["given back", "refunded"])
async def test_a_unit_that_comes_back_can_be_drawn_at_once(drawer, way):
    path = (("p/a", Limit(1, "1h", name="r")),)
    place = await drawer.draw(path, 1)
    with pytest.raises(ResourceStopped):
        await drawer.draw(path, 1)
    if way == "given back":
        drawer.give_back(place)
    else:
        drawer.settle(place, -1)
    assert (await drawer.draw(path, 1)).cost == 1


async def test_an_older_observation_that_comes_while_a_newer_one_is_written_does_not_replace_it(
    clock, database, drawer, monkeypatch
):
    limit, now = Limit(100, 1, name="r"), clock.now().timestamp()
    newer, older = (limits.Observation("p/a", limit, left, now + 60, now - age) for left, age in ((3, 0), (7, 1)))
    real = database.transaction

    async def away(fn, *args, **kwargs):
        drawer.observe(older)
        raise DatabaseUnreachable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", away)
        drawer.observe(newer)
        with pytest.raises(DatabaseUnreachable):
            await drawer.flush()
    assert database.transaction == real
    await drawer.flush()
    assert database.transaction_sync(limits.read, ["p/a"])["p/a"]["r"].remaining == 3


async def test_a_limit_that_never_has_room_again_stops_its_requests(drawer):
    limit = (("p/a", Limit.parse("1/99999999999d")),)
    await drawer.draw(limit, 1)
    with pytest.raises(ResourceStopped) as caught:
        await drawer.draw(limit, 1)
    assert caught.value.until == FAR


# -- a task that is cancelled -----------------------------------------------------------------------------------------


async def test_whoever_waits_goes_on_although_the_task_of_the_draws_is_cancelled(clock, database, drawer, monkeypatch):
    """As `asyncio.run` cancels every task once its main coroutine has ended."""
    limit, began, real = Limit(100, 1, burst=100, name="r"), asyncio.Event(), database.transaction
    place = await drawer.draw((("p/a", limit),), 1)

    async def transaction(fn, *args):
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()
        return await real(fn, *args)

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", transaction)
        first, second = (asyncio.create_task(drawer.draw(((f"p/{name}", limit),), 1)) for name in "bc")
        await asyncio.sleep(0)
        drawer.settle(place, 5)
        await began.wait()
        third, saving = (asyncio.create_task(one) for one in (drawer.draw((("p/d", limit),), 1), drawer.flush()))
        await asyncio.sleep(0)
        drawer._task.cancel()
        async with asyncio.timeout(LIMIT / 5):
            answers = await asyncio.gather(first, second, third, saving, return_exceptions=True)
    assert [getattr(one, "gate", None) for one in answers] == ["database", "database", None, None]
    assert tat(database) == pytest.approx(clock.now().timestamp() + 0.06, abs=1e-3)


async def test_saving_ends_although_the_task_of_the_draws_is_cancelled_before_it_has_begun(clock, database, drawer):
    place = await drawer.draw((("p/a", Limit(100, 1, burst=100, name="r")),), 1)
    drawer.settle(place, 5)
    drawer._task.cancel()
    async with asyncio.timeout(LIMIT / 5):
        await drawer.flush()
    assert tat(database) == pytest.approx(clock.now().timestamp() + 0.06, abs=1e-3)


async def test_closing_settles_although_the_task_of_the_draws_is_cancelled(clock, database, drawer, monkeypatch):
    limit, began, real = Limit(100, 1, burst=100, name="r"), asyncio.Event(), database.transaction
    place = await drawer.draw((("p/a", limit),), 1)

    async def transaction(fn, *args):
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()
        return await real(fn, *args)

    monkeypatch.setattr(database, "transaction", transaction)
    drawer.settle(place, 5)
    closing = asyncio.create_task(drawer.close())
    await began.wait()
    drawer._task.cancel()
    async with asyncio.timeout(LIMIT / 5):
        await closing
    assert tat(database) == pytest.approx(clock.now().timestamp() + 0.06, abs=1e-3)


async def test_what_was_observed_is_kept_by_a_save_that_is_cancelled(clock, database, drawer, monkeypatch):
    limit, now, began = Limit(100, 1, name="r"), clock.now().timestamp(), asyncio.Event()

    async def transaction(*_):
        began.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", transaction)
        drawer.observe(limits.Observation("p/a", limit, 3, now + 60, now))
        saving = asyncio.create_task(drawer.flush())
        await began.wait()
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
    await drawer.flush()
    assert database.transaction_sync(limits.read, ["p/a"])["p/a"]["r"].remaining == 3


# -- a connection that is cut -----------------------------------------------------------------------------------------


async def test_units_come_back_once_although_the_answer_to_their_commit_is_lost(clock, database, drawer, monkeypatch):
    limit, answers, real = Limit(100, 1, burst=100, name="r"), ["lost"], database.transaction
    place = await drawer.draw((("p/a", limit),), 40)

    async def transaction(fn, *args):
        result = await real(fn, *args)
        if answers:
            raise DatabaseUnreachable(f"the answer is {answers.pop()}")
        return result

    monkeypatch.setattr(database, "transaction", transaction)
    drawer.settle(place, -10)
    await drawer.flush()
    assert answers == []
    assert tat(database) == pytest.approx(clock.now().timestamp() + 0.3, abs=1e-3)


# -- what is ahead ----------------------------------------------------------------------------------------------------


async def test_draws_of_one_transaction_are_ahead_alike(clock, database, drawer, monkeypatch):
    """Commits are slow, and a hundred requests go into one: what the first needs the last needs, too, and the next."""
    path, real = (("p/a", Limit(10_000, 1, burst=10_000, name="r")),), database.transaction

    async def slow(*args):
        result = await real(*args)
        clock.advance(0.4)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", slow)
        await drawer.draw_again(await drawer.draw(path, 1))
        places = await asyncio.gather(*(drawer.draw(path, 1) for _ in range(100)))
        assert [n for n, place in enumerate(places) if place.arrived > place.deadline] == []
        assert not drawer.is_late(await drawer.draw(path, 1))


@pytest.mark.parametrize("how", ["changed", "evicted"])
async def test_a_path_whose_limits_changed_is_as_far_ahead_as_before(clock, drawer, monkeypatch, how):
    """Its connection opens slowly, whatever its limits are; the same if this worker has used many paths meanwhile."""
    path, other = (("p/a", Limit(100, 1, burst=100, name="r")),), (("p/b", Limit(100, 1, burst=100, name="r")),)
    place = await drawer.draw(path, 1)
    if how == "changed":
        other = (("p/a", Limit(200, 1, burst=200, name="r")),)
    else:
        monkeypatch.setattr(drawing, "_MOST_LEASES", 1)
    await drawer.draw(other, 1)
    clock.advance(3)
    place = await drawer.draw_again(place)
    assert place.send_at == pytest.approx(clock.now().timestamp() + 1, abs=1e-3)
    if how == "changed":
        place = await drawer.draw(other, 1)
        assert place.send_at > clock.now().timestamp() + 0.9


async def test_a_unit_that_comes_back_to_a_path_that_was_forgotten_can_be_drawn_at_once(drawer, monkeypatch):
    monkeypatch.setattr(drawing, "_MOST_LEASES", 1)
    path = (("p/a", Limit(1, "1h", name="r")),)
    place = await drawer.draw(path, 1)
    await drawer.draw((("p/b", Limit(1, "1h", name="r")),), 1)
    with pytest.raises(ResourceStopped):
        await drawer.draw(path, 1)
    drawer.give_back(place)
    assert (await drawer.draw(path, 1)).cost == 1


# -- closing ----------------------------------------------------------------------------------------------------------


async def test_closing_writes_what_waits_for_its_next_try(clock, postgres_database):
    drawer = drawing.Drawing(postgres_database, lambda: clock.now().timestamp(), clock.now, lambda: 0.5)
    path, at = (("p/a", Limit(10, "1h", burst=10, name="r")),), clock.now().timestamp()
    place = await drawer.draw(path, 1)
    with hold(postgres_database, "p/a"):
        drawer.settle(place, 2)
        await drawer.flush()
        drawer.observe(limits.Observation("p/a", path[0][1], 5, at + 60, at))
    async with asyncio.timeout(LIMIT / 5):
        await drawer.close()
    state = postgres_database.transaction_sync(limits.read, ["p/a"])["p/a"]["r"]
    assert (round((state.tat - at) / path[0][1].interval), state.remaining) == (3, 5)
    await drawer.draw(path, 1)
    await drawer.flush()
    state = postgres_database.transaction_sync(limits.read, ["p/a"])["p/a"]["r"]
    assert state.remaining == 4


async def test_closing_writes_what_was_settled_although_the_database_was_away(clock, database, drawer, monkeypatch):
    place = await drawer.draw((("p/a", Limit(100, 1, burst=100, name="r")),), 1)

    async def away(*_):
        raise DatabaseUnreachable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", away)
        drawer.settle(place, 5)
        await drawer.flush()
    await drawer.close()
    assert tat(database) == pytest.approx(clock.now().timestamp() + 0.06, abs=1e-3)


# -- limits that a program holds --------------------------------------------------------------------------------------


async def test_what_is_observed_of_other_limits_is_written_while_one_is_held(clock, postgres_database):
    drawer = drawing.Drawing(postgres_database, lambda: clock.now().timestamp(), clock.now, lambda: 0.5)
    limit, at = Limit(10, "1h", burst=10, name="r"), clock.now().timestamp()
    await drawer.draw((("p/a", limit), ("p/b", limit)), 1)
    with hold(postgres_database, "p/a"):
        for key in ("p/a", "p/b", "p/new"):
            drawer.observe(limits.Observation(key, limit, 5, at + 60, at))
        with pytest.raises(DBAPIError):
            await drawer.flush()
        states = postgres_database.transaction_sync(limits.read, ["p/a", "p/b", "p/new"])
        assert {key: one["r"].remaining for key, one in states.items()} == {"p/a": None, "p/b": 5, "p/new": 5}
        assert list(drawer._observations) == [("p/a", "r")]
    await drawer.flush()
    assert postgres_database.transaction_sync(limits.read, ["p/a"])["p/a"]["r"].remaining == 5
    await drawer.close()


async def test_a_worker_whose_first_draws_meet_a_held_limit_learns_the_clock_of_the_database(clock, postgres_database):
    """Its own clock began elsewhere: without the difference the draws would be for a moment that never comes."""
    here = 1_000_000.0 - clock.now().timestamp()
    drawer = drawing.Drawing(postgres_database, lambda: clock.now().timestamp() + here, clock.now, lambda: 0.5)
    held, free = ((((key, Limit(10, "1h", burst=10, name="r")),)) for key in ("p/a", "p/b"))
    postgres_database.transaction_sync(limits.draw, [limits.Ask((*held, *free))])
    with hold(postgres_database, "p/a"):
        refused, place = await asyncio.gather(drawer.draw(held, 1), drawer.draw(free, 1), return_exceptions=True)
    assert refused.gate == "database"
    assert place.send_at == pytest.approx(1_000_000.0, abs=1)
    assert not drawer.is_late(place)
    await drawer.close()


# -- how much work it is ----------------------------------------------------------------------------------------------


def lines_of(module):
    """Counts the lines of a module that run in this thread, as a list that grows; `sys.settrace` takes it."""
    count = []

    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count.append(1)
        return trace

    return count, trace


async def test_the_work_of_a_batch_grows_with_its_draws(drawer):
    async def work(number, of):
        paths = [((f"p/{of}{n}", Limit(10_000, 1, burst=10_000, name="r")),) for n in range(number)]
        count, trace = lines_of(drawing)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            await asyncio.gather(*(drawer.draw(path, 1) for path in paths))
        finally:
            sys.settrace(before)
        return len(count)

    few, many = await work(100, "few"), await work(400, "many")
    assert many < 4.5 * few


async def test_the_work_of_settling_beside_held_limits_grows_with_what_is_settled(postgres_database, monkeypatch):
    limit, compared = Limit(10, "1h", burst=10, name="r"), []
    settled = [limits.Settled("p/a", limit, 1.0 + n) for n in range(200)]
    postgres_database.transaction_sync(limits.draw, [limits.Ask((("p/a", limit),))])
    monkeypatch.setattr(limits.Settled, "__eq__", lambda one, other: compared.append(1) or one is other)
    monkeypatch.setattr(limits.Settled, "__hash__", object.__hash__)
    with hold(postgres_database, "p/a"):
        drawn, rest = postgres_database.transaction_sync(limits.draw_free, [], settled)
    assert (drawn, len(rest)) == ([], 200)
    assert len(compared) <= 200


async def test_a_limit_that_somebody_reset_is_asked_again(clock, database, drawer):
    """A refusal until tomorrow is repeated for two seconds, and then the database is asked."""
    path = (("p/a", Limit(1, "1d", name="r")),)
    await drawer.draw(path, 1)
    with pytest.raises(ResourceStopped):
        await drawer.draw(path, 1)
    database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {rate_limit}"))
    clock.advance(1.9)
    with pytest.raises(ResourceStopped):
        await drawer.draw(path, 1)
    clock.advance(0.2)
    await drawer.draw(path, 1)
