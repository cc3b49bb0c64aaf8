"""One list of the job's columns: it is the table's, and whichever way a job is inserted, each of them arrives."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from resilient import JobInfo
from resilient.store.jobs import changes, finishing, leases
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.claim_snapshot import ClaimedJob
from resilient.store.jobs.columns import BY_NAME, COLUMNS, OWN, NewJob, Writer, has_only, names, selected, types
from resilient.store.jobs.filters import JOB

A_MINUTE = timedelta(minutes=1)
AT = datetime(2030, 1, 1, tzinfo=UTC)
TYPES = {"timestamp with time zone": "timestamptz", "integer": "int", "varchar(255)": "text"}
TIMES = {"run_at", "delay", "expires_at", "expires_in"}  # of a new job: the insert makes two columns of them
SAMPLES = {
    "payload_version": 4, "priority": -3, "run_at": AT, "delay": 3600.0, "expires_at": AT, "expires_in": 7200.0,
    "max_attempts": 7, "unique_key": "u", "unique_until": "start", "idempotency_key": 'i\\"\t', "tags": '{"user": "7"}',
    "trace": '{"traceparent": "t"}', "ordering_key": "o", "ordering_policy": "skip", "followed": True, "waits": 2,
    "order_no": 5,
}  # fmt: skip
DOCUMENTS = {"tags": {"user": "7"}, "trace": {"traceparent": "t"}}


def type_of(column):
    name = column.type.compile(dialect=postgresql.dialect()).split(" COLLATE")[0].lower()
    return TYPES.get(name, name)


def default_of(column):
    if column.server_default is None:
        return None
    text = str(column.server_default.arg)
    return {"true": True, "false": False}[text] if text in ("true", "false") else int(text)


def differences(table, definition):
    """What one of them says and the other does not."""
    said = {(c.name, type_of(c), default_of(c)) for c in table.columns}
    return said ^ {(c.name, c.type, c.default) for c in definition}


def test_the_list_is_the_tables():
    assert not differences(JOB, COLUMNS)
    assert len(BY_NAME) == len(COLUMNS)


def test_a_column_in_one_of_them_alone_is_a_difference():
    table = JOB.to_metadata(sa.MetaData())
    table.append_column(sa.Column("colour", sa.String(255)))
    assert differences(table, COLUMNS) == {("colour", "text", None)}
    assert {name for name, *_ in differences(JOB, COLUMNS[:-1])} == {"finished_at"}


def test_a_column_without_a_default_is_written_by_every_insert():
    needed = {c.name for c in JOB.columns if not c.nullable and c.server_default is None}
    assert needed <= {*names(Writer.CALLER), *names(Writer.INSERT)}


def test_the_caller_writes_the_fields_of_a_new_job():
    assert set(NewJob._fields) - TIMES == set(names(Writer.CALLER))
    assert {n: v for n, v in NewJob._field_defaults.items() if n not in TIMES} == {
        n: BY_NAME[n].default for n in NewJob._field_defaults if n not in TIMES
    }
    assert set(SAMPLES) == set(NewJob._field_defaults), "a new field needs a sample here"
    assert set(OWN) < set(NewJob._fields)
    assert {*OWN, "state"} == set(jobs._OWN_TEXT)


RECORDS = [ClaimedJob, leases.OverdueJob, jobs.KeyHolder, changes.LockedJob, finishing.ExpiredJob]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
def test_records_name_columns(record):
    computed = {"alive": "true"} if record is leases.OverdueJob else {}
    assert selected(record, **computed).count(",") == len(record._fields) - 1
    assert list(types(record, *computed)) == list(record._fields)


def test_what_people_are_shown_names_columns():
    assert set(JobInfo.__slots__) <= set(BY_NAME)


def test_a_record_that_names_no_column_is_refused():
    class Wrong(ClaimedJob):
        _fields = (*ClaimedJob._fields, "colour")

    with pytest.raises(LookupError, match="colour"):
        selected(Wrong)


def test_like_changes_only_what_it_is_given():
    model = NewJob(uuid4(), "k", "a", "1", **SAMPLES)
    id_ = uuid4()
    assert model.like(id_, "b", "2") == model._replace(id=id_, resource_key="b", payload="2")


def test_has_only_looks_at_every_other_field():
    required = [name for name in NewJob._fields if name not in NewJob._field_defaults]
    is_bare, plain = has_only(required), NewJob(uuid4(), "k", "a", "1")
    assert is_bare(plain)
    assert not any(is_bare(plain._replace(**{name: value})) for name, value in SAMPLES.items())


# -- every way in --------------------------------------------------------------------------------------------


def _alone(c, d, job):
    jobs.insert(c, d, [job])


def _as_unique(c, d, job):
    assert jobs.insert_unique(c, d, [job]) == {job.id}


def _in_a_batch(c, d, job):
    others = [NewJob(uuid4(), "other", "b", "null") for _ in range(jobs.COPY_LEAST)]
    jobs.insert(c, d, [*others, job, NewJob(uuid4(), "other", "b", "null")])


def _as_an_event(c, d, job):
    if jobs.can_append(d, job):
        jobs.append(c, d, job)
    else:
        jobs.insert(c, d, [job])


def stored(c, d, id_):
    return d.execute(c, sa.select(JOB).where(JOB.c.id == id_)).mappings().one()


EVERYTHING = {name: value for name, value in SAMPLES.items() if name not in ("delay", "expires_in")}


@pytest.mark.parametrize("insert", [_alone, _as_unique, _in_a_batch, _as_an_event])
@pytest.mark.parametrize("given", [{}, *({name: value} for name, value in SAMPLES.items()), EVERYTHING], ids=",".join)
def test_every_column_arrives(database, insert, given):
    lane = {"ordering_key": "lane", "ordering_policy": "block"} if insert is _as_an_event else {}
    job = NewJob(uuid4(), "k", "a/1", '{"n": 1.50}', **{**lane, **given})
    before = database.transaction_sync(lambda c, d: d.now(c))
    database.transaction_sync(insert, job)
    row = database.transaction_sync(stored, job.id)
    numbered = insert is _as_an_event and jobs.can_append(database.dialect, job)
    expected = {name: getattr(job, name) for name in names(Writer.CALLER)}
    expected |= {name: BY_NAME[name].default for name in names(Writer.ENGINE)}
    expected |= {name: DOCUMENTS[name] for name in DOCUMENTS if expected[name] is not None}
    expected |= {"payload": {"n": 1.5}, "unique_lock": job.unique_key} | ({"order_no": 1} if numbered else {})
    expected["state"] = "blocked" if job.waits else "scheduled" if job.is_later else "ready"
    times = {name: row[name] for name in BY_NAME if name not in expected}
    assert {name: row[name] for name in expected} == expected
    assert set(times) == {"run_at", "expires_at", "created_at", "updated_at"}
    assert before <= times["created_at"] <= times["updated_at"] < before + A_MINUTE
    assert job.start(before) <= times["run_at"] < job.start(before) + A_MINUTE
    expiry = job.expiry(before)
    assert times["expires_at"] == expiry or expiry < times["expires_at"] < expiry + A_MINUTE


def test_an_event_that_somebody_follows_is_no_plain_event(postgres_database):
    job = NewJob(uuid4(), "k", "a/1", "1", ordering_key="o", ordering_policy="block")
    assert jobs.can_append(postgres_database.dialect, job)
    assert not jobs.can_append(postgres_database.dialect, job._replace(followed=True))
