"""requests through a job: what an SDK built on it gets, and what it can no longer do wrong."""

import contextlib
import copy
import http.cookiejar

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry as UrllibRetry

from resilient import FailureKind, Job, Retry, SyncJob, handler
from resilient.adapters.requests import Session, session
from resilient.testing import Reply, bench_of, job, sync_job


def plain(use, **options):
    @handler("h", retry=Retry(max_attempts=1), **options)
    def h(job: SyncJob[None]) -> None:
        with session(job) as s:
            use(s)

    return h


async def test_requests_carry_token_and_key_and_count(run, fake):
    url = fake.url

    def use(s):
        assert s.get(f"{url}/me").json() == {"ok": True}
        s.post(f"{url}/charges", json={"a": 1}, headers={"Idempotency-Key": "sdk-17", "Authorization": "Bearer sdk"})
        s.post(f"{url}/charges", json={"a": 2}, headers={"Idempotency-Key": "by-hand"})

    assert (await run(plain(use))).state.value == "succeeded"
    assert {one.account for one in fake.log} == {"one"}
    first, second = (one.idempotency_key for one in fake.performed)
    assert len(first) == 32
    assert second == "by-hand"


async def test_the_same_key_after_a_lost_answer(run, fake):
    """The SDK makes a new one for each try; the provider sees one charge."""
    numbers = iter(range(100))
    fake.fail_next("lost", on="POST /charges")

    def use(s):
        s.post(f"{fake.url}/charges", json={"a": 1}, headers={"Idempotency-Key": f"sdk-{next(numbers)}"})

    @handler("h", retry=Retry(max_attempts=3))
    def h(job: SyncJob[None]) -> None:
        use(session(job))

    found = await run(h, again=1)
    assert (found.state.value, found.executions) == ("succeeded", 2)
    assert [one.status for one in fake.log.api] == [None, 200]
    assert len({one.idempotency_key for one in fake.log.api}) == len(fake.performed) == 1


async def test_a_lost_answer_without_a_key_is_in_doubt(run, fake):
    fake.fail_next("lost", on="POST /orders")
    found = await run(plain(lambda s: s.post(f"{fake.url}/orders", json={})), again=2)
    assert (found.state.value, found.last_error_kind) == ("dead", FailureKind.AMBIGUOUS)
    assert len(fake.performed) == 1


async def test_a_body_that_is_cut_is_no_success(run, fake):
    fake.fail_next("cut")
    found = await run(plain(lambda s: s.get(f"{fake.url}/x")))
    assert (found.state.value, found.last_error_kind) == ("dead", FailureKind.TRANSIENT)


async def test_a_refused_token_is_refreshed_and_the_request_repeated(run, fake):
    def use(s):
        if not fake.log:  # a machine that stands still ends the wait for a refresh, and the job runs again
            fake.expire_tokens()
        s.post(f"{fake.url}/x", data={"a": 1}).raise_for_status()

    assert (await run(plain(use))).state.value == "succeeded"
    assert [one.status for one in fake.log.api] == [401, 200]
    assert fake.account("one").refreshes == 1


async def test_a_stream_cannot_be_repeated(run, fake):
    def use(s):
        if not fake.log:
            fake.expire_tokens()
        s.post(f"{fake.url}/x", data=iter([b"a", b"b"])).raise_for_status()

    found = await run(plain(use), again=1)
    assert [one.status for one in fake.log.api] == [401, 200]
    assert [one.body for one in fake.log.api] == [b"ab", b"ab"]
    assert found.state.value == "succeeded"


async def test_a_throttle_stops_the_next_request_before_any_io(run, fake, time):
    fake.throttle(for_=100)

    def use(s):
        first = s.get(f"{fake.url}/x")
        assert (first.status_code, first.headers["Retry-After"]) == (429, "100")
        assert first.json()
        s.get(f"{fake.url}/y")

    found = await run(plain(use))
    assert (found.finished_at, found.attempts) == (None, 0)
    assert [one.path for one in fake.log.api] == ["/x"]
    assert fake.early == 0


class SdkError(Exception):
    """What an SDK makes of everything."""


async def test_what_an_sdk_wraps_is_classified_all_the_same(run, fake):
    fake.throttle(for_=100)

    def use(s):
        try:
            s.get(f"{fake.url}/x").raise_for_status()
        except requests.HTTPError:
            raise SdkError("rate limited") from None

    found = await run(plain(use))
    assert (found.finished_at, found.attempts, found.last_error_kind) == (None, 0, FailureKind.THROTTLED)


@pytest.mark.parametrize(("fault", "code"), [("hang", "read_timeout"), ("dropped", "read_error")])
async def test_timeouts_and_closed_connections(run, fake, fault, code):
    fake.fail_next(fault)
    found = await run(plain(lambda s: s.get(f"{fake.url}/x", timeout=0.3)))
    assert found.last_error_kind == FailureKind.TRANSIENT
    assert code in found.last_error or "protocol" in found.last_error or "onnection" in found.last_error


async def test_credentials_stay_with_the_provider(run, fake, stranger):
    """Also on a redirect, and once it has left, it is a stranger's request even if it comes back."""
    fake.on("/out", Reply(302, headers={"location": f"{stranger.url}/there"}))
    stranger.on("/there", Reply(302, headers={"location": f"{fake.url}/back"}))

    def use(s):
        s.get(f"{fake.url}/out", headers={"X-Own-Key": "k"})
        s.get(f"{stranger.url}/direct")

    await run(plain(use))
    assert [(one.path, one.account, "x-own-key" in one.headers) for one in fake.log.api] == [
        ("/out", "one", True), ("/back", "", False),
    ]  # fmt: skip
    assert [("authorization" in one.headers, "x-own-key" in one.headers) for one in stranger.log] == [
        (False, False)
    ] * 2


async def test_an_endless_error_is_read_to_its_bound(run, fake):
    fake.fail_next(Reply(500, fault="endless"))
    seen = []
    await run(plain(lambda s: seen.append(s.get(f"{fake.url}/x"))))
    assert seen[0].status_code == 500
    assert 64 * 1024 <= len(seen[0].content) < 128 * 1024


async def test_a_streamed_download_is_not_read_first(run, fake):
    fake.fail_next("endless")

    def use(s):
        with s.get(f"{fake.url}/x", stream=True) as answer:
            assert next(answer.iter_content(100)) == b"x" * 100

    assert (await run(plain(use))).state.value == "succeeded"


async def test_no_token_is_seen_in_errors(run, fake):
    seen = []

    def use(s):
        answer = s.get(f"{fake.url}/x")
        seen.append(str(dict(answer.request.headers)))

    await run(plain(use))
    assert "access" not in seen[0]


def test_only_a_plain_handlers_job(fake):
    with pytest.raises(TypeError, match="aiohttp"):
        session(job(None))
    assert isinstance(session(sync_job(None)), Session)


def test_in_a_handlers_unit_test(fake, monkeypatch):
    """`testing.sync_job` has no gate: its calls are recorded, the requests are really sent."""

    class Offline(HTTPAdapter):
        def send(self, request, **_):
            answer = requests.Response()
            answer.status_code, answer._content, answer.request, answer.url = 200, b"{}", request, request.url
            return answer

    monkeypatch.setattr("resilient.adapters.requests._pool", Offline())
    made = sync_job(None)
    assert session(made).get("https://api.acme.example/x").json() == {}
    (call,) = bench_of(made).calls
    assert (call.method, call.reported[0]) == ("GET", 200)


def test_async_job_is_not_plain():
    assert not isinstance(job(None), SyncJob)
    assert isinstance(job(None), Job)


async def test_bare_stays_bare_within_the_stranger_and_back(run, fake, stranger):
    fake.on("/out", Reply(302, headers={"location": f"{stranger.url}/there"}))
    stranger.on("/there", Reply(302, headers={"location": "/again"}))
    stranger.on("/again", Reply(302, headers={"location": f"{fake.url}/back"}))

    def use(s):
        s.get(f"{fake.url}/out", headers={"X-Own-Key": "k"})
        s.get(f"{stranger.url}/there", headers={"X-Other-Key": "k"}, allow_redirects=False)

    await run(plain(use))
    assert [(one.path, "x-own-key" in one.headers, "authorization" in one.headers) for one in fake.log.api] == [
        ("/out", True, True), ("/back", False, False),
    ]  # fmt: skip
    assert [(one.path, {"x-own-key", "x-other-key"} & set(one.headers)) for one in stranger.log] == [
        ("/there", set()), ("/again", set()), ("/there", {"x-other-key"}),
    ]  # fmt: skip


async def test_an_adapter_that_is_mounted_carries_the_jobs_requests(run, fake):
    """SDKs mount their own, for certificates or a larger pool."""
    closed, shared = [], HTTPAdapter()
    shared.close = lambda: closed.append(True)

    def use(s):
        for prefix in ("http://", fake.url, ""):
            s.mount(prefix, shared)
            s.post(f"{fake.url}/charges", json={})
        s.mount("file://", HTTPAdapter())
        assert type(s.get_adapter("file:///x")) is HTTPAdapter
        copied = copy.copy(s)
        copied.mount(f"{fake.url}/charges", shared)
        copied.post(f"{fake.url}/charges", json={})

    assert (await run(plain(use))).state.value == "succeeded"
    assert {(one.account, bool(one.idempotency_key)) for one in fake.log.api} == {("one", True)}
    assert len(fake.performed) == 4
    assert closed


@pytest.mark.parametrize("status", [429, 503])
async def test_retries_of_an_adapter_that_is_mounted_are_off(run, fake, status):
    """They would send into the provider's pause, and end a job that has to wait as one in doubt."""
    fake.fail_next(Reply(status, headers={"retry-after": "1"}), times=4)
    often = UrllibRetry(total=3, status_forcelist=[429, 503], allowed_methods=None)

    def use(s):
        s.mount("http://", HTTPAdapter(max_retries=often))
        s.post(f"{fake.url}/charges", json={}).raise_for_status()

    job = await run(plain(use))
    assert [one.status for one in fake.log.api] == [status]
    assert (job.attempts, "unknown outcome" in job.last_error) == (int(status == 503), False)


async def test_what_an_auth_sends_again_is_a_call_of_the_job(run, fake, stranger):
    """Digest, NTLM and Kerberos send by the connection that an answer names."""
    seen = []

    class Challenged(requests.auth.AuthBase):
        def __call__(self, request):
            request.register_hook("response", self.answer)
            return request

        def answer(self, response, **options):
            if "X-Answer" in response.request.headers or response.is_redirect:
                return response
            again = response.request.copy()
            again.headers["X-Answer"] = "secret"
            done = response.connection.send(again, **options)
            seen.append((done.status_code, "Bearer" in done.request.headers.get("Authorization", "")))
            return done

    fake.on("GET /away", Reply(302, None, {"Location": f"{stranger.url}/there"}))

    def use(s):
        s.get(f"{fake.url}/me", auth=Challenged())
        s.get(f"{fake.url}/away", auth=Challenged())

    assert (await run(plain(use))).state.value == "succeeded"
    assert [one.account for one in fake.log.api] == ["one", "one", "one"]
    assert seen == [(200, False), (200, False)]
    assert len(stranger.log) == 2
    assert all("x-answer" not in one.headers for one in stranger.log)


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/round", {}, "too_many_redirects"),
        ("ftp://x/", {}, "bad_url"),
        ("nowhere", {}, "bad_url"),
        ("/x", {"X-Name": "a\nb"}, "bad_request"),
    ],
)
async def test_what_no_repeat_makes_better_is_not_repeated(run, fake, path, headers, code):
    fake.on("GET /round", Reply(302, None, {"Location": f"{fake.url}/round"}))
    url = fake.url + path if path.startswith("/") else path
    found = await run(plain(lambda s: s.get(url, headers=headers)))
    assert (found.state.value, found.last_error_kind, found.last_error_code) == ("dead", "permanent", code)


async def test_a_charset_that_is_none_is_read_as_utf_8(run, fake):
    fake.on("*", Reply(200, "ä-1", headers={"content-type": "text/plain; charset=punycode"}))
    texts = []
    assert (await run(plain(lambda s: texts.append(s.get(f"{fake.url}/x").text)))).state.value == "succeeded"
    assert texts == ["ä-1"]


async def test_a_write_whose_streamed_answer_breaks_off_is_not_sent_again(run, fake):
    fake.fail_next("cut", on="POST /orders")

    @handler("h", retry=Retry(max_attempts=3))
    def h(job: SyncJob[None]) -> None:
        with session(job) as s, s.post(f"{fake.url}/orders", json={}, stream=True) as answer:
            list(answer.iter_content(10))

    found = await run(h, again=2)
    assert (found.state.value, found.last_error_kind, len(fake.log.api)) == ("dead", FailureKind.AMBIGUOUS, 1)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_sdks_own_retry_after_an_answer_that_breaks_off_has_the_same_key(run, fake, streams):
    fake.fail_next("cut", on="POST /charges")

    def use(s):
        for _ in range(2):
            with contextlib.suppress(requests.exceptions.ChunkedEncodingError):
                assert list(s.post(f"{fake.url}/charges", json={}, stream=streams).iter_lines())
                return

    assert (await run(plain(use))).state.value == "succeeded"
    assert (len(fake.log.api), len({one.idempotency_key for one in fake.log.api}), len(fake.performed)) == (2, 1, 1)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("location", ["http://[", "http://a:99999/", "http://u:p@127.0.0.1:1/", "file:///etc/passwd"])
async def test_a_redirect_to_what_is_no_address_is_no_bug(run, fake, location, follows):
    fake.on("GET /out", Reply(302, None, {"Location": location}))
    found = await run(plain(lambda s: s.get(f"{fake.url}/out", allow_redirects=follows)))
    assert (found.state.value, found.last_error_kind, found.last_error_code) == ("dead", "permanent", "bad_url")


async def test_a_redirect_with_blanks_is_followed(run, fake):
    fake.on("GET /out", Reply(302, None, {"Location": "/a b"}))
    assert (await run(plain(lambda s: s.get(f"{fake.url}/out").raise_for_status()))).state.value == "succeeded"
    assert len(fake.log.api) == 2


async def test_a_host_that_no_name_server_takes_is_no_bug(run):
    found = await run(plain(lambda s: s.get(f"http://{'a' * 64}.example/")))
    assert (found.state.value, found.last_error_kind, found.last_error_code) == ("dead", "permanent", "bad_url")


async def test_cookies_of_a_kind_that_nobody_sends_are_not_read(run, fake, monkeypatch):
    read = []
    monkeypatch.setattr(http.cookiejar, "split_header_words", lambda values: read.extend(values) or [])
    fake.on("*", Reply(200, {}, {"Set-Cookie": "a=1", "Set-Cookie2": "b,c"}))
    cookies = []

    def use(s):
        s.get(f"{fake.url}/x")
        cookies.extend(s.cookies.keys())

    assert (await run(plain(use))).state.value == "succeeded"
    assert (cookies, read) == (["a"], [])
