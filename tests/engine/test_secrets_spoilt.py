"""Stored secrets that somebody cut, changed or half wrote: their account waits, and everybody else goes on."""

import pytest
from sqlalchemy import text

from resilient import Resilient
from resilient.core.base.errors import SecretsUnreadable
from resilient.store.accounts.secrets import KeyRing, key_id_of, new_key
from tests.helpers import LIMIT
from tests.idp import me

KEY = new_key()
A, B = "idp/acct-1", "idp/acct-2"


def flipped(sealed):
    return sealed[:30] + ("A" if sealed[30] != "A" else "B") + sealed[31:]


SPOILT = {
    "cut in its text": lambda sealed: sealed[:31],
    "cut to a few bytes": lambda sealed: sealed[:17],
    "its key's name alone": lambda sealed: key_id_of(sealed) + ":",
    "changed": flipped,
    "no base64": lambda sealed: key_id_of(sealed) + ":*** é",
    "another key": lambda sealed: "0" * 12 + sealed[12:],
    "nothing": lambda _: "",
    "words": lambda _: "token",
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_it_is_one_error_that_shows_nothing(spoil):
    ring = KeyRing([KEY])
    with pytest.raises(SecretsUnreadable, match="the secrets of grant 1") as caught:
        ring.open(spoil(ring.seal("canary-secret", "grant", "1", "secrets")), "grant", "1", "secrets")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
async def test_what_cannot_be_opened_stops_its_account_alone(database_url, idp, spoil, caplog):
    idp.access.add("canary")
    app = Resilient(database_url, handlers=[me], secrets=[KEY], providers=[idp.provider()])
    for key in (A, B):
        await app.connections.add(key, token="canary")

    with app.database.sync_engine.begin() as c:
        chosen = "WHERE id = (SELECT grant_id FROM resilient_connection WHERE resource_key = :key)"
        sealed = c.execute(text(f"SELECT secrets FROM resilient_grant {chosen}"), {"key": A}).scalar_one()
        c.execute(text(f"UPDATE resilient_grant SET secrets = :spoilt {chosen}"), {"key": A, "spoilt": spoil(sealed)})
    app.grants.accounts.forget()
    jobs = [await app.enqueue(me, resource_key=key) for key in (A, B, A)]
    await app.worker().drain(timeout=LIMIT)
    found = [await app.jobs.get(one.id) for one in jobs]
    assert [(one.state, one.attempts) for one in found] == [("ready", 0), ("succeeded", 0), ("ready", 0)]
    assert (await app.resources.get(A)).auth == "unreadable"
    assert "canary" not in caplog.text
    await app.connections.add(A, token="canary")
    await app.worker().drain(timeout=LIMIT)
    assert {(await app.jobs.get(one.id)).state for one in jobs} == {"succeeded"}
    await app.close()
