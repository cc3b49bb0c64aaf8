"""Tokens at the bounds: the last moment, the longest life, the oddest value, and what a refusal is called."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.accounts import tokens
from resilient.core.accounts.tokens import Credentials
from resilient.core.base.bounds import KEPT_VALUE, TOKEN
from resilient.core.base.errors import Failure, Scope
from resilient.core.base.errors import FailureKind as K
from resilient.core.base.exchange import AnswerFacts
from resilient.core.provider.auth import OAuth2, Rotation
from resilient.core.provider.rules import Errors, Rule

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
TICK = timedelta(microseconds=1)
TEN_YEARS = 10 * 366 * 86400
OLD = Credentials(token="canary-old", refresh_token="canary-refresh", version=4)


def oauth(**facts):
    return OAuth2(token_url="https://idp.example/token", **facts)


def merged(answer, old=OLD, **facts):
    return tokens.merge(old, {"access_token": "canary", **answer}, oauth(**facts), NOW)


def seconds(at):
    return None if at is None else (at - NOW).total_seconds()


@pytest.mark.parametrize(
    ("token", "at", "expected"),
    [
        ("", None, True),
        ("", NOW + TICK, True),
        ("t", None, False),
        ("t", NOW - TICK, True),
        ("t", NOW, True),
        ("t", NOW + TICK, False),
    ],
)
def test_a_token_is_over_and_due_from_its_very_moment_on(token, at, expected):
    assert tokens.is_expired(Credentials(token=token, expires_at=at), NOW) is expected
    assert tokens.needs_refresh(Credentials(token=token, refresh_at=at), NOW) is expected


def test_the_end_does_not_say_when_to_refresh_nor_the_refresh_when_it_ends():
    assert not tokens.needs_refresh(Credentials(token="t", expires_at=NOW), NOW)
    assert not tokens.is_expired(Credentials(token="t", refresh_at=NOW), NOW)


@pytest.mark.parametrize(
    ("refusals", "since", "expected"),
    [
        (10, timedelta(hours=1), True),
        (11, timedelta(hours=2), True),
        (9, timedelta(hours=2), False),
        (10, timedelta(hours=1) - TICK, False),
        (10, None, False),
        (0, None, False),
    ],
)
def test_a_grant_is_hopeless_after_ten_refusals_over_an_hour(refusals, since, expected):
    assert tokens.is_hopeless(refusals, None if since is None else NOW - since, NOW) is expected


@pytest.mark.parametrize(
    ("failures", "least"),
    [(1, 2.5), (2, 5), (3, 10), (4, 20), (5, 40), (6, 80), (7, 150), (8, 150), (11, 150), (12, 150), (5000, 150)],
)
def test_each_failure_doubles_the_delay_of_which_half_is_jitter(failures, least):
    assert tokens.delay(failures, 0) == least
    assert tokens.delay(failures, 0.5) == 1.5 * least
    assert tokens.delay(failures, 1) == 2 * least


def test_a_previous_token_is_over_at_its_very_moment():
    old = Credentials(previous="canary-1", previous_until=NOW)
    assert tokens.replay(old, NOW - TICK) == "canary-1"
    assert tokens.replay(old, NOW) == ""


@pytest.mark.parametrize(
    ("stored", "answer", "rotated"),
    [("r1", "r2", True), ("r1", "r1", False), ("", "r2", False), ("r1", None, False)],
)
def test_only_another_refresh_token_in_place_of_one_is_a_rotation(stored, answer, rotated):
    made = merged({"refresh_token": answer}, Credentials(refresh_token=stored), rotation=Rotation.GRACE, grace=60)
    assert made.previous == ("r1" if rotated else "")
    assert made.previous_until == (NOW + timedelta(seconds=60) if rotated else None)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("https://x.example", "https://x.example"),
        ("", None),
        (True, None),
        (None, None),
        ({"a": 1}, None),
        (7, "7"),
        (-7, "-7"),
        (1.5, "1.5"),
        (10**20 - 1, "99999999999999999999"),
        (10**20, None),
        (-(10**20), None),
        (float("inf"), None),
        ("a😀", "a😀"),
    ],
)
def test_which_values_of_an_answer_are_kept(value, kept):
    assert merged({"team": value}, keep=("team",)).values == ({} if kept is None else {"team": kept})


@pytest.mark.parametrize(("number", "is_kept"), [(0xD7FF, True), (0xD800, False), (0xDFFF, False), (0xE000, True)])
def test_a_lone_surrogate_cannot_be_stored(number, is_kept):
    text = f"a{chr(number)}b"
    assert merged({"team": text}, keep=("team",)).values == ({"team": text} if is_kept else {})


def test_the_first_of_several_values_is_kept():
    assert merged({"teams": [{"id": "a"}, {"id": "b"}]}, keep=("teams[].id",)).values == {"id": "a"}


@pytest.mark.parametrize(
    ("value", "life"),
    [
        ("3600", 3600),
        (" 3600 ", 3600),
        ("3600.5", 3600.5),
        ("3600.", 3600),
        ("3.600.5", None),
        ("3600s", None),
        ("٣٦٠٠", None),  # digits, but no number of JSON's nor of a form's
        ("-5", None),
        ("1e3", None),
        ("", None),
        (TEN_YEARS, TEN_YEARS),
        (TEN_YEARS + 1, None),  # it has no end
        (10**400, None),
        (float("inf"), None),
    ],
)
def test_what_is_read_as_a_lifetime(value, life):
    assert seconds(merged({"expires_in": value}).expires_at) == life


def test_a_lifetime_in_milliseconds_may_be_a_thousand_times_as_large():
    in_ms = {"lifetime_field": "ttl", "lifetime_unit": 0.001}
    assert seconds(merged({"ttl": TEN_YEARS * 1000}, **in_ms).expires_at) == TEN_YEARS
    late = merged({"ttl": TEN_YEARS * 1000 + 1}, lifetime=100, **in_ms)
    assert seconds(late.expires_at) == 100  # beyond, it is no number of seconds: the provider's usual one is taken


def test_no_field_is_read_where_none_is_named():
    made = merged({"": 5, "expires_in": 3600}, lifetime_field="", lifetime=7200, early_field="")
    assert (seconds(made.expires_at), seconds(made.refresh_at)) == (7200, 6900)


@pytest.mark.parametrize(("early", "use"), [(0, 50), (0.5, 0.5), (1, 1), (99.5, 99.5), (100, 50), (101, 50)])
def test_the_provider_may_name_a_moment_within_the_life_for_the_refresh(early, use):
    made = merged({"expires_in": 100, "refresh_in": early}, early_field="refresh_in")
    assert seconds(made.refresh_at) == use


def test_what_stands_beside_a_deep_token_goes_before_what_stands_at_the_top():
    inner = {"access_token": "user", "expires_in": 100, "refresh_in": 30}
    body = {"refresh_in": 70, "expires_in": 200, "data": {"user": inner}}
    made = tokens.merge(OLD, body, oauth(success=("data.user.access_token",), early_field="refresh_in"), NOW)
    assert (made.token, seconds(made.expires_at), seconds(made.refresh_at)) == ("user", 100, 30)


@pytest.mark.parametrize("status", [200, 204, 299, 300, 301, 302, 399])
def test_a_good_answer_without_a_token_is_an_outage_of_the_whole_provider(status):
    failure = tokens.classify_token(AnswerFacts(status, body={}), oauth(), NOW)
    assert failure == Failure(K.TRANSIENT, code="no_token", provider_wide=True, status=status)


@pytest.mark.parametrize("status", [200, 301])
def test_an_error_in_a_good_answer_keeps_that_status(status):
    failure = tokens.classify_token(AnswerFacts(status, body={"error": "invalid_grant"}), oauth(), NOW)
    assert (failure.kind, failure.code, failure.status) == (K.AUTH, "invalid_grant", status)


OURS = Rule(K.AUTH, code=("app_off", "app_*_gone"), scope=Scope.PROVIDER)
DEAD = Rule(K.AUTH, code="grant_off")
SLOW = Rule(K.THROTTLED, code="slow", scope=Scope.PROVIDER)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("invalid_client", True),
        ("unauthorized_client", False),
        ("app_off", True),
        ("app_is_gone", True),
        ("single", True),
        ("s", False),
        ("grant_off", False),
        ("slow", False),
        (None, False),
    ],
)
def test_which_codes_name_the_application_itself(code, expected):
    alone = Rule(K.AUTH, code="single", scope=Scope.PROVIDER)
    facts = oauth(errors=Errors(code=("error",), rules=(OURS, alone, DEAD, SLOW)))
    assert tokens.is_explicit(Failure(K.AUTH, code=code, scope=Scope.PROVIDER), facts) is expected


UNFIT = ["a\r\nX-Evil: 1", "a\x00", "a\ud800", "\u0416", " a", "a" * (TOKEN.value + 1)]


@pytest.mark.parametrize("value", UNFIT)
def test_a_token_that_no_header_holds_is_none(value):
    assert merged({"access_token": value}) is None
    failure = tokens.classify_token(AnswerFacts(200, {}, body={"access_token": value}), oauth(), NOW)
    assert failure is not None
    assert (failure.kind, failure.code) == (K.TRANSIENT, "no_token")
    assert merged({"access_token": "a" * TOKEN.value}).token


@pytest.mark.parametrize("value", ["a\ud800", "a" * (TOKEN.value + 1)])
def test_a_refresh_token_that_cannot_be_sent_leaves_the_old_one(value):
    assert merged({"refresh_token": value}).refresh_token == "canary-refresh"


@pytest.mark.parametrize("value", ["a\r\nb", "a\x1b[2J", "\x9b", "a" * (KEPT_VALUE.value + 1)])
def test_what_an_answer_says_of_the_account_is_short_and_without_control_characters(value):
    old = Credentials(token="t", values={"shop": "before"})
    assert merged({"shop": value}, old, keep=("shop",)).values == {"shop": "before"}
    assert merged({"shop": "a" * KEPT_VALUE.value}, old, keep=("shop",)).values["shop"][0] == "a"
