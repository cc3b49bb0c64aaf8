"""Routes find themselves wherever they are mounted: whether ``root_path`` says where, or the path was cut."""

from __future__ import annotations

import pytest

from resilient.surface.web.scope import with_mount_path


def placed(path, raw, root=""):
    scope = with_mount_path({"type": "http", "path": path, "raw_path": raw, "root_path": root})
    return scope["path"], scope["root_path"]


@pytest.mark.parametrize(
    ("path", "raw", "root", "whole", "prefix"),
    [
        ("/jobs/", b"/ops/jobs", "", "/ops/jobs", "/ops"),  # Litestar adds the slash
        ("/jobs/", b"/ops/jobs/", "", "/ops/jobs/", "/ops"),
        ("/", b"/ops", "", "/ops", "/ops"),
        ("/", b"/ops/", "", "/ops/", "/ops"),
        ("/account/crm/a b/", b"/in/ops/account/crm/a%20b", "", "/in/ops/account/crm/a b", "/in/ops"),
        ("/jobs/", b"/shop/ops/jobs", "/shop", "/shop/ops/jobs", "/shop/ops"),  # a server that is given root_path
        ("/jobs/", b"/ops/jobs", "/shop", "/shop/ops/jobs", "/shop/ops"),  # and one whose raw_path lacks it
    ],
)
def test_what_a_mount_cut_away_is_root_path_again(path, raw, root, whole, prefix):
    assert placed(path, raw, root) == (whole, prefix)


@pytest.mark.parametrize(
    ("path", "raw", "root"),
    [
        ("/jobs", b"/jobs", ""),
        ("/", b"/", ""),
        ("/ops/jobs", b"/ops/jobs", "/ops"),  # as ASGI has it
        ("/ops", b"/ops", "/ops"),
        ("/ops/jobs", b"/inside/ops/jobs", "/ops"),  # rewritten on the way, and still below root_path
        ("/jobs", b"", ""),
        ("/jobs", None, ""),
        ("/jobs", b"/other", ""),
        ("/jobs", b"//evil.example/jobs", ""),  # would be an address of another host
        ("/jobs", b"/%5Cevil.example/jobs", ""),
        ("/jobs", b"/%0Aevil/jobs", ""),
        ("/jobs", b"https://evil.example/jobs", ""),
    ],
)
def test_nothing_else_is_changed(path, raw, root):
    assert placed(path, raw, root) == (path, root)


def test_the_frameworks_own_scope_stays_as_it_was():
    scope = {"type": "http", "path": "/jobs/", "raw_path": b"/ops/jobs"}
    assert with_mount_path(scope) is not scope
    assert scope == {"type": "http", "path": "/jobs/", "raw_path": b"/ops/jobs"}
    assert with_mount_path({"type": "lifespan"}) == {"type": "lifespan"}
