"""Facts of locks on the current OpenTelemetry span (``dlock_opentelemetry``).

celery-dlock starts no spans. Without the setting, no function of this module is called.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from billiard.exceptions import SoftTimeLimitExceeded

from .locking import owner
from .locking.events import Event, Listeners
from .utils.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NO_SPANS", "NoSpans", "Spans", "spans_of"]

_PREFIX: Final = "celery.dlock."
#: Maximum number of losses, and of owners with a final outcome, to remember.
_REMEMBERED: Final = 1000
#: The events after which a call has no lock, and which are its outcome.
_OUTCOMES: Final = frozenset({"skipped", "queued", "bypassed", "misfired"})


class NoSpans:
    """Writes to no span."""

    def outcome(self, text: str) -> None:
        """Do nothing."""

    def waited(self, seconds: float) -> None:
        """Do nothing."""


class Spans(NoSpans):
    """Writes to the current span, if there is one that records.

    Args:
        current: Returns the current span: ``opentelemetry.trace.get_current_span``.
    """

    def __init__(self, current: Callable[[], Any]) -> None:
        self._current = current
        self._told: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)
        self._settled: deque[str] = deque(maxlen=_REMEMBERED)

    def listen(self, listeners: Listeners) -> None:
        """Receive the events of locks from now on."""
        listeners.add(self._on_event, lambda _kind: self._is_recording())
        listeners.after_loss = self._on_lost_before

    def outcome(self, text: str) -> None:
        """Record what became of the call that runs in this span."""
        self._set("outcome", text)

    def waited(self, seconds: float) -> None:
        """Record how long the call waited in its pool slot or in the queue before it took the lock."""
        self._set("wait_ms", round(max(0.0, seconds) * 1000))

    def _set(self, name: str, value: str | int) -> None:
        if self._is_recording():
            self._write(lambda span: span.set_attribute(_PREFIX + name, value))

    def _is_recording(self) -> bool:
        recording: list[bool] = []
        self._write(lambda span: recording.append(span.is_recording()))
        return any(recording)

    def _write(self, write: Callable[[Any], object]) -> None:
        """Write to the current span. An error of the application's tracer must not decide about a call."""
        try:
            write(self._current())
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            logger.warning("cannot write to the current span", exc_info=True)

    def _on_event(self, event: Event) -> None:
        if event.kind == "acquired":
            scope = owner.entered()
            # A Lock in the body of a task is another lock: the attributes are about that of the task.
            if event.owner not in self._settled and (scope is None or scope.own is None):
                self.outcome("acquired")
                self._set("token", event.token or 0)
                self._set("wait_ms", 0)
        elif event.kind == "refused":
            self._add("refused", event.name, event.reason)
        elif event.kind == "lost":
            self._lost(event.name, event.owner, event.reason)
        elif event.kind in _OUTCOMES:
            # After a misfire, ignore the skip that follows. After a bypass, ignore the events of a Lock in the body.
            if event.owner not in self._settled:
                self.outcome(event.kind)
            if event.kind in {"bypassed", "misfired"}:
                self._settled.append(event.owner)

    def _on_lost_before(self, name: str, whose: str) -> None:
        self._lost(name, whose, "found by the watchdog before the end of the work")

    def _lost(self, name: str, whose: str, reason: str) -> None:
        # The body may have found the loss before its release reports it.
        if (name, whose) not in self._told and self._is_recording():
            self._told.append((name, whose))
            self._add("lost", name, reason)

    def _add(self, event: str, name: str, reason: str) -> None:
        self._write(lambda span: span.add_event(event, {_PREFIX + "name": name, _PREFIX + "reason": reason}))


NO_SPANS: Final = NoSpans()


def spans_of(listeners: Listeners, *, wanted: bool) -> NoSpans:
    """Return the writer to spans. It writes nothing if it is not wanted, or if opentelemetry-api is not installed."""
    if not wanted:
        return NO_SPANS
    try:
        from opentelemetry.trace import get_current_span  # noqa: PLC0415  # an optional dependency
    except ImportError:
        logger.warning(
            "dlock_opentelemetry is on, but no span shows locks: install the package, "
            "pip install 'celery-dlock[opentelemetry]'"
        )
        return NO_SPANS
    spans = Spans(get_current_span)
    spans.listen(listeners)
    return spans
