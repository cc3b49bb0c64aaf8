"""The settings, the tables by `migrate`, the commands, and connections of handlers."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.management import ManagementUtility, call_command
from django.core.management.base import CommandError
from django.db import DatabaseError, connection, connections, transaction
from django.db.migrations.loader import MigrationLoader
from django.test import override_settings

import resilient.django
from resilient import InvalidInput, Kind, Resilient, SchemaOutdated, SetupError, SyncJob, handler
from resilient.django.management.commands.resilient import with_app
from resilient.django.settings import address_of
from resilient.store.db import schema
from tests.django.conftest import Order
from tests.helpers import LIMIT

PUSH = Kind("push")


def put():
    return resilient.django.enqueue(PUSH, resource_key="crm/acct-7")


# -- tables ----------------------------------------------------------------------------------------------------------


def test_migrate_makes_the_tables_and_takes_them_back(migrated):
    put()
    assert resilient.django.app().sync.jobs.count() == 1
    call_command("migrate", "resilient", "zero", verbosity=0)
    assert not [name for name in connection.introspection.table_names() if name.startswith("resilient_j")]
    call_command("migrate", verbosity=0)
    assert resilient.django.app().sync.jobs.count() == 0


def test_before_the_migration_it_names_djangos_own_command(empty_url, use):
    use(empty_url)
    with pytest.raises(SchemaOutdated, match=r"has no tables of resilient: run `manage\.py migrate`"):
        put()
    database = resilient.django.app().database
    with pytest.raises(SetupError, match=r"`manage\.py migrate`"):
        schema.check_sync(database)
    with override_settings(RESILIENT={"DATABASE": empty_url}):  # one that Django does not migrate
        assert resilient.django.app().database.dialect.upgrade_with == "resilient db upgrade"


def test_migrate_brings_the_tables_to_what_the_engine_needs(migrated):
    with transaction.atomic():
        c = resilient.django.session()
        schema.verify(c, resilient.django.app().database.dialect)


def test_each_revision_of_the_engine_has_its_migration():
    """Without one `migrate` has nothing to do where the tables are behind: add one, with `tables.back_to(revision)`.

    One migration may stand for several revisions.
    """
    names = [name for label, name in MigrationLoader(None).disk_migrations if label == "resilient"]
    assert (max(names), schema.head()) == ("0005_erased", "0010_since_0009")


def test_another_database_gets_no_tables(empty_url, use, tmp_path):
    with override_settings(RESILIENT={"DATABASE": f"sqlite:///{tmp_path}/jobs.db"}):
        use(empty_url)
        call_command("migrate", verbosity=0)
    assert not [name for name in connection.introspection.table_names() if name.startswith("resilient")]


def test_flush_deletes_the_jobs_and_leaves_the_tables(django_url):
    Order.objects.create(item="chair")
    put()
    call_command("flush", interactive=False, verbosity=0)
    assert resilient.django.app().sync.jobs.count() == 0
    assert put().created


def test_a_flush_that_is_refused_deletes_nothing(django_url, monkeypatch, capsys):
    put()
    monkeypatch.setattr("builtins.input", lambda _question: "no")
    call_command("flush")
    assert resilient.django.app().sync.jobs.count() == 1
    assert "cancelled" in capsys.readouterr().out


# -- settings --------------------------------------------------------------------------------------------------------


def test_the_address_is_djangos(use):
    use("postgresql://shop@/shop?host=db.example", OPTIONS={
        "sslmode": "require", "assume_role": "jobs", "pool": True, "options": "-c search_path=x"
    }, PASSWORD="p@ss", PORT=6432)  # fmt: skip
    url = address_of("default")
    assert (url.username, url.password, url.database) == ("shop", "p@ss", "shop")
    assert dict(url.query) == {
        "host": "db.example", "port": "6432", "sslmode": "require", "options": "-c search_path=x -c role=jobs",
    }  # fmt: skip
    assert Resilient(url).database.driver_arguments()["host"] == "db.example"


def test_a_test_run_in_memory_has_one_database(use):
    use("sqlite://", NAME="file:memorydb_default?mode=memory&cache=shared")
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE thing (x)")
    mine = resilient.django.app()
    names = mine.database.transaction_sync(lambda c, _d: c.exec_driver_sql("SELECT name FROM sqlite_master").all())
    assert ("thing",) in names
    connection.connection.close()  # Django keeps open what is in memory


def made_at_import():
    return "no app"


AT_IMPORT = Resilient("sqlite:///of-production.db")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"APPP": "x"}, r"RESILIENT\['APPP'\] is not known: did you mean 'APP'"),
        ({"DATABASE": 7}, "takes an alias of DATABASES or an address"),
        ({"DATABASE": "other"}, "The connection 'other' doesn't exist"),
        ({"APP": "tests.django.nowhere:app"}, "cannot be imported"),
        ({"APP": "tests.django.test_program:PUSH"}, "neither a Resilient app nor a function"),
        ({"APP": "tests.django.test_program:made_at_import"}, "makes no Resilient app but a str"),
        ({"APP": "tests.django.test_program:AT_IMPORT"}, "make it in a function"),
    ],
)
def test_what_cannot_be_meant_is_named(django_url, values, message):
    with override_settings(RESILIENT=values), pytest.raises(SetupError, match=message):
        resilient.django.app()


def test_other_databases_are_named():
    wrapper = connections["default"]
    wrapper.vendor = "oracle"
    try:
        with pytest.raises(SetupError, match="is oracle: give them a database of their own"):
            address_of("default")
    finally:
        del wrapper.vendor


# -- commands --------------------------------------------------------------------------------------------------------


def manage(*words):
    with pytest.raises(SystemExit) as ended:
        ManagementUtility(["manage.py", "resilient", *words]).execute()
    return ended.value.code


def test_every_command_is_passed_on(django_url, capsys):
    job = put()
    assert manage("jobs", "list", "--json") == 0
    assert str(job.id) in capsys.readouterr().out
    assert manage("status", "--settings", "django.conf.global_settings") == 0
    assert manage("jobs", "show", "01a1fdb4-a777-732f-bd70-8bb3acf8a11f") == 3
    call_command("resilient", "jobs", "cancel", str(job.id))
    assert resilient.django.app().sync.jobs.get(job.id).state == "cancelled"
    with pytest.raises(CommandError, match="status 3"):
        call_command("resilient", "jobs", "show", "01a1fdb4-a777-732f-bd70-8bb3acf8a11f")


def test_help_is_the_command_lines(capsys):
    ManagementUtility(["manage.py", "help", "resilient"]).execute()
    assert "worker" in capsys.readouterr().out


def test_the_app_is_that_of_the_settings_unless_another_is_named():
    app = ["--app", "resilient.django:app"]
    assert with_app(["worker"]) == [*app, "worker"]
    assert with_app(["worker", "--settings=x", "--pythonpath", "y"]) == [*app, "worker"]
    assert with_app(["status", "--database=sqlite:///x.db"]) == ["status", "--database=sqlite:///x.db"]


# -- handlers --------------------------------------------------------------------------------------------------------

STATES = []


@handler("order.note")
def note(job: SyncJob[str]) -> None:
    Order.objects.create(item=job.payload)
    STATES.append((threading.current_thread().name, connections["default"].connection is None))


@handler("order.note_later")
async def note_later(job) -> None:
    await Order.objects.acreate(item=job.payload)


def shop():
    return Resilient(resilient.django.address(), handlers=[note, note_later])


@override_settings(RESILIENT={"APP": "tests.django.test_program:shop"})
def test_handlers_meet_djangos_models(django_url):
    STATES.clear()
    with transaction.atomic():
        resilient.django.enqueue(note, "one", resource_key="crm/acct-7")
        resilient.django.enqueue(note_later, "two", resource_key="crm/acct-7")
        with pytest.raises(InvalidInput, match="TransactionTestCase"):
            resilient.django.run_jobs()
    assert resilient.django.run_jobs() == 2
    assert sorted(Order.objects.values_list("item", flat=True)) == ["one", "two"]
    assert [is_closed for _, is_closed in STATES] == [False]


@override_settings(RESILIENT={"APP": "tests.django.test_program:shop"})
def test_a_connection_that_was_cut_off_is_left_before_the_next_job(django_url):
    """As Django leaves it before the next request."""
    fresh = resilient.django.app().kinds["order.note"]
    job = type("Job", (), {"payload": "chair"})()
    fresh(job)
    assert connection.connection is None  # CONN_MAX_AGE is 0
    connection.ensure_connection()
    connection.connection.close()
    connection.errors_occurred = True
    fresh(job)
    assert Order.objects.count() == 2
    connection.ensure_connection()
    connection.connection.close()
    with pytest.raises(DatabaseError):
        note(job)
    connection.close()


SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
HELD = {}


@handler("order.hold")
def hold(job: SyncJob[None]) -> None:
    Order.objects.create(item="held")
    HELD["began"].set()
    assert HELD["go"].wait(LIMIT)


def holding_shop():
    return Resilient(resilient.django.address(), handlers=[note, hold])


def others():
    """Sessions of this process in Django's database beside this thread's."""
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS)
        return cursor.fetchone()[0]


def await_no_others():
    """The server ends a session when it reads that it is closed."""
    deadline = time.monotonic() + LIMIT
    while others():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def kept(postgres_url, use):
    """Django keeps its connections, and the collector finds none of them."""
    use(postgres_url, CONN_MAX_AGE=None)
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    gc.disable()
    yield
    gc.enable()


@override_settings(RESILIENT={"APP": "tests.django.test_program:holding_shop"})
def test_what_handlers_threads_keep_is_closed_with_their_worker(kept):
    """Else a test run could not drop its database."""
    resilient.django.enqueue(note, "one", resource_key="crm/acct-7")
    assert resilient.django.run_jobs() == 1
    await_no_others()


@override_settings(RESILIENT={"APP": "tests.django.test_program:holding_shop"})
def test_close_closes_what_threads_keep_and_what_they_use_once_they_end(kept):
    fresh = resilient.django.app().kinds
    job = type("Job", (), {"payload": "chair"})()
    HELD.update(began=threading.Event(), go=threading.Event())
    with ThreadPoolExecutor(1) as resting, ThreadPoolExecutor(1) as busy:
        for _ in range(2):
            resting.submit(fresh["order.note"], job).result(LIMIT)
        held = busy.submit(fresh["order.hold"], job)
        assert HELD["began"].wait(LIMIT)
        assert others() == 2
        resilient.django.close()
        HELD["go"].set()
        held.result(LIMIT)
        await_no_others()
        resting.submit(fresh["order.note"], job).result(LIMIT)  # it opens a new one
        assert others() == 1
        resilient.django.close()
        await_no_others()
    assert Order.objects.count() == 4


@override_settings(RESILIENT={"APP": "tests.django.test_program:holding_shop"})
def test_what_threads_keep_is_closed_before_any_of_djangos_databases_is_dropped(kept, monkeypatch):
    """Not only that of the jobs."""
    creation = connections.create_connection("default").creation
    monkeypatch.setattr(creation, "_destroy_test_db", lambda *_: await_no_others())
    with ThreadPoolExecutor(1) as resting:
        job = type("Job", (), {"payload": "chair"})()
        resting.submit(resilient.django.app().kinds["order.note"], job).result(LIMIT)
        assert others() == 1
        creation.destroy_test_db(verbosity=0)
