"""Facts are checked where they are written: a word that nobody knows is refused, with those that are known."""

import re
from dataclasses import fields
from enum import Enum
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from resilient import (
    ApiKey,
    Basic,
    BatchEndpoint,
    Bearer,
    BudgetFields,
    Errors,
    FailureKind,
    GraphQLPages,
    Idempotency,
    Incremental,
    InvalidInput,
    LastKey,
    Limit,
    LinkHeader,
    NextCursor,
    NextUrl,
    OAuth2,
    Offset,
    OnePage,
    PageNumber,
    Provider,
    Rotation,
    Rule,
    Scope,
    Signature,
    Wait,
    WaitDialect,
    Webhook,
    Word,
)
from resilient.core.base import budgets
from resilient.core.events import webhook
from resilient.core.gates import rate_limit, retry_after
from resilient.core.provider import auth, rules
from resilient.core.sync import incremental, paging

USUAL = {
    OAuth2: {"token_url": "https://acme.example/token"},
    Wait: {},
    Rule: {"kind": FailureKind.THROTTLED},
    WaitDialect: {},
    BudgetFields: {"name": "b", "remaining": "x-left"},
    Incremental: {"style": "filter", "query": "since", "field": "at"},
    OnePage: {},
    LinkHeader: {},
    NextUrl: {"url": "next"},
    NextCursor: {"cursor": "next", "query": "cursor"},
    LastKey: {},
    PageNumber: {},
    Offset: {},
    GraphQLPages: {},
    Signature: {"header": "x-sig"},
    Webhook: {"token": "x-token"},
    Limit: {"rate": 1, "per": 1},
}
MODULES = (auth, budgets, incremental, rate_limit, paging, retry_after, rules, webhook)
NAMES = {name: value for module in MODULES for name, value in vars(module).items()} | {"FailureKind": FailureKind}


def words(cls):
    """The arguments that take words, with one that is known."""
    for one in fields(cls):
        if not one.init and cls is not Limit:
            continue
        kind = eval(str(one.type), {**vars(__import__("typing")), **vars(__import__("builtins")), **NAMES})  # noqa: S307
        for part in (kind, *(() if get_origin(kind) is tuple else get_args(kind))):
            if get_origin(part) is Literal and isinstance(get_args(part)[0], str):
                yield one.name, get_args(part)
            elif isinstance(part, type) and issubclass(part, Enum):
                yield one.name, tuple(part)


EVERY = [(cls, name, known) for cls in USUAL for name, known in words(cls)]


def test_every_declaration_with_words_is_looked_at():
    assert {(cls.__name__, name) for cls, name, _ in EVERY} >= {
        ("OAuth2", "body"), ("OAuth2", "client_auth"), ("OAuth2", "pkce"), ("OAuth2", "rotation"), ("Wait", "period"),
        ("OAuth2", "zero_lifetime"), ("Incremental", "style"), ("Incremental", "source"), ("Incremental", "deletions"),
        ("NextCursor", "absent"), ("OnePage", "absent"), ("Signature", "scheme"), ("Signature", "key"),
        ("Wait", "word"),
        ("Signature", "encoding"), ("Signature", "word"), ("Webhook", "challenge"), ("Rule", "kind"), ("Rule", "scope"),
        ("WaitDialect", "retry_after"), ("BudgetFields", "word"), ("Limit", "counts"),
    }  # fmt: skip


@pytest.mark.parametrize(("cls", "name", "known"), EVERY, ids=lambda one: getattr(one, "__name__", str(one)[:20]))
@pytest.mark.parametrize("wrong", ["jsno", "JSON", 7, ["form"], True])
def test_an_unknown_word_is_refused_naming_those_that_are_known(cls, name, known, wrong):
    with pytest.raises(InvalidInput) as caught:
        cls(**{**USUAL[cls], name: wrong})
    told = str(caught.value)
    assert cls.__name__ in told or "limit counts" in told
    shown = [one.name if isinstance(one, Enum) else str(one) for one in known if one not in tuple(FailureKind)[8:]]
    assert [word for word in shown if word not in told] == []


@pytest.mark.parametrize("wrong", ["single_use", "SINGLE_USE"])
def test_text_is_no_word_of_an_enumeration(wrong):
    """It would be equal to the member and yet not be it: a used-up refresh token would be sent again."""
    with pytest.raises(InvalidInput, match=r"Rotation\.SINGLE_USE"):
        OAuth2(token_url="https://acme.example/token", rotation=wrong)


OAUTH = {"token_url": "https://acme.example/token"}


@pytest.mark.parametrize(
    ("cls", "facts", "told"),
    [
        (OAuth2, {**OAUTH, "flows": ("authorisation_code",)}, "'authorization_code'"),
        (OAuth2, {**OAUTH, "scopes": "repo"}, "('repo',)"),
        (OAuth2, {**OAUTH, "success": "access_token"}, "('access_token',)"),
        (OAuth2, {**OAUTH, "success": ()}, "at which path"),
        (OAuth2, {**OAUTH, "keep": ("a]",)}, "no path"),
        (OAuth2, {**OAUTH, "lifetime": -1}, "above 0"),
        (OAuth2, {**OAUTH, "lifetime_unit": 0}, "above 0"),
        (OAuth2, {**OAUTH, "margin": "5m"}, "number"),
        (OAuth2, {**OAUTH, "margin": float("nan")}, "number"),
        (OAuth2, {**OAUTH, "key_header": {"kid": "1"}}, "client_auth='jwt'"),
        (OAuth2, {**OAUTH, "refreshes": False, "refresh_lifetime": 5}, "refresh_lifetime"),
        (OAuth2, {**OAUTH, "refreshes": False, "rotation": Rotation.GRACE}, "rotate"),
        (OAuth2, {**OAUTH, "grace": 5}, "Rotation.GRACE"),
        (OAuth2, {"token_url": ""}, "token_url"),
        (OAuth2, {"token_url": "https://{my shop}.example/token"}, "placeholder"),
        (Wait, {"fallback": 0}, "above 0"),
        (Wait, {"fallback": 5, "period": "day"}, "one or the other"),
        (Wait, {"text": "("}, "regular expression"),
        (Wait, {"body": "a]"}, "no path"),
        (WaitDialect, {"hints": (("x-wait", "seconds"),)}, "Word.DELTA_S"),
        (BudgetFields, {"name": "b"}, "remaining="),
        (BudgetFields, {"name": "b", "remaining": "x", "window": 0}, "above 0"),
        (Rule, {"kind": FailureKind.BUG}, "FailureKind.THROTTLED"),
        (Rule, {"kind": None, "scope": Scope.PROVIDER}, "success"),
        (Rule, {"kind": FailureKind.AUTH, "status": 4030}, "100 to 599"),
        (Rule, {"kind": FailureKind.AUTH, "status": ("403",)}, "100 to 599"),
        (Rule, {"kind": FailureKind.AUTH, "status": 200}, "told from others"),
        (Rule, {"kind": FailureKind.AUTH, "text": "("}, "regular expression"),
        (Rule, {"kind": FailureKind.AUTH, "header": {"x": "("}}, "regular expression"),
        (Rule, {"kind": FailureKind.AUTH, "where": {"a]": 1}}, "no path"),
        (Errors, {"code": "error.code"}, "('error.code',)"),
        (Errors, {"code_text": "<Code>[^<]+</Code>"}, "0 groups"),
        (Errors, {"rules": (FailureKind.AUTH,)}, "Rule(...)"),
        (NextCursor, {"cursor": "next"}, "query= or body="),
        (NextCursor, {"cursor": "next", "query": "a", "body": "b"}, "query and body"),
        (NextCursor, {"query": "a"}, "cursor= or header="),
        (NextCursor, {"cursor": "a]", "query": "a"}, "no path"),
        (NextUrl, {"url": ""}, "url="),
        (OnePage, {"items": "a]"}, "no path"),
        (OnePage, {"more": "a", "done": "b"}, "one flag"),
        (PageNumber, {"most": 0}, "from 1"),
        (PageNumber, {"page": True}, "from 1"),
        (PageNumber, {"pages": "a", "header": "b"}, "pages and header"),
        (Offset, {"query": "q", "clause": "SKIP {ofset}"}, "{offset}"),
        (Offset, {"query": "q", "clause": "SKIP"}, "no place"),
        (Idempotency, {"methods": frozenset({"PSOT"})}, "'PSOT' is none of"),
        (Idempotency, {"methods": "POST"}, "lists texts"),
        (Idempotency, {"life": -1}, "above 0"),
        (Idempotency, {"made_up": "("}, "regular expression"),
        (Idempotency, {"lives_with": "device"}, "'account', 'grant'"),
        (Idempotency, {"in_path": True, "query": "key"}, "leave out query="),
        (BatchEndpoint, {"path": "$batch"}, "'/$batch'"),
        (BatchEndpoint, {"path": "/$batch", "most": 0}, "from 1"),
        (Provider, {"name": "p", "hosts": "api.example.com"}, "('api.example.com',)"),
        (Provider, {"name": "p", "base_url": "https://{}.example.com"}, "placeholder"),
        (Provider, {"name": "p", "headers": {"X-Tenant": "{tenant id}"}}, "placeholder"),
        (Provider, {"name": "p", "limits": {"account": Limit(1, per=1)}}, "list of Limit"),
        (Provider, {"name": "p", "limits": {"acount": [Limit(1, per=1)]}}, "'acount'"),
        (Provider, {"name": "p", "concurrency": {"account": 0}}, "from 1"),
        (Provider, {"name": "p", "reads": ("/search",)}, "POST /v1/search"),
        (Provider, {"name": "p", "pagination": {"list": "next"}}, "Paginator"),
        (Provider, {"name": "p", "auth": ("bearer",)}, "OAuth2 or Bearer"),
        (Provider, {"name": "p", "webhook": "x-sig"}, "Webhook"),
        (Provider, {"name": "p", "route": "search"}, "takes a function"),
        (Provider, {"name": "p", "exceptions": {"a.B": "transient"}}, "FailureKind.TRANSIENT"),
    ],
)
def test_what_cannot_be_meant_is_refused(cls, facts, told):
    with pytest.raises(InvalidInput, match=re.escape(told)):
        cls(**facts)


def test_an_apps_own_words_are_checked_too():
    acme = Provider(name="acme", auth=(OAuth2(**OAUTH),))
    with pytest.raises(InvalidInput, match=r"limts= is none of .*limits"):
        acme.configured(limts={})
    with pytest.raises(InvalidInput, match="scopes"):
        acme.configured(scopes="repo")
    with pytest.raises(InvalidInput, match="'basic'"):
        acme.configured(client_auth="bsaic")


def test_names_of_headers_are_found_however_they_are_written():
    assert Wait(header="X-Reset").header == "x-reset"
    assert WaitDialect(hints=(("X-Wait", Word.DELTA_S),)).hints == (("x-wait", Word.DELTA_S),)
    assert BudgetFields("b", remaining="X-Left").stated_in == {"x-left"}
    assert Errors(code_header="X-Code").code_header == "x-code"
    assert NextCursor(header="X-Next", query="c").header == "x-next"


def test_what_takes_no_words():
    assert (Bearer().kind, ApiKey().kind, Basic().kind) == ("bearer", "api_key", "basic")
    assert get_type_hints(Bearer)["kind"]
