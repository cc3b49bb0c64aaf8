"""What the doctor finds: real faults on real databases, and the judgement of facts."""

import asyncio
import os
import shutil
import sqlite3
import threading
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import make_url

from resilient import Bearer, DatabaseUnreachable, Provider, Resilient
from resilient.core.schedules import cron
from resilient.core.schedules.schedule import Spec, Template
from resilient.engine.inspect import doctor
from resilient.store.db import schema
from resilient.store.db.address import for_listening
from resilient.store.db.wake import listener_name
from resilient.store.inspect import health, why, workers
from resilient.store.inspect.health import Contents, Server, Session, WorkerSeen
from resilient.store.schedules import ticks as schedules
from tests.helpers import until
from tests.idp import me

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SERVER = Server((17, 2), NOW, {"autovacuum": "on", "fsync": "on", "synchronous_commit": "on", "max_connections": "100"})
ALIVE = WorkerSeen("w1", "host", 1, frozenset({"mail"}), "1.0", 1.0, stopping=False)
CONTENTS = Contents({}, [], beside_alembic=False, workers=[ALIVE], waiting=frozenset({("mail", "a/1")}), stranded=0)
EVERY = Spec(cron.ticks(every=60), Template(resource_key="a/1", payload="null"), "latest", "skip", 0.0, "", None)
BEAT = workers.Beat("w1", "here", 1, ["mail"], 10, 0, "1.0", stopping=False)


async def findings(database, **options):
    return {finding.name: finding for finding in await doctor.examine(database, **options)}


def judged(contents=CONTENTS, *, server=SERVER, skew=(0.0, 0.0)):
    found = [*doctor.check_server(server, skew, sqlite=False), *doctor.check_contents(contents)]
    return {finding.name: finding for finding in found if finding.level != "ok"}


def test_a_loop_that_stood_still():
    still = replace(ALIVE, loop_lag=4.2)
    assert judged(replace(CONTENTS, workers=[ALIVE, replace(ALIVE, loop_lag=0.9)])) == {}
    assert "loop of worker w1 stood still for 4" in judged(replace(CONTENTS, workers=[still]))["loop"].message


def test_schedules_that_do_not_tick():
    late = [("hourly", NOW), ("daily", NOW)]
    finding = judged(replace(CONTENTS, overdue=late))["schedules"]
    assert finding.message == "schedule hourly is due since 2030-01-01 00:00:00 UTC (and 1 other) and does not tick"
    assert "resilient schedules remove NAME" in finding.remedy
    assert "other" not in judged(replace(CONTENTS, overdue=late[:1]))["schedules"].message


# -- real databases ----------------------------------------------------------------------------------------


async def test_a_healthy_database(database):
    await database.transaction(lambda c, d: workers.beat(c, d, BEAT, d.now(c)))
    found = await findings(database)
    bad = {name for name, finding in found.items() if finding.level != "ok"}
    # the tests' server does not fsync, and nothing but a heartbeat is there of the worker
    assert bad == (set() if database.is_sqlite else {"durability", "listeners"})
    assert all(bool(finding.remedy) is (finding.level != "ok") for finding in found.values())
    assert set(found) >= {"database", "schema", "workers", "queue", "durability"}
    assert set(found) >= ({"wal", "disk"} if database.is_sqlite else {"clock", "autovacuum", "notify"})


async def test_a_schedule_that_nobody_ticks_is_late_after_five_minutes(database_url, open_database, clock):
    database = open_database(database_url, clock=clock.now)
    for name, over in (("late", {}), ("paused", {"paused": True}), ("gone", {"removed": True})):
        sets = ", ".join(f"{key} = :{key}" for key in ("next_at", *over))
        at = {"next_at": clock.now(), "name": name, **over}
        await database.transaction(schedules.declare, {name: ("k", EVERY)}, ())
        await database.transaction(
            lambda c, d, sets=sets, at=at: d.run(c, f"UPDATE {{schedule}} SET {sets} WHERE name = :name", at)
        )
    clock.advance(minutes=5)
    assert (await database.transaction(health.contents)).overdue == []
    clock.advance(seconds=1)
    assert [name for name, _ in (await database.transaction(health.contents)).overdue] == ["late"]


async def test_plans_that_the_server_chooses_are_shown(postgres_url, open_database):
    assert "plans" not in await findings(open_database(postgres_url))
    found = await findings(open_database(postgres_url, generic_plans=False))
    assert (found["plans"].level, "generic_plans=False" in found["plans"].message) == ("ok", True)


async def test_nothing_answers(open_database):
    (finding,) = await doctor.examine(open_database("postgresql://u:canary@127.0.0.1:1/db"))
    assert (finding.name, finding.level) == ("database", "fail")
    assert "canary" not in repr(finding)


async def test_no_file_and_none_made(tmp_path, open_database):
    finding, disk = await doctor.examine(open_database(f"sqlite:///{tmp_path}/absent.db"))
    assert "does not exist" in finding.message
    assert disk.name == "disk"
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_is_looked_at_before_the_file_is_opened(tmp_path, open_database, monkeypatch):
    file = tmp_path / "app.db"
    file.touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))

    def refuse(*_, **__):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    monkeypatch.setattr(sqlite3.dbapi2, "connect", refuse)
    found = {one.name: one for one in await doctor.examine(open_database(f"sqlite:///{file}"))}
    assert f"disk I/O error (3 MB are free in {tmp_path}: make room)" in found["database"].message
    assert (found["disk"].level, found["disk"].remedy) == ("fail", "make room, or prune finished jobs")


async def test_a_folder_that_takes_no_writes(tmp_path, open_database, monkeypatch):
    (tmp_path / "app.db").touch()
    database = open_database(f"sqlite:///{tmp_path}/app.db")
    assert "folder" not in await findings(database)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and access(path, mode))
    assert (await findings(database))["folder"].level == "fail"


async def test_a_link_is_followed_to_the_disk_of_its_file(tmp_path, open_database, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "app.db").touch()
    (tmp_path / "app.db").symlink_to(tmp_path / "far" / "app.db")
    monkeypatch.setattr(doctor, "filesystem_of", lambda path, _: "nfs4" if path.parent.name == "far" else "ext4")
    assert (await findings(open_database(f"sqlite:///{tmp_path}/app.db")))["filesystem"].level == "fail"


async def test_a_folder_that_may_not_be_entered(tmp_path, open_database, monkeypatch):
    folder = tmp_path / "private"
    database = open_database(f"sqlite:///{folder}/app.db")
    stat = os.stat

    def refusing(path, *args, **kwargs):
        if str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(shutil, "disk_usage", refusing)
    seen = await findings(database, makes_tables=True)
    assert seen["folder"].message == f"{folder} cannot be examined: Permission denied"
    assert seen["database"].level == "fail"
    assert seen["database"].message.startswith(f"the database {folder}/app.db cannot be looked at (Permission denied)")


async def test_no_tables(empty_url, open_database):
    database = open_database(empty_url)
    await database.transaction(lambda c, _d: c.execute(sa.text("SELECT 1")))
    found = await findings(database)
    assert (found["schema"].level, found["schema"].remedy) == ("fail", "`resilient db upgrade`")
    assert "workers" not in found


async def test_a_ready_job_without_a_turn(database):
    def strand(c, d):
        d.run(
            c,
            "INSERT INTO {job} (id, kind, resource_key, state, run_at, created_at, updated_at)"
            " VALUES (:id, 'mail', 'a/b', 'ready', :now, :now, :now)",
            {"id": d.id(UUID(int=1)), "now": d.now(c)},
        )

    await database.transaction(strand)
    found = await findings(database)
    assert found["queue"].message == "1 resource with ready jobs fell out of the line for the workers"
    assert found["workers"].message == "no worker is alive, and jobs are waiting"
    assert found["workers"].level == "fail"


async def test_workers(database):
    await database.transaction(lambda c, d: workers.beat(c, d, BEAT, d.now(c) - timedelta(minutes=2)))
    await database.transaction(lambda c, d: workers.beat(c, d, replace(BEAT, id="w2"), d.now(c)))
    found = await findings(database)
    assert found["workers"].message == "1 alive"
    assert "worker w1 (process 1 on here) has been silent for 2 min" in found["lost_worker"].message


async def test_facts_that_grew_old(database):
    told = [Provider(name="acme", verified_on=date(2026, 11, 1)), Provider(name="own")]
    assert "facts" not in await findings(database, providers=told, host_now=lambda: datetime(2027, 1, 1, tzinfo=UTC))
    found = await findings(database, providers=told, host_now=lambda: datetime(2028, 1, 1, tzinfo=UTC))
    assert (found["facts"].level, found["facts"].message) == (
        "warn", "the facts of acme were last checked on 2026-11-01, more than a year ago"
    )  # fmt: skip
    assert "resilient providers show acme" in found["facts"].remedy


async def test_accounts_that_cannot_be_connected_for_want_of_a_key(database):
    crm, sdk = Provider(name="crm", auth=(Bearer(),)), Provider(name="sdk")
    providers = [crm, Provider(name="open", auth=(Bearer(),), anonymous=True), sdk]
    found = await findings(database, providers=providers, keys=frozenset())
    assert (found["secrets"].level, found["secrets"].message) == (
        "warn", "no account of crm can be connected: credentials are stored encrypted, and no key is given"
    )  # fmt: skip
    assert "RESILIENT_SECRETS" in found["secrets"].remedy
    for well in ({"keys": frozenset({"k"})}, {"keys": frozenset(), "own_table": True}, {}):
        assert "secrets" not in await findings(database, providers=providers, **well)
    assert "secrets" not in await findings(database, providers=providers[1:], keys=frozenset())


async def test_other_sessions(postgres_database, postgres_url, open_database):
    other = open_database(postgres_url)
    with other.sync_engine.begin() as c:
        pid = c.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        server = await postgres_database.transaction(health.server, 0.0)
    (session,) = server.long
    assert (session.pid, session.state) == (pid, "idle in transaction")
    assert 0 < session.seconds < 60
    assert server.sessions >= 2
    assert server.hidden == 0


async def test_other_sessions_that_may_not_be_seen(postgres_server, open_database):
    name = postgres_server.create()
    with postgres_server.connect() as admin:
        admin.execute("CREATE ROLE short_sighted LOGIN")
        database = open_database(postgres_server.url(name).replace("postgres@", "short_sighted@"))
        server = await database.transaction(health.server)
        assert server.hidden >= 1
        assert "GRANT pg_monitor" in judged(server=server)["privileges"].remedy
        await database.close()
        postgres_server.drop(name)
        admin.execute("DROP ROLE short_sighted")


@pytest.mark.parametrize("by", ["the holder of the lock", "one who waits for it"])
async def test_a_table_that_is_locked_against_everybody(by, postgres_database, postgres_url, monkeypatch):
    """Its holder is named at once; nobody waits for ever, and no worker is called dead."""
    statement, asks = "LOCK TABLE resilient_job IN ACCESS EXCLUSIVE MODE", "SELECT pg_backend_pid()"
    with psycopg.connect(postgres_url) as holder, psycopg.connect(postgres_url) as waiter:
        pid = (holder if by == "the holder of the lock" else waiter).execute(asks).fetchone()[0]
        thread = threading.Thread(target=waiter.execute, args=[statement])
        if by == "the holder of the lock":
            holder.execute(statement)
        else:
            holder.execute("SELECT count(*) FROM resilient_job")
            thread.start()
        await until(lambda: postgres_database.transaction_sync(health.server).locked)
        found = await findings(postgres_database)
        monkeypatch.setattr(why, "_PATIENCE", "10ms")
        with pytest.raises(DatabaseUnreachable, match="locked against everybody for 10ms: `resilient doctor` names"):
            postgres_database.transaction_sync(why.overview_soon)
        holder.rollback()
        if thread.ident is not None:
            thread.join()
    assert found["locked"].remedy == f"wait until it ends, or end it: SELECT pg_terminate_backend({pid})"
    assert ("waits to lock" in found["locked"].message) == (by == "one who waits for it")
    assert "resilient_job" in found["locked"].message
    assert "workers" not in found
    assert "locked" not in await findings(postgres_database)


async def test_sessions_that_take_no_writes(postgres_server, postgres_url, open_database):
    name = make_url(postgres_url).database
    with postgres_server.connect() as admin:
        admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    found = await findings(open_database(postgres_url))
    assert "RESET default_transaction_read_only" in found["read_only"].remedy
    assert found["read_only"].level == "fail"


async def test_autovacuum_turned_off_for_a_table(postgres_database):
    off = sa.text("ALTER TABLE resilient_turn SET (autovacuum_enabled = off)")
    await postgres_database.transaction(lambda c, _d: c.execute(off))
    assert (await findings(postgres_database))["table_autovacuum"].remedy == (
        "ALTER TABLE resilient_turn RESET (autovacuum_enabled)"
    )


async def test_dead_rows_are_read(postgres_database):
    contents = await postgres_database.transaction(health.contents)
    assert set(contents.rows) == {f"resilient_{name}" for name in ("job", "turn", "resource", "rate_limit")}


async def test_beside_an_application_that_uses_alembic(database):
    await database.transaction(lambda c, _d: c.execute(sa.text("CREATE TABLE alembic_version (x integer)")))
    finding = (await findings(database))["alembic"]
    assert "include_name=resilient.alembic.include_name" in finding.message
    assert finding.level == "ok"


async def test_in_a_schema(postgres_server, open_database):
    name = postgres_server.create()
    database = open_database(postgres_server.url(name), schema="jobs")
    await schema.upgrade(database)
    found = await findings(database)
    assert {finding.level for finding in found.values()} == {"ok", "warn"}
    await database.close()
    postgres_server.drop(name)


async def test_a_clock_that_is_wrong(postgres_database):
    found = await findings(postgres_database, host_now=lambda: datetime.now(UTC) - timedelta(hours=1))
    assert "this host's clock is 1 h behind the database's" in found["clock"].message


async def test_notifications(postgres_database, monkeypatch):
    found = await findings(postgres_database, listen_url=for_listening("postgres://u:canary@127.0.0.1:1/db"))
    assert "could not be tried" in found["notify"].message
    assert "canary" not in repr(found)
    monkeypatch.setattr(health, "hearers", lambda _url: None)
    assert (await findings(postgres_database))["notify"].remedy.startswith("give listen_url= the address of")


async def test_workers_that_listen_elsewhere(postgres_url, postgres_server):
    """As on two nodes of a cluster: what is notified in one place is not heard in the other."""
    there = postgres_server.create()
    address, elsewhere = for_listening(postgres_url), for_listening(postgres_server.url(there))
    async with Resilient(postgres_url, handlers=[me], listen_url=postgres_server.url(there)) as app:
        worker = app.worker()
        running = asyncio.create_task(worker.run(signals=False))
        try:

            async def hears():
                sessions = await asyncio.to_thread(health.hearers, elsewhere)
                return listener_name(worker.id) in sessions and "workers" in await findings(app.database)

            await until(hears)
            found = await findings(app.database, listen_url=address)
            assert f"comes from {worker.id}, 1 of 1 living worker:" in found["listeners"].message
            assert "listeners" not in await findings(app.database, listen_url=elsewhere)
        finally:
            worker.stop()
            await running
    postgres_server.drop(there)


async def test_an_engine_that_is_not_set_up_for_a_queue(tmp_path, open_database):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/app.db")
    with engine.connect() as c:
        c.exec_driver_sql("PRAGMA synchronous=OFF")
        database = open_database(engine)
        await schema.upgrade(database)
    engine.dispose()
    fresh = sa.create_engine(f"sqlite:///{tmp_path}/app.db")

    @sa.event.listens_for(fresh, "connect")
    def _(connection, _record):
        connection.execute("PRAGMA synchronous=NORMAL")

    found = await findings(open_database(fresh))
    assert "journal_mode is delete" in found["wal"].message
    assert found["durability"].level == "warn"
    fresh.dispose()


# -- judgement ---------------------------------------------------------------------------------------------


def test_all_is_well():
    assert judged() == {}


@pytest.mark.parametrize(
    ("skew", "message"),
    [
        ((6.0, 5.5), "6 s behind"),
        ((-5.5, -9.0), "6 s ahead of"),
        ((30.0, -30.0), None),  # the answer took a minute: nothing is known
        ((4.0, 3.9), None),
    ],
)
def test_clock(skew, message):
    found = judged(skew=skew)
    assert ("clock" in found) is (message is not None)
    assert message is None or message in found["clock"].message


@pytest.mark.parametrize(
    ("changes", "name", "level"),
    [
        ({"autovacuum": "off"}, "autovacuum", "fail"),
        ({"track_counts": "off"}, "autovacuum", "fail"),
        ({"fsync": "off"}, "durability", "warn"),
        ({"synchronous_commit": "off"}, "durability", "warn"),
        ({"server_encoding": "SQL_ASCII"}, "encoding", "warn"),
        ({"max_connections": "10"}, "connections", "warn"),
    ],
)
def test_settings(changes, name, level):
    found = judged(server=replace(SERVER, settings=SERVER.settings | changes, sessions=10))
    assert {name: level} == {finding.name: finding.level for finding in found.values()}


def test_what_holds_back_vacuum():
    held = Session(7, "report", "idle in transaction", 3600.0)
    found = judged(server=replace(SERVER, long=[held, replace(held, pid=8, seconds=100.0)]))
    assert "session 7 of 'report' has had a transaction open for 60 minutes" in found["long_transaction"].message
    assert "pg_terminate_backend(7)" in found["long_transaction"].remedy
    assert "'old'" in judged(server=replace(SERVER, prepared=["old"]))["long_transaction"].message
    assert "'gone'" in judged(server=replace(SERVER, idle_slots=["gone"]))["replication_slot"].remedy


@pytest.mark.parametrize(("rows", "bad"), [((10, 20_000), True), ((10, 9_000), False), ((50_000, 100_000), False)])
def test_dead_rows(rows, bad):
    assert ("dead_rows" in judged(replace(CONTENTS, rows={"resilient_turn": rows}))) is bad


def test_jobs_that_wait_for_a_key():
    found = judged(replace(CONTENTS, keyless=3))
    assert found["sealed"].message.startswith("3 jobs wait because workers met them that lack the key")
    assert "sealed" not in judged(CONTENTS)


def test_kinds_nobody_knows():
    found = judged(replace(CONTENTS, waiting=frozenset({("mail", "a/1"), ("sms", "a/1")})))
    assert found["kinds"].message.startswith("jobs of kind sms are waiting")
    stopping = replace(ALIVE, stopping=True)
    assert "mail" in judged(replace(CONTENTS, workers=[stopping]))["kinds"].message


def test_accounts_that_no_worker_with_the_kind_serves():
    narrow = replace(ALIVE, resources=("github/*",))
    keys = [*(f"crm/{n}" for n in range(6)), "github/a/search"]
    waiting = frozenset(("mail", key) for key in keys)
    found = judged(replace(CONTENTS, workers=[narrow], waiting=waiting))
    assert found["resources"].message.startswith("jobs of crm/0, crm/1, crm/2, crm/3, crm/4 and 1 more are waiting")
    assert "kinds" not in found
    other = replace(ALIVE, kinds=frozenset({"sms"}))
    assert "resources" in judged(replace(CONTENTS, workers=[narrow, other], waiting=waiting))
    assert "resources" not in judged(replace(CONTENTS, workers=[narrow, ALIVE], waiting=waiting))


def test_two_versions_at_once():
    newer = replace(ALIVE, id="w2", code_version="1.1")
    assert "1.0, 1.1" in judged(replace(CONTENTS, workers=[ALIVE, newer]))["versions"].message


def test_nobody_works():
    assert judged(replace(CONTENTS, workers=[], waiting=frozenset()))["workers"].level == "warn"
    assert judged(replace(CONTENTS, workers=[]))["workers"].level == "fail"


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/export /srv nfs4 rw 0 0
/dev/vdb /srv/local xfs rw 0 0
tmpfs /srv/local\\040x tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/app.db", "ext4"),
        ("/srv/app.db", "nfs4"),
        ("/srv/local/a/app.db", "xfs"),
        ("/srvx/a", "ext4"),
        ("/srv/local x/a", "tmpfs"),
    ],
)
def test_filesystems(path, kind):
    assert doctor.filesystem_of(Path(path), MOUNTS) == kind
    assert doctor.filesystem_of(Path(path), "") == ""


def test_disk():
    def found(**changes):
        facts = {"filesystem": "ext4", "free": 2**40, "log": 0} | changes
        return {f.name: f.level for f in doctor.check_disk(Path("/srv/app.db"), **facts)}

    assert found() == {"disk": "ok"}
    assert found(free=10 * 2**20) == {"disk": "fail"}
    assert found(filesystem="nfs4") == {"disk": "ok", "filesystem": "fail"}
    assert found(log=2 * 2**30) == {"disk": "ok", "wal_size": "warn"}
