"""The admin of orders: each order's page shows the lock of its invoice."""

from typing import Any

from django.contrib import admin
from django.db import transaction

from celery_dlock import Lock
from celery_dlock.django.admin import LockAdminMixin
from orders.models import Order
from orders.tasks import book, send_invoice


@admin.register(Order)
class OrderAdmin(LockAdminMixin, admin.ModelAdmin):
    list_display = ("id", "customer", "amount", "invoice_sent_at")
    readonly_fields = ("invoice_sent_at",)
    actions = ("publish_invoices", "publish_bookings")

    def lock_of(self, obj: Order) -> Lock:
        return send_invoice.lock_for(obj.pk)

    @admin.action(description="Send the invoices of the selected orders")
    def publish_invoices(self, _request: Any, orders: Any) -> None:
        # Published after the commit: a worker that starts at once finds the order in the database.
        with transaction.atomic():
            for order in orders:
                send_invoice.delay_on_commit(order.pk)

    @admin.action(description="Book the selected orders")
    def publish_bookings(self, _request: Any, orders: Any) -> None:
        with transaction.atomic():
            for order in orders:
                book.delay_on_commit(order.customer, order.amount)
