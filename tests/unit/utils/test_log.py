"""The fields that log lines carry beside their text."""

import logging
from collections.abc import Iterator

import pytest

from celery_dlock.utils.log import log_fields, logger


@pytest.fixture
def factory_with_task_id() -> Iterator[None]:
    """A record factory that sets Celery's attributes on each record, as applications do."""
    original = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = original(*args, **kwargs)
        record.task_id = record.task_name = "of the application"
        return record

    logging.setLogRecordFactory(factory)
    yield
    logging.setLogRecordFactory(original)


def fields_of(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(vars(record).get(field) for field in ("task_name", "task_id", "lock_name"))


def test_log_fields_are_attributes_of_the_record(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("skipped", extra=log_fields("app.pay", "7", "app.pay:1"))
    assert fields_of(caplog.records[0]) == ("app.pay", "7", "app.pay:1")


@pytest.mark.usefixtures("factory_with_task_id")
def test_log_fields_replace_attributes_of_a_record_factory(caplog: pytest.LogCaptureFixture) -> None:
    """An error here would end the task that logs."""
    logger.warning("skipped", extra=log_fields("app.pay", "7", "app.pay:1"))
    assert fields_of(caplog.records[0]) == ("app.pay", "7", "app.pay:1")


@pytest.mark.usefixtures("factory_with_task_id")
def test_log_fields_without_a_task_keep_attributes_of_a_record_factory(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("swept", extra=log_fields(lock_name="app.pay:1"))
    assert fields_of(caplog.records[0]) == ("of the application", "of the application", "app.pay:1")


def test_log_line_of_a_caller_names_the_callers_function(caplog: pytest.LogCaptureFixture) -> None:
    logger.info("here", extra=log_fields("app.pay"))
    logger.warning("here", extra=log_fields("app.pay"))
    assert caplog.records[-1].funcName == "test_log_line_of_a_caller_names_the_callers_function"
