"""The engine's tables, from nothing."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from resilient.django import tables


class Migration(migrations.Migration):
    """Taken back, it drops the tables and every job in them."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar = [migrations.RunPython(tables.forwards, tables.back_to("base"))]
