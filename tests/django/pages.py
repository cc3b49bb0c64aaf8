"""Views of the tests."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

import resilient.django
from resilient import Kind


def order(request):
    resilient.django.enqueue(Kind("push"), request.GET["item"], resource_key="crm/acct-7")
    if request.GET["item"] == "none":
        raise ValueError("sold out")
    return HttpResponse("ok")


urlpatterns = [path("order", order)]
