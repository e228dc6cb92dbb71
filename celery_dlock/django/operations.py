"""The actions of the admin: the permission and the form of each, and its effect on one entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django import forms

from ..control import ActionRefused, LockControl
from ..errors import DLockError, StoreUnavailable

__all__ = ["DROP", "HOLD", "RELEASE", "REQUEUE", "SENT", "UNHOLD", "UNSENT", "Operation", "Target", "act_on"]

#: Reasons of a refused release, in the words of the admin's pages.
_REFUSALS: Final = {
    "free": "no acquisition holds it any more",
    "other": "another acquisition holds it now",
    "granted": "it is granted to a waiting call, which is about to start",
    "kept": "it is kept on purpose; end an operator's hold by “Unhold”, or release it by force",
    "fresh": "its holder is alive; it can be released by force",
}


class ReasonForm(forms.Form):
    """The form of every action: a reason for the audit."""

    reason = forms.CharField(
        max_length=500, required=False, help_text="It is stored with the record of this action.",
        widget=forms.TextInput(attrs={"class": "vTextField"}),
    )  # fmt: skip


class ReleaseForm(ReasonForm):
    """The form of a release."""

    force = forms.BooleanField(
        required=False, label="By force",
        help_text=(
            "Release the lock also if its holder is alive, or if it is kept on purpose. "
            "Another call can then run beside the holder, until the holder notices."
        ),
    )  # fmt: skip


class HoldForm(ReasonForm):
    """The form of a hold."""

    minutes = forms.IntegerField(min_value=1, max_value=366 * 24 * 60, initial=60, label="Minutes")
    reason = forms.CharField(
        max_length=500, help_text="Skipped and waiting calls report it.",
        widget=forms.TextInput(attrs={"class": "vTextField"}),
    )  # fmt: skip
    field_order = ("minutes", "reason")


@dataclass(frozen=True, slots=True)
class Target:
    """One entry as a page showed it.

    Args:
        name: The lock name.
        mark: The acquisition, run mark or message that the page showed. An action does not reach a later one.
        detail: What tells two entries of one mark apart: the tick of a run, or the hold of a lock.
    """

    name: str
    mark: str
    detail: str = ""

    @property
    def text(self) -> str:
        """The entry as the value of a form field."""
        return json.dumps([self.name, self.mark, self.detail])

    @classmethod
    def parse(cls, text: str) -> Target | None:
        """Return the entry of a form field; None if the text is malformed."""
        try:
            values = json.loads(text)
            json.dumps(values, ensure_ascii=False).encode()  # no page can show half a surrogate pair
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(one, str) for one in values):  # noqa: PLR2004
            return None
        return cls(*values)


@dataclass(frozen=True, slots=True)
class Operation:
    """An action of the admin.

    Args:
        name: Its name in forms.
        label: Its name for people.
        permission: The verb of Django's permission for it: ``"release"`` stands for ``release_heldlock``.
        question: What its confirmation page says.
        act: Acts on one entry. Returns a text for the log entry, or "" if the entry has changed meanwhile.
        form: The form of its confirmation page.
        changed: The text about an entry that was not acted on.
    """

    name: str
    label: str
    permission: str
    question: str
    act: Callable[[LockControl, Target, Mapping[str, Any]], str]
    form: type[forms.Form] = ReasonForm
    changed: str = "it has changed since this page was made"


def act_on(
    control: LockControl, operation: Operation, targets: Sequence[Target], values: Mapping[str, Any]
) -> tuple[list[tuple[Target, str]], list[str]]:
    """Act on each entry.

    Returns:
        The entries that were acted on, each with a text for its log entry, and a text for each refused entry.

    Raises:
        StoreUnavailable: The store did not answer.
    """
    done, refused = [], []
    for target in targets:
        try:
            text = operation.act(control, target, values)
        except ActionRefused as error:
            refused.append(f"{target.name}: {_REFUSALS.get(error.why, error.message)}")
        except StoreUnavailable:
            raise
        except (DLockError, ValueError) as error:  # the entry is no lock name, or was not made by a page
            refused.append(f"{target.name}: {error}")
        else:
            if text:
                done.append((target, text))
            else:
                refused.append(f"{target.name}: {operation.changed}")
    return done, refused


def _release(control: LockControl, target: Target, values: Mapping[str, Any]) -> str:
    control.release(target.name, target.mark, force=values["force"], reason=values["reason"])
    return "Released by force." if values["force"] else "Released."


def _hold(control: LockControl, target: Target, values: Mapping[str, Any]) -> str:
    # It concerns whichever call comes next, so no acquisition is compared.
    minutes = values["minutes"]
    held = control.hold(target.name, minutes * 60, values["reason"])
    return f"Held for {minutes} min." if held else f"Held for {minutes} min, from the release of its present holder."


def _unhold(control: LockControl, target: Target, values: Mapping[str, Any]) -> str:
    ended = control.unhold(target.name, hold=target.detail, reason=values["reason"])
    return "Ended the hold." if ended else ""


def _sent(control: LockControl, target: Target, values: Mapping[str, Any]) -> str:
    return "Resolved: it did its work." if _resolve(control, target, values, sent=True) else ""


def _unsent(control: LockControl, target: Target, values: Mapping[str, Any]) -> str:
    return "Resolved: it did not do its work." if _resolve(control, target, values, sent=False) else ""


def _resolve(control: LockControl, target: Target, values: Mapping[str, Any], *, sent: bool) -> bool:
    return control.resolve(target.name, sent=sent, tick=target.detail, mark=target.mark, reason=values["reason"])


def _requeue(control: LockControl, target: Target, values: Mapping[str, Any]) -> str:
    done = control.requeue(target.name, target.mark, reason=values["reason"])
    return f"Requeued the message {target.mark}." if done else ""


def _drop(control: LockControl, target: Target, values: Mapping[str, Any]) -> str:
    done = control.drop(target.name, target.mark, reason=values["reason"])
    return f"Dropped the message {target.mark}." if done else ""


RELEASE: Final = Operation(
    "release", "Release", "release",
    "Release these locks? Each is then granted to the next waiting call.",
    _release, ReleaseForm,
)  # fmt: skip
HOLD: Final = Operation(
    "hold", "Hold", "hold",
    "Hold these locks, so that no call runs? If an execution holds a lock, the hold begins at its release.",
    _hold, HoldForm,
)  # fmt: skip
UNHOLD: Final = Operation(
    "unhold", "Unhold", "hold", "End the hold of these locks, or cancel one that has not begun?", _unhold
)
SENT: Final = Operation(
    "sent", "Resolve: it did its work", "resolve",
    "Did these runs do their work? Then their names count as used, and no call repeats the work.",
    _sent,
)  # fmt: skip
UNSENT: Final = Operation(
    "not_sent", "Resolve: it did not do its work", "resolve",
    "Did these runs not do their work? Then the next call of each name runs.",
    _unsent,
)  # fmt: skip
REQUEUE: Final = Operation(
    "requeue", "Requeue", "requeue",
    "Put these messages back into their queues? Each runs when it gets its lock.",
    _requeue,
)  # fmt: skip
DROP: Final = Operation(
    "drop", "Drop", "drop",
    "Drop these messages? They do not run, and their results become REVOKED.",
    _drop, changed="the message is not there any more, or its end could not be stored; see the log",
)  # fmt: skip
