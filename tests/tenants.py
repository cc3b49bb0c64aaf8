"""Accounts of one provider, and apps that have them, as several processes on one database would."""

from __future__ import annotations

import asyncio

import pytest

from resilient import Resilient
from resilient.store.accounts.secrets import new_key
from tests.helpers import until
from tests.idp import me

KEY = new_key()


@pytest.fixture
async def make(database_url, idp):
    """``make(provider, **options)``: an app on the test's database, at its provider, with `KEY`."""
    made = []

    def make_(provider=None, **options):
        options = {"secrets": [KEY], **options}
        made.append(Resilient(database_url, handlers=[me], providers=[provider or idp.provider()], **options))
        return made[-1]

    yield make_
    idp.hold.set()
    for app in made:
        await app.close()


async def refreshing(app, idp, key):
    """A caller that waits for a refresh whose answer is held back, until ``idp.hold`` is set."""
    idp.hold.clear()
    before = len(idp.asked)
    waiting = asyncio.create_task(app.credentials(key))
    await until(lambda: len(idp.asked) > before)
    return waiting
