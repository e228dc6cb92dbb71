"""Error replies of a server as exceptions, with the cause, and with the change that removes the cause."""

from __future__ import annotations

import math
import re
from typing import Final

from ...errors import ScriptStopped, StoreNotReady, StoreQuarantined, StoreRefused, StoreUnavailable

__all__ = ["error_from_reply", "error_from_tls", "overwritten", "quarantined", "right_missing"]

#: Temporary causes by error code: without a change by the operator, the same command succeeds later.
_TEMPORARY: Final = {
    "LOADING": "it is loading its data",
    "BUSY": "it is busy with another program's script (SCRIPT KILL ends that)",
    "READONLY": "it is a replica, and takes no writes until it is promoted; or dlock_url has to name the primary",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "NOREPLICAS": "it takes no writes because too few replicas are in reach (min-replicas-to-write)",
    "CLUSTERDOWN": "its cluster is down",
    "TRYAGAIN": "its cluster is moving this key",
    "max number of clients": "it has too many connections (maxclients)",
}
#: Causes that last until the operator changes something, by error code.
_PERMANENT: Final = {
    "OOM": "it has no memory left for locks: raise its maxmemory or make room",
    "MISCONF": "it cannot write to its disk, and so takes no writes: see its log",
    "NOAUTH": "it wants a password: put it into dlock_url",
    "WRONGPASS": "user or password is wrong: correct dlock_url",
    "NOPERM": "a right is missing: grant what docs/reference/redis-keys-and-permissions.md lists under Permissions",
    "MOVED": "it is a node of a Redis Cluster: let dlock_url begin with redis+cluster:// (with TLS rediss+cluster://)",
    "CROSSSLOT": "it is a Redis Cluster, perhaps behind a proxy: let dlock_url be redis+cluster://, and name its nodes",
    "NOCLUSTER": "it is a single server and no node of a Redis Cluster: let dlock_url begin with redis:// or rediss://",
    "SENTINEL": "it is a sentinel and keeps no locks: let dlock_url begin with sentinel://, and set master_name",
    "NODB": "it has fewer databases: correct the number at the end of dlock_url, or raise its `databases`",
    "WRONGTYPE": "another program overwrote a key of a lock: delete that key, or set another dlock_prefix",
}
_CAUSES: Final = {**_TEMPORARY, **_PERMANENT}

#: Error texts without a code, and the code for each. They differ by server version, and inside a script.
_SPELLINGS: Final = (
    (r"cluster support disabled", "NOCLUSTER"),
    (r"unknown command .EVALSHA", "SENTINEL"),
    (r"DB index is out of range", "NODB"),
    (r"ACL failure in script|can't run this command|can't access at least one|[Nn]o permissions to", "NOPERM"),
    (r"AUTH .*without any password|invalid username-password pair", "WRONGPASS"),
    (r"unauthenticated (multi)?bulk length|HELLO must be called .*authenticated|^Authentication required", "NOAUTH"),
)
# For an error inside a script, Redis 6.2 writes the code after a dash, or after the line number.
_CODE: Final = re.compile(
    rf"(?:^|-|@user_script:\d+: )({'|'.join(code for code in _CAUSES if code.isupper())})\b|(max number of clients)"
)


#: OpenSSL's texts for a failed handshake, with their causes.
_TLS: Final = (
    (r"(Hostname|IP address) mismatch", "its certificate is for another host: correct the host, or ssl_check_hostname"),
    (r"CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted: let ssl_ca_certs name the CA that signed it"),
    (r"CERTIFICATE_REQUIRED", "it requires a client certificate: set ssl_certfile and ssl_keyfile"),
    (r"UNKNOWN_CA|BAD_CERTIFICATE", "it does not trust the client certificate: let ssl_certfile be one that it trusts"),
    (r"WRONG_VERSION_NUMBER", "it does not use TLS: begin its URL with redis://, without the second s of rediss://"),
)


def error_from_tls(text: str) -> StoreRefused | None:
    """Return the exception for a failed TLS handshake, or None for any other error. No command was executed."""
    for spelling, cause in _TLS:
        if re.search(spelling, text):
            return StoreRefused(f"the lock store refused: {cause}; server reply: {text}")
    return None


def error_from_reply(text: str, code: str = "") -> StoreUnavailable:
    """Return the exception for an error reply.

    Args:
        text: Text of the reply. Quoted arguments are cut off, because one of them may be a parked message.
        code: Error code, if redis-py removed it from the text.
    """
    text = text.partition(", with args beginning with")[0].replace("\n", " ")
    code = code or _code(text)
    cause = _CAUSES.get(code)
    message = f"the lock store refused: {cause}; server reply: {text}" if cause else f"the lock store refused: {text}"
    if code in _TEMPORARY:
        return StoreNotReady(message)
    # A server that is full refuses only the first write of a script.
    stopped = "@user_script" in text and code not in ("OOM", "MISCONF")
    return ScriptStopped(message) if stopped else StoreRefused(message)


def right_missing(text: str) -> bool:
    """Return whether an error reply means that the user may not run the command."""
    return _code(text) == "NOPERM"


def overwritten(text: str) -> bool:
    """Return whether an error reply means that another program overwrote a key."""
    return _code(text) == "WRONGTYPE"


def _code(text: str) -> str:
    if found := _CODE.search(text):
        return found[1] or found[2]
    return next((code for spelling, code in _SPELLINGS if re.search(spelling, text)), "")


def quarantined(left_ms: int) -> StoreQuarantined:
    """Return the exception for an acquire that a quarantine refused (``scripts/lib/quarantine.lua``)."""
    return StoreQuarantined(
        "the lock store was started, emptied or promoted to primary a moment ago: it grants nothing new for another "
        f"{math.ceil(left_ms / 100) / 10:.1f} s, until the leases that it may have lost have expired "
        "(dlock_quarantine)",
        left_ms / 1000,
    )
