"""Pages."""

from __future__ import annotations

from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt

import resilient.django
from shop.jobs import Invoice, send_invoice
from shop.models import Order


@csrf_exempt
def place(request: HttpRequest) -> JsonResponse:
    """A row and a job, or neither: ATOMIC_REQUESTS makes each request one transaction."""
    order = Order.objects.create(item=request.POST["item"])
    job = resilient.django.enqueue(send_invoice, Invoice(order=order.pk), resource_key="invoices/ours")
    if request.POST["item"] == "nothing":
        raise ValueError("nobody can order nothing")
    return JsonResponse({"order": order.pk, "job": str(job.id)}, status=201)
