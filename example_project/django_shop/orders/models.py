"""Orders of customers."""

from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=100)
    amount = models.PositiveIntegerField(help_text="In cents.")
    invoice_sent_at = models.DateTimeField(null=True, blank=True, editable=False)

    def __str__(self) -> str:
        return f"Order {self.pk} of {self.customer}"
