"""The shop's tasks. Each says in its decorator what must not happen twice, or not at the same time."""

import json
import os
import smtplib
import time
import urllib.request
from datetime import timedelta
from email.message import EmailMessage

import redis
from celery.utils.log import get_task_logger

from celery_dlock import SingletonTask, singleton_task
from example_project.shop.app import REDIS_URL, app

logger = get_task_logger(__name__)

SMTP_SERVER = os.environ.get("SMTP_SERVER", "localhost:1025")
SMS_GATEWAY = os.environ.get("SMS_GATEWAY", "http://localhost:8080")

ledgers = redis.Redis.from_url(REDIS_URL, decode_responses=True)


# Asked for by the web shop, by the support desk and by a nightly clean-up: the customer gets one receipt.
# `once_per`: after a success the number stays used, so a copy that comes late is skipped as well.
# `after_crash`: no mail server says whether it had the mail of a process that died. So nobody sends it again until
# somebody has looked: send_receipt.resolve(number, address, sent=True or False).
@singleton_task(app=app, name="shop.send_receipt", key="{number}", once_per=timedelta(hours=1), after_crash="hold")
def send_receipt(number: str, address: str) -> None:
    mail = EmailMessage()
    mail["Message-ID"] = f"<{number}@shop.example>"
    mail["From"] = "shop@shop.example"
    mail["To"] = address
    mail["Subject"] = f"Your receipt {number}"
    mail.set_content("Thank you for your order.")
    host, _, port = SMTP_SERVER.rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=10) as server:
        server.send_message(mail)


# An SMS cannot be taken back. After a crash the next call runs, and has the key that the first one had: the gateway
# knows by it what it has delivered already.
@singleton_task(app=app, name="shop.send_sms", bind=True, key="{sms_id}", once_per=timedelta(hours=1))
def send_sms(self: SingletonTask, sms_id: str, phone: str, text: str) -> None:
    sms = json.dumps({"id": sms_id, "to": phone, "text": text}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": self.lease.idempotency_key}
    request = urllib.request.Request(SMS_GATEWAY, data=sms, headers=headers)
    with urllib.request.urlopen(request, timeout=10):
        pass  # an answer other than 2xx is an HTTPError: the task fails, and the id is not used up


# Two beats run, so that one may die: each night comes twice, and one report is made, also where one beat's message
# comes when the other's report is done. `once_per="tick"`: the beats say in their messages which night it is.
# The ttl says how long the shop waits when a whole host is gone. It is renewed while the report
# runs, so it may be far shorter than the report takes.
@singleton_task(app=app, name="shop.nightly_report", bind=True, ttl=2, once_per="tick")
def nightly_report(self: SingletonTask) -> int | None:
    for part in ("orders", "returns", "receipts", "stock", "suppliers"):
        self.lease.ensure()  # raises LockLost, should another report have the right to write now
        _summarise(part)
    return self.lease.token  # grows with every report: a store that compares it refuses a late writer


# Started by hand, and one a year at a time. When its process is killed, the key does not wait for the ttl.
@singleton_task(app=app, name="shop.yearly_report", bind=True, key="{year}", ttl=20)
def yearly_report(self: SingletonTask, year: int) -> int | None:
    for part in ("orders", "returns", "taxes"):
        self.lease.ensure()
        _summarise(f"{part} of {year}")
    return self.lease.token


# Every request for a rebuild brings news, so none may be skipped: they come again until it is their turn.
@singleton_task(
    app=app, name="shop.rebuild_index", key="{index}", on_conflict="retry", retry_delay=0.5, retry_delay_max=5
)
def rebuild_index(index: str, product: str) -> str:
    _summarise(product)
    return f"{index}: {product}"


# Every line of a ledger carries the balance after it, so an account's entries are posted one at a time and in order.
# Those that wait are parked in the store, where no worker's death reaches them. `acks_late`: the one that was being
# posted when its worker died comes back as well, after the broker's visibility timeout.
@singleton_task(app=app, name="shop.post_entry", key=["account"], on_conflict="queue", acks_late=True, ttl=2)
def post_entry(account: str, amount: int) -> int:
    last = ledgers.lindex(f"ledger:{account}", -1)
    balance = amount + (json.loads(last)["balance"] if last else 0)
    _summarise(account, seconds=0.2)
    ledgers.rpush(f"ledger:{account}", json.dumps({"amount": amount, "balance": balance}))
    return balance


def _summarise(part: str, seconds: float = 1) -> None:
    """Stand in for an hour of SQL."""
    logger.info("summarising %s", part)
    time.sleep(seconds)
