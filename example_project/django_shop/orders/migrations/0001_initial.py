from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("customer", models.CharField(max_length=100)),
                ("amount", models.PositiveIntegerField(help_text="In cents.")),
                ("invoice_sent_at", models.DateTimeField(blank=True, editable=False, null=True)),
            ],
        ),
    ]
