"""What the shop keeps."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order; ``invoice`` is empty until the invoicing service has written one."""

    item = models.CharField(max_length=100)
    invoice = models.CharField(max_length=20, blank=True)

    def __str__(self) -> str:
        """For people."""
        return f"{self.item} ({self.invoice or 'no invoice yet'})"
