"""What a database address is refused for, and what is said of the place of a file that cannot be used."""

from __future__ import annotations

import os
import shutil
import sqlite3
from types import SimpleNamespace

import pytest
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import OperationalError

from resilient import Resilient, SetupError
from resilient.store.db import address
from resilient.store.db.address import checked, reason, shown


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:pass@w0rd@127.0.0.1:5432/db",
        "postgresql://u:pass@w0/rd@127.0.0.1/db",
        "postgresql://u:pass@w0?rd@127.0.0.1/db",
        "postgresql+psycopg://u@corp:pass@w0rd@127.0.0.1/db",
        URL.create("postgresql", "u", "pass", "w0rd@127.0.0.1", 5432, "db"),
    ],
)
def test_an_at_of_a_password_is_refused_and_nothing_of_it_is_shown(text):
    for use in (checked, Resilient, lambda one: Resilient("sqlite:///x.db", listen_url=one)):
        with pytest.raises(SetupError, match="write %40 for each @") as caught:
            use(text)
        assert "w0" not in str(caught.value)
        assert "pass@" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("postgresql://u:pass%40w0rd@127.0.0.1/db", "postgresql://u:***@127.0.0.1/db"),
        ("postgresql://u@corp:secret@host/db", "postgresql://u%40corp:***@host/db"),
        ("postgresql://u@host:5432/db", "postgresql://u@host:5432/db"),
        ("postgresql://u:x@/db?host=/run/a@b", "postgresql://u:***@/db?host=%2Frun%2Fa%40b"),
    ],
)
def test_an_at_elsewhere_is_none(text, said):
    assert shown(checked(text)) == said


def test_a_file_may_have_one(tmp_path):
    assert checked(f"sqlite:///{tmp_path}/a@b.db").database == f"{tmp_path}/a@b.db"


@pytest.mark.parametrize("message", ["disk I/O error", "unable to open database file"])
@pytest.mark.parametrize(
    ("free", "flag", "may", "remedy"),
    [
        (3 * 2**20, 0, True, "(3 MB are free in {}: make room)"),
        (2**34, 1, True, "(16,384 MB are free in {}: it is read-only: mount it for writing)"),
        (2**34, 0, False, "(16,384 MB are free in {}: this user may not write there: change that, or the address)"),
        (2**34, 0, True, "it may be written to: look at the disk's health"),
    ],
)
def test_what_is_wrong_with_the_place_of_a_file(tmp_path, monkeypatch, message, free, flag, may, remedy):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(address.os, "statvfs", lambda _: SimpleNamespace(f_flag=flag * os.ST_RDONLY))
    monkeypatch.setattr(address.os, "access", lambda *_: may)
    error = OperationalError("SELECT 1", {}, sqlite3.OperationalError(message))
    said = reason(error, make_url(f"sqlite:///{tmp_path}/app.db"))
    assert said.startswith(message)
    assert remedy.format(tmp_path) in said


def test_a_place_that_is_gone(tmp_path):
    error = OperationalError("SELECT 1", {}, sqlite3.OperationalError("disk I/O error"))
    said = reason(error, make_url(f"sqlite:///{tmp_path}/gone/app.db"))
    assert said == f"disk I/O error (its folder {tmp_path}/gone cannot be looked at: No such file or directory)"


def test_a_folder_is_no_disk_that_is_ill(tmp_path):
    """`docker run -v ./app.db:/app/app.db` makes a folder where there is no such file yet."""
    error = OperationalError("SELECT 1", {}, sqlite3.OperationalError("unable to open database file"))
    said = reason(error, make_url(f"sqlite:///{tmp_path}"))
    assert said == "unable to open database file (it is a folder: correct the address, or the mount)"
