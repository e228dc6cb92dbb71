"""Does a server speak TLS where its URL does not, or the other way round? Neither side would say so."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ...errors import StoreUnavailable
from ...utils.fork_guard import no_fork
from ..location import Address, StoreLocation

__all__ = ["tls_mismatch"]

#: Where TLS is asked for beside a URL.
_BESIDE: Final = {
    "dlock_url": "dlock_transport_options",
    "broker_url": "broker_use_ssl",
    "result_backend": "redis_backend_use_ssl",
}
#: Seconds for each step.
_PATIENCE: Final = 2.0


def tls_mismatch(place: StoreLocation) -> str:
    """What to change, where one of the place's servers speaks otherwise than its URL; empty where none surely does.

    Takes seconds; for one that failed to answer. No secret is sent.
    """
    beside = _BESIDE.get(place.setting, "the settings")
    if place.kind == "sentinel":
        primary = _mismatch(place, _primary(place), (f"set 'ssl' in {beside}", f"take 'ssl' out of {beside}"))
        encrypted = bool(place.sentinel_options.get("ssl"))
        cures = 'its sentinel_kwargs want "ssl": True', 'its sentinel_kwargs must not have "ssl"'
        return primary or _mismatch(place, place.addresses, cures, encrypted=encrypted)
    cures = "its URL has to begin with rediss", "its URL has to begin with redis, without a second s"
    if place.kind == "cluster":
        cures = "its URL has to begin with rediss+cluster", "its URL has to begin with redis+cluster"
    if not place.shown.startswith("rediss"):
        cures = cures[0], f"take the options of TLS out of the URL or {beside}"
    return _mismatch(place, place.addresses, cures)


def _mismatch(
    place: StoreLocation, addresses: Sequence[Address], cures: tuple[str, str], *, encrypted: bool | None = None
) -> str:
    secure = place.options.get("connection_class")
    if encrypted is None:
        encrypted = secure is not None and secure.__name__ == "SSLConnection"
    for host, port in addresses:
        if encrypted and _answers_plainly((host, port)):
            return f"{host}:{port} speaks no TLS: {cures[1]}"
        if not encrypted and _shakes_hands((host, port)):
            return f"{host}:{port} speaks TLS only: {cures[0]}"
        if encrypted and "ssl_certfile" not in place.options and _wants_certificate((host, port)):
            return f"{host}:{port} wants a certificate of ours: set ssl_certfile and ssl_keyfile"
    return ""


def _primary(place: StoreLocation) -> Sequence[Address]:
    from .sentinel import SentinelDoor  # noqa: PLC0415  # importing celery_dlock loads no driver

    try:
        return [SentinelDoor(place, timeout=_PATIENCE).address()]
    except StoreUnavailable:
        return []


def _answers_plainly(address: Address) -> bool:
    try:
        with socket.create_connection(address, _PATIENCE) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _shakes_hands(address: Address) -> bool:
    try:
        with _secured(address):
            return True
    except OSError:
        return False


def _wants_certificate(address: Address) -> bool:
    try:
        with _secured(address) as secure:
            # TLS 1.3 tells it only when the hands are shaken. Who wants none says nothing until it is asked.
            secure.settimeout(_PATIENCE / 4)
            secure.recv(1)
    except OSError as error:
        return "CERTIFICATE_REQUIRED" in str(error)
    return False


@contextmanager
def _secured(address: Address) -> Iterator[ssl.SSLSocket]:
    # Not the default context: nothing is verified, so no certificates need to be loaded.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        no_fork(),
        socket.create_connection(address, _PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as secure,
    ):
        yield secure
