"""What a resource's row says of credentials, written by two at the same moment: the second one looks again."""

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa

from resilient.core.accounts.fuse import APP_REFUSED, SUSPECT_AUTH
from resilient.core.accounts.tokens import NOT_CONNECTED, UNREADABLE
from resilient.engine.accounts import fuse as engine_fuse
from resilient.store.accounts import connections, fuse, grants
from resilient.store.gates import controls as gates
from tests.helpers import LIMIT
from tests.interleaving import until_it_waits

A = "p/a"
GRANT = uuid4()
FRESH = grants.NewSecrets(None, None, None, None)


def connect(c, d):
    grants.insert_if_new(c, d, grants.new(GRANT, A, "bearer", d.now(c)), None)
    connections.bind(c, d, A, GRANT, {}, "ok")


def set_to(key, auth):
    return lambda c, d: gates.set_auth(c, d, key, auth)


@pytest.fixture
def meet(postgres_database):
    """``meet(first, second)``: what both give; the second begins when the first has done all but its commit."""

    def meet(first, second):
        def run(c, d):
            result = first(c, d)
            running = pool.submit(postgres_database.transaction_sync, second)
            until_it_waits(watch, running)
            return result, running

        arguments = postgres_database.driver_arguments()
        with psycopg.connect(**arguments, autocommit=True) as watch, ThreadPoolExecutor(1) as pool:
            result, running = postgres_database.transaction_sync(run)
            return result, running.result(LIMIT)

    return meet


@pytest.fixture
def auth(postgres_database):
    return lambda key: postgres_database.transaction_sync(gates.auth_of, key)


def test_an_account_that_is_connected_at_this_moment_stays_open(postgres_database, meet, auth):
    postgres_database.transaction_sync(gates.set_auth, A, NOT_CONNECTED)
    _, is_shut = meet(connect, lambda c, d: connections.shut_unconnected(c, d, A, tell=False))
    assert (is_shut, auth(A)) == (False, "ok")


def test_an_account_that_gets_new_secrets_at_this_moment_stays_open(postgres_database, meet, auth):
    postgres_database.transaction_sync(connect)
    postgres_database.transaction_sync(gates.set_auth, A, UNREADABLE)
    _, is_shut = meet(
        lambda c, d: grants.authorise(c, d, GRANT, FRESH, kind="bearer", flow=None),
        lambda c, d: connections.shut_unreadable(c, d, A, GRANT, 1, tell=False),
    )
    assert (is_shut, auth(A)) == (False, "ok")


def test_an_account_whose_grant_died_waits_for_a_new_one_not_for_a_key(postgres_database, auth):
    postgres_database.transaction_sync(connect)
    row = postgres_database.transaction_sync(grants.read, GRANT)
    postgres_database.transaction_sync(set_to(A, "needs_reauth"))
    with postgres_database.sync_engine.begin() as c:
        c.execute(sa.text("UPDATE resilient_grant SET state = 'needs_reauth'"))
    is_shut = postgres_database.transaction_sync(
        lambda c, d: connections.shut_unreadable(c, d, A, GRANT, row.version, tell=False)
    )
    assert (is_shut, auth(A)) == (False, "needs_reauth")


@pytest.mark.parametrize("auth_then", ["revoked", "needs_reauth"])
@pytest.mark.parametrize("lack", [NOT_CONNECTED, UNREADABLE])
def test_an_account_that_gets_what_it_lacked_does_not_open_where_it_lacks_more(
    postgres_database, meet, auth, lack, auth_then
):
    postgres_database.transaction_sync(gates.set_auth, A, lack)
    meet(set_to(A, auth_then), lambda c, d: gates.open_auth(c, d, A, lack))
    assert auth(A) == auth_then


def test_an_accepted_application_lifts_no_doubt_of_its_grants(postgres_database, meet, auth):
    postgres_database.transaction_sync(gates.set_auth, "p", APP_REFUSED)
    meet(set_to("p", SUSPECT_AUTH), lambda c, d: fuse.note_accepted(c, d, "p"))
    assert auth("p") == SUSPECT_AUTH


def test_a_refused_application_ends_no_doubt_of_its_grants(meet, auth):
    meet(set_to("p", SUSPECT_AUTH), lambda c, d: engine_fuse._gate_provider(c, d, "p", APP_REFUSED))
    assert auth("p") == SUSPECT_AUTH


def test_a_pause_and_a_refusal_at_the_same_moment_both_hold(postgres_database, meet):
    meet(lambda c, d: gates.pause(c, d, A, reason="by hand"), set_to(A, "needs_reauth"))
    facts = postgres_database.transaction_sync(lambda c, d: gates.circuits.lock(c, d, [A]))[A]
    assert (facts.auth, facts.paused_reason, facts.revision) == ("needs_reauth", "by hand", 2)
