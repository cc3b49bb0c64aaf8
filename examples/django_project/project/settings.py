"""Settings of the sample project: what is needed and no more."""

from __future__ import annotations

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "only for this sample")
DEBUG = os.environ.get("DJANGO_DEBUG") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
ROOT_URLCONF = "project.urls"
USE_TZ = True

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "resilient.django",
    "shop",
]

if os.environ.get("SHOP_DATABASE") == "postgresql":
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": os.environ.get("PGDATABASE", "shop"),
            "USER": os.environ.get("PGUSER", "postgres"),
            "HOST": os.environ.get("PGHOST", ""),
            "ATOMIC_REQUESTS": True,
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("SHOP_FILE", str(BASE_DIR / "shop.db")),
            "ATOMIC_REQUESTS": True,
            "TEST": {"NAME": os.environ.get("SHOP_TEST_FILE", str(BASE_DIR / "test.db"))},  # a worker opens it, too
        }
    }

RESILIENT = {"APP": "shop.jobs:make"}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
