"""Django's entry: ``INSTALLED_APPS = [..., "resilient.django"]``."""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.apps import AppConfig
from django.db.backends.base.creation import BaseDatabaseCreation


class ResilientConfig(AppConfig):
    """The tables by migrations of the label ``resilient``, the commands ``resilient`` and ``flush``."""

    name = "resilient.django"
    label = "resilient"
    verbose_name = "Resilient"

    def ready(self) -> None:
        """See that a test run can drop its database, which nobody may be connected to."""
        from resilient.django.settings import current  # noqa: PLC0415 - Django imports this file before its settings

        current()  # raises for a mistake in the setting
        BaseDatabaseCreation.destroy_test_db = _closing_first(BaseDatabaseCreation.destroy_test_db)


def _closing_first(destroy: Any) -> Any:
    """The class's, for every database: handlers may keep connections to any."""

    @wraps(destroy)
    def closing(*args: Any, **options: Any) -> Any:
        from resilient.django.program import close  # noqa: PLC0415 - half of the engine: only where needed

        close()
        return destroy(*args, **options)

    return closing
