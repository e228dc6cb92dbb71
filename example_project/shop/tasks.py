"""The shop's tasks. Each decorator declares what must not happen twice, or not at the same time."""

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

CARRIER_KEYS = ("key A", "key B")

ledgers = redis.Redis.from_url(REDIS_URL, decode_responses=True)


# The web shop, the support desk and a nightly clean-up publish it, and the customer gets one receipt.
# `once_per`: after a success the number stays used, so a late copy is skipped too.
# `after_crash`: a mail server cannot tell whether it got the mail of a process that died. The mail is held until an
# operator has looked and calls send_receipt.resolve(number, address, sent=True or False).
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


# An SMS cannot be recalled. After a crash the next call runs with the idempotency key of the first one. By that key the
# gateway recognises an SMS that it has delivered.
@singleton_task(app=app, name="shop.send_sms", bind=True, key="{sms_id}", once_per=timedelta(hours=1))
def send_sms(self: SingletonTask, sms_id: str, phone: str, text: str) -> None:
    sms = json.dumps({"id": sms_id, "to": phone, "text": text}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": self.lease.idempotency_key}
    request = urllib.request.Request(SMS_GATEWAY, data=sms, headers=headers)
    with urllib.request.urlopen(request, timeout=10):
        pass  # an answer other than 2xx is an HTTPError: the task fails, and the id is not used up


# Two beats run, so that one may die, and each night is published twice. `once_per="tick"` makes one report of it: the
# messages say which night they are for. The ttl is how long the shop waits after the death of a whole host. The lease
# is renewed while the report runs, so the ttl may be far shorter than the report.
@singleton_task(app=app, name="shop.nightly_report", bind=True, ttl=2, once_per="tick")
def nightly_report(self: SingletonTask) -> int | None:
    for part in ("orders", "returns", "receipts", "stock", "suppliers"):
        self.lease.ensure()  # raises LockLost if another report may write now
        _summarise(part)
    return self.lease.token  # grows with every report: a store that compares it rejects a late writer


# Started by hand, one at a time for each year. If its process is killed, the lock is released before the ttl.
@singleton_task(app=app, name="shop.yearly_report", bind=True, key="{year}", ttl=20)
def yearly_report(self: SingletonTask, year: int) -> int | None:
    for part in ("orders", "returns", "taxes"):
        self.lease.ensure()
        _summarise(f"{part} of {year}")
    return self.lease.token


# Every request for a rebuild brings new data, so none may be skipped: each is retried until it gets the lock.
@singleton_task(
    app=app, name="shop.rebuild_index", key="{index}", on_conflict="retry", retry_delay=0.5, retry_delay_max=5
)
def rebuild_index(index: str, product: str) -> str:
    _summarise(product)
    return f"{index}: {product}"


# Every line of a ledger carries the balance after it, so an account's entries are posted one at a time and in order.
# Waiting entries are parked in the store and survive the death of any worker. `acks_late`: an entry whose worker dies
# while posting it is delivered again, after the broker's visibility timeout.
@singleton_task(app=app, name="shop.post_entry", key=["account"], on_conflict="queue", acks_late=True, ttl=2)
def post_entry(account: str, amount: int) -> int:
    last = ledgers.lindex(f"ledger:{account}", -1)
    balance = amount + (json.loads(last)["balance"] if last else 0)
    _summarise(account, seconds=0.2)
    ledgers.rpush(f"ledger:{account}", json.dumps({"amount": amount, "balance": balance}))
    return balance


# The carrier accepts two connections at a time, each with a key of its own. `limit`: each running call has a seat, 0 or
# 1, which chooses the key. The other labels wait in the store, and the first of them gets the seat that becomes free.
@singleton_task(app=app, name="shop.print_label", bind=True, key="carrier", limit=2, on_conflict="queue")
def print_label(self: SingletonTask, order: str) -> str:
    _summarise(order)
    return f"{order} by {CARRIER_KEYS[self.lease.seat]}"


# Of several price lists, only the newest one counts. `replace`: it stops an older one that is being published, and
# starts when that one has ended. `stop="ask"`: an older one stops between two products, never in the middle of one.
@singleton_task(app=app, name="shop.publish_prices", bind=True, key="{market}", on_conflict="replace", stop="ask")
def publish_prices(self: SingletonTask, market: str, prices: dict[str, int]) -> int:
    for product in prices:
        self.lease.ensure()  # raises Replaced if a newer price list waits
        _summarise(f"{product} in {market}")
    return len(prices)


def _summarise(part: str, seconds: float = 1) -> None:
    """Simulate an hour of SQL."""
    logger.info("summarising %s", part)
    time.sleep(seconds)
