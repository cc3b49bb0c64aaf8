"""A name whose owner lets nobody say where it leads keeps no other name waiting."""

import asyncio
import socket
import threading
from functools import partial
from types import SimpleNamespace

import httpcore
import pytest

from resilient.wire.requests import guard, sockets
from resilient.wire.requests.guard import PublicNetwork, PublicNetworkSync
from resilient.wire.requests.sockets import Backend
from tests.helpers import LIMIT, until


@pytest.fixture
def silent(monkeypatch):
    """Names below evil.example are looked up until the end of the test; how often each was."""
    real, over, asked = socket.getaddrinfo, threading.Event(), []

    def getaddrinfo(host, *args, **options):
        if str(host).endswith("evil.example"):
            asked.append(host)
            over.wait(LIMIT)
            raise socket.gaierror("gone")
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield asked
    over.set()


async def test_others_find_their_hosts_meanwhile(silent):
    """More of them than an event loop has threads for everybody's names."""
    network = PublicNetwork()
    waiting = [asyncio.create_task(network.connect_tcp(f"a{n}.evil.example", 443)) for n in range(40)]
    async with asyncio.timeout(LIMIT):
        while len(silent) < 40:  # noqa: ASYNC110 - asked in threads
            await asyncio.sleep(0.01)
        assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        assert await guard.look_up("localhost", 80)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_name_is_looked_up_once_for_all_and_nobody_waits_longer_than_told(silent):
    network = PublicNetwork()
    for _ in range(3):
        with pytest.raises(httpcore.ConnectTimeout, match="nobody says where"):
            await network.connect_tcp("b.evil.example", 443, timeout=0.02)
    await until(lambda: silent)  # asked in a thread
    assert silent == ["b.evil.example"]


async def test_there_are_so_many_threads_and_no_more(silent, monkeypatch):
    monkeypatch.setattr(guard, "MOST_LOOKUPS", 2)
    network = PublicNetwork()
    for n in range(5):
        with pytest.raises(httpcore.ConnectTimeout):
            await network.connect_tcp(f"c{n}.evil.example", 443, timeout=0.05)
    await until(lambda: len(silent) >= 2)
    assert sorted(silent) == ["c0.evil.example", "c1.evil.example"]


class Silent:
    """A network in which no address answers: each attempt takes all of its time."""

    def __init__(self):
        self.now, self.tried = 0.0, []

    def connect(self, address, _port, seconds, *_):
        self.tried.append(address)
        self.now += seconds
        raise httpcore.ConnectTimeout

    async def connect_async(self, *args):
        self.connect(*args)


@pytest.mark.parametrize("kind", ["async", "sync", "unguarded"])
async def test_addresses_of_a_host_share_the_time_to_connect(kind, monkeypatch):
    """However many the owner of the name lists; and each is tried."""
    addresses = [f"93.184.216.{n}" for n in range(1, 41)]
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 443)) for one in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)
    network, silent = {"async": PublicNetwork, "sync": PublicNetworkSync, "unguarded": Backend}[kind](), Silent()
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: silent.now))
    inner = SimpleNamespace(connect_tcp=silent.connect_async if kind == "async" else silent.connect)
    setattr(network, "_inner" if kind == "unguarded" else "_network", inner)
    connect = network.connect_tcp if kind == "async" else partial(asyncio.to_thread, network.connect_tcp)
    with pytest.raises(httpcore.ConnectTimeout):
        await connect("many.example", 443, 5.0)
    assert silent.tried == addresses
    assert silent.now == pytest.approx(5.0)


@pytest.mark.parametrize("network", [Backend, PublicNetworkSync])
def test_a_name_that_no_name_server_takes_is_a_host_that_is_not_there(network):
    """Python refuses a label of more than 63 characters with a UnicodeError, which is no OSError."""
    with pytest.raises(httpcore.ConnectError, match=r"label (empty or )?too long"):
        network().connect_tcp("a" * 64 + ".example", 443)


@pytest.mark.parametrize("network", [Backend, PublicNetworkSync])
def test_a_thread_waits_for_a_name_no_longer_than_told(silent, network):
    name = f"{network.__name__}.evil.example"
    for _ in range(3):
        with pytest.raises(httpcore.ConnectTimeout, match=f"nobody says where '{name}' is"):
            network().connect_tcp(name, 443, timeout=0.02)
    assert silent == [name]


# -- hosts that were silent before -----------------------------------------------------------------------------------


async def test_silent_names_keep_others_waiting_for_a_moment_only(silent, monkeypatch):
    monkeypatch.setattr(guard, "SOON", 0.01)
    network = PublicNetwork()
    waiting = [asyncio.create_task(network.connect_tcp(f"f{n}.evil.example", 443)) for n in range(guard.MOST_LOOKUPS)]
    async with asyncio.timeout(LIMIT):
        assert await guard.look_up("localhost", 80)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_hosts_that_were_silent_wait_for_each_other(silent, monkeypatch):
    """However many places have been given back."""
    for name, number in (("SOON", 0.01), ("MOST_LOOKUPS", 2), ("MOST_SILENT", 2), ("MOST_AGAIN", 1)):
        monkeypatch.setattr(guard, name, number)
    loop, names = asyncio.get_running_loop(), [f"g{n}.evil.example" for n in range(5)]
    lookups = guard._of_loops.of(loop)
    for name in names:
        lookups.remember(name)
    waiting = [asyncio.create_task(guard.look_up(name, 443)) for name in names]
    await until(lambda: silent)
    async with asyncio.timeout(LIMIT):
        assert await guard.look_up("localhost", 80)
    assert silent == names[:1]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_host_that_answers_again_is_one_as_all(monkeypatch):
    lookups = guard._of_loops.of(asyncio.get_running_loop())
    lookups.remember("localhost")
    assert await guard.look_up("localhost", 80)
    assert lookups.silent == {}


async def test_no_more_places_are_given_back_than_there_are(silent, monkeypatch):
    for name, number in (("SOON", 0.01), ("MOST_LOOKUPS", 2), ("MOST_SILENT", 3)):
        monkeypatch.setattr(guard, name, number)
    lookups = guard._of_loops.of(asyncio.get_running_loop())
    waiting = [asyncio.create_task(guard.look_up(f"h{n}.evil.example", 443)) for n in range(9)]
    await until(lambda: len(lookups.silent) == 5)
    assert sorted(silent) == [f"h{n}.evil.example" for n in range(5)]
    assert lookups.given_back == 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_thread_that_cannot_start_keeps_its_place_for_the_next(monkeypatch):
    """Its place came back twice, once more with each such failure."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(guard, "SOON", 0.0)
    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(RuntimeError, match="start new thread"):
        await guard.look_up("localhost", 1)
    for _ in range(3):
        await asyncio.sleep(0)
    lookups = guard._of_loops.of(asyncio.get_running_loop())
    assert (lookups.places._value, lookups.given_back, lookups.under_way) == (guard.MOST_LOOKUPS, 0, {})
