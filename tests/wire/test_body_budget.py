"""Bodies that are held at once: one account's large answers leave room for those of others, and nobody waits."""

import asyncio
import gc
import gzip
import json
import threading

import httpx
import pytest

from resilient import Errors, FailureKind, Provider, Rule
from resilient.wire.requests.answer import AnswerTooLarge, NoRoomForAnswer
from resilient.wire.requests.body_budget import BODY_BUDGET, FREE, STEP, BodyBudget, Reservation
from resilient.wire.requests.client import build_client
from resilient.wire.requests.explain import explain
from resilient.wire.requests.pool import Pool, PoolSettings
from resilient.wire.requests.request_log import RequestLog
from tests.helpers import bomb
from tests.wire.conftest import UNHURRIED, Recorder
from tests.wire.test_bodies import MIB, answering

SETTINGS = PoolSettings(**UNHURRIED, tries=1, largest=4 * MIB, bodies=12 * MIB)  # one account: 6 MiB beside the free


@pytest.fixture(autouse=True)
def _all_comes_back():
    assert BODY_BUDGET.total() == 0
    yield
    assert BODY_BUDGET.total() == 0


@pytest.fixture
async def over():
    made = Pool(SETTINGS)
    yield made
    await made.aclose()


def of(account):
    return Recorder(key=f"api/{account}")


large = answering(bomb(3, 1), (b"gzip",))  # 2 MiB beside its free part


# -- the budget itself ------------------------------------------------------------------------------------------------


def test_an_account_may_hold_as_much_as_is_left_free():
    budget = BodyBudget()
    assert budget.draw("a/1", 50, 100)
    assert not budget.draw("a/1", 1, 100)
    assert budget.draw("a/2", 25, 100)
    assert not budget.draw("a/2", 1, 100)
    assert budget.draw("a/3", 12, 100)
    budget.give_back("a/1", 50)
    assert budget.total() == 37
    assert budget.draw("a/2", 6, 100)


def test_however_long_one_account_draws_the_others_find_half():
    budget, count = BodyBudget(), 0
    while budget.draw("a/evil", 1, 1_000):
        count += 1
    assert count == budget.total() == 500
    assert budget.draw("a/honest", 250, 1_000)
    for account in range(50):
        while budget.draw(f"a/{account}", 1, 1_000):
            count += 1
    assert budget.total() == count + 250 <= 1_000


def test_what_is_given_back_is_forgotten():
    budget = BodyBudget()
    for account in range(1_000):
        assert budget.draw(f"a/{account}", 1, 2)
        budget.give_back(f"a/{account}", 1)
    assert budget.total() == 0
    assert not budget._by_account


def test_threads_draw_and_give_back_at_once():
    def work(account):
        for _ in range(2_000):
            one = Reservation(account, 1_000_000)
            assert one.grow(3)
            assert one.grow(4)

    threads = [threading.Thread(target=work, args=(f"a/{n % 2}",)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert BODY_BUDGET.total() == 0


# -- over sockets -----------------------------------------------------------------------------------------------------


async def test_what_one_account_holds_leaves_room_for_another(client, rude, over):
    evil, honest = of("evil"), of("honest")
    async with rude(large) as (url, _):
        kept = [await client(over=over, into=evil).get(url) for _ in range(3)]
        with pytest.raises(NoRoomForAnswer, match=r"12,582,912 bytes .* api/evil .*PoolSettings\(bodies=\)") as raised:
            await client(over=over, into=evil).get(url)
        kept.append(await client(over=over, into=honest).get(url))
        assert [len(one.content) for one in kept] == [3 * MIB] * 4
        failure = explain(raised.value, RequestLog(evil), evil.now()).failure
        assert (failure.kind, failure.code, failure.counts_for_breaker) == ("transient", "no_room_for_answer", False)
        del kept, raised
        again = await client(over=over, into=evil).get(url)
    assert again.content == bytes(3 * MIB)


async def test_an_answer_gives_its_room_back_with_its_last_reference(client, rude, over):
    """Not when the collector comes: that counts objects, and a body of 64 MiB is one."""
    gc.disable()
    try:
        async with rude(large) as (url, _):
            for _ in range(5):
                answer = await client(over=over).get(url)
                assert BODY_BUDGET.total() == 2 * STEP
                del answer
                assert BODY_BUDGET.total() == 0
    finally:
        gc.enable()


async def test_one_that_breaks_off_gives_it_back(client, rude, over):
    async def behave(_reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n" + bytes(3 * MIB))
        await writer.drain()

    async with rude(behave) as (url, _):
        with pytest.raises(httpx.RemoteProtocolError):
            await client(over=over).get(url)
        assert BODY_BUDGET.total() == 0
    async with rude(answering(bomb(5, 1), (b"gzip",))) as (url, _):
        with pytest.raises(AnswerTooLarge):
            await client(over=over).get(url)
        assert BODY_BUDGET.total() == 0


async def test_twenty_at_once_end_each_by_itself(client, rude, over):
    """They wait for no room, so none for another's: who gets none frees its part and its connection at once."""

    async def ask():
        try:
            return len((await client(over=over).get(url)).content)
        except NoRoomForAnswer:
            return None

    async with rude(large) as (url, _):
        sizes = await asyncio.gather(*(ask() for _ in range(20)))
    assert set(sizes) <= {3 * MIB, None}
    assert 3 * MIB in sizes


async def test_small_answers_are_never_refused(client, rude, over):
    reservation = Reservation("api/acct", 12 * MIB)
    assert reservation.grow(6 * MIB)
    async with rude(answering(bytes(FREE), ())) as (url, _):
        assert len((await client(over=over).get(url)).content) == FREE
    del reservation


async def test_one_answer_of_the_largest_size_always_fits(client, rude):
    pool = Pool(PoolSettings(**UNHURRIED, tries=1, largest=5 * MIB, bodies=1))
    async with rude(answering(bomb(5, 1), (b"gzip",))) as (url, _):
        assert len((await client(over=pool).get(url)).content) == 5 * MIB
    await pool.aclose()


async def test_what_is_streamed_holds_nothing(client, rude, over):
    reservation = Reservation("api/acct", 12 * MIB)
    assert reservation.grow(6 * MIB)
    async with rude(large) as (url, _), client(over=over).stream("GET", url) as response:
        assert sum([len(part) async for part in response.aiter_bytes()]) == 3 * MIB
    del reservation


async def test_a_post_whose_answer_had_no_room_is_in_doubt(client, hooks, rude, over):
    """It took effect: it is not sent again as another one, and no circuit hears of it."""
    reservation = Reservation("api/acct", 12 * MIB)
    assert reservation.grow(6 * MIB)
    async with rude(large) as (url, _):
        with pytest.raises(NoRoomForAnswer) as raised:
            await client(over=over).post(url)
    assert hooks.steps == ["admit", "mark", "answered", "clear", "cut_off"]
    assert hooks.cut_by_us
    assert explain(raised.value, RequestLog(hooks), hooks.now()).failure.kind == "ambiguous"
    del reservation, raised


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_where_the_body_is_read_for_its_errors(client, hooks, rude, over, method):
    errors = Errors(rules=(Rule(FailureKind.PERMANENT, code="wrong", status=200),))
    reservation = Reservation("api/acct", 12 * MIB)
    assert reservation.grow(6 * MIB)
    async with rude(large) as (url, _):
        provider = Provider(name="api", base_url=url, errors=errors)
        with pytest.raises(NoRoomForAnswer) as raised:
            await client(provider, over=over).request(method, url)
    assert raised.value.failure.kind == ("transient" if method == "GET" else "ambiguous")
    del reservation, raised


async def test_threads_too(rude, over):
    loop = asyncio.get_running_loop()

    def bridge(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def ask(url):
        one = build_client(RequestLog(of("acct")), over, bridge, "http://x")
        kept = [one.get(url) for _ in range(3)]
        with pytest.raises(NoRoomForAnswer):
            one.get(url)
        assert BODY_BUDGET.total() == 6 * STEP
        del kept
        assert BODY_BUDGET.total() == 0
        assert len(one.get(url).content) == 3 * MIB

    async with rude(large) as (url, _):
        await asyncio.to_thread(ask, url)


# -- why no ratio is bounded ------------------------------------------------------------------------------------------


def test_an_honest_answer_may_be_packed_as_a_bomb_is():
    """A sensor that was quiet: 682 to 1. So how much a body grows says nothing about who sent it."""
    text = json.dumps([0.0] * 1_000_000).encode()
    assert len(text) > MIB + 200 * len(gzip.compress(text))
