"""The actions of operators in words, as the command line and the dashboard show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["ACTIONS", "DONE", "RIGHTS", "Action"]


class Action(NamedTuple):
    """An action of an operator in words. It is a method of ``LockControl``.

    Args:
        title: Its name: the heading of its form, and the text of its button.
        about: What it does: the help of its command, and the explanation of its form.
        done: Its result.
        gone: Why it changed nothing: what the operator saw is no longer there; "" if that cannot be.
        question: The dashboard asks this before it acts; "" if a mistake is easily corrected.
    """

    title: str
    about: str
    done: str
    gone: str = ""
    question: str = ""


#: The actions, by the names under which the rights of an operator are given.
ACTIONS: Final[Mapping[str, Action]] = {
    "release": Action(
        "Release the lock",
        "Release the lock, and grant it to the next waiter. If its lease was renewed less than half a ttl ago, its "
        "holder counts as alive. A release by force frees the lock all the same, and another call may run beside the "
        "holder until it notices.",
        "the lock is released",
        "the lock is free",
        "Release this lock?",
    ),
    "hold": Action(
        "Hold the lock",
        "Hold the lock for a limited time, so that no call runs. If it is held now, the hold begins at its release.",
        "the lock is held",
    ),
    "unhold": Action(
        "End the hold",
        "End the hold, or cancel one that has not begun.",
        "the hold has ended",
        "there is no such hold",
    ),
    "resolve": Action(
        "Settle the outcome",
        "Record whether a run of unknown outcome did its work.",
        "the outcome is settled",
        "there is no such unknown outcome",
    ),
    "forget": Action(
        "Delete the run mark",
        "Delete the run mark of a name or of a tick (once_per), so that the next call runs.",
        "the run mark is deleted",
        "there is no such run mark",
        "Delete the run mark?",
    ),
    "requeue": Action(
        "Requeue",
        "Put the dead letter back into its queue.",
        "the dead letter is back in its queue",
        "there is no such dead letter",
    ),
    "drop": Action(
        "Drop",
        "End the waiter or dead letter: its result becomes REVOKED.",
        "the message is dropped; its result is REVOKED",
        # LockControl.drop() does not tell these cases apart.
        "the message is no longer there, it runs already, or its end could not be stored; in the last case it is a "
        "dead letter now, and the log has the reason",
        "Drop this message? Its result becomes REVOKED.",
    ),
    "drop_claim": Action(
        "Delete the claim",
        "Delete the claim (unique), so that another call can be published. The message stays in the broker, and runs.",
        "the claim is deleted",
        "there is no such claim",
        "Delete the claim?",
    ),
}
#: The rights that an operator may have.
RIGHTS: Final = frozenset(ACTIONS)
#: The results by action. ``hold_later``: the lock is held by a call now.
DONE: Final[Mapping[str, str]] = {
    **{name: action.done for name, action in ACTIONS.items()},
    "hold_later": "the lock will be held when its present holder releases it",
}
