"""Store locations: a URL is parsed once, checked, and shown without its secrets.

The scheme decides between one server, Sentinel and Cluster. A list of URLs means Redlock: :mod:`..config.locations`.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from ..errors import InvalidLockOptions

__all__ = [
    "IGNORED_OPTIONS",
    "SCHEMES",
    "Address",
    "StoreLocation",
    "provided",
    "safe_error_text",
    "scheme_of",
    "shown",
    "tls",
]

Address: TypeAlias = tuple[str, int]
Kind: TypeAlias = Literal["server", "sentinel", "cluster", "memory", "postgresql", "mysql"]

_SOCKETS = ("unix", "redis+socket")
_CLUSTERS = ("redis+cluster", "rediss+cluster")
_MEMORY = "memory"
_POSTGRESQL = "postgresql"
_MYSQL = ("mysql", "mariadb")
SCHEMES: Final = ("redis", "rediss", *_SOCKETS, "sentinel", *_CLUSTERS, _MEMORY, _POSTGRESQL, *_MYSQL)

#: Options of redis-py that are ignored: timeouts, retries and pools are those of this library.
IGNORED_OPTIONS: Final = frozenset((
    "max_connections", "timeout", "socket_timeout", "socket_connect_timeout", "retry_on_timeout", "retry_on_error",
    "health_check_interval", "protocol", "decode_responses", "encoding", "encoding_errors",
))  # fmt: skip
#: The beginning of a second URL.
_ANOTHER: Final = re.compile(r"[,;]\s*[a-z+]+://")
#: A host with its port: only such a text may be shown. The next one matches the beginning of a value in a query.
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[^:=\[\]]*)(:\d{1,5})?")
_QUERY: Final = re.compile(r"[?#&][^=]*=")
#: Characters that no host has. Without this check, errors would show a query without its "?", with a password.
_NO_HOST: Final = re.compile(r"[\s&=;,?#@\\]")
#: The beginning of an option of a database.
_OPTION: Final = re.compile(r"[a-z_]+=")
#: The name of a PostgreSQL schema that needs no escapes.
_SCHEMA: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_COMMITS: Final = ("on", "off", "local", "remote_write", "remote_apply")
_FORMS: Final = {
    **dict.fromkeys(("redis", "rediss"), "host:port/number of the database"),
    **dict.fromkeys(_SOCKETS, "/path of the socket"),
    **dict.fromkeys(_CLUSTERS, "host:port,host:port"),
    "sentinel": "host:port;sentinel://host:port/number of the database",
    _MEMORY: " and nothing behind it",
    **dict.fromkeys((_POSTGRESQL, *_MYSQL), "user:password@host:port,host:port/database?option=value"),
}


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """The location of one store: a server, a Sentinel set, a Cluster, or the memory of the process.

    Args:
        kind: The kind of servers at the addresses, or ``"memory"``.
        shown: The URL without user and password.
        setting: The setting that names the URL.
        addresses: The addresses of the server, of the sentinels, or of some Cluster nodes; empty for a Unix socket.
        options: The connection options for redis-py or PyMySQL, except host and port; for PostgreSQL all of libpq's,
            ``schema`` and ``synchronous_commit``. They contain the secrets.
        master_name: The name of the primary, as the sentinels know it.
        sentinel_options: The connection options for the sentinels, for redis-py's client.
        shared: What is known about the servers, or the data of a memory store. All stores of this process share it.
        logged: The facts that a connection of this process has logged. The others do not log them again.
    """

    kind: Kind
    shown: str
    setting: str
    addresses: tuple[Address, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    master_name: str | None = None
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    shared: dict[str, Any] = field(default_factory=dict, repr=False, hash=False, compare=False)
    logged: set[str] = field(default_factory=set, repr=False, hash=False, compare=False)

    @classmethod
    def of(cls, url: str, *, setting: str = "dlock_url", more: Mapping[str, Any] | None = None) -> StoreLocation:
        """Return the location that a URL names.

        Args:
            url: A URL with one of the :data:`SCHEMES`.
            setting: The setting that holds the URL, for errors.
            more: Options beside the URL: ``master_name``, ``sentinel_kwargs``, ``credential_provider`` and ``ssl``. The
                query precedes ``master_name`` and ``credential_provider`` of these.

        Raises:
            InvalidLockOptions: The URL cannot be used. The message shows no password.
        """
        scheme = scheme_of(url)
        if scheme not in SCHEMES:
            expected = ", ".join(f"{s}://" for s in SCHEMES)
            valkey = "; use redis:// for Valkey too" if scheme.startswith("valkey") else ""
            raise InvalidLockOptions(
                f"invalid {setting}={shown(url)!r}: expected a URL that starts with one of {expected}{valkey}"
            )
        try:
            return _with_hosts(_READERS.get(scheme, _server)(url, scheme, setting, dict(more or {})))
        except _Form:
            reason = f"expected {scheme}://{_FORMS[scheme]}"
            if "@" in url:
                # One of these characters may end the host early. Then the shown URL looks correct.
                reason += " (percent-encode / @ : ? # in user and password: p%2Fw for p/w)"
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            reason = safe_error_text(error)
        raise InvalidLockOptions(f"{setting}: cannot keep locks at {shown(url)!r}; {reason}") from None

    def options_at(self, address: Address | None) -> dict[str, Any]:
        """Return all options that redis-py needs for a connection to one of the servers."""
        return dict(self.options) | ({"host": address[0], "port": address[1]} if address else {})


class _Form(ValueError):
    """The URL does not have the form that its scheme requires."""


def _with_hosts(found: StoreLocation) -> StoreLocation:
    """Return the location if its hosts can be hosts.

    Raises:
        _Form: A host contains a character that is not allowed in host names.
    """
    if any(_NO_HOST.search(host) for host, _ in found.addresses):
        raise _Form
    return found


def shown(url: str) -> str:
    """Return the URL without user, password and query. "…" replaces text that may be one of them."""
    # A semicolon or comma ends a URL only if a scheme follows: a password may contain one.
    return "".join(map(_shown, re.split(r"([,;]\s*)(?=[a-z+]+://)", url)))


def _shown(url: str) -> str:
    # Do not use urlsplit: a password may contain a character that ends the host.
    scheme, colon, rest = url.partition(":")
    if not rest.startswith("/"):
        return _public(url.lstrip("/"))  # without a scheme, the URL begins with the secrets
    location = rest.lstrip("/")
    return f"{scheme}{colon}{rest[: len(rest) - len(location)]}{_public(location)}"


def _public(location: str) -> str:
    """Return the text between the password and the query, without text that may belong to them."""
    secret, _, rest = location.rpartition("@")
    if _QUERY.search(secret):
        return "…"  # the @ may belong to a value of the query, followed by the rest of a password
    rest = re.split("[?#&]", rest)[0]
    hosts, slash, path = rest.partition("/")
    if not all(map(_HOST.fullmatch, hosts.split(","))):
        # If the host is missing, the password is in the position of the port.
        user = hosts.partition(":")[0]
        return "…" if "=" in user else f"{user}:…"
    return hosts + slash + (path if "=" not in path else "…")


def scheme_of(url: str) -> str:
    """Return the text before the first colon. Not by urlsplit, because its errors quote the password."""
    return url.partition(":")[0].lower()


def safe_error_text(error: Exception) -> str:
    """Return the text of an error about a URL in one line, without parts of the URL."""
    if "Port" in str(error):
        # The error quotes the supposed port: the beginning of a password that contains / ? or #.
        return "its port is no number up to 65535, or its password is not percent-encoded"
    if any(word in str(error) for word in ("netloc", "IPv6", "IPvFuture", "IPv4")):
        # The error of urlsplit quotes user and password, or the text in brackets.
        return "its host cannot be read, or its password is not percent-encoded"
    if str(error).startswith("invalid literal for int()"):
        # Celery's backend quotes the path in its error. It may be the end of a password that contains / ? or #.
        return "no number of a database, or its password is not percent-encoded"
    if "unexpected keyword argument" in str(error):
        # If a password ended the host early, its rest is read as the query.
        named = re.search(r"argument ('\w+')", str(error))
        return f"redis-py knows no option {named[1]}" if named else "redis-py does not know all options of its query"
    return " ".join(str(error).split())


def tls(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return TLS options in the form of redis-py, from the form of Celery's settings."""
    # Celery takes "CERT_NONE"; redis-py takes "none" or a number of the ssl module.
    return {
        key: value.removeprefix("CERT_").lower() if key == "ssl_cert_reqs" and isinstance(value, str) else value
        for key, value in options.items()
        if key.startswith("ssl_")
    }


def _server(url: str, scheme: str, setting: str, more: dict[str, Any]) -> StoreLocation:
    parts = urlsplit(url)
    if _ANOTHER.search(url) or "," in _hosts(parts):
        raise ValueError(
            "this is one server; for Redlock give a list of URLs and not one text, for a Cluster redis+cluster://"
        )
    if not url.startswith(f"{scheme}://") or (scheme not in _SOCKETS and not re.fullmatch(r"/?\d*/?", parts.path)):
        # redis-py would read the first form as localhost, and the second as database 0.
        raise _Form
    from redis.connection import parse_url  # noqa: PLC0415  # importing celery_dlock loads no driver

    # Build the URL here, because urlunsplit drops the slashes of a URL without a host.
    bare = f"{'unix' if scheme in _SOCKETS else scheme}://{parts.netloc}{parts.path}"
    options = dict(parse_url(bare)) | _asked(parts.query, more)
    if scheme != "rediss" and any(key.startswith("ssl_") for key, _ in parse_qsl(parts.query)):
        raise ValueError("its ssl_ options ask for rediss://")
    if scheme in _SOCKETS and _secured(more):
        raise ValueError("a socket of this machine speaks no TLS: take 'ssl' out of dlock_transport_options")
    address = () if scheme in _SOCKETS else ((options.pop("host", "localhost"), options.pop("port", 6379)),)
    return StoreLocation("server", shown(url), setting, address, options)


def _sentinels(url: str, _scheme: str, setting: str, more: dict[str, Any]) -> StoreLocation:
    chunks = [urlsplit(chunk) for chunk in url.split(";")]
    if any("," in _hosts(chunk) for chunk in chunks):
        raise ValueError("sentinels are separated by semicolons: sentinel://host1:26379;sentinel://host2:26379")
    if not all(chunk.scheme == "sentinel" and chunk.hostname for chunk in chunks):
        raise _Form
    if not all(re.fullmatch(r"/?\d*/?", chunk.path) for chunk in chunks):
        raise _Form
    user = _one("users", [unquote(chunk.username or "") for chunk in chunks])
    password = _one("passwords", [unquote(chunk.password or "") for chunk in chunks])
    options = _credentials(user, password)
    options["db"] = int(_one("databases", [chunk.path.strip("/") for chunk in chunks]) or 0)
    queries = dict(parse_qsl(_one("options", [chunk.query for chunk in chunks])))
    name = queries.pop("master_name", None) or more.get("master_name")
    if not name:
        raise ValueError(
            f"{setting.partition('_')[0]}_transport_options={{'master_name': ...}} has to name the primary"
        )
    options |= _asked(urlencode(queries), more)
    addresses = tuple(_address(chunk, 26379) for chunk in chunks)
    return StoreLocation("sentinel", shown(url), setting, addresses, options, name, more.get("sentinel_kwargs") or {})


def _cluster(url: str, scheme: str, setting: str, more: dict[str, Any]) -> StoreLocation:
    parts = urlsplit(url)
    if _ANOTHER.search(url):
        raise ValueError(f"nodes are separated by commas: {scheme}://host1:7000,host2:7000")
    secret, _, hosts = parts.netloc.rpartition("@")
    if "@" in secret:
        raise ValueError("user and password stand once, before the first host, percent-encoded")
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if not all(node.hostname for node in nodes):
        raise _Form
    if "@" in parts.path:
        raise _Form
    if parts.path.strip("/") not in ("", "0"):
        raise ValueError("a Redis Cluster has no database but 0")
    user, _, password = secret.partition(":")
    options = _credentials(unquote(user), unquote(password)) | _asked(parts.query, more)
    if scheme.startswith("rediss"):
        options["connection_class"] = _ssl_connection()
    return StoreLocation("cluster", shown(url), setting, tuple(_address(node, 6379) for node in nodes), options)


def _memory(url: str, _scheme: str, setting: str, more: dict[str, Any]) -> StoreLocation:
    if url != f"{_MEMORY}://":
        raise _Form
    if used := sorted(key for key, value in more.items() if value):
        raise ValueError(f"{used[0]} needs a server, and this store is in the memory of the process")
    return StoreLocation("memory", url, setting)


def _postgresql(url: str, scheme: str, setting: str, more: dict[str, Any]) -> StoreLocation:
    addresses, named, words = _database(url, scheme, more, 5432)
    options: dict[str, Any] = dict(zip(("user", "password", "dbname"), named, strict=True))
    options = {key: text for key, text in options.items() if text}
    if addresses:
        options |= {
            "host": ",".join(host for host, _ in addresses),
            "port": ",".join(str(port) for _, port in addresses),
        }
    options |= words
    if not options.get("host"):
        raise _Form
    if not _SCHEMA.fullmatch(options.get("schema", "public")):
        raise ValueError("invalid schema: expected letters, digits and underscores, without a digit at the beginning")
    if options.get("synchronous_commit", "on") not in _COMMITS:
        raise ValueError(f"invalid synchronous_commit: expected one of {', '.join(_COMMITS)}")
    return StoreLocation("postgresql", shown(url), setting, addresses, options)


def _mysql(url: str, scheme: str, setting: str, more: dict[str, Any]) -> StoreLocation:
    addresses, named, words = _database(url, scheme, more, 3306)
    if not addresses or not named[2]:
        raise _Form
    options = dict(zip(("user", "password", "database"), named, strict=True))
    if taken := options.keys() & words.keys():
        raise ValueError(f"{min(taken)} stands before the query of the URL, and not in it")
    return StoreLocation("mysql", shown(url), setting, addresses, options | words)


def _database(
    url: str, scheme: str, more: dict[str, Any], port: int
) -> tuple[tuple[Address, ...], tuple[str, str, str], dict[str, str]]:
    """Return the addresses, then user, password and database, and the options of an SQL store's URL."""
    parts = urlsplit(url)
    if not url.startswith(f"{scheme}://") or "@" in parts.path or "/" in parts.path[1:] or parts.fragment:
        raise _Form
    if used := sorted(key for key, value in more.items() if value):
        raise ValueError(f"{used[0]} is for Redis: give options of {scheme} in the query of the URL")
    secret, _, hosts = parts.netloc.rpartition("@")
    if "@" in secret:
        raise ValueError("user and password stand once, before the first host, percent-encoded")
    addresses = tuple(_address(urlsplit(f"//{host}"), port) for host in hosts.split(",")) if hosts else ()
    user, _, password = secret.partition(":")
    words = [word for word in parts.query.split("&") if word]
    if not all(map(_OPTION.match, words)):
        raise _Form  # without its text, which may be the end of a password
    return addresses, (unquote(user), unquote(password), unquote(parts.path[1:])), dict(parse_qsl(parts.query))


_READERS: Final = {
    "sentinel": _sentinels, _MEMORY: _memory, _POSTGRESQL: _postgresql, **dict.fromkeys(_CLUSTERS, _cluster),
    **dict.fromkeys(_MYSQL, _mysql),
}  # fmt: skip


def _one(what: str, given: Iterable[str]) -> str:
    """Return the value that all addresses with a value agree on; "" if none has one."""
    different = set(given) - {""}
    if len(different) > 1:
        raise ValueError(f"its addresses name different {what}")
    return different.pop() if different else ""


def _hosts(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _address(parts: SplitResult, port: int) -> Address:
    return unquote(parts.hostname or ""), parts.port or port


def _credentials(user: str | None, password: str | None) -> dict[str, Any]:
    return {key: text for key, text in (("username", user), ("password", password)) if text}


def _asked(query: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed options of a query and of the settings beside the URL."""
    from redis.connection import parse_url  # noqa: PLC0415  # importing celery_dlock loads no driver

    words = {"db" if key == "virtual_host" else key: value for key, value in parse_qsl(query)}
    # redis-py converts the types of the options that it knows.
    options = dict(parse_url(f"redis://h?{urlencode({k: v for k, v in words.items() if k not in IGNORED_OPTIONS})}"))
    options.pop("host")
    secure = tls(options)
    given = more.get("ssl")
    options |= (tls(given) if isinstance(given, Mapping) else {}) | secure
    if secure or _secured(more):
        options["connection_class"] = _ssl_connection()
    provider = options.get("credential_provider") or more.get("credential_provider")
    if provider:
        options |= provided(provider)
    return options


def _secured(more: Mapping[str, Any]) -> bool:
    """Return whether a setting beside the URL asks for TLS. An empty dict does too, as in ``broker_use_ssl``."""
    return more.get("ssl") is True or isinstance(more.get("ssl"), Mapping)


def provided(provider: Any) -> dict[str, Any]:
    """Return the options for a credential provider, which replaces user and password.

    Args:
        provider: The provider, or the dotted path of its class.

    Raises:
        ValueError: It is no credential provider, or the path names no class.
    """
    from redis import CredentialProvider  # noqa: PLC0415  # importing celery_dlock loads no driver

    # If the text names no class, do not show it: it may be the secret itself.
    found = _made(_named(provider)) if isinstance(provider, str) else provider
    if not isinstance(found, CredentialProvider):
        raise ValueError(f"credential_provider=<{type(found).__name__}> is no redis.CredentialProvider")  # noqa: TRY004  # a setting
    return {"username": None, "password": None, "credential_provider": found}


def _made(provider: Callable[[], Any]) -> Any:
    try:
        return provider()
    except Exception as error:
        raise ValueError(f"credential_provider cannot be made: {type(error).__name__}: {error}") from error


def _named(path: str) -> Any:
    """Return the class at a dotted path.

    Raises:
        ValueError: There is no such class. The error does not quote the path.
        ImportError: The module of the class imports a module that is missing.
    """
    if "." not in path:
        raise ValueError("credential_provider is no dotted path of a class")
    try:
        return pkgutil.resolve_name(path)
    except ModuleNotFoundError as error:
        if error.name and not f"{path}.".startswith(f"{error.name}."):
            raise
        missing = "there is no module of that name"
    except AttributeError:
        missing = "its module has nothing of that name"
    except ValueError:
        missing = "it is no dotted name"
    raise ValueError(f"credential_provider cannot be imported: {missing}")


def _ssl_connection() -> type[Any]:
    from redis.connection import SSLConnection  # noqa: PLC0415  # importing celery_dlock loads no driver

    return SSLConnection
