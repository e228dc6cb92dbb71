"""What a server says when it does not do what it was asked, as our exceptions, with what to change."""

from __future__ import annotations

import re
from typing import Final

from ...errors import StoreNotReady, StoreRefused, StoreUnavailable

__all__ = ["error_from_reply", "error_from_tls", "overwritten"]

#: Nobody has to do anything, or somebody already is: the same command will be carried out later.
_PASSING: Final = {
    "LOADING": "it is loading its data",
    "BUSY": "it is busy with somebody's script (SCRIPT KILL ends that)",
    "READONLY": "it is a replica, and takes no writes until it is promoted; or dlock_url has to name the primary",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "NOREPLICAS": "it takes no writes because too few replicas are in reach (min-replicas-to-write)",
    "CLUSTERDOWN": "its cluster is down",
    "TRYAGAIN": "its cluster is moving this key",
    "max number of clients": "it has too many connections (maxclients)",
}
#: Somebody has to change something.
_LASTING: Final = {
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
    "WRONGTYPE": "a key of a lock was overwritten by somebody else: delete that key, or set another dlock_prefix",
}
_CAUSES: Final = {**_PASSING, **_LASTING}

#: What older and newer servers call the same, also inside a script.
_SPELLINGS: Final = (
    (r"cluster support disabled", "NOCLUSTER"),
    (r"unknown command .EVALSHA", "SENTINEL"),
    (r"DB index is out of range", "NODB"),
    (r"ACL failure in script|can't run this command|can't access at least one|[Nn]o permissions to", "NOPERM"),
    (r"AUTH .*without any password|invalid username-password pair", "WRONGPASS"),
    (r"unauthenticated (multi)?bulk length|HELLO must be called .*authenticated|^Authentication required", "NOAUTH"),
)
# In Redis 6.2 the code of what failed inside a script stands behind a dash, or behind the script's line.
_CODE: Final = re.compile(
    rf"(?:^|-|@user_script:\d+: )({'|'.join(code for code in _CAUSES if code.isupper())})\b|(max number of clients)"
)


#: What OpenSSL says when it does not come to terms with the server.
_TLS: Final = (
    (r"(Hostname|IP address) mismatch", "its certificate is for another host: correct the host, or ssl_check_hostname"),
    (r"CERTIFICATE_VERIFY_FAILED", "its certificate is not to be trusted: let ssl_ca_certs name who signed it"),
    (r"CERTIFICATE_REQUIRED", "it wants a certificate of ours: set ssl_certfile and ssl_keyfile"),
    (r"UNKNOWN_CA|BAD_CERTIFICATE", "it does not trust our certificate: let ssl_certfile be one that it knows"),
    (r"WRONG_VERSION_NUMBER", "it speaks no TLS: let its URL begin without the second s of rediss://"),
)


def error_from_tls(said: str) -> StoreRefused | None:
    """The exception for an error of TLS in which nothing was carried out; None where it is none of those."""
    for spelling, cause in _TLS:
        if re.search(spelling, said):
            return StoreRefused(f"the lock store refused: {cause}; it said: {said}")
    return None


def error_from_reply(said: str, code: str = "") -> StoreUnavailable:
    """The exception for an error that a server answered with.

    Args:
        said: The server's words. What they quote of the command is cut off: a parked message may be among it.
        code: Its first word, where a driver has taken that off.
    """
    said = said.partition(", with args beginning with")[0].replace("\n", " ")
    code = code or _code(said)
    cause = _CAUSES.get(code)
    if cause is None:
        return StoreRefused(f"the lock store refused: {said}")
    text = f"the lock store refused: {cause}; it said: {said}"
    return StoreNotReady(text) if code in _PASSING else StoreRefused(text)


def overwritten(said: str) -> bool:
    """Does this error say that the key holds something else than a lock?"""
    return _code(said) == "WRONGTYPE"


def _code(said: str) -> str:
    if found := _CODE.search(said):
        return found[1] or found[2]
    return next((code for spelling, code in _SPELLINGS if re.search(spelling, said)), "")
