"""Django's tasks as jobs: with `django.tasks` where it is (Django 6), else with the package."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.test import override_settings

import resilient.django
from resilient import Limit, Resilient, SetupError
from resilient.django import tasks
from resilient.testing import FakeClock
from tests.django.test_transactions import forget

try:
    from django.tasks import TaskResultStatus, default_task_backend, task
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished
except ModuleNotFoundError:
    from django_tasks import TaskResultStatus, default_task_backend, task
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished

CALLS = []
CLOCK = FakeClock()


@task
def add(a, b=0):
    CALLS.append((a, b))
    return {"sum": a + b}


@task(priority=5, queue_name="mail")
async def greet(name):
    CALLS.append(name)
    return f"hello {name}"


@task(takes_context=True)
def attempt_of(context, fail=0):
    CALLS.append(context.attempt)
    if context.attempt <= fail:
        raise LookupError("not yet")
    return context.task_result.id


@task
def fail():
    raise ValueError("never")


class Stop(Exception):
    pass


class Refusal(Exception):
    pass


@task
def refuse(how):
    error = Refusal("two lines\nreason: none")
    if how == "note":
        error = ValueError("x")
        error.add_note("Note: seen by nobody")
    if how == "group":
        error = ExceptionGroup("some", [KeyError("a")])
    if how == "chain":
        error.__cause__ = KeyError("b")
    raise error


def shop():
    return Resilient(resilient.django.address(), handlers=[tasks.run_task], limits={"tasks/slow": [Limit(1, per="1h")]})


def stopped_shop():
    return Resilient(resilient.django.address(), handlers=[tasks.run_task], clock=CLOCK.now)


def without_tasks():
    return Resilient(resilient.django.address())


@pytest.fixture
def shop_tasks(django_url):
    CALLS.clear()
    with override_settings(RESILIENT={"APP": "tests.django.test_tasks:shop"}):
        yield resilient.django.app


@pytest.fixture
def stopped_time(shop_tasks):
    """What failed is not tried again before `CLOCK` says so."""
    with override_settings(RESILIENT={"APP": "tests.django.test_tasks:stopped_shop"}):
        yield


def test_a_task_is_run_and_its_value_is_read(shop_tasks):
    with transaction.atomic():
        result = add.enqueue(1, b=2)
        assert result.status == TaskResultStatus.READY
        assert add.get_result(result.id).status == TaskResultStatus.READY  # in the same transaction
        with pytest.raises(ValueError, match="not finished"):
            _ = result.return_value
    assert resilient.django.run_jobs() == 1
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, {"sum": 3}, 1)
    assert (result.args, result.kwargs) == ([1], {"b": 2})
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert CALLS == [(1, 2)]


def test_a_task_is_enqueued_if_the_block_commits(shop_tasks):
    with pytest.raises(Stop), transaction.atomic():
        result = add.enqueue(1)
        raise Stop
    assert shop_tasks().sync.jobs.count() == 0
    with pytest.raises(TaskResultDoesNotExist):
        add.get_result(result.id)
    with pytest.raises(TaskResultDoesNotExist):
        default_task_backend.get_result("nonsense")


def test_a_coroutine_is_run_and_priority_and_queue_are_the_jobs(shop_tasks):
    done = greet.enqueue("Ada")
    job = shop_tasks().sync.jobs.get(done.id)
    assert (job.priority, job.resource_key, job.payload["args"]) == (5, "tasks/mail", ["Ada"])
    again = greet.get_result(done.id)
    assert (again.task.priority, again.task.queue_name) == (5, "mail")
    resilient.django.run_jobs()
    assert greet.get_result(done.id).return_value == "hello Ada"


async def test_coroutines_enqueue_and_read(shop_tasks):
    result = await add.aenqueue(1)
    assert (await add.aget_result(result.id)).status == TaskResultStatus.READY
    await sync_to_async(forget)()
    await shop_tasks().close()


def test_a_task_may_run_later(shop_tasks):
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    result = add.using(run_after=tomorrow).enqueue(1)
    assert resilient.django.run_jobs() == 0
    assert abs(add.get_result(result.id).task.run_after - tomorrow) < timedelta(milliseconds=1)


def test_a_queue_with_a_slash_is_the_account_whose_gate_holds(shop_tasks):
    app = shop_tasks()
    app.sync.resources.pause("crm/acct-7")
    add.using(queue_name="crm/acct-7").enqueue(1)
    add.using(queue_name="crm/acct-8").enqueue(2)
    assert resilient.django.run_jobs() == 1
    assert CALLS == [(2, 0)]


def test_what_fails_is_told_with_its_error(shop_tasks):
    with override_settings(
        TASKS={"default": {"BACKEND": "resilient.django.tasks.Backend", "OPTIONS": {"max_attempts": 1}}}
    ):
        result = fail.enqueue()
        resilient.django.run_jobs()
        result.refresh()
    assert result.status == TaskResultStatus.FAILED
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert "never" in error.traceback
    assert "resilient" not in error.traceback.replace(__file__, ""), "the frames of the task alone"
    assert result.is_finished


@pytest.mark.parametrize(
    ("how", "cls"), [("lines", Refusal), ("note", ValueError), ("group", ExceptionGroup), ("chain", Refusal)]
)
def test_the_class_of_an_error_is_told_whatever_its_text_looks_like(stopped_time, how, cls):
    result = refuse.enqueue(how)
    resilient.django.run_jobs()
    result.refresh()
    assert [one.exception_class for one in result.errors] == [cls]


def test_a_task_that_failed_is_tried_again(stopped_time):
    result = attempt_of.enqueue(fail=1)
    resilient.django.run_jobs()
    result.refresh()
    assert (result.status, len(result.errors)) == (TaskResultStatus.READY, 1)
    assert result.errors[0].exception_class is LookupError
    CLOCK.advance(hours=1)
    resilient.django.run_jobs()
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, result.id, 2)
    assert CALLS == [1, 2]


def test_signals_tell_of_it(shop_tasks):
    results = []

    def hear(sender, task_result, **_):
        results.append((task_result.status, task_result.id))

    for signal in (task_enqueued, task_finished):
        signal.connect(hear)
    try:
        done = add.enqueue(1)
        resilient.django.run_jobs()
    finally:
        for signal in (task_enqueued, task_finished):
            signal.disconnect(hear)
    assert results == [(TaskResultStatus.READY, done.id), (TaskResultStatus.SUCCESSFUL, done.id)]


def test_what_is_no_json_is_refused_at_once(shop_tasks):
    with pytest.raises(TypeError, match="Unsupported type"):
        add.enqueue(object())
    assert shop_tasks().sync.jobs.count() == 0


def test_an_app_that_runs_no_tasks_is_told(django_url):
    with override_settings(RESILIENT={"APP": "tests.django.test_tasks:without_tasks"}):
        with pytest.raises(SetupError, match=r"handlers=\[\.\.\., resilient\.django\.tasks\.run_task\]"):
            add.enqueue(1)
        (error,) = default_task_backend.check()
        assert error.id == "resilient.E002"
    with override_settings(RESILIENT={"APP": "tests.django.nowhere:app"}):
        (error,) = default_task_backend.check()
        assert error.id == "resilient.E001"


def test_all_is_well_where_it_is_listed(shop_tasks):
    assert list(default_task_backend.check()) == []


def test_a_database_of_its_own_takes_tasks_too(shop_tasks, tmp_path):
    setting = {"DATABASE": f"sqlite:///{tmp_path}/jobs.db", "APP": "tests.django.test_tasks:elsewhere"}
    with override_settings(RESILIENT=setting):
        result = add.enqueue(4)
        assert resilient.django.run_jobs() == 1
        result.refresh()
        assert result.return_value == {"sum": 4}
    assert shop_tasks().sync.jobs.count() == 0


def elsewhere():
    return Resilient(resilient.django.address(), handlers=[tasks.run_task])
