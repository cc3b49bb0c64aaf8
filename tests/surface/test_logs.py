"""``--log json``: each line an object, whoever logs and whatever is in it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap

import pytest

from resilient import Kind, Resilient
from resilient.core.base.bounds import LOGGED_TEXT
from resilient.core.base.loggers import MASK
from resilient.core.base.phrases import plain
from resilient.surface.cli.logs import MOST_EXTRAS, JsonFormatter, TextFormatter


def line(message, *args, **words):
    exc_info = words.pop("exc_info", None)
    record = logging.getLogger("shop").makeRecord(
        "shop", logging.WARNING, "shop.py", 7, message, args, exc_info, extra=words or None
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert plain(text) == text, "a terminal obeys nothing in it"
    return json.loads(text)


def test_the_keys():
    document = line("sent %d mails", 3, customer="acme", seconds=0.5)
    assert document.pop("time").endswith("Z")
    extra = {"customer": "acme", "seconds": 0.5}
    assert document == {"level": "warning", "logger": "shop", "message": "sent 3 mails", "extra": extra}


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_who_handles_the_record_too_reads_its_message(formatter):
    """Python's own formatter leaves it there; reporters of errors and pytest's `caplog` rest on that."""
    record = logging.LogRecord("shop", logging.INFO, __file__, 1, "sent %d mails", (3,), None)
    formatter.format(record)
    assert record.message == "sent 3 mails"


class Rude:
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    "text",
    ["two\nlines", "\x1b[31mred\x1b[0m", "\x7f\x9b31m", "\u202eevil", "\ud800", "a\x00b", '"}\n{"level": "error'],
)
def test_what_terminals_and_readers_obey_is_written_out(text):
    record = logging.LogRecord(
        "resilient", logging.INFO, __file__, 1, "pushing %s", (f"{text}\n2026 CRITICAL x",), None
    )
    lines = TextFormatter().format(record).split("\n")
    assert lines[0][23:].startswith("Z INFO    resilient: pushing ")
    assert plain("\n".join(lines)) == "\n".join(lines)
    assert all(one.startswith("    ") for one in lines[1:])
    document = line(text, name_of_it=text)
    assert document["message"] == plain(text)
    assert document["extra"] == {"name_of_it": plain(text)}


def test_credentials_are_hidden_wherever_they_stand():
    try:
        raise ValueError("password=hunter2pass")  # noqa: TRY301
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    document = line(
        "Authorization: Bearer abcdefghijkl at https://u:hunter2pass@example.com/?key=hunter2pass", exc_info=info,
        password="hunter2pass two", api_key=["hunter2pass"], note="token=hunter2pass",
    )  # fmt: skip
    text = json.dumps(document)
    assert "hunter2pass" not in text
    assert "abcdefghijkl" not in text
    assert document["extra"]["password"] == document["extra"]["api_key"] == MASK
    assert document["exception"]["type"] == "ValueError"
    assert "test_logs.py" in document["exception"]["traceback"]


def test_a_log_does_not_fail():
    assert line("%d of %d", "three")["message"] == "%d of %d (its arguments do not fit: TypeError)"
    assert "text cannot be had" in line("x", rude=Rude())["extra"]["rude"]
    assert line("x", nan=float("nan"))["extra"] == {"nan": "nan"}
    assert len(line("x" * 100_000)["message"]) == LOGGED_TEXT.value
    assert len(line("x", **{f"n{n}": n for n in range(500)})["extra"]) == MOST_EXTRAS
    error = ValueError(Rude())
    assert line("x", exc_info=(ValueError, error, None))["exception"]["type"] == "ValueError"


PROGRAM = """
    import logging, os, signal, warnings
    from resilient import Job, Resilient, handler

    @handler("mail.send")
    async def send(job: Job[str]) -> None:
        logging.getLogger("shop").info("to \\x1b[31m%s", job.payload, extra={{"customer": 7}})
        warnings.warn("old")
        if job.payload == "bug":
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("token=hunter2pass")

    app = Resilient({url!r}, handlers=[send])
"""


def documents(*words, cwd, status):
    command = [sys.executable, "-m", "resilient.surface.cli", *words, "--log", "json"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    return [json.loads(one) for one in done.stderr.splitlines()]


def test_each_line_of_a_worker_is_an_object(tmp_path):
    url = f"sqlite:///{tmp_path}/app.db"
    (tmp_path / "shop.py").write_text(textwrap.dedent(PROGRAM).format(url=url))
    app = Resilient(url, kinds=[Kind("mail.send")])
    ids = [str(app.enqueue_sync("mail.send", to, resource_key="smtp/a").id) for to in ("ada", "bug")]
    app.database.close_sync()
    rows = documents("--app", "shop:app", "worker", "--concurrency", "1", cwd=tmp_path, status=0)
    own = [row for row in rows if row["logger"] == "shop"]
    assert [(row["job_id"], row["kind"], row["resource_key"], row["attempt"]) for row in own] == [
        (one, "mail.send", "smtp/a", 1) for one in ids
    ]
    assert own[0]["extra"] == {"customer": 7}
    assert own[0]["message"] == r"to \x1b[31mada"
    assert "py.warnings" in {row["logger"] for row in rows}
    (end,) = [row for row in rows if row["logger"] == "resilient.worker" and row.get("job_id") == ids[1]]
    assert end["message"].startswith(f"job {ids[1]} (mail.send on smtp/a): ")
    assert "hunter2pass" not in json.dumps(rows)
    assert "stopped after 2 executions" in rows[-1]["message"]


def test_what_ends_a_worker_is_an_object_too(tmp_path):
    (row,) = documents("--app", "nothing.here:app", "worker", cwd=tmp_path, status=2)
    assert (row["level"], row["logger"]) == ("critical", "resilient.cli")
    assert "there is no module 'nothing.here'" in row["message"]


LEAKS = """
    import gc, threading
    from resilient import Job, Resilient, handler

    class Pool:
        def __del__(self):
            raise ValueError("token=hunter2pass")

    def connect():
        raise ValueError("postgresql://ann:hunter2pass@h/x")

    @handler("mail.send")
    async def send(job: Job[str]) -> None:
        thread = threading.Thread(target=connect, name="sdk")
        thread.start()
        thread.join()
        pool = Pool()
        pool.itself = pool
        del pool
        gc.collect()

    app = Resilient({url!r}, handlers=[send])
"""


@pytest.mark.parametrize("shape", ["json", "text"])
def test_what_nobody_can_catch_is_a_record_and_shows_no_secret(tmp_path, shape):
    """A thread of a vendor's SDK dies with its address: Python would write it to standard error as it is."""
    url = f"sqlite:///{tmp_path}/app.db"
    (tmp_path / "shop.py").write_text(textwrap.dedent(LEAKS).format(url=url))
    Resilient(url, kinds=[Kind("mail.send")]).enqueue_sync("mail.send", "ada", resource_key="smtp/a")
    words = ["--app", "shop:app", "worker", "--max-jobs", "1", "--log", shape]
    command = [sys.executable, "-m", "resilient.surface.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "hunter2pass" not in done.stderr
    assert "thread sdk ended by an error that nobody caught" in done.stderr
    assert "Pool.__del__" in done.stderr
    for line in done.stderr.splitlines():
        assert json.loads(line)["level"] if shape == "json" else line.startswith(("20", "    ")), line


HOOKS = """
import sys, threading
from resilient.surface.cli import logs
mine = threading.excepthook = sys.unraisablehook = lambda what: None
logs.set_up("json", "info")
assert threading.excepthook is mine and sys.unraisablehook is mine
"""


def test_a_hook_of_the_program_stays():
    subprocess.run([sys.executable, "-c", HOOKS], check=True)
