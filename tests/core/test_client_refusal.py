"""Whom a refusal at a token endpoint is about: no single customer shuts a provider."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import Errors, Failure, FailureKind, OAuth2, Rule, Scope
from resilient.core.accounts.tokens import Refusal, Verdict, is_explicit, judge

GRANT, OPEN, APPLICATION = Verdict.GRANT, Verdict.OPEN, Verdict.APPLICATION


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"explicit": False}, GRANT),  # a bare 401 for one grant
        ({"explicit": False, "others": 1}, OPEN),
        ({"explicit": True}, OPEN),
        ({"explicit": True, "witness": True}, APPLICATION),
        ({"explicit": False, "witness": True}, APPLICATION),
        ({"explicit": True, "others": 9, "tenant_owned": True}, GRANT),  # the customer's own server says anything
        ({"explicit": True, "others": 9, "accepted_lately": True}, GRANT),  # it was taken a moment ago
        ({"explicit": True, "others": 9, "credible": False}, GRANT),  # it never worked, others did
    ],
)
def test_whom_it_is_about(facts, verdict):
    assert judge(Refusal(**facts)) is verdict


@given(st.booleans(), st.integers(0, 1000), st.booleans(), st.booleans())
def test_without_a_witness_no_number_of_refusals_is_enough(explicit, others, credible, lately):
    said = Refusal(explicit=explicit, others=others, credible=credible, accepted_lately=lately)
    assert judge(said) is not APPLICATION


RULES = Errors(rules=(Rule(FailureKind.AUTH, code=("bad_client*", "x"), scope=Scope.PROVIDER),))


@pytest.mark.parametrize(
    ("code", "explicit"),
    [
        ("invalid_client", True), ("bad_client_secret", True), ("unauthorized_client", False), ("http_401", False),
        (None, False), ("weird", False), ("redirect_uri_mismatch", False),
    ],
)  # fmt: skip
def test_which_codes_name_the_application(code, explicit):
    oauth = OAuth2(token_url="https://a.example/t", errors=RULES)
    assert is_explicit(Failure(FailureKind.AUTH, scope=Scope.PROVIDER, code=code), oauth) is explicit
