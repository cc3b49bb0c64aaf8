"""Arguments of a wrong but likely type: an error that says what to pass, and shows no value."""

import dataclasses
import inspect
import pickle

import pytest
from pydantic import BaseModel

from resilient import (
    BatchEndpoint,
    BreakerPolicy,
    Credentials,
    Errors,
    FailureKind,
    FullJitter,
    Idempotency,
    Inbound,
    InvalidInput,
    Item,
    Job,
    Kind,
    Limit,
    LinkHeader,
    NextCursor,
    OAuth2,
    PageRequest,
    Provider,
    RabbitMQ,
    Resilient,
    Retry,
    Rule,
    Schedule,
    SetupError,
    Signature,
    Stream,
    Wait,
    Webhook,
    handler,
)  # fmt: skip

OAUTH = OAuth2(authorize_url="https://acme.example/a", token_url="https://acme.example/t", client_secret="hush")


class Contact(BaseModel):
    name: str


@handler("contact.push")
async def push(job: Job[Contact]) -> None: ...


LIKELY = [
    (Provider, {"auth": OAUTH}, "Provider(auth=...) takes a tuple of Auth, not an OAuth2: write (it,), with a comma"),
    (Provider, {"auth": None}, "Provider(auth=...) takes a tuple of Auth, not None"),
    (Provider, {"errors": None}, "Provider(errors=...) takes Errors, not None"),
    (
        Provider,
        {"limits": [Limit(1, per="1s")]},
        "Provider(limits=...) takes a dict of text to a list of Limit, not a list",
    ),
    (Provider, {"headers": {"x-a": 7}}, "Provider(headers=...) takes at ['x-a'] text, not an int"),
    (Provider, {"headers": [("x-a", "b")]}, "Provider(headers=...) takes a dict of text to text, not a list"),
    (Provider, {"base_url": None}, "Provider(base_url=...) takes text, not None"),
    (Provider, {"name": 7}, "Provider(name=...) takes text, not an int"),
    (OAuth2, {"token_url": None}, "OAuth2(token_url=...) takes text, not None"),
    (Idempotency, {"methods": ["POST"]}, "Idempotency(methods=...) takes a frozenset of text, not a list"),
]


def name_of(case):
    return f"{case[0].__name__}-{next(iter(case[1]))}"


@pytest.mark.parametrize("case", LIKELY, ids=name_of)
def test_a_declaration_says_what_it_takes(case):
    fn, words, text = case
    needed = {Provider: {"name": "acme", "base_url": "https://acme.example"}}.get(fn, {})
    with pytest.raises(InvalidInput) as error:
        fn(**{**needed, **words})
    assert str(error.value) == text


ACME = Provider(name="acme", base_url="https://acme.example")
APPS = [
    ({"handlers": push}, "handlers=...) takes a list of Handler, not a Handler: write [it]"),
    ({"providers": ACME}, "providers=...) takes a list of Provider, not a Provider: write [it]"),
    ({"limits": [Limit(1, per="1s")]}, "limits=...) takes a dict of text to a list of Limit or None, not a list"),
    ({"breakers": BreakerPolicy()}, "breakers=...) takes a dict of text to BreakerPolicy or None, not a BreakerPolicy"),
]


@pytest.mark.parametrize(("words", "text"), APPS, ids=[next(iter(words)) for words, _ in APPS])
def test_an_app_says_what_it_takes(words, text):
    with pytest.raises((SetupError, InvalidInput)) as error:
        Resilient("sqlite:///app.db", **words)
    assert str(error.value) == f"Resilient({text}"


ODD = ["text", 7, 2.5, None, ["text"], ("text",), {"a": 1}, {"a": "b"}, object(), Contact, push, b"x", OAUTH]
ODD += [Limit(1, per="1s"), [Limit(1, per="1s")], {"account": Limit(1, per="1s")}]
DECLARED = [
    (Provider, {"name": "acme", "base_url": "https://acme.example"}),
    (OAuth2, {"authorize_url": "https://acme.example/a", "token_url": "https://acme.example/t"}),
    (Limit, {"rate": 1, "per": "1s"}),
    (Retry, {}),
    (FullJitter, {}),
    (BreakerPolicy, {}),
    (Errors, {}),
    (Rule, {"kind": FailureKind.AUTH, "status": 400}),
    (Wait, {"fallback": 60}),
    (Idempotency, {}),
    (BatchEndpoint, {"path": "/batch"}),
    (NextCursor, {"cursor": "next", "query": "cursor"}),
    (LinkHeader, {}),
    (Signature, {"header": "x-signature"}),
    (Webhook, {"signatures": (Signature(header="x-signature"),)}),
    (Stream, {"name": "s", "request": lambda: PageRequest("/x"), "paginator": LinkHeader()}),
    (PageRequest, {"url": "/x"}),
    (Schedule, {"handler": push, "payload": Contact(name="Ada"), "every": "1h", "resource_key": "acme/a"}),
    (Inbound, {"provider": "acme", "secrets": ["s"], "jobs": {"*": push}, "resource_key": lambda _: "acme/a"}),
    (Item, {"payload": None}),
    (Kind, {"kind": "k"}),
    (RabbitMQ, {"url": "amqp://127.0.0.1"}),
    (Credentials, {}),
    (Resilient, {"database": "sqlite:///app.db"}),
    (handler, {"kind": "k"}),
]  # fmt: skip


@pytest.mark.parametrize("declared", DECLARED, ids=lambda one: one[0].__name__)
def test_nothing_raw_comes_of_a_wrong_type(declared):
    """Every argument with sixteen values of other types: taken, or refused in words that name the argument."""
    fn, words = declared
    raw = []
    for argument in inspect.signature(fn).parameters:
        for odd in ODD:
            try:
                fn(**{**words, argument: odd})
            except (InvalidInput, SetupError) as error:
                assert "hush" not in str(error)  # noqa: PT017
            except Exception as error:  # noqa: BLE001 - that is the point
                raw.append(f"{argument}={type(odd).__name__}: {type(error).__name__}: {error}")
    assert raw == []


def test_what_is_explained_is_still_itself():
    limit = Limit(5, per="1m", name="x")
    assert pickle.loads(pickle.dumps(limit)) == limit  # noqa: S301 - our own
    assert dataclasses.replace(Wait(fallback=60), fallback=30) == Wait(fallback=30)
    assert list(inspect.signature(Limit).parameters) == ["rate", "per", "burst", "name", "counts"]
    assert handler.__name__ == "handler"
    with pytest.raises(TypeError, match="unexpected keyword argument 'nam'"):
        Limit(5, per="1m", nam="x")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Limit(5, pr="1m"),
            r"keyword argument 'pr'; did you mean 'per'\?; there are rate, per, burst, name, counts",
        ),
        (lambda: Limit(5, per="1m", zzz=1), r"keyword argument 'zzz'; there are rate, per, burst, name, counts"),
        (lambda: handler("x", time_out=3), r"keyword argument 'time_out'; did you mean 'timeout'\?; there are kind, "),
        (
            lambda: Provider("x", "https://x.example"),
            r"were given; write name=\.\.\.: by name go name, title, base_url, ",
        ),
    ],
)
def test_names_and_places_that_do_not_fit_are_told_with_those_that_do(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_a_handler_without_its_kind_is_refused_where_it_stands():
    with pytest.raises(SetupError, match=r"write @handler\('some.kind'\) above send"):

        @handler
        def send(job): ...


def test_errors_of_the_programs_own_functions_stay_what_they_are():
    def broken(_):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        Inbound(provider="acme", secrets=(one for one in broken(1)), jobs={}, resource_key=broken)
