"""A server that speaks TLS: the distribution's, because the wheels' cannot."""

import subprocess
from pathlib import Path
from typing import Any

from tests.support.cluster_nodes import BUS
from tests.support.processes import HOST, free_port
from tests.support.servers import Server

BINARY = Path("/usr/bin/redis-server")


class TlsServer(Server):
    """One server on one TLS port, with an authority of its own; use as a context manager. For tests marked `servers`.

    Args:
        folder: of these files only; afterwards it holds `ca.crt`, and of the server and a client a `.crt` and a `.key`.
        mutual: refuse clients without a certificate of the same authority.
        options, password: as a `Server`'s.
    """

    def __init__(self, folder: Path, *, mutual: bool = False, password: str | None = None, **options: Any) -> None:
        super().__init__(folder, binary=BINARY, password=password, **options)
        self.mutual = mutual
        folder.mkdir(parents=True, exist_ok=True)
        make_certificates(folder)

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    def plain_url(self, db: int = 0) -> str:
        """Return the URL of the same place without TLS."""
        return super()._url(f":{self.password}@" if self.password else "", db)

    def _url(self, user: str, db: int) -> str:
        """Return the URL as redis-py and Celery read it, with the client's certificate if the server asks for one."""
        wanted = f"ssl_cert_reqs=required&ssl_ca_certs={self.authority}"
        if self.mutual:
            wanted += f"&ssl_certfile={self.folder / 'client.crt'}&ssl_keyfile={self.folder / 'client.key'}"
        return f"rediss://{user}{HOST}:{self.port}/{db}?{wanted}"

    def _command(self) -> list[str | Path]:
        command = super()._command()
        # The port of `Server` becomes the TLS one, and there is no other.
        command[command.index("--port")] = "--tls-port"
        own = self.folder / "server.crt", self.folder / "server.key"
        tls: list[str | Path] = ["--port", "0", "--tls-cert-file", own[0], "--tls-key-file", own[1]]
        tls += ["--tls-ca-cert-file", self.authority, "--tls-auth-clients", "yes" if self.mutual else "optional"]
        return [*command, *tls]


class TlsNode(Server):
    """A node of a Cluster with a plain port and one of TLS, by which the nodes talk to one another.

    TLS from the start. If nodes were switched one by one, they could wait for ever for a handshake. A node that was not
    switched yet reads it as plain words.

    Args:
        folder: of this Cluster only.
        certificates: the folder of :func:`make_certificates`.
        options: as a `Server`'s.
    """

    def __init__(self, folder: Path, *, certificates: Path, **options: Any) -> None:
        super().__init__(folder, binary=BINARY, **options)
        self.certificates = certificates
        #: Another one at each start.
        self.tls_port = 0

    def _command(self) -> list[str | Path]:
        assert self.port is not None
        self.tls_port = free_port()
        ports = ["--tls-port", str(self.tls_port), "--cluster-port", str(self.port + BUS), "--tls-cluster", "yes"]
        own = self.certificates / "server.crt", self.certificates / "server.key"
        tls: list[str | Path] = ["--tls-cert-file", own[0], "--tls-key-file", own[1]]
        tls += ["--tls-ca-cert-file", self.certificates / "ca.crt", "--tls-auth-clients", "no"]
        return [*super()._command(), *ports, *tls]


def make_certificates(folder: Path) -> None:
    """A throw-away authority `ca`, and signed by it `server` (localhost) and `client`."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    own: list[str | Path] = [
        "-keyout",
        folder / "ca.key",
        "-out",
        folder / "ca.crt",
        "-subj",
        "/CN=throw-away authority",
    ]
    _openssl("req", "-x509", *curve, *own)
    names = folder / "names"
    names.write_text(f"subjectAltName=DNS:localhost,IP:{HOST}\n")
    for who in ("server", "client"):
        request, key, signed = (folder / f"{who}.{kind}" for kind in ("csr", "key", "crt"))
        _openssl("req", *curve[:-2], "-keyout", key, "-out", request, "-subj", f"/CN={who}")
        by: list[str | Path] = ["-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", "2"]
        _openssl("x509", "-req", "-in", request, "-out", signed, "-extfile", names, *by)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
