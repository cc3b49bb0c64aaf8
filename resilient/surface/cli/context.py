"""What every command needs: the app (or just a database), how to print, and closing it all afterwards."""

from __future__ import annotations

import asyncio
import getpass
import importlib
import inspect
import os
import socket
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from resilient.core.base.errors import InvalidInput, SetupError
from resilient.surface.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from types import ModuleType

    from resilient.engine.app.app import Resilient
    from resilient.surface.shards import Shards

VIA: Final = "command line"
_NO_APP = (
    "which app? Say --app module:app (or RESILIENT_APP=module:app); for looking at a database without the program's"
    " code: --database sqlite:///app.db or postgresql://... (or RESILIENT_DATABASE)"
)


@dataclass(slots=True)
class Context:
    """One run of the command line."""

    app_name: str | None = None
    database: str | None = None
    schema: str | None = None
    debug: bool = False
    out: Output = field(default_factory=Output)
    typed_database: str | None = None
    person: str = ""
    because: str | None = None
    acts: bool = True  # what the app's methods change is noted as changed by ``person``
    shard: str | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _app: Resilient | None = None
    _whole: Any = None

    @property
    def app(self) -> Resilient:
        """The program's app; with only a database, one without handlers."""
        if self._app is None:
            if self.app_name is not None:
                self._app = choose(self.whole, self.app_name, self.shard)
            elif self.database is not None:
                from resilient.engine.app.app import Resilient  # noqa: PLC0415 - a second of imports, only where needed

                try:
                    self._app = Resilient(self.database, schema=self.schema, upgrade=False)
                except SetupError as error:
                    name = "--database" if self.typed_database else "RESILIENT_DATABASE"
                    raise type(error)(f"{name}: {error}") from None
            else:
                raise SetupError(_NO_APP)
            if self.acts:
                from resilient.engine.ground.audited import acting  # noqa: PLC0415 - as above

                self._stack.enter_context(acting(self.person or person(), self.because, VIA))
        return self._app

    def program(self, what: str) -> Resilient:
        """The program's app, for commands that need its code. Raises `SetupError`."""
        self.program_name(what)
        return self.app

    def shards(self, what: str) -> Shards | None:
        """The program's shards, if it has several and ``--shard`` names none."""
        if self.shard is None and self._app is None:
            self.program_name(what)
            value = self.whole
            if isinstance(value, _shards()):
                return value
            self._app = value
        return None

    @property
    def whole(self) -> Any:
        """The app, or the `Shards`, of ``--app``; made once."""
        if self._whole is None:
            self._whole = load_whole(cast("str", self.app_name))
        return self._whole

    def go_to_shard_of(self, key: str, *, strictly: bool = False) -> None:
        """Choose the shard of this account, unless ``--shard`` names one.

        If it names another one, a remark says so; with ``strictly`` raises `InvalidInput`.
        """
        if self.app_name is None or "/" not in key or "*" in key or not isinstance(self.whole, _shards()):
            return
        home = self.whole.name_of(key)
        if self.shard is None:
            self.shard = self.out.options["--shard"] = home
        if self.shard != home:
            text = f"{key} lives in shard {home}, as the program says: this is {self.shard}"
            if strictly:
                raise InvalidInput(f"{text}; leave --shard out, or say --shard {home}")
            self.out.remark(text)

    def program_name(self, what: str) -> str:
        """The app's name, as module:app, for commands that start processes with it. Raises `SetupError`."""
        if self.app_name is None:
            raise SetupError(f"{what} needs the program's code: say --app module:app (or RESILIENT_APP=module:app)")
        return self.app_name

    @property
    def knows_policies(self) -> bool:
        """Whether limits declared in code are available."""
        return self.app_name is not None

    @property
    def now(self) -> datetime:
        """The time by the database's clock, with which all times on the screen are compared."""
        now: datetime = self.app.database.transaction_sync(lambda c, d: d.now(c))
        return now

    @contextmanager
    def audited(
        self, action: str, subject: str, why: str | None = None, *, dry_run: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Note a change: before it is made, and afterwards with its outcome; a dry run changes nothing."""
        if dry_run:
            yield {}
            return
        who, why = self.person or person(), why or self.because
        with self.app.sync.audit.change(who, action, subject, why=why, via=VIA) as outcome:
            yield outcome

    def close(self) -> None:
        """Close connections that were opened here."""
        self._stack.close()
        if self._app is not None:
            asyncio.run(self._app.close())


def person() -> str:
    """The user of this machine, as user@host."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container may know no names
        return f"{os.getuid() if hasattr(os, 'getuid') else 'somebody'}@{socket.gethostname()}"


def choose(value: Any, name: str, shard: str | None = None) -> Resilient:
    """The app that ``value`` is, or a shard of it. Raises `SetupError`."""
    if isinstance(value, _shards()):
        if shard is None:
            raise SetupError(f"{name} has the shards {', '.join(value)}: say which, --shard {next(iter(value))}")
        return value[shard]
    if shard is not None:
        raise SetupError(f"--shard {shard}: {name} has no shards")
    return cast("Resilient", value)


def _shards() -> type[Shards]:
    from resilient.surface.shards import Shards  # noqa: PLC0415 - as above

    return Shards


def load_whole(name: str) -> Any:
    """The app, or the `Shards`, that ``module:attribute`` names; the attribute may be a function that makes it.

    Raises `SetupError`, which says what the name leads to.
    """
    from resilient.engine.app.app import Resilient  # noqa: PLC0415 - as above

    module_name, _, attribute = name.partition(":")
    module = _import(module_name, name)
    value = _attribute(module, attribute, name) if attribute else _only_app(module, name)
    if inspect.isroutine(value):
        value = _call(value, name)
    if not isinstance(value, (Resilient, _shards())):
        raise SetupError(f"{name} is not a Resilient app but of type {type(value).__name__}")
    return value


def _call(factory: Callable[[], Any], name: str) -> Any:
    try:
        return factory()
    except SetupError:
        raise
    except Exception as error:
        raise SetupError(f"{name}() makes no app: {type(error).__name__}: {error}") from error


def _import(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if not module_name or module_name.endswith(".py") or "/" in module_name:
        raise SetupError(f"{name!r} is not module:app: write the import name, such as 'shop.jobs:app'")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise SetupError(f"there is no module {module_name!r} here ({here}) or among the installed ones") from None
        raise SetupError(f"{module_name} cannot be imported: {error}") from error
    except SystemExit as error:  # it would be taken for this command's own exit status
        raise SetupError(f"{module_name} cannot be imported: it calls sys.exit({error.code!r})") from error
    except Exception as error:
        if isinstance(error, SetupError):
            raise
        raise SetupError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            have = ", ".join(f"{module.__name__}:{one}" for one in _apps(module)) or "none"
            raise SetupError(f"{name}: there is no {attribute!r}; apps in that module: {have}")
        value = getattr(value, part)
    return value


def _only_app(module: ModuleType, name: str) -> Any:
    apps = _apps(module)
    if len(apps) != 1:
        have = ", ".join(f"{module.__name__}:{one}" for one in apps) or "none"
        raise SetupError(f"{name} names no app: write module:app; apps in that module: {have}")
    return getattr(module, apps[0])


def _apps(module: ModuleType) -> list[str]:
    from resilient.engine.app.app import Resilient  # noqa: PLC0415 - as above

    return sorted(key for key, value in vars(module).items() if isinstance(value, (Resilient, _shards())))
