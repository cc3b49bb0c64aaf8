"""``manage.py flush`` empties the engine's tables too, so a `TransactionTestCase` leaves no job."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import flush
from django.db import connections

from resilient.django import tables


class Command(flush.Command):
    """Django's own, and with it every job, event, connection and setting of a resource."""

    def handle(self, **options: Any) -> None:
        """Where Django deletes its rows, which it may ask about before, ours go too."""
        alias = options["database"]
        operations = connections[alias].ops
        delete = operations.execute_sql_flush

        def delete_all(statements: Any) -> None:
            delete(statements)
            tables.empty(alias)

        operations.execute_sql_flush = delete_all
        try:
            super().handle(**options)
        finally:
            del operations.execute_sql_flush
