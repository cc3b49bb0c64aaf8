"""requests in the thread of a plain handler whose time ends: what was shut, what was sent, and what was neither."""

import contextlib
import socket
import threading

import pytest
import requests
from requests.adapters import HTTPAdapter

from resilient import FailureKind, Retry, SyncJob, handler
from resilient.adapters.requests import session
from resilient.testing import sync_job
from resilient.wire.requests.sockets import Line, line, using
from tests.helpers import LIMIT


class Answers:
    """A server that gives each connection the next of its answers, byte for byte; it hangs up at once on ``None``."""

    def __init__(self, *answers):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/"
        self.answers, self.open, self.over = answers, [], threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            for answer in self.answers:
                one, _ = self.listening.accept()
                self.open.append(one)
                one.recv(65_536)
                if answer is None:
                    one.close()
                else:
                    one.sendall(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in (self.listening, *self.open):
            one.close()


@pytest.fixture
def own():
    """The line of this thread."""
    made = Line()
    with using(made):
        yield made


FAULTS = {
    "no answer": b"",
    "half a header": b"HTTP/1.1 200 OK\r\nContent-",
    "no HTTP": b"220 smtp.example ESMTP\r\n\r\n",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234",
    "half a last body": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\n1234",
    "hung up": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_failed_is_not_waited_for(own, fault):
    """A handler that caught its error and then uses up its time has read nothing that `cut` made incomplete."""
    with Answers(FAULTS[fault]) as server, session(sync_job(None)) as s:
        with pytest.raises(requests.RequestException):
            s.get(server.url, timeout=(LIMIT, 0.05))
        own.cut()
    assert (own.is_cut, own.broke) == (True, False)


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"], ids=["kept", "last"])
def test_a_body_that_is_read_is_waited_for(own, header):
    """urllib3 closes its connection when a last answer begins: the body is still read from the socket."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n" + header + b"\r\n1234"
    with Answers(head) as server, session(sync_job(None)) as s:
        answer = s.get(server.url, stream=True, timeout=LIMIT)
        own.cut()
        assert own.broke
        with pytest.raises(requests.RequestException):
            answer.content  # noqa: B018 - reads it


def test_a_socket_that_is_closed_is_not_waited_for(own):
    with socket.socket() as one:
        own.hold(one)
    own.cut()
    assert not own.broke


def test_an_answer_that_was_read_is_not_waited_for(own):
    with Answers(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as server, session(sync_job(None)) as s:
        assert s.get(server.url, timeout=LIMIT).json() == {}
        own.cut()
    assert not own.broke


# -- what was never sent ----------------------------------------------------------------------------------------------


class Late(HTTPAdapter):
    """The time of the handler is over when the second request is about to use its connection."""

    def send(self, request, **options):
        if request.method == "POST":
            line().cut()
        return super().send(request, **options)


def in_lookup(s, fake):
    own, lookup = line(), socket.getaddrinfo

    def cut(*args, **options):
        own.cut()
        return lookup(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", cut)
        s.post(f"{fake.url}/orders", json={})


def before_reuse(s, fake):
    s.mount("http://", Late())
    s.get(f"{fake.url}/me")
    s.post(f"{fake.url}/orders", json={})


@pytest.mark.parametrize("use", [in_lookup, before_reuse])
async def test_what_was_never_sent_is_not_in_doubt(run, fake, use):
    """A POST without an idempotency key, when the handler's time ends before its first byte."""

    @handler("h", retry=Retry(max_attempts=1))
    def h(job: SyncJob[None]) -> None:
        with session(job) as s:
            use(s, fake)

    job = await run(h)
    assert (job.last_error_kind, job.last_error_code) == (FailureKind.TRANSIENT, "connect_timeout")
    assert fake.performed == []


def test_nothing_is_sent_when_the_time_ends_during_the_handshake(own, certificate):
    context, cert = certificate
    got = []

    def serve():
        with contextlib.suppress(OSError), listening.accept()[0] as plain:
            own.cut()
            with context.wrap_socket(plain, server_side=True) as secure:
                got.append(secure.recv(65_536))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        with session(sync_job(None)) as s, pytest.raises(requests.ConnectTimeout, match="time is over"):
            s.post(f"https://127.0.0.1:{listening.getsockname()[1]}/", json={}, verify=cert)
        serving.join(LIMIT)
    assert got in ([], [b""])
    assert not own.broke


def pump(source, sink):
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(65_536):
            sink.sendall(data)


def test_an_answer_in_tls_within_tls_is_cut_too(own, certificate):
    """Through an HTTPS proxy: what urllib3 calls the socket is none."""
    context, cert = certificate
    over = threading.Event()

    def answer():
        with target.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as secure:
            secure.recv(65_536)
            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234")
            over.wait(LIMIT)

    def tunnel():
        with proxy.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as secure:
            secure.recv(65_536)
            with socket.create_connection(target.getsockname()) as beyond:
                secure.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                threading.Thread(target=pump, args=(beyond, secure), daemon=True).start()
                pump(secure, beyond)

    with socket.create_server(("127.0.0.1", 0)) as target, socket.create_server(("127.0.0.1", 0)) as proxy:
        for serve in (answer, tunnel):
            threading.Thread(target=serve, daemon=True).start()
        ports = [one.getsockname()[1] for one in (target, proxy)]
        with session(sync_job(None)) as s:
            proxies = {"https": f"https://127.0.0.1:{ports[1]}"}
            got = s.get(f"https://127.0.0.1:{ports[0]}/", proxies=proxies, verify=cert, stream=True, timeout=LIMIT)
            own.cut()
            assert own.broke
            with pytest.raises(requests.RequestException):
                got.content  # noqa: B018 - reads it
        over.set()


# -- TLS that ends without a word -------------------------------------------------------------------------------------

CUT = {
    "no answer": b"",
    "half a header": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234",
    "a body without a length": b"HTTP/1.1 200 OK\r\n\r\n1234",
}


def cut_off(context, answer, listening):
    """Answer, and end the connection as somebody in between may: without TLS's close_notify."""
    with listening.accept()[0] as plain:
        secure = context.wrap_socket(plain, server_side=True)
        secure.recv(65_536)
        secure.sendall(answer)
        socket.socket.shutdown(secure, socket.SHUT_WR)
        with contextlib.suppress(OSError):
            secure.recv(1)
        secure.close()


@pytest.mark.parametrize("answer", CUT)
async def test_an_end_that_tls_does_not_announce_is_a_cut_after_the_request_was_sent(run, certificate, answer):
    """A POST without an idempotency key is in doubt then, or answered in part; it is not taken for unsent or whole."""
    context, cert = certificate
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/"
        threading.Thread(target=cut_off, args=(context, CUT[answer], listening), daemon=True).start()

        @handler("h", retry=Retry(max_attempts=1))
        def h(job: SyncJob[None]) -> None:
            with session(job) as s:
                s.post(url, json={}, verify=cert)

        job = await run(h)
    assert (job.state, job.last_error_kind) == ("dead", FailureKind.AMBIGUOUS)
    assert "unknown outcome" in job.last_error


def test_a_body_that_ends_with_its_connection_is_whole_if_tls_says_so(own, certificate):
    context, cert = certificate

    def serve():
        with listening.accept()[0] as plain:
            secure = context.wrap_socket(plain, server_side=True)
            secure.recv(65_536)
            secure.sendall(CUT["a body without a length"])
            with contextlib.suppress(OSError):
                secure.unwrap().close()
            secure.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        with session(sync_job(None)) as s:
            assert s.get(f"https://127.0.0.1:{listening.getsockname()[1]}/", verify=cert).text == "1234"
