"""``python manage.py test``: how a project tests what it enqueues."""

from __future__ import annotations

from django.test import TestCase, TransactionTestCase

import resilient.django
from shop.models import Order


class OrderTest(TestCase):
    """In a transaction that is rolled back: no job is left, and none is run."""

    def test_an_order_enqueues_its_invoice(self) -> None:
        """Read in the same transaction: give ``session=``."""
        response = self.client.post("/orders", {"item": "chair"})
        self.assertEqual(response.status_code, 201)
        jobs = resilient.django.app().sync.jobs.list(kind="invoice.send", session=resilient.django.session())
        self.assertEqual([job.payload for job in jobs], [{"order": response.json()["order"]}])

    def test_no_order_no_invoice(self) -> None:
        """What the view wrote is undone by its own savepoint, the job too."""
        with self.assertRaises(ValueError):
            self.client.post("/orders", {"item": "nothing"})
        self.assertEqual(Order.objects.count(), 0)
        self.assertEqual(resilient.django.app().sync.jobs.count(session=resilient.django.session()), 0)


class InvoiceTest(TransactionTestCase):
    """With commits, so that a worker can run the jobs. Afterwards Django's flush deletes them, too."""

    def test_an_invoice_is_written(self) -> None:
        """`run_jobs` works until nothing is due."""
        self.client.post("/orders", {"item": "table"})
        self.assertEqual(resilient.django.run_jobs(), 1)
        self.assertEqual(Order.objects.get().invoice[:2], "R-")

    def test_nothing_is_left_of_other_tests(self) -> None:
        """Whichever of the two runs first."""
        self.assertEqual(resilient.django.app().sync.jobs.count(), 0)
        self.client.post("/orders", {"item": "lamp"})
