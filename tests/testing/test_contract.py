"""The contract itself: whatever is wrong with a provider, it says so."""

import hashlib
import hmac
import runpy
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from providers import github, hubspot, slack
from resilient import (
    BatchEndpoint,
    Errors,
    FailureKind,
    InvalidInput,
    Limit,
    NextCursor,
    OAuth2,
    Provider,
    Rule,
    Signature,
    Wait,
    Webhook,
)
from resilient.testing.contract import NOW, Dialect, Hook, Pages, Sample, Token, problems

TABLES = Path(__file__).parents[1] / "providers" / "dialects"


def dialect(name):
    return runpy.run_path(str(TABLES / f"{name}.py"))["DIALECT"]


def broken(provider, **changes):
    return replace(provider, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"title": ""}, "title"),
        ({"base_url": ""}, "base_url"),
        ({"base_url": "http://api.github.com"}, "not https"),
        ({"hosts": ("http://api.github.com",)}, "not https"),
        ({"verified_on": None}, "verified_on"),
        ({"verified_on": date(2999, 1, 1)}, "verified_on"),
        ({"sources": ()}, "sources"),
        ({"sources": (" ",)}, "sources"),
        ({"unverified": ("everything",)}, "'everything'"),
        ({"route": None}, "route="),
        ({"limits": {"account": [Limit(1, per=1, name="a"), Limit(2, per=1, name="a")]}}, "limits"),
        ({"pagination": {}}, "no pagination 'rest'"),
        ({"auth": (OAuth2(token_url="https://x", client_id="mine"),)}, "belongs to the app"),
        ({"batch": BatchEndpoint(path="/$batch")}, ""),
        ({"webhook": None, "auth": ()}, ""),
    ],
)
def test_facts(changes, sentence):
    sentences = problems(broken(github.provider(), **changes), dialect("github"))
    assert any(sentence in one for one in sentences) if sentence else sentences == []


def test_a_host_per_account_must_be_declared():
    provider = Provider(name="p", title="P", base_url="https://{shop}.example.com")
    assert any("pattern" in one for one in problems(provider, Dialect(throttled=(), refused=())))


@pytest.mark.parametrize("index", range(len(github.GITHUB.errors.rules)))
def test_no_rule_may_be_lost(index):
    """Without one of its rules, GitHub's answers mean something else."""
    rules = list(github.GITHUB.errors.rules)
    del rules[index]
    sentences = problems(
        broken(github.GITHUB, errors=replace(github.GITHUB.errors, rules=tuple(rules))), dialect("github")
    )
    assert sentences != []


def test_a_rule_without_a_sample_is_named():
    rules = (*github.GITHUB.errors.rules, Rule(FailureKind.CONFLICT, status=499))
    sentences = problems(broken(github.GITHUB, errors=replace(github.GITHUB.errors, rules=rules)), dialect("github"))
    assert [one for one in sentences if "499" in one] == sentences
    assert sentences


def test_a_permission_error_taken_for_a_throttle_is_found():
    greedy = replace(github.GITHUB.errors, rules=(*github.GITHUB.errors.rules, Rule(FailureKind.THROTTLED, status=403)))
    assert any(
        "permission: means throttled" in p for p in problems(broken(github.GITHUB, errors=greedy), dialect("github"))
    )


def test_a_wrong_wait_is_found():
    rules = tuple(
        replace(rule, wait=Wait(fallback=5)) if rule.code == "TEN_SECONDLY_ROLLING" else rule
        for rule in hubspot.HUBSPOT.errors.rules
    )
    sentences = problems(
        broken(hubspot.HUBSPOT, errors=replace(hubspot.HUBSPOT.errors, rules=rules)), dialect("hubspot")
    )
    assert sentences == ["ten seconds: tells to wait 5 s, not 10"]


def test_a_wrong_scope_and_route_are_found():
    rules = tuple(replace(rule, scope=None) for rule in slack.SLACK.errors.rules)
    wrong = broken(slack.SLACK, errors=replace(slack.SLACK.errors, rules=rules), route=lambda _: ("x", 1))
    sentences = problems(wrong, dialect("slack"))
    assert any("concerns the account, not the endpoint" in one for one in sentences)
    assert any("routed to 'x'" in one for one in sentences)


def test_a_dead_grant_that_is_not_known_is_found():
    oauth = replace(github.GITHUB.oauth, errors=Errors(code=("error",)))
    sentences = problems(broken(github.GITHUB, auth=(oauth,)), dialect("github"))
    assert any("used up: means transient, not auth" in one for one in sentences)


def test_empty_tables_are_not_enough():
    sentences = problems(github.provider(), Dialect(throttled=(), refused=()))
    for part in (
        "throttled:",
        "refused:",
        "expired:",
        "reset:",
        "dead_grant:",
        "hooks:",
        "pages:",
        "no sample is decided",
    ):
        assert any(one.startswith(part) for one in sentences), part


def test_samples_in_the_wrong_group_are_found():
    no = Sample("no", 403, FailureKind.PERMANENT)
    wait = Sample("wait", 429, FailureKind.THROTTLED)
    sentences = problems(
        github.provider(), Dialect(throttled=[no], refused=[wait], expired=[no], reset=[no], dead_grant=[no])
    )
    for part in ("throttled:", "refused:", "expired:", "reset:", "dead_grant:"):
        assert any(one.startswith(part) for one in sentences), part


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"items": 99}, "records, not 99"),
        ({"resume": "x"}, "next pass begins"),
        ({"pages": ()}, "does not end"),
    ],
)
def test_pages(change, sentence):
    table = dialect("github")
    pages = [replace(one, **change) for one in table.pages]
    assert any(sentence in one for one in problems(github.provider(), replace(table, pages=pages)))


def test_pages_that_end_early():
    table = dialect("github")
    twice = [replace(one, pages=[*one.pages, *one.pages]) for one in table.pages]
    assert any("ends after" in one for one in problems(github.provider(), replace(table, pages=twice)))
    wrong = [replace(one, pages=[replace(page, asks="nothing=1") for page in one.pages]) for one in table.pages]
    assert any("without 'nothing=1'" in one for one in problems(github.provider(), replace(table, pages=wrong)))


def test_a_paginator_that_goes_round_is_found():
    class Round(NextCursor):
        """Pretends to go on."""

        def _next(self, request, _answer, _items):
            return request.with_query(x=int(request.query("x") or 0) + 1)

    pages = Pages("list", github_page(), [page({"items": [], "n": 1}), page({"items": []})], items=0)
    provider = broken(github.GITHUB, pagination={"list": Round(items="items", cursor="n", query="x")})
    sentences = problems(provider, replace(dialect("github"), pages=[pages]))
    assert any("goes round for ever" in one for one in sentences)


def github_page():
    from resilient import PageRequest

    return PageRequest("https://api.github.com/x")


def page(body):
    from resilient.testing.contract import Page

    return Page("api", body)


@pytest.mark.parametrize(
    "webhook",
    [
        Webhook(signatures=(Signature(header="x-hub-signature-256"),)),  # without its prefix
        Webhook(signatures=(Signature(header="x-hub-signature-256", pattern="sha256=(.*)", encoding="base64"),)),
        Webhook(signatures=(Signature(header="x-hub-signature", pattern="sha256=(.*)"),)),
    ],
)
def test_a_wrong_signature_scheme_is_found(webhook):
    sentences = problems(broken(github.GITHUB, webhook=webhook), dialect("github"))
    assert any(one.startswith("hook 1, a genuine one") for one in sentences)


def test_a_sample_with_a_signed_time_needs_the_time_it_was_sent():
    sent = NOW - timedelta(days=30)
    webhook = Webhook(
        signatures=(Signature(header="x-sign", signed="{timestamp}.{body}", timestamp="x-time", tolerance=300),)
    )
    stamp = str(int(sent.timestamp()))
    sign = hmac.new(b"s" * 9, f"{stamp}.{{}}".encode(), hashlib.sha256).hexdigest()
    hook = Hook("s" * 9, b"{}", {"x-sign": sign, "x-time": stamp})

    def said(hook):
        made = replace(dialect("github"), hooks=[hook])
        return [one for one in problems(broken(github.GITHUB, webhook=webhook), made) if one.startswith("hook")]

    (sentence,) = [one for one in said(hook) if "genuine" in one]
    assert "sent too long ago" in sentence
    assert "Hook(..., at=datetime(..., tzinfo=UTC))" in sentence
    assert [one for one in said(replace(hook, at=sent)) if "genuine" in one] == []


@pytest.mark.parametrize("secret", ["abcba", "abcdabcd", "s" * 9, "0" * 8, "a"])
def test_a_secret_that_reads_the_same_in_another_order_is_no_fault_of_the_provider(secret):
    sign = hmac.new(secret.encode(), b"{}", hashlib.sha256).hexdigest()
    hook = Hook(secret, b"{}", {"x-hub-signature-256": f"sha256={sign}"})
    sentences = problems(github.provider(), replace(dialect("github"), hooks=[hook]))
    assert [one for one in sentences if one.startswith("hook")] == []


def test_a_scheme_that_signs_nothing_of_the_body_is_refused():
    with pytest.raises(InvalidInput, match="change the body"):
        Signature(header="x-sig", signed="{timestamp}", timestamp="x-time", tolerance=1e12)


GOOD = {"access_token": "a", "refresh_token": "r", "expires_in": 28800}


@pytest.mark.parametrize(
    ("token", "sentence"),
    [
        (Token("good", GOOD, "a", "r", 28800), ""),
        (Token("other", GOOD, "b", "r", 28800), "its token is read as 'a', not 'b'"),
        (Token("lasts", GOOD, "a", "r", 60), "its lasts is read as 28800.0, not 60"),
        (Token("kept", GOOD, "a", "r", 28800, {"id": "1"}), "its values is read as {}"),
        (Token("none", {"token": "a"}, "a"), "means transient, not a token"),
        (Token("single", {"access_token": "a"}, "a"), "no refresh token"),
    ],
)
def test_good_tokens_are_read_as_they_should_be(token, sentence):
    sentences = problems(github.provider(), replace(dialect("github"), tokens=[token]))
    assert any(sentence in one for one in sentences) if sentence else sentences == []
