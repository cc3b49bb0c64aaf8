"""One program over several databases."""

from __future__ import annotations

import asyncio
import io
import time

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from resilient import (
    ApiKey,
    BadResourceKey,
    InvalidInput,
    Item,
    Job,
    Limit,
    OAuth2,
    Provider,
    Schedule,
    SetupError,
    Shard,
    Shards,
    handler,
)
from resilient.store.accounts.secrets import new_key
from resilient.surface.cli import main
from tests.helpers import LIMIT, until
from tests.serving import Server

SEEN: list[tuple[str, float]] = []


@handler("push")
async def push(job: Job[None]) -> None:
    SEEN.append((job.resource_key, time.monotonic()))


@handler("ask")
async def ask(job: Job[None]) -> None:
    (await job.client.get("/" + job.resource_key.split("/")[1])).raise_for_status()
    SEEN.append((job.resource_key, time.monotonic()))


def region(account):
    return "us" if account.split("/")[-1].startswith("u") else "eu"


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


@pytest.fixture
async def shards(empty_urls):
    made = Shards({"eu": empty_urls(), "us": empty_urls()}, of=region, handlers=[push], upgrade=True)
    async with made:
        yield made


async def test_each_account_is_in_its_shard(shards):
    await shards.enqueue(push, resource_key="crm/e1")
    await asyncio.to_thread(shards.enqueue_sync, push, resource_key="crm/u1/search")
    items = [Item(resource_key=f"crm/{key}") for key in ("u2", "e2", "u3")]
    enqueue_many = shards.enqueue_many_sync
    done = await asyncio.to_thread(enqueue_many, push, items)
    assert [str(one.id) for one in done] == [
        str((await shards.app(key).jobs.list(resource=key))[0].id) for key in ("crm/u2", "crm/e2", "crm/u3")
    ]
    assert [await shards[name].jobs.count() for name in shards] == [2, 3]
    assert await shards.worker("us").drain() == 3
    assert {key for key, _ in SEEN} == {"crm/u1/search", "crm/u2", "crm/u3"}
    assert await shards.worker().drain() == 2


@handler("follow")
async def follow(job: Job[str]) -> None:
    job.then(push, None, resource_key=job.payload)


async def test_a_shards_app_refuses_accounts_of_others(empty_urls):
    """There are neither their limits nor their circuit nor their credentials."""
    pages = {"token_url": "https://crm.example/token", "authorize_url": "https://crm.example/consent"}
    oauth = OAuth2(client_id="ours", client_secret="canary", redirect_uri="https://shop.example/back", **pages)
    crm = Provider(name="crm", base_url="https://crm.example", auth=(ApiKey(), oauth))
    urls = {"eu": empty_urls(), "us": empty_urls()}
    async with Shards(
        urls, of=region, handlers=[push, follow], providers=[crm], upgrade=True, secrets=[new_key()]
    ) as shards:
        eu, words = shards["eu"], r"crm/u1 lives in shard 'us', .* the app of 'eu': use shards.app\('crm/u1'\)"
        flow = eu.workflow("order", resource_key="crm/e1")
        for call in (
            lambda: eu.enqueue(push, resource_key="crm/u1"),
            lambda: eu.enqueue_many(push, [Item(resource_key="crm/e1"), Item(resource_key="crm/u1")]),
            lambda: asyncio.to_thread(eu.enqueue_sync, push, resource_key="crm/u1"),
            lambda: asyncio.to_thread(flow.step, "push", None, resource_key="crm/u1"),
            lambda: eu.connections.add("crm/u1", api_key="k"),
            lambda: asyncio.to_thread(eu.sync.connections.add, "crm/u1", api_key="k"),
            lambda: eu.connections.import_("crm/u1", access_token="k", refresh_token="r"),
            lambda: eu.connections.authorize_url("crm/u1"),
        ):
            with pytest.raises(InvalidInput, match=words):
                await call()
        assert await eu.jobs.count() == 0
        assert await eu.connections.list() == []
        await shards.app("crm/u1").connections.add("crm/u1", api_key="k")
        mine, other = [await shards.enqueue(follow, key, resource_key="crm/e1") for key in ("crm/e2", "crm/u1")]
        await shards.worker().drain()
        assert (await eu.jobs.get(mine.id)).state == "succeeded"
        assert "crm/u1 lives in shard 'us'" in (await eu.jobs.get(other.id)).last_error
        assert {key for key, _ in SEEN} == {"crm/e2"}


async def test_a_session_is_at_the_accounts_database(shards):
    url = shards["us"].database.url
    driver = "postgresql+psycopg" if url.get_backend_name() == "postgresql" else "sqlite+aiosqlite"
    engine = create_async_engine(url.set(drivername=driver))
    async with AsyncSession(engine) as session, session.begin():
        with pytest.raises(InvalidInput, match="crm/e1 lives in shard 'eu', and this session is at another database"):
            await shards.enqueue(push, resource_key="crm/e1", session=session)
        await shards.enqueue(push, resource_key="crm/u1", session=session)
    async with AsyncSession(engine) as session, session.begin():
        with pytest.raises(InvalidInput, match="crm/e1 lives in shard 'eu'"):
            await shards.enqueue_many(push, [None], resource_key="crm/e1", session=session)
        await shards.enqueue_many(push, [None], resource_key="crm/u1", session=session)
    await engine.dispose()
    assert [await shards[name].jobs.count() for name in shards] == [0, 2]


def test_what_cannot_be_meant(tmp_path):
    one, two = f"sqlite:///{tmp_path}/1.db", f"sqlite:///{tmp_path}/2.db"
    crm = Provider(name="crm", base_url="https://crm.example")
    for shards, options, words in [
        ({}, {}, "at least one shard"),
        ({"eu": one, "us": one.replace("/1.db", "/./1.db")}, {}, "'eu' and 'us' have the same tables"),
        ({"eu": one, "us": two}, {"learn": {"crm": (1, 9)}}, "'eu' has no share: 'crm' has a limit"),
        ({"eu": Shard(one, share="0.5"), "us": Shard(two, share=0.3)}, {}, "share='0.5' is a part of 1"),
        ({"eu": one, "us": two}, {"limits": {"crm": [Limit(10, per=1)]}}, "'eu' has no share: 'crm' has a limit"),
        ({"eu": Shard(one, share=0.8), "us": Shard(two, share=0.3)}, {}, "1.1 together"),
    ]:
        with pytest.raises(SetupError, match=words):
            Shards(shards, of=region, providers=[crm], **options)
    with pytest.raises(InvalidInput, match="no shard 'us'"):
        Shards({"eu": one}, of=region)["us"]

    async def asked(_account):
        return "eu"

    with pytest.raises(SetupError, match="plain function"):
        Shards({"eu": one}, of=asked)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda _: "asia", "says 'asia' of crm/1, which is no shard: these are eu"),
        (lambda _: None, "says None of crm/1"),
        (lambda _: ["eu"], r"says \['eu'\] of crm/1"),
        ({}.__getitem__, "of=__getitem__ fails for crm/1: KeyError: 'crm/1'"),
    ],
)
def test_a_function_that_says_no_shard(tmp_path, of, words):
    made = Shards({"eu": f"sqlite:///{tmp_path}/1.db"}, of=of, handlers=[push])
    with pytest.raises(InvalidInput, match=words):
        made.enqueue_sync(push, resource_key="crm/1/search")
    with pytest.raises(BadResourceKey):
        made.enqueue_many_sync(push, [None])
    with pytest.raises(SetupError, match="schedule 'push@crm/1': of="):
        Shards(
            {"eu": f"sqlite:///{tmp_path}/1.db"},
            of=of,
            handlers=[push],
            schedules=[Schedule(push, resource_key="crm/1", every="1h")],
        )


@pytest.mark.parametrize("once", [iter, lambda many: filter(None, many), lambda many: (one for one in many)])
def test_what_can_be_read_once_is_every_shards(tmp_path, once):
    urls = {"eu": f"sqlite:///{tmp_path}/1.db", "us": f"sqlite:///{tmp_path}/2.db"}
    made = Shards(urls, of=region, handlers=once([push, ask]))
    assert [sorted(app.kinds) for app in made.apps.values()] == [["ask", "push"]] * 2


def test_each_shard_has_its_own_schedules_and_all_the_handlers(tmp_path):
    made = Shards(
        {"eu": f"sqlite:///{tmp_path}/1.db", "us": f"sqlite:///{tmp_path}/2.db"},
        of=region,
        handlers=(one for one in (push, ask)),
        schedules=[
            Schedule(push, resource_key="crm/u1", every="1h"),
            Schedule(push, for_each="crm/*", every="1h"),
        ],
    )
    assert [sorted(app.kinds) for app in made.apps.values()] == [["ask", "push"]] * 2
    assert [sorted(app.schedules.declared) for app in made.apps.values()] == [
        ["push@crm/*"],
        ["push@crm/*", "push@crm/u1"],
    ]


def test_the_command_line_takes_one_shard(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "regions.py").write_text(
        "from resilient import Shards\n"
        f"app = Shards({{'eu': 'sqlite:///{tmp_path}/1.db', 'us': 'sqlite:///{tmp_path}/2.db'}}, of=lambda key: 'eu')\n"
    )
    assert main(["--app", "regions:app", "jobs", "count"]) == 2
    assert "has the shards eu, us: say which, --shard eu" in capsys.readouterr().err
    assert main(["--app", "regions:app", "--shard", "us", "jobs", "count"]) == 0
    assert main(["--app", "regions:app", "--shard", "us", "doctor"]) == 0
    assert f"{tmp_path}/2.db" in capsys.readouterr().out
    assert main(["--app", "regions:app", "--shard", "asia", "jobs", "count"]) == 2
    assert main(["--database", f"sqlite:///{tmp_path}/1.db", "--shard", "us", "jobs", "count"]) == 2
    assert "a --shard is one of an app's" in capsys.readouterr().err
    for options in (["--supervised", "0"], ["--max-jobs", "1"]):
        assert main(["--app", "regions:app", "worker", *options]) == 2
        assert "are one shard's: say which, --shard eu" in capsys.readouterr().err


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """The command line of two shards, in which crm/acct-7 lives in ``us``: status, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESILIENT_SECRETS", new_key())
    (tmp_path / "homes.py").write_text(
        "from resilient import Bearer, Provider, Shards, handler\n"
        "@handler('push')\n"
        "async def push(job): ...\n"
        f"urls = {{'eu': 'sqlite:///{tmp_path}/1.db', 'us': 'sqlite:///{tmp_path}/2.db'}}\n"
        "app = Shards(urls, of=lambda key: 'us' if key.endswith('7') else 'eu', handlers=[push],\n"
        " providers=[Provider(name='crm', base_url='https://api.crm.example', auth=(Bearer(),))])\n"
    )

    def run(*words):
        status = main(["--app", "homes:app", *words])
        return status, *capsys.readouterr()

    return run


def test_the_command_line_enqueues_in_the_shard_of_the_account(say):
    def jobs(shard):
        return int(say("--shard", shard, "jobs", "count")[1])

    assert say("enqueue", "push", "--resource", "crm/acct-7")[0] == 0
    assert say("--shard", "us", "enqueue", "push", "--resource", "crm/acct-7/search")[0] == 0
    assert (jobs("eu"), jobs("us")) == (0, 2)
    status, _, error = say("--shard", "eu", "enqueue", "push", "--resource", "crm/acct-7")
    assert status == 2
    assert "crm/acct-7 lives in shard us, as the program says: this is eu" in error
    assert (jobs("eu"), jobs("us")) == (0, 2)
    assert say("erase", "crm/acct-7", "--yes")[0] == 0
    assert (jobs("eu"), jobs("us")) == (0, 0)


def test_the_command_line_goes_to_the_shard_of_an_account(say, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("token-of-7"))
    assert say("connections", "add", "crm/acct-7")[0] == 0
    for words in (
        ("resources", "pause", "crm/acct-7"), ("resources", "why", "crm/acct-7"), ("resources", "show", "crm/acct-7"),
        ("resources", "limit", "crm/acct-7", "--limit", "5/s"), ("resources", "resume", "crm/acct-7"),
        ("connections", "show", "crm/acct-7"), ("connections", "revoke", "crm/acct-7", "--yes"),
    ):  # fmt: skip
        assert say(*words)[0] == 0, words
        assert say("--shard", "eu", *words)[2].startswith("crm/acct-7 lives in shard us"), words
    assert '"crm/acct-7"' in say("export", "crm/acct-7")[1]
    for words in (("resources", "show", "crm"), ("resources", "pause", "crm/*", "--yes")):  # in every shard
        assert say(*words)[0] == 2


async def test_a_database_that_is_away_at_the_start_and_comes_later(tmp_path, caplog):
    place = tmp_path / "later"
    shards = Shards(
        {"eu": f"sqlite:///{tmp_path}/1.db", "us": f"sqlite:///{place}/2.db"}, of=region, handlers=[push], upgrade=True
    )
    async with shards:
        assert "shard us cannot be reached" in caplog.text
        await shards.enqueue(push, resource_key="crm/e1")
        workers = shards.worker()
        running = asyncio.create_task(workers.run(signals=False))
        await until(lambda: [key for key, _ in SEEN] == ["crm/e1"])
        place.mkdir()
        await shards.enqueue(push, resource_key="crm/u1")
        await until(lambda: [key for key, _ in SEEN] == ["crm/e1", "crm/u1"])
        workers.stop()
        await running


async def test_a_worker_that_fails_ends_all_once_they_finished_what_runs(tmp_path, caplog):
    begun, go_on = asyncio.Event(), asyncio.Event()

    @handler("slow")
    async def slow(job: Job[None]) -> None:
        begun.set()
        await go_on.wait()

    urls = {"eu": f"sqlite:///{tmp_path}/1.db", "us": f"sqlite:///{tmp_path}/2.db"}
    async with Shards(urls, of=region, handlers=[slow]) as shards:
        job = await shards.enqueue(slow, resource_key="crm/e1")
        workers = shards.worker()

        async def fail(**_options):
            await begun.wait()
            raise SetupError("not these tables")

        workers.workers["us"].run = fail
        running = asyncio.create_task(workers.run(signals=False))
        await until(lambda: "shard us: its worker failed" in caplog.text)
        for _ in range(100):  # turns of the loop in which the handler would be cut off
            await asyncio.sleep(0)
        assert not running.done()
        go_on.set()
        with pytest.raises(SetupError, match="not these tables"):
            await running
        assert (await shards["eu"].jobs.get(job.id)).state == "succeeded"


async def test_each_worker_that_fails_is_named(tmp_path, caplog):
    """Also the one that fails while it winds down for another's sake, and one that was cancelled by nobody here."""
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("eu", "us")}
    async with Shards(urls, of=region, handlers=[push]) as shards:
        workers = shards.worker()
        eu, us = workers.workers["eu"], workers.workers["us"]

        async def fail(**_options):
            raise SetupError("not these tables")

        async def fail_later(**_options):
            await eu._stopping.wait()
            raise SetupError("the disk is full")

        us.run, eu.run = fail, fail_later
        with pytest.raises(SetupError, match="not these tables"):
            await workers.run(signals=False)
        assert "shard us: its worker failed" in caplog.text
        assert "shard eu: its worker failed" in caplog.text
        assert "the disk is full" in caplog.text


async def test_a_worker_that_is_cancelled_ends_all(tmp_path, caplog):
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("eu", "us")}
    async with Shards(urls, of=region, handlers=[push]) as shards:
        workers = shards.worker()

        async def cancelled(**_options):
            raise asyncio.CancelledError

        workers.workers["us"].run = cancelled
        async with asyncio.timeout(LIMIT):
            with pytest.raises(asyncio.CancelledError):
                await workers.run(signals=False)
        assert "shard us: its worker was cancelled" in caplog.text
        assert workers.workers["eu"].stopping


async def test_two_schemas_of_one_database_are_two_shards(postgres_server):
    name = postgres_server.create()
    url = postgres_server.url(name)
    places = {shard: Shard(url, schema=shard) for shard in ("eu", "us")}
    async with Shards(places, of=region, handlers=[push], upgrade=True) as shards:
        await shards.enqueue_many(push, [Item(resource_key=f"crm/{key}") for key in ("e1", "u1", "u2")])
        assert [await shards[shard].jobs.count() for shard in shards] == [1, 2]
        assert await shards.worker("us").drain() == 2
        assert {key for key, _ in SEEN} == {"crm/u1", "crm/u2"}
        assert await shards.worker("eu").drain() == 1
        assert [await shards[shard].jobs.count(state="succeeded") for shard in shards] == [1, 2]
    postgres_server.drop(name)


async def test_one_cluster_is_killed_and_the_other_goes_on(own_postgres, postgres_url):
    """Two servers, one worker process for both; each keeps to its half of what the provider allows all accounts."""
    arrivals: dict[str, list[float]] = {"e": [], "u": []}

    async def api(scope, receive, send):
        arrivals[scope["path"][1]].append(time.monotonic())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    def ended(letter):
        return sum(key.startswith(f"crm/{letter}") for key, _ in SEEN)

    with Server(api) as url:
        shards = Shards(
            {"eu": Shard(postgres_url, share=0.5), "us": Shard(own_postgres.url(own_postgres.create()), share=0.5)},
            of=region,
            handlers=[ask],
            providers=[Provider(name="crm", base_url=url)],
            limits={"crm": [Limit(20, per=1)]},
            upgrade=True,
        )
        async with shards:
            for letter in "eu":
                await shards.enqueue_many(ask, [Item(resource_key=f"crm/{letter}{n % 5}") for n in range(30)])
            workers = shards.worker(concurrency=10, grace=1)
            running = asyncio.create_task(workers.run(signals=False))
            await until(lambda: ended("u") >= 1 and ended("e") >= 1)
            await asyncio.to_thread(own_postgres.kill)
            before = ended("e")
            await until(lambda: ended("e") >= min(30, before + 10))
            await asyncio.to_thread(own_postgres.start)
            await until(lambda: (ended("e"), ended("u") >= 30) == (30, True))
            workers.stop()
            await running
    for times in arrivals.values():  # 10 a second, and what the machine may be late; without a share there are 19
        assert max(sum(start <= at < start + 1 for at in times) for start in times) <= 14
