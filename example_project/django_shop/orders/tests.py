"""Tests of the project with Django's own client: `python manage.py test`. They need the lock store, and no worker."""

from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import TestCase
from django.urls import reverse

from celery_dlock import Lock
from orders.models import Order
from orders.tasks import send_invoice


class AdminTest(TestCase):
    def setUp(self) -> None:
        self.order = Order.objects.create(customer="ann", amount=1250)
        self.page = reverse("admin:orders_order_change", args=[self.order.pk])
        self.client.force_login(User.objects.create_superuser("operator"))

    def lock(self) -> Lock:
        return send_invoice.lock_for(self.order.pk)

    def test_system_checks_find_nothing(self) -> None:
        call_command("check", fail_level="WARNING")

    def test_pages_show_the_lock_while_it_is_held(self) -> None:
        self.assertContains(self.client.get(self.page), "<td>free</td>", html=True)
        with self.lock():
            page = self.client.get(self.page)
            self.assertContains(page, "<td>held</td>", html=True)
            self.assertContains(self.client.get("/locks/locks"), self.lock().name)
            self.assertContains(self.client.get(page.context["dlock"]["url"]), "Release")
        self.assertNotContains(self.client.get("/locks/locks"), self.lock().name)

    def test_invoice_is_published_after_the_commit(self) -> None:
        chosen = {"action": "publish_invoices", "_selected_action": [self.order.pk]}
        with self.captureOnCommitCallbacks() as callbacks:
            self.client.post(reverse("admin:orders_order_changelist"), chosen)
        assert len(callbacks) == 1

    def test_dashboard_is_for_the_staff(self) -> None:
        self.assertContains(self.client.get("/locks/"), "<h1")
        self.client.logout()
        self.assertRedirects(self.client.get("/locks/"), "/admin/login/?next=/locks/")
