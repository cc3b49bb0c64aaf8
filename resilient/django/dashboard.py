"""The dashboard beside a Django project, for those who are signed in there, and a link to it in the admin.

In ``asgi.py``::

    application = with_dashboard(get_asgi_application(), at="/ops", origin="https://shop.example")

In ``urls.py``: ``add_link("/ops/")``, after the admin was imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, get_args

from asgiref.sync import sync_to_async
from django.conf import settings

from resilient.core.base.errors import SetupError
from resilient.django import program
from resilient.surface.web.dashboard.guard import Operator, Right

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    Application = Callable[[Any, Any, Any], Awaitable[None]]


_STAFF: Final[tuple[Right, ...]] = ("read",)


def rights_of(user: Any) -> Collection[Right]:
    """Every right to active superusers, ``read`` to other active staff, none to anybody else."""
    every: tuple[Right, ...] = get_args(Right)
    return every if user.is_active and user.is_superuser else _STAFF if user.is_active and user.is_staff else ()


def with_dashboard(
    application: Application,
    *,
    at: str = "/ops",
    rights: Callable[[Any], Collection[Right]] = rights_of,
    **options: Any,
) -> Application:
    """The same ASGI application with the dashboard at a path, for Django's users with some of its rights.

    ``rights(user)`` is called in a thread, so it may read models. Other ``options`` are those of `web.dashboard`:
    ``origin``, ``secret``, ``reconnect``. Raises `SetupError` for a path that is none.
    """
    from starlette.responses import RedirectResponse  # noqa: PLC0415 - an extra, and only where needed
    from starlette.routing import Mount  # noqa: PLC0415 - as above

    from resilient.surface.web.dashboard.mount import dashboard  # noqa: PLC0415 - as above

    path = "/" + at.strip("/")
    if path == "/":
        raise SetupError(f"with_dashboard(at={at!r}): give it a path of its own, such as '/ops'")
    find = sync_to_async(program.fresh(_operator))  # in a thread whose connections no request of Django's renews

    async def operator(request: Any) -> Operator | None:
        key = request.cookies.get(settings.SESSION_COOKIE_NAME)
        who: Operator | None = await find(key, rights) if key else None
        return who

    mount = Mount(path, app=dashboard(program.app(), operator=operator, **options))

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        route = _route_of(scope) if scope["type"] == "http" else ""
        if route == path:  # a mount begins behind its slash
            await RedirectResponse(f"{scope.get('root_path', '').rstrip('/')}{path}/")(scope, receive, send)
        elif route.startswith(f"{path}/"):
            _, child = mount.matches(scope)
            await mount.handle({**scope, **child}, receive, send)
        else:
            await application(scope, receive, send)

    return serve


def _route_of(scope: Any) -> str:
    """The path below where the server was told to be (``uvicorn --root-path``): ASGI's ``path`` has both."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _operator(session_key: str, rights: Callable[[Any], Collection[Right]]) -> Operator | None:
    from django.contrib.auth import get_user  # noqa: PLC0415 - needs its app to be installed
    from django.http import HttpRequest  # noqa: PLC0415 - as above

    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    user = get_user(request)
    allowed = rights(user) if user.is_authenticated else ()
    return Operator(user.get_username(), allowed) if allowed else None


def add_link(url: str, *, site: Any = None, rights: Callable[[Any], Collection[Right]] = rights_of) -> None:
    """Show the dashboard among the admin's applications, to those who may read it; ``site`` is `admin.site`."""
    from django.contrib import admin  # noqa: PLC0415 - needs its app to be installed

    site = site or admin.site
    listed = site.get_app_list
    entry = {
        "name": "Resilient",
        "app_label": "resilient",
        "app_url": url,
        "has_module_perms": True,
        "models": [
            {"name": "Dashboard", "object_name": "Dashboard", "admin_url": url, "add_url": None, "view_only": True,
             "perms": {"view": True}},
        ],
    }  # fmt: skip

    def get_app_list(request: Any, app_label: str | None = None) -> list[Any]:
        apps: list[Any] = listed(request) if app_label is None else listed(request, app_label)
        is_shown = app_label is None and "read" in rights(request.user)
        return [*apps, entry] if is_shown else apps

    site.get_app_list = get_app_list
