"""Sums by the minute: added up by each worker in rows of its own, put together later, kept for two days."""

from datetime import timedelta

import pytest

from resilient.store.inspect import throughput
from resilient.store.inspect.throughput import FRESH, KEPT, Series, Throughput

OK, RETRY = Series("push", "crm", "succeeded"), Series("push", "crm", "retry")
OTHER = Series("pull", "other", "succeeded")
MINUTE = timedelta(minutes=1)


@pytest.fixture
def add(database, clock):
    def add(worker, sums):
        database.transaction_sync(throughput.add, worker, sums, clock.now())

    return add


@pytest.fixture
def fold(database, clock):
    return lambda: database.transaction_sync(lambda c, d: throughput.fold(c, d, clock.now()))


@pytest.fixture
def read(database):
    return lambda *args, **options: database.transaction_sync(
        lambda c, d: throughput.throughput(c, d, *args, **options)
    )


@pytest.fixture
def rows(read_all):
    return lambda: read_all("SELECT worker, outcome, count FROM {throughput} ORDER BY minute, worker, outcome")


def minute_of(at):
    return at.replace(second=0, microsecond=0)


def test_workers_add_to_rows_of_their_own(add, read, rows, clock):
    at = minute_of(clock.now())
    add("w1", {OK: 3, RETRY: 1})
    add("w2", {OK: 4})
    add("w1", {OK: 2, OTHER: 7})
    assert len(rows()) == 4
    assert read() == [Throughput(at, *OTHER, 7), Throughput(at, *RETRY, 1), Throughput(at, *OK, 9)]
    clock.advance(60)
    add("w1", {OK: 1})
    assert read(kind="push")[-1] == Throughput(at + MINUTE, *OK, 1)
    assert read(at + MINUTE) == [Throughput(at + MINUTE, *OK, 1)]


def test_spans_begin_at_multiples_of_the_step(add, read, clock):
    for _ in range(30):
        add("w", {OK: 1})
        clock.advance(60)
    sums = read(step=10)
    assert sum(one.count for one in sums) == 30
    assert max(one.count for one in sums) == 10
    assert all(one.at.minute % 10 == 0 for one in sums)
    assert read(sums[0].at + timedelta(minutes=7), step=10) == sums, "a span is whole"


def test_what_no_worker_adds_to_any_more_is_put_together(add, read, rows, fold, clock):
    add("w1", {OK: 3, RETRY: 1})
    add("w2", {OK: 4})
    clock.advance(FRESH.total_seconds() + 60)
    add("w2", {OK: 5})
    before = read()
    assert fold() == 3
    assert [tuple(row.values()) for row in rows()] == [("", "retry", 1), ("", "succeeded", 7), ("w2", "succeeded", 5)]
    assert read() == before
    assert fold() == 0
    assert read() == before


def test_they_are_kept_for_two_days(add, read, fold, clock):
    add("w1", {OK: 3})
    clock.advance((KEPT - MINUTE).total_seconds())
    add("w1", {OK: 1})
    fold()
    assert [one.count for one in read()] == [3, 1]
    clock.advance(180)
    assert fold() == 1
    assert [one.count for one in read(clock.now() - 2 * KEPT)] == [1]
