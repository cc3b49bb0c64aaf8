"""Redaction, names, GraphQL documents, pools: the parts that need no server."""

import logging
import ssl

import pytest

from resilient.wire.requests import redact
from resilient.wire.requests.client import only_queries
from resilient.wire.requests.pool import Pool, PoolSettings


@pytest.mark.parametrize(
    ("document", "operation", "expected"),
    [
        ("{ a }", None, True),
        ("query { a }", None, True),
        ("query Q($x: Int = 1) { a(n: $x) { b } }", None, True),
        ("mutation { a }", None, False),
        ("subscription { a }", None, False),
        ("fragment F on T { a } query { ...F }", None, True),
        ("fragment F on T { a } mutation { ...F }", None, False),
        ("query A { a } mutation B { b }", "A", True),
        ("query A { a } mutation B { b }", "B", False),
        ("query A { a } mutation B { b }", None, False),
        ("# mutation\n{ mutation }", None, True),
        ('{ a(text: "} mutation {") }', None, True),
        ('{ a(text: """} mutation {""") }', None, True),
        ("{ query { mutation { b } } }", None, True),
        ("", None, False),
        ("nonsense", None, False),
    ],
)
def test_only_queries(document, operation, expected):
    assert only_queries(document, operation) is expected


@pytest.mark.parametrize(
    ("text", "secrets", "shown"),
    [
        ("token abcdefgh leaked", ("Bearer abcdefgh",), "token [hidden] leaked"),
        ("Bearer abcdefgh", (), "Bearer [hidden]"),
        ("see https://u:p@h.test/a?sig=1&x=2.", (), "see https://h.test/a?sig=…&x=…"),
        ("a short one: abc", ("abc",), "a short one: abc"),
        ("plain", (), "plain"),
        ("no amqp://app:pa/s?s@mq:5672/v, bye", (), "no amqp://mq:5672/v, bye"),
        ("(postgresql+psycopg://app:p@ss@db/x?password=y)", (), "(postgresql+psycopg://db/x?password=…"),
        ("redis://:pass@h:6379", (), "redis://h:6379"),
        ("GET http://h:8080/users/bob@b.example", (), "GET http://h:8080/users/bob@b.example"),
        ("host=db password=hunter2 user=app", (), "host=db password=[hidden] user=app"),
        ("Pwd='a b';x", (), "Pwd=[hidden];x"),
        (
            "{'user': 'a', 'api_key': 'b, c', \"secret\":\"d\"}",
            (),
            "{'user': 'a', 'api_key': [hidden], \"secret\":[hidden]}",
        ),
        (
            "connect(token=t) failed: page_token=7, password: wrong",
            (),
            "connect(token=[hidden]) failed: page_token=7, password: wrong",
        ),
    ],
)
def test_scrub(text, secrets, shown):
    assert redact.scrub(text, secrets) == shown


def test_a_pools_filters_are_installed_once():
    Pool()
    before = list(logging.getLogger("httpx").filters)
    Pool()
    assert logging.getLogger("httpx").filters == before


def test_a_pool_opens_nothing_until_it_is_asked():
    pool = Pool()
    assert (pool._async, pool._sync) == (None, None)
    pool.close()


def test_one_set_of_certificates_for_both_kinds_of_connections():
    pool = Pool()
    one, two = pool.for_coroutines, pool.for_threads
    assert one._context is two._pool._ssl_context
    assert pool.for_coroutines is one
    pool.close()


def test_certificates_that_everybody_trusts_are_loaded_once_a_process():
    one, two, own = Pool(), Pool(), Pool(PoolSettings(verify=False))
    assert one._certificates() is two._certificates()
    assert own._certificates() is not one._certificates()
    assert (one._certificates().verify_mode, own._certificates().verify_mode) == (ssl.CERT_REQUIRED, ssl.CERT_NONE)
