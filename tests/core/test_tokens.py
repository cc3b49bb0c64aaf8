"""When tokens are refreshed, what an answer makes of them, and which states a grant may go through."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import Failure, FailureKind, OAuth2, Rotation, Scope
from resilient.core.accounts import tokens
from resilient.core.accounts.tokens import TRANSITIONS, Credentials, GrantEvent, GrantState, RefreshFailure

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
OLD = Credentials(token="canary-old", refresh_token="canary-refresh", version=4)


def oauth(**facts):
    return OAuth2(token_url="https://idp.example/token", **facts)


def seconds(at):
    return None if at is None else (at - NOW).total_seconds()


@pytest.mark.parametrize(
    ("facts", "answer", "ends", "use"),
    [
        ({}, {"expires_in": 3600}, 3600, 3300),
        ({}, {"expires_in": "3600"}, 3600, 3300),
        ({"margin": 60}, {"expires_in": 3600}, 3600, 3540),
        ({}, {"expires_in": 60}, 60, 30),  # never the whole life as margin: that would refresh on each request
        ({}, {}, None, None),
        ({}, {"expires_in": None}, None, None),
        ({}, {"expires_in": "soon"}, None, None),
        ({}, {"expires_in": -5}, None, None),
        ({}, {"expires_in": True}, None, None),
        ({}, {"expires_in": float("nan")}, None, None),
        ({"lifetime": 7200}, {}, 7200, 6900),
        ({"lifetime": 7200}, {"expires_in": None}, 7200, 6900),
        ({"lifetime_field": "ttl", "lifetime_unit": 0.001}, {"ttl": 3_600_000}, 3600, 3300),
        ({"early_field": "refresh_in"}, {"expires_in": 3600, "refresh_in": 1800}, 3600, 1800),
        ({"early_field": "refresh_in"}, {"expires_in": 3600, "refresh_in": 9999}, 3600, 3300),
        ({"zero_lifetime": "endless"}, {"expires_in": 0}, None, None),
        ({}, {"expires_in": 0}, 60, 30),
    ],
)
def test_when_a_token_ends_and_is_refreshed(facts, answer, ends, use):
    made = tokens.merge(OLD, {"access_token": "canary", **answer}, oauth(**facts), NOW)
    assert (seconds(made.expires_at), seconds(made.refresh_at)) == (ends, use)
    assert not tokens.needs_refresh(made, NOW)


NO_TOKENS = [None, [], "text", {}, {"access_token": None}, {"access_token": " "}, {"message": "slow"}]


@pytest.mark.parametrize("body", NO_TOKENS)
def test_what_is_no_token_answer(body):
    assert tokens.merge(OLD, body, oauth(), NOW) is None


@pytest.mark.parametrize("said", [{}, {"refresh_token": None}, {"refresh_token": ""}, {"refresh_token": 5}])
def test_a_missing_refresh_token_keeps_the_old_one(said):
    made = tokens.merge(OLD, {"access_token": "canary-new", **said}, oauth(), NOW)
    assert (made.token, made.refresh_token, made.previous, made.version) == ("canary-new", "canary-refresh", "", 5)


@pytest.mark.parametrize(
    ("facts", "previous"),
    [
        ({"rotation": Rotation.SINGLE_USE}, ""),
        ({"rotation": Rotation.GRACE, "grace": 600}, "canary-refresh"),
        ({"rotation": Rotation.GRACE}, "canary-refresh"),
        ({"rotation": Rotation.OLD_KEPT}, "canary-refresh"),
    ],
)
def test_the_previous_token_is_kept_where_it_can_be_replayed(facts, previous):
    made = tokens.merge(OLD, {"access_token": "a", "refresh_token": "canary-2"}, oauth(**facts), NOW)
    assert (made.refresh_token, tokens.replay(made, NOW)) == ("canary-2", previous)
    if facts.get("grace"):
        assert tokens.replay(made, NOW + timedelta(seconds=601)) == ""


def test_a_token_deeper_in_the_answer_brings_what_stands_beside_it():
    body = {"access_token": "bot", "authed_user": {"access_token": "user", "refresh_token": "r2", "expires_in": 100}}
    made = tokens.merge(OLD, body, oauth(success=("authed_user.access_token", "access_token")), NOW)
    assert (made.token, made.refresh_token, seconds(made.expires_at)) == ("user", "r2", 100)


def test_what_belongs_to_the_account_is_kept():
    facts = oauth(keep=("instance_url", "team.id"))
    made = tokens.merge(OLD, {"access_token": "a", "instance_url": "https://x.example", "team": {"id": 7}}, facts, NOW)
    assert made.values == {"instance_url": "https://x.example", "id": "7"}
    again = tokens.merge(made, {"access_token": "b", "instance_url": None}, facts, NOW)
    assert again.values == made.values


def test_no_secret_in_the_repr():
    assert "canary" not in repr(OLD)


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        (Failure(FailureKind.AUTH), RefreshFailure.DEAD),
        (Failure(FailureKind.AUTH, scope=Scope.PROVIDER), RefreshFailure.MISCONFIGURED),
        (Failure(FailureKind.THROTTLED), RefreshFailure.THROTTLED),
        (Failure(FailureKind.QUOTA), RefreshFailure.THROTTLED),
        (Failure(FailureKind.TRANSIENT), RefreshFailure.TRANSIENT),
        (Failure(FailureKind.PERMANENT), RefreshFailure.UNEXPLAINED),
        (Failure(FailureKind.AMBIGUOUS), RefreshFailure.LOST),
    ],
)
def test_the_classes_of_failure(failure, found):
    assert tokens.refresh_failure(failure) is found


@given(st.integers(1, 100), st.floats(0, 0.999))
def test_delays_grow_to_five_minutes(failures, roll):
    found = tokens.delay(failures, roll)
    assert 2.5 <= found <= 300
    assert tokens.delay(1, roll) <= 5


@given(st.lists(st.sampled_from(GrantEvent), max_size=30))
def test_a_dead_or_revoked_grant_is_never_refreshed_and_a_person_always_heals_it(events):
    state = GrantState.ACTIVE
    for event in events:
        found = tokens.after(state, event)
        if event is GrantEvent.AUTHORISED:
            assert found is GrantState.ACTIVE
        if state in (GrantState.NEEDS_REAUTH, GrantState.REVOKED):
            doubted = GrantState.SUSPECT if event is GrantEvent.DOUBTED else None
            assert found in (None, doubted, GrantState.ACTIVE, GrantState.REVOKED)
        state = found or state


def test_only_the_providers_word_or_ours_ends_a_grant():
    ends = {e for (_, e), s in TRANSITIONS.items() if s in (GrantState.NEEDS_REAUTH, GrantState.REVOKED)}
    assert ends == {GrantEvent.DIED, GrantEvent.GIVEN_UP}
