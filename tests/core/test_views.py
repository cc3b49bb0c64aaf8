"""What views show of a payload."""

import re

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.jobs.records import check_redaction, is_sealed, redacted, without_sealed

PAYLOAD = {"token": "t", "card": {"number": 42, "owner": "Ada"}, "items": [{"price": 1, "token": "u"}, {"price": 2}]}


@pytest.mark.parametrize(
    ("redact", "shown"),
    [
        (["token"], {**PAYLOAD, "token": "[hidden]", "items": [{"price": 1, "token": "[hidden]"}, {"price": 2}]}),
        (["card.number"], {**PAYLOAD, "card": {"number": "[hidden]", "owner": "Ada"}}),
        (["items.*.price"], {**PAYLOAD, "items": [{"price": "[hidden]", "token": "u"}, {"price": "[hidden]"}]}),
        (["items.1"], {**PAYLOAD, "items": [PAYLOAD["items"][0], "[hidden]"]}),
        (["*"], dict.fromkeys(PAYLOAD, "[hidden]")),
        (["number.card", "nothing"], PAYLOAD),
        (sorted, ["card", "items", "token"]),
        (lambda p: p.pop("nothing"), "[hidden] (redact= failed: KeyError)"),
        (lambda p: p["card"].clear(), None),
        (None, PAYLOAD),
    ],
)
def test_what_is_shown(redact, shown):
    before = repr(PAYLOAD)
    assert redacted(PAYLOAD, redact) == shown
    assert repr(PAYLOAD) == before


@pytest.mark.parametrize("redact", ["token", 7, [7], [""], {"token": 1}])
def test_what_is_no_redaction(redact):
    message = (
        "redact of kind 'k' takes field names (['token']), paths (['card.number', 'items.*.price']) or a function of"
        " the payload"
    )
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        check_redaction("k", redact)


@pytest.mark.parametrize("redact", [None, ["token"], ("token", "card.number"), {"token"}, frozenset({"*"}), [], sorted])
def test_what_is_a_redaction(redact):
    check_redaction("k", redact)


def test_a_sealed_payload_is_shown_by_its_key_alone():
    row = {"id": 1, "payload": {"resilient:sealed": "0123456789ab:c2VjcmV0"}, "steps": [{"resilient:sealed": "x"}]}
    assert without_sealed(row) == {
        "id": 1,
        "payload": {"sealed": "with key 0123456789ab"},
        "steps": [{"sealed": "with key x"}],
    }


@pytest.mark.parametrize(
    ("value", "sealed"),
    [
        ({"resilient:sealed": "k:x"}, True),
        ({"resilient:sealed": "k:x", "id": 1}, False),
        ({"sealed": "k:x"}, False),
        ({}, False),
        ("resilient:sealed", False),
        (None, False),
    ],
)
def test_which_payload_is_sealed(value, sealed):
    assert is_sealed(value) is sealed
    assert (without_sealed(value) != value) is sealed


def test_a_path_is_walked_from_the_top_and_step_by_step():
    payload = {"card": {"number": 1}, "old": {"card": {"number": 2}}, "items": [{"price": 3, "was": {"price": 4}}]}
    assert redacted(payload, ["card.number", "items.*.price"]) == {
        "card": {"number": "[hidden]"},
        "old": {"card": {"number": 2}},
        "items": [{"price": "[hidden]", "was": {"price": 4}}],
    }


def test_no_more_of_a_key_is_shown_than_names_it():
    assert without_sealed({"resilient:sealed": "k1:c2VjcmV0"}) == {"sealed": "with key k1"}
    assert without_sealed({"resilient:sealed": "0123456789abcdef:x:y"}) == {"sealed": "with key 0123456789ab"}
    assert without_sealed({"resilient:sealed": 7}) == {"sealed": "with key 7"}
