"""Jobs that were rescued before: claimed alone, so that nobody waits beside them when they kill their process again."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from resilient.core.gates.policy import Policies
from resilient.store.gates import resources
from resilient.store.jobs import claim
from resilient.store.jobs import insert as jobs

POLICIES = Policies()


def put(database, *keys):
    new = [jobs.NewJob(uuid4(), "k", key, "null") for key in keys]
    database.transaction_sync(jobs.insert, new)
    database.transaction_sync(resources.ensure, ["p", *keys])
    return [job.id for job in new]


def suspect(database, *ids):
    def write(c, d):
        for id_ in ids:
            d.run(c, "UPDATE {job} SET rescues = 1 WHERE id = :id", {"id": d.id(id_)})

    database.transaction_sync(write)


def take(database):
    ask = claim.Ask("w", 10, ["k"], timedelta(seconds=60), POLICIES.for_key, lambda: 0.5)
    return [row.id for row in database.transaction_sync(claim.claim, ask).jobs]


@pytest.mark.parametrize("keys", [["p/a"] * 4, ["p/a", "p/b", "p/c", "p/d"]])
def test_each_suspect_is_claimed_alone_and_everything_is_claimed(database, keys):
    ids = put(database, *keys)
    suspect(database, ids[1], ids[3])
    claims = [take(database) for _ in range(6)]
    assert sorted(id_ for one in claims for id_ in one) == sorted(ids)
    assert all(len(one) == 1 for one in claims if ids[1] in one or ids[3] in one)


def test_the_others_are_claimed_together(database):
    ids = put(database, "p/a", "p/b", "p/a", "p/c")
    assert sorted(take(database)) == sorted(ids)
