"""aiohttp through a job: what an SDK built on it gets, and what it can no longer do wrong."""

import asyncio
import contextlib

import aiohttp
import pytest

from resilient import FailureKind, Job, Retry, handler
from resilient.adapters.aiohttp import session
from resilient.testing import Reply, job, sync_job


def coroutine(use, **options):
    @handler("h", retry=Retry(max_attempts=1), **options)
    async def h(job: Job[None]) -> None:
        async with session(job) as s:
            await use(s)

    return h


async def sent(request):
    async with request as answer:
        await answer.read()
        return answer


async def test_requests_carry_token_and_key_and_count(run, fake):
    async def use(s):
        async with s.get(f"{fake.url}/me", params={"a": "b c"}) as answer:
            assert await answer.json() == {"ok": True}
        sdk = {"Idempotency-Key": "sdk-17", "Authorization": "Bearer sdk"}
        await sent(s.post(f"{fake.url}/charges", json={"a": 1}, headers=sdk))
        await sent(s.post(f"{fake.url}/charges", data={"a": 2}, headers={"Idempotency-Key": "by-hand"}))

    assert (await run(coroutine(use))).state.value == "succeeded"
    assert {one.account for one in fake.log} == {"one"}
    assert fake.log[0].query == {"a": "b c"}
    first, second = (one.idempotency_key for one in fake.performed)
    assert (len(first), second) == (32, "by-hand")


async def test_the_same_key_after_a_lost_answer(run, fake):
    numbers = iter(range(100))
    fake.fail_next("lost", on="POST /charges")

    @handler("h", retry=Retry(max_attempts=3))
    async def h(job: Job[None]) -> None:
        async with session(job) as s:
            await sent(s.post(f"{fake.url}/charges", json={}, headers={"Idempotency-Key": f"sdk-{next(numbers)}"}))

    found = await run(h, again=1)
    assert (found.state.value, found.executions) == ("succeeded", 2)
    assert len({one.idempotency_key for one in fake.log.api}) == len(fake.performed) == 1


async def test_a_lost_answer_without_a_key_is_in_doubt(run, fake):
    fake.fail_next("lost", on="POST /orders")
    found = await run(coroutine(lambda s: sent(s.post(f"{fake.url}/orders", json={}))), again=2)
    assert (found.state.value, found.last_error_kind) == ("dead", FailureKind.AMBIGUOUS)
    assert len(fake.performed) == 1


async def test_a_refused_token_is_refreshed_and_the_request_repeated(run, fake):
    async def use(s):
        if not fake.log:  # a machine that stands still ends the wait for a refresh, and the job runs again
            fake.expire_tokens()
        (await sent(s.post(f"{fake.url}/x", json={"a": 1}))).raise_for_status()

    assert (await run(coroutine(use))).state.value == "succeeded"
    assert [(one.status, one.json) for one in fake.log.api] == [(401, {"a": 1}), (200, {"a": 1})]
    assert fake.account("one").refreshes == 1


async def test_a_stream_cannot_be_repeated(run, fake):
    async def parts():
        yield b"a"
        yield b"b"

    async def use(s):
        if not fake.log:
            fake.expire_tokens()
        (await sent(s.post(f"{fake.url}/x", data=parts()))).raise_for_status()

    found = await run(coroutine(use), again=1)
    assert [(one.status, one.body) for one in fake.log.api] == [(401, b"ab"), (200, b"ab")]
    assert found.state.value == "succeeded"


async def test_a_throttle_stops_the_next_request_before_any_io(run, fake):
    fake.throttle(for_=100)

    async def use(s):
        first = await sent(s.get(f"{fake.url}/x"))
        assert (first.status, first.headers["Retry-After"]) == (429, "100")
        assert await first.json()
        await sent(s.get(f"{fake.url}/y"))

    found = await run(coroutine(use))
    assert (found.finished_at, found.attempts) == (None, 0)
    assert [one.path for one in fake.log.api] == ["/x"]
    assert fake.early == 0


class SdkError(Exception):
    """What an SDK makes of everything."""


async def test_what_an_sdk_wraps_is_classified_all_the_same(run, fake):
    fake.throttle(for_=100)

    async def use(s):
        try:
            (await sent(s.get(f"{fake.url}/x"))).raise_for_status()
        except aiohttp.ClientResponseError:
            raise SdkError("rate limited") from None

    found = await run(coroutine(use))
    assert (found.finished_at, found.attempts, found.last_error_kind) == (None, 0, FailureKind.THROTTLED)


@pytest.mark.parametrize("fault", ["hang", "dropped"])
async def test_timeouts_and_closed_connections(run, fake, fault):
    fake.fail_next(fault, times=2)

    async def use(s):
        await sent(s.post(f"{fake.url}/charges", timeout=aiohttp.ClientTimeout(sock_read=0.3)))

    assert (await run(coroutine(use))).last_error_kind == FailureKind.TRANSIENT


async def test_credentials_stay_with_the_provider(run, fake, stranger):
    fake.on("/out", Reply(302, headers={"location": f"{stranger.url}/there"}))
    stranger.on("/there", Reply(302, headers={"location": f"{fake.url}/back"}))

    async def use(s):
        await sent(s.get(f"{fake.url}/out", headers={"X-Own-Key": "k"}))
        await sent(s.get(f"{stranger.url}/direct"))

    await run(coroutine(use))
    assert [(one.path, one.account, "x-own-key" in one.headers) for one in fake.log.api] == [
        ("/out", "one", True), ("/back", "", False),
    ]  # fmt: skip
    assert [("authorization" in one.headers, "x-own-key" in one.headers) for one in stranger.log] == [
        (False, False)
    ] * 2


async def test_an_endless_error_is_read_to_its_bound(run, fake):
    fake.fail_next(Reply(500, fault="endless"))
    seen = []

    async def use(s):
        async with s.get(f"{fake.url}/x") as answer:
            seen.append(await answer.read())

    await run(coroutine(use))
    assert 64 * 1024 <= len(seen[0]) < 512 * 1024


async def test_a_streamed_download_is_not_read_first(run, fake):
    fake.fail_next("endless")

    async def use(s):
        async with s.get(f"{fake.url}/x") as answer:
            assert await answer.content.readexactly(100) == b"x" * 100

    assert (await run(coroutine(use))).state.value == "succeeded"


def test_only_a_coroutine_handlers_job():
    with pytest.raises(TypeError, match="requests"):
        session(sync_job(None))


async def test_in_a_handlers_unit_test(fake):
    async with session(job(None)) as s, s.get(f"{fake.url}/x") as answer:
        assert answer.status == 401  # a job without a database has no credentials


async def test_bare_stays_bare_within_the_stranger_and_back(run, fake, stranger):
    fake.on("/out", Reply(302, headers={"location": f"{stranger.url}/there"}))
    stranger.on("/there", Reply(302, headers={"location": "/again"}))
    stranger.on("/again", Reply(302, headers={"location": f"{fake.url}/back"}))

    async def use(s):
        await sent(s.get(f"{fake.url}/out", headers={"X-Own-Key": "k"}))
        await sent(s.get(f"{stranger.url}/there", headers={"X-Other-Key": "k"}, allow_redirects=False))

    await run(coroutine(use))
    assert [(one.path, "x-own-key" in one.headers, "authorization" in one.headers) for one in fake.log.api] == [
        ("/out", True, True), ("/back", False, False),
    ]  # fmt: skip
    assert [(one.path, {"x-own-key", "x-other-key"} & set(one.headers)) for one in stranger.log] == [
        ("/there", set()), ("/again", set()), ("/there", {"x-other-key"}),
    ]  # fmt: skip


ASTRAY = {
    "plain": lambda url: {"location": url},
    "fragment": lambda url: {"location": f"{url}#top"},
    "uri": lambda url: {"uri": url},
}


@pytest.mark.parametrize("spelling", ASTRAY)
async def test_a_chain_that_went_astray_is_bare_however_many_went_before(run, fake, stranger, spelling):
    """Redirects that nobody follows leave nothing that another chain could miss, nor pick up."""
    stranger.on("/seen/*", lambda one: Reply(302, headers={"location": f"/nowhere{one.path}"}))
    fake.on("/out", Reply(302, headers=ASTRAY[spelling](f"{stranger.url}/there")))
    stranger.on("/there", Reply(302, headers=ASTRAY[spelling](f"{fake.url}/back")))

    async def use(s):
        for n in range(101):
            await sent(s.get(f"{stranger.url}/seen/{n}", allow_redirects=False))
        await sent(s.get(f"{fake.url}/out", headers={"X-Own-Key": "k"}))

    await run(coroutine(use))
    assert (stranger.log[-1].path, "x-own-key" in stranger.log[-1].headers) == ("/there", False)
    assert [(one.path, "authorization" in one.headers) for one in fake.log.api] == [("/out", True), ("/back", False)]


async def test_two_at_once_take_not_each_others_hop(run, fake, stranger):
    """One is redirected to where the other goes by itself, before the first has followed."""
    fake.on("/out", Reply(302, headers={"location": f"{stranger.url}/there"}))

    async def use(s):
        own = {"X-Own-Key": "k"}
        await sent(s.get(f"{fake.url}/out", headers=own, allow_redirects=False))
        await sent(s.get(f"{stranger.url}/there", headers={"X-Other-Key": "k"}))
        answers = (sent(s.get(f"{fake.url}/out", headers=own)), sent(s.get(f"{stranger.url}/there", headers=own)))
        await asyncio.gather(*answers)

    await run(coroutine(use))
    carried = [sorted({"x-own-key", "x-other-key"} & set(one.headers)) for one in stranger.log]
    assert carried[0] == ["x-other-key"]
    assert sorted(carried[1:]) == [[], ["x-own-key"]]


async def test_middlewares_of_one_request_leave_the_jobs_in_its_place(run, fake):
    """An SDK signs its requests by one; aiohttp takes it instead of the session's."""
    signed = []

    async def sign(request, handler):
        signed.append(request.url.path)
        return await handler(request)

    async def use(s):
        await sent(s.get(f"{fake.url}/x", middlewares=(sign,)))
        await sent(s.post(f"{fake.url}/charges", json={}, middlewares=()))

    assert (await run(coroutine(use))).state.value == "succeeded"
    assert signed == ["/x"]
    assert [(one.account, bool(one.idempotency_key)) for one in fake.log.api] == [("one", False), ("one", True)]


@pytest.mark.parametrize(("path", "code"), [("/round", "too_many_redirects"), ("ftp://x/", "bad_url")])
async def test_what_no_repeat_makes_better_is_not_repeated(run, fake, path, code):
    fake.on("GET /round", Reply(302, None, {"Location": f"{fake.url}/round"}))
    url = path if "://" in path else fake.url + path
    found = await run(coroutine(lambda s: sent(s.get(url))))
    assert (found.state.value, found.last_error_kind, found.last_error_code) == ("dead", "permanent", code)


async def test_a_charset_that_is_none_is_read_as_utf_8(run, fake):
    fake.on("*", Reply(200, "ä-1", headers={"content-type": "text/plain; charset=punycode"}))
    texts = []

    async def use(s):
        async with s.get(f"{fake.url}/x") as answer:
            texts.append(await answer.text())

    assert (await run(coroutine(use))).state.value == "succeeded"
    assert texts == ["ä-1"]


async def whole(answer):
    await answer.read()


async def streamed(answer):
    async for _ in answer.content.iter_any():
        pass


@pytest.mark.parametrize("use", [whole, streamed])
@pytest.mark.parametrize(
    ("path", "state", "kind", "sent"),
    [("orders", "dead", FailureKind.AMBIGUOUS, 1), ("charges", "succeeded", None, 2)],
)
async def test_a_write_whose_answer_breaks_off_is_sent_again_with_a_key_only(run, fake, use, path, state, kind, sent):
    fake.fail_next("cut", on=f"POST /{path}")

    @handler("h", retry=Retry(max_attempts=3))
    async def h(job: Job[None]) -> None:
        async with session(job) as s, s.post(f"{fake.url}/{path}", json={}) as answer:
            await use(answer)

    found = await run(h, again=2)
    last = found.last_error_kind if state == "dead" else None
    assert (found.state.value, last, len(fake.log.api)) == (state, kind, sent)
    assert len(fake.performed) == 1


async def test_a_host_that_no_name_server_takes_is_no_bug(run):
    found = await run(coroutine(lambda s: sent(s.get(f"http://{'a' * 64}.example/"))))
    assert (found.state.value, found.last_error_kind, found.last_error_code) == ("dead", "permanent", "bad_url")


async def test_an_sdks_own_retry_after_an_answer_that_breaks_off_has_the_same_key(run, fake):
    fake.fail_next("cut", on="POST /charges")

    async def use(s):
        with contextlib.suppress(aiohttp.ClientPayloadError):
            await sent(s.post(f"{fake.url}/charges", json={}))
        await sent(s.post(f"{fake.url}/charges", json={}))

    assert (await run(coroutine(use))).state.value == "succeeded"
    assert (len(fake.log.api), len({one.idempotency_key for one in fake.log.api}), len(fake.performed)) == (2, 1, 1)
