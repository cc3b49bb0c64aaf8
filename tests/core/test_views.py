"""What views show of a payload."""

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.jobs.records import check_redaction, redacted, without_sealed

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
    with pytest.raises(InvalidInput, match="redact of kind 'k' takes field names"):
        check_redaction("k", redact)


def test_a_sealed_payload_is_shown_by_its_key_alone():
    row = {"id": 1, "payload": {"resilient:sealed": "0123456789ab:c2VjcmV0"}, "steps": [{"resilient:sealed": "x"}]}
    assert without_sealed(row) == {
        "id": 1,
        "payload": {"sealed": "with key 0123456789ab"},
        "steps": [{"sealed": "with key x"}],
    }
