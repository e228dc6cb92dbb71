"""The text that says in a lock to which acquisition it belongs, and the kind of holder that it names.

An owner's acquisition is ``owner.number``. Other holders have no body, and a text of their own. The Lua scripts read
the same texts.
"""

from __future__ import annotations

from typing import Final, Literal

__all__ = [
    "GUARDED",
    "KEPT",
    "OPERATOR",
    "HolderKind",
    "acquisition_shown",
    "granted_to",
    "kind_of",
    "owner_of",
    "reserved_for",
    "shown_acquisition",
]

#: ``"owner"``: it has a lease. ``"grant"``: the lock is reserved for a waiter. ``"min_hold"`` and ``"keep_on_retry"``:
#: the body has ended, and the option keeps the lock. ``"operator"``: an operator holds it. ``"file"``: it holds the
#: lock file of its machine (``on_store_error="local"``), and perhaps not the lock in the store. ``"guard"``: its lease
#: is over, and a transaction that it guards is still open (``lease.guard``).
HolderKind = Literal["owner", "grant", "min_hold", "keep_on_retry", "operator", "file", "guard"]

#: The acquisition of a lock that ``min_hold`` keeps.
KEPT: Final = "kept"
#: The acquisition of a lock that a guarded transaction keeps.
GUARDED: Final = "guarded"
#: Start of the owner, and of the acquisition, of an operator's hold.
OPERATOR: Final = "operator:"
_GRANT, _RESERVED = "grant:", "reserved:"


def kind_of(acquisition: str) -> HolderKind:
    """Return the kind of holder that an acquisition names."""
    if acquisition == KEPT:
        return "min_hold"
    if acquisition == GUARDED:
        return "guard"
    kinds: dict[str, HolderKind] = {_GRANT: "grant", _RESERVED: "keep_on_retry", OPERATOR: "operator"}
    return next((kind for start, kind in kinds.items() if acquisition.startswith(start)), "owner")


def granted_to(identity: str) -> str:
    """Return the acquisition of a lock that is granted to a waiter."""
    return f"{_GRANT}{identity}"


def reserved_for(identity: str) -> str:
    """Return the acquisition of a lock that ``keep_on_retry`` keeps for a retry."""
    return f"{_RESERVED}{identity}"


def owner_of(acquisition: str) -> str:
    """Return the owner of an acquisition; "" if no owner has it. An operator is the owner of a hold."""
    return acquisition if acquisition.startswith(OPERATOR) else acquisition.rpartition(".")[0]


def acquisition_shown(acquisition: str, token: str, since: str) -> str:
    """Return an acquisition as operators see it, so that it names no later holder.

    The acquisitions of kept locks are not unique. The fencing token makes them so, or the start of an operator's hold
    in microseconds.
    """
    kind = kind_of(acquisition)
    if kind in ("owner", "grant"):
        return acquisition
    return f"{acquisition}@{since if kind == 'operator' else token}"


def shown_acquisition(text: str) -> tuple[str, str]:
    """Return the parts of an acquisition as operators see it: the stored text, and what follows it."""
    if text.startswith((OPERATOR, f"{KEPT}@", f"{GUARDED}@", _RESERVED)):
        acquisition, sign, detail = text.rpartition("@")
        return (acquisition, detail) if sign else (text, "")
    return text, ""
