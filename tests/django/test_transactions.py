"""Jobs and events in Django's transactions: they exist if, and only if, the outermost block commits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import IntegrityError, connection, connections, transaction
from django.test import Client, override_settings
from sqlalchemy.exc import DBAPIError

import resilient.django
from resilient import Event, InvalidInput, Item, Kind, Resilient, SetupError
from resilient.django.connection import Loan
from tests.django.conftest import Order


def kinds(app):
    return sorted(job.kind for job in app.sync.jobs.list())


def put(kind, **options):
    return resilient.django.enqueue(Kind(kind), {"item": 1}, resource_key="crm/acct-7", **options)


PUSH = Kind("push")


class Stop(Exception):
    pass


def test_a_job_is_there_if_the_block_commits(app):
    with transaction.atomic():
        order = Order.objects.create(item="chair")
        job = resilient.django.enqueue(PUSH, {"order": order.pk}, resource_key="crm/acct-7")
        assert connection.vendor == "sqlite" or app.sync.jobs.count() == 0  # SQLite has one at a time
    assert app.sync.jobs.get(job.id).kind == "push"
    assert Order.objects.count() == 1


def test_it_is_not_if_the_block_fails(app):
    with pytest.raises(Stop), transaction.atomic():
        Order.objects.create(item="chair")
        put("push")
        raise Stop
    assert kinds(app) == []
    assert Order.objects.count() == 0


def test_a_savepoint_takes_its_own_jobs_back_and_no_others(app):
    with transaction.atomic():
        put("before")
        with pytest.raises(Stop), transaction.atomic():
            put("within")
            raise Stop
        with transaction.atomic():
            put("second")
        put("after")
    assert kinds(app) == ["after", "before", "second"]


def test_outside_of_a_block_a_job_has_its_own(app):
    put("push")
    assert kinds(app) == ["push"]
    assert not connection.in_atomic_block


def test_a_session_outside_of_a_block_is_refused(app):
    with pytest.raises(InvalidInput, match=r"transaction\.atomic"):
        resilient.django.session()


def test_what_needs_order_and_unique_keys_is_written_at_once(app):
    with transaction.atomic():
        first = put("push", unique_key="a", ordering_key="lane", tags={"x": "y"})
        again = put("push", unique_key="a", ordering_key="lane")
        later = put("push", ordering_key="lane", delay=60)
        assert again.id == first.id
        assert not again.created
    assert {str(job.id) for job in app.sync.jobs.list()} == {str(first.id), str(later.id)}


def test_many_at_once_and_what_is_read_in_the_same_transaction(app):
    """Sixty go by COPY on PostgreSQL; times and tags come back as the engine has them, not as Django reads them."""
    run_at = datetime(2031, 1, 1, tzinfo=UTC)
    mine = resilient.django.app()
    with transaction.atomic():
        session = resilient.django.session()
        items = [Item({"n": n}, run_at=run_at, tags={"n": str(n)}) for n in range(60)]
        mine.enqueue_many_sync(PUSH, items, resource_key="crm/acct-7", session=session)
        job = mine.sync.jobs.list(session=session, limit=1)[0]
        assert job.run_at == run_at
        assert job.run_at.utcoffset() == timedelta()
        assert isinstance(job.tags, dict)
    assert app.sync.jobs.count() == 60


@override_settings(USE_TZ=False)
def test_times_without_zones_in_django_are_aware_here(app):
    connection.close()
    with transaction.atomic():
        job = put("push")
        mine = resilient.django.app().sync.jobs.get(job.id, session=resilient.django.session())
    assert mine.run_at.tzinfo is not None
    assert abs(mine.run_at - datetime.now(UTC)) < timedelta(hours=0.5)


class OrderPlaced(Event, type="order.placed"):
    order: int


async def index(message):
    pass


def on_a_bus():
    return Resilient(resilient.django.address(), destinations={"search": index}, routes={OrderPlaced: ["search"]})


@override_settings(RESILIENT={"APP": "tests.django.test_transactions:on_a_bus"})
def test_an_event_is_published_if_the_block_commits(app):
    with pytest.raises(Stop), transaction.atomic():
        resilient.django.publish(OrderPlaced(order=1))
        raise Stop
    with transaction.atomic():
        resilient.django.publish(OrderPlaced(order=2), key="order-2")
        resilient.django.publish(OrderPlaced(order=3), key="order-2")
    resilient.django.publish(OrderPlaced(order=4))
    events = [job.payload for job in app.sync.jobs.list(kind="outbox.search")]
    assert sorted(event["data"]["order"] for event in events) == [2, 3, 4]


def test_each_request_is_one_transaction(app, use, django_url):
    """ATOMIC_REQUESTS: the view enqueues, then fails, and nothing was enqueued."""
    use(django_url, ATOMIC_REQUESTS=True)
    client = Client()
    assert client.get("/order?item=chair").status_code == 200
    assert app.sync.jobs.count() == 1
    with pytest.raises(ValueError, match="sold out"):
        client.get("/order?item=none")
    assert app.sync.jobs.count() == 1


def forget():
    """Close this thread's connection, and know no more of it: the thread serves other tests too."""
    connections["default"].close()
    del connections["default"]


async def test_a_coroutine_enqueues_in_the_thread_of_its_models(app):
    await resilient.django.aenqueue(PUSH, {"item": 1}, resource_key="crm/acct-7")
    assert await app.jobs.count(kind="push") == 1
    await sync_to_async(forget)()
    await app.close()


def test_workers_are_woken_after_the_commit_and_only_then(app):
    mine, pokes = resilient.django.app(), []
    worker = type("Worker", (), {"wake": lambda _self: pokes.append(app.sync.jobs.count())})()
    mine.ground.workers.add(worker)
    with transaction.atomic():
        put("push")
        with pytest.raises(Stop), transaction.atomic():
            put("lost")
            raise Stop
        assert pokes == []
    if connection.vendor == "postgresql":
        mine.ground.waker.close()  # its thread tells them, and has by now
    assert pokes
    assert set(pokes) == {1}


def test_django_keeps_its_connection_as_it_was(app):
    connection.ensure_connection()
    driver, autocommit = connection.connection, connection.get_autocommit()
    with transaction.atomic():
        session = resilient.django.session()
        resilient.django.app().enqueue_sync(PUSH, resource_key="crm/acct-7", session=session)
        session.commit()
        session.close()
        assert connection.in_atomic_block
        transaction.set_rollback(True)
    assert app.sync.jobs.count() == 0  # the engine's side has committed nothing
    assert connection.connection is driver
    assert connection.get_autocommit() is autocommit
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)
    if connection.vendor == "postgresql":
        assert len(driver._notice_handlers) == 0


def test_after_an_error_of_the_database_the_block_can_only_be_rolled_back(app):
    """PostgreSQL would take the COMMIT of a failed transaction, and roll it back without a word."""
    if connection.vendor != "postgresql":
        return

    def fail():
        session = resilient.django.session()
        session.exec_driver_sql("SELECT 1/0")

    with transaction.atomic():
        Order.objects.create(item="lost")
        with pytest.raises(DBAPIError, match="division by zero"):
            fail()
        assert connection.needs_rollback
    assert Order.objects.count() == 0


def test_a_rolled_back_savepoint_leaves_a_session_that_works(app):
    with transaction.atomic():
        with pytest.raises(IntegrityError), transaction.atomic():
            Order.objects.create(pk=1, item="a")
            put("lost")
            Order.objects.create(pk=1, item="b")
        put("push")
    assert kinds(app) == ["push"]


def test_a_database_of_its_own_has_no_part_in_djangos_transactions(app, tmp_path):
    with override_settings(RESILIENT={"DATABASE": f"sqlite:///{tmp_path}/jobs.db"}):
        with pytest.raises(SetupError, match="is an address"):
            put("push")
        resilient.django.app().enqueue_sync(PUSH, resource_key="crm/acct-7")
        assert resilient.django.app().sync.jobs.count() == 1
    assert app.sync.jobs.count() == 0


def test_a_loan_ends_nothing(app):
    with transaction.atomic():
        Order.objects.create(item="chair")
        loan = Loan("default")
        for end in (loan.commit, loan.rollback, loan.close):
            end()
        assert connection.in_atomic_block
        transaction.set_rollback(True)
    assert Order.objects.count() == 0
    assert settings.configured
