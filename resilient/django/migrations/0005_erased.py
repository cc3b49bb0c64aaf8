"""The engine's revision 0010: which accounts were erased lately."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from resilient.django import tables


class Migration(migrations.Migration):
    """Taken back, the tables are those of revision 0009."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("resilient", "0004_wish")]
    operations: ClassVar = [migrations.RunPython(tables.forwards, tables.back_to("0009_since_0008"))]
