"""Where routes are mounted: ASGI says it by ``root_path``, some frameworks say nothing and cut the path.

Litestar does (2.25): for ``/ops/jobs`` its mount at ``/ops`` is given the path ``/jobs/``, which Starlette's router
sends elsewhere, and links made of ``root_path`` miss the mount.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from starlette.routing import Router

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX: Final = re.compile(r"(?:/[^/\\\s]+)+")  # a place on this server: "//..." would be another one


class MountedRouter(Router):
    """Starlette's router, which finds its routes wherever it is mounted."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `Router`."""
        await super().__call__(with_mount_path(scope), receive, send)


def mounted(app: ASGIApp) -> ASGIApp:
    """The same app, wherever it is mounted."""

    async def located(scope: Scope, receive: Receive, send: Send) -> None:
        await app(with_mount_path(scope), receive, send)

    return located


def with_mount_path(scope: Scope) -> Scope:
    """A copy of the scope as ASGI wants it: ``path`` whole, and ``root_path`` its beginning.

    The mount has cut the path if ``path`` is a proper suffix of ``raw_path`` and does not start with ``root_path``.
    Slashes at its end are not compared.
    """
    path, root = scope.get("path", ""), scope.get("root_path", "").rstrip("/")
    whole = unquote_to_bytes(scope.get("raw_path") or b"").decode(errors="replace")
    is_whole = path == whole or (root and f"{path}/".startswith(f"{root}/"))
    front, end = whole.rstrip("/"), path.rstrip("/")
    prefix = front.removesuffix(end) if front.endswith(end) else ""
    if is_whole or not _PREFIX.fullmatch(prefix):
        return {**scope}
    outer = "" if f"{prefix}/".startswith(f"{root}/") else root
    return {**scope, "root_path": outer + prefix, "path": outer + whole}
