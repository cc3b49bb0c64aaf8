"""Many keys in one transaction: numbers are drawn last and sorted, so that nobody waits in a circle."""

import threading

import pytest
from sqlmodel import Session

from resilient import Event, InvalidInput, Resilient
from tests.helpers import LIMIT

KEYS = 500


class Moved(Event, type="stock.moved"):
    number: int


async def null(_message):
    pass


@pytest.fixture
def app(database):
    return Resilient(database, destinations={"a": null, "b": null}, routes={Moved: ["a", "b"]})


def test_500_keys_in_reversed_orders_never_deadlock(postgres_url, open_database, read_all_of):
    database = open_database(postgres_url)
    app = Resilient(database, destinations={"a": null, "b": null}, routes={Moved: ["a", "b"]})
    start, failed, rounds = threading.Barrier(4), [], 2

    def write(number):
        keys = list(range(KEYS))[:: 1 if number % 2 else -1]
        try:
            for _ in range(rounds):
                with Session(database.sync_engine) as s:
                    for key in keys:
                        app.outbox.publish(s, Moved(number=key), key=f"k{key:03d}")
                    start.wait(LIMIT)  # so that all of them commit at once
                    s.commit()
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)
            start.abort()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failed == []
    lanes = read_all_of(database, "SELECT last_no FROM {order}")
    assert [row["last_no"] for row in lanes] == [4 * rounds] * (2 * KEYS)


def test_the_short_way_and_the_general_one_write_the_same(postgres_url, open_database, read_all_of, monkeypatch):
    """One event goes by a statement of its own (``store/jobs/insert.py: append``)."""

    def written(append):
        database = open_database(postgres_url)
        app = Resilient(database, destinations={"a": null}, routes={Moved: ["a"]})
        monkeypatch.setattr("resilient.store.jobs.insert.can_append", append)
        for _ in range(3):
            with Session(database.sync_engine) as s:
                app.outbox.publish(s, Moved(number=1), key="k")
                s.commit()
        rows = read_all_of(database, "SELECT * FROM {job} ORDER BY id DESC LIMIT 3")
        lane = read_all_of(database, "SELECT * FROM {order}")
        turns = read_all_of(database, "SELECT resource_key, priority FROM {turn}")
        own = ("id", "run_at", "created_at", "updated_at", "payload", "head_id", "last_no", "order_no")
        database.transaction_sync(lambda c, d: [d.run(c, f"DELETE FROM {t}") for t in ("{job}", "{order}", "{turn}")])
        plain = [{k: v for k, v in row.items() if k not in own} for row in (*rows, *lane)]
        return plain, [row["order_no"] for row in rows], turns

    from resilient.store.jobs import insert

    fits = insert.can_append
    assert written(fits) == written(lambda _d, _j: False)


def test_what_is_published_during_the_commit_is_refused(app, database):
    from sqlalchemy import event

    with Session(database.sync_engine) as s:
        app.outbox.publish(s, Moved(number=1))

        @event.listens_for(s, "before_commit")
        def _(session):
            app.outbox.publish(session, Moved(number=2))

        with pytest.raises(InvalidInput, match="is being committed"):
            s.commit()
        s.rollback()
        event.remove(s, "before_commit", _)
        app.outbox.publish(s, Moved(number=3))
        s.commit()


@pytest.fixture
def read_all_of():
    def read(database, statement):
        return database.transaction_sync(lambda c, d: [dict(r) for r in c.execute(d.sql(statement)).mappings()])

    return read
