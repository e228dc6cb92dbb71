"""A process of tests/contract/test_migrations.py: a project of Django whose locks are at an address."""

import json
import sys
from typing import Any

import django
import pymysql
from celery import Celery
from django.conf import settings
from django.core.management import call_command


def main(dlock_url: str, database: dict[str, Any], command: list[str]) -> None:
    # Django takes mysqlclient, or what says that it is.
    pymysql.version_info = (2, 2, 8, "final", 0)
    pymysql.install_as_MySQLdb()
    app = Celery("shop", broker="memory://")
    app.conf.dlock_url = dlock_url
    app.set_default()
    apps = ["django.contrib.auth", "django.contrib.contenttypes", "celery_dlock.django"]
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=apps, USE_TZ=True)
    django.setup()
    call_command(*command)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
