"""Column types give the same Python values on both databases."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
import sqlalchemy as sa

from resilient.store.db.types import DOCUMENT, KEY, SEARCHED, UtcDateTime

METADATA = sa.MetaData()
THING = sa.Table(
    "thing",
    METADATA,
    sa.Column("key", KEY, primary_key=True),
    sa.Column("at", UtcDateTime),
    sa.Column("document", DOCUMENT),
    sa.Column("searched", SEARCHED),
)
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def things(empty_url, open_database):
    database = open_database(empty_url)
    database.transaction_sync(lambda c, _d: METADATA.create_all(c))
    return database


def store(database, **values):
    """What comes back for what was put in."""

    def run(c, _d):
        c.execute(THING.insert().values(key="k", **values))
        return c.execute(sa.select(THING)).one()

    return database.transaction_sync(run)


@pytest.mark.parametrize(
    "time",
    [
        NOON,
        NOON + timedelta(microseconds=1),
        datetime(1999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(2030, 6, 1, 3, tzinfo=timezone(timedelta(hours=-9, minutes=-30))),
        None,
    ],
)
def test_times_come_back_in_utc(things, time):
    found = store(things, at=time).at
    assert found == time
    assert found is None or found.tzinfo is UTC


def test_whatever_the_time_zone_of_the_server(postgres_server, open_database):
    name = postgres_server.create()
    with postgres_server.connect() as c:
        c.execute(f"ALTER DATABASE {name} SET timezone = 'Asia/Kolkata'")
    database = open_database(postgres_server.url(name))
    database.transaction_sync(lambda c, _d: METADATA.create_all(c))
    assert store(database, at=NOON).at.isoformat() == "2030-01-01T12:00:00+00:00"
    assert database.transaction_sync(lambda c, d: d.now(c)).tzinfo is UTC


def test_naive_times_are_refused(things):
    with pytest.raises(sa.exc.StatementError, match="naive datetime"):
        store(things, at=datetime(2030, 1, 1))  # noqa: DTZ001 - the point


def test_times_sort_and_compare_by_time(things):
    times = [NOON + timedelta(microseconds=n) for n in (999_999, 0, 1, 1_000_000, 10)]

    def run(c, _d):
        c.execute(THING.insert(), [{"key": str(n), "at": time} for n, time in enumerate(times)])
        return c.execute(sa.select(THING.c.at).where(THING.c.at > NOON).order_by(THING.c.at)).scalars().all()

    assert things.transaction_sync(run) == sorted(times)[1:]


def test_keys_sort_as_bytes(things):
    """Locks are taken in key order by SQL here and by Python there; a prefix is a range."""
    keys = ["a/b", "a-b", "A", "a", "a.b", "a_b", "aB", "b", "ab", "a/B", "Z", "a+b"]

    def run(c, _d):
        c.execute(THING.insert(), [{"key": key} for key in keys])
        below = sa.select(THING.c.key).where(THING.c.key >= "a/", THING.c.key < "a0").order_by(THING.c.key)
        return c.execute(sa.select(THING.c.key).order_by(THING.c.key)).scalars().all(), c.execute(below).scalars().all()

    ordered, below = things.transaction_sync(run)
    assert ordered == sorted(keys)
    assert below == ["a/B", "a/b"]


def test_every_key_column_sorts_as_bytes(postgres_database):
    collations = postgres_database.transaction_sync(
        lambda c, _d: c.execute(
            sa.text(
                "SELECT attrelid::regclass::text, attname, collname FROM pg_attribute"
                " JOIN pg_collation l ON l.oid = attcollation JOIN pg_class r ON r.oid = attrelid"
                " WHERE r.relkind = 'r' AND (attname IN ('resource_key', 'parked_on', 'waiting_for')"
                " OR (relname, attname) = ('resilient_resource', 'key')) AND relname ~ '^resilient_'"
            )
        ).all()
    )
    assert len(collations) >= 6
    assert {collation for *_, collation in collations} == {"C"}


@pytest.mark.parametrize(
    "document",
    [{"b": 1, "a": [1.5, None, {"ü": "\n"}]}, [12345678901234567890], 7, "text", [], {}, False, 0.1],
)
def test_documents_come_back(things, document):
    row = store(things, document=document, searched=document)
    assert row.document == document
    assert row.searched == document


def test_no_document_is_null(things):
    store(things, document=None, searched=None)
    count = sa.select(sa.func.count()).where(THING.c.document.is_(None), THING.c.searched.is_(None))
    assert things.transaction_sync(lambda c, _d: c.execute(count).scalar()) == 1
