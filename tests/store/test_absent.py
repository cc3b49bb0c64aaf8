"""Rows written once although the job may run twice."""

from __future__ import annotations

import threading

from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from resilient import insert_if_absent
from tests.helpers import LIMIT


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charges"
    key: Mapped[str] = mapped_column(String(50), primary_key=True)
    amount: Mapped[int]


def test_the_second_one_changes_nothing(database):
    engine = database.sync_engine
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        assert insert_if_absent(session, Charge, {"key": "a", "amount": 1})
        assert not insert_if_absent(session, Charge, {"key": "a", "amount": 2})
        session.commit()
        assert session.get_one(Charge, "a").amount == 1
    with engine.begin() as c:
        assert insert_if_absent(c, Charge.__table__, {"key": "b", "amount": 3})


def test_of_two_at_once_one_is_new(open_database, postgres_url):
    engine = open_database(postgres_url).sync_engine
    Base.metadata.create_all(engine)
    found = []

    def second():
        with engine.begin() as c:
            found.append(insert_if_absent(c, Charge, {"key": "a", "amount": 2}))

    with engine.connect() as c:
        with c.begin():
            assert insert_if_absent(c, Charge, {"key": "a", "amount": 1})
            thread = threading.Thread(target=second)
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        thread.join(LIMIT)
    assert found == [False]
