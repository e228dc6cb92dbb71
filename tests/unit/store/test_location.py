"""Store locations: URLs, Celery's own settings, and what is refused."""

from __future__ import annotations

import itertools
import re
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery
from kombu import Connection as KombuConnection
from redis import CredentialProvider
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

from celery_dlock.config.settings import Settings
from celery_dlock.errors import InvalidLockOptions
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation, shown
from celery_dlock.store.redis.endpoint import ServerEndpoint
from tests.unit.settings import settings_of

MASTER = {"master_name": "m"}
#: As redis-py has it.
VERIFIED = ssl.CERT_REQUIRED


class Rotating(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        return "who", "s3cret"


class Unmade(CredentialProvider):
    def __init__(self) -> None:
        raise RuntimeError("no region")


ROTATING = f"{__name__}.Rotating"


def place(broker: str | list[str] = "amqp://b//", backend: str | None = None, **conf: Any) -> StoreLocation:
    (found,) = settings_of(broker, backend, **conf).locations
    return found


def options(found: StoreLocation) -> dict[str, Any]:
    """Options that are not passed to redis-py, except the class of a plain connection."""
    return {key: value for key, value in found.options.items() if value is not None}


def more(url: Any, given: Any = None, **options: Any) -> dict[str, Any]:
    return {"dlock_url": url, "dlock_transport_options": given or options}


def refusal(**given: Any) -> str:
    with pytest.raises(InvalidLockOptions) as raised:
        place(**given)
    assert "s3cret" not in str(raised.value)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# dlock_url


@pytest.mark.core
@pytest.mark.parametrize(
    ("url", "kind", "addresses", "how"),
    [
        ("redis://h", "server", [("h", 6379)], {}),
        ("redis://h:7/3", "server", [("h", 7)], {"db": 3}),
        ("redis:///3", "server", [("localhost", 6379)], {"db": 3}),
        ("redis://u%40x:p%2Fw%3A%40@h", "server", [("h", 6379)], {"username": "u@x", "password": "p/w:@"}),
        ("redis://:p@h", "server", [("h", 6379)], {"password": "p"}),
        ("redis://[::1]:7", "server", [("::1", 7)], {}),
        ("rediss://h", "server", [("h", 6379)], {"connection_class": SSLConnection}),
        (
            "rediss://h?ssl_cert_reqs=CERT_NONE&ssl_check_hostname=false",
            "server",
            [("h", 6379)],
            {"connection_class": SSLConnection, "ssl_cert_reqs": "none", "ssl_check_hostname": False},
        ),
        ("unix:///s?db=2", "server", [], {"connection_class": UnixDomainSocketConnection, "path": "/s", "db": 2}),
        (
            "redis+socket:///s?virtual_host=2",
            "server",
            [],
            {"connection_class": UnixDomainSocketConnection, "path": "/s", "db": 2},
        ),
        ("sentinel://a;sentinel://b:7/3?master_name=m", "sentinel", [("a", 26379), ("b", 7)], {"db": 3}),
        (
            "sentinel://u:p@a/2?master_name=m;sentinel://u:p@b/2",
            "sentinel",
            [("a", 26379), ("b", 26379)],
            {"username": "u", "password": "p", "db": 2},
        ),
        (
            "redis+cluster://u:p%2Cw@a,b:7,[::1]:8",
            "cluster",
            [("a", 6379), ("b", 7), ("::1", 8)],
            {"username": "u", "password": "p,w"},
        ),
        ("rediss+cluster://a:7/0", "cluster", [("a", 7)], {"connection_class": SSLConnection}),
    ],
)
def test_a_url_names_servers_user_password_database_and_tls(
    url: str, kind: str, addresses: list[tuple[str, int]], how: dict[str, Any]
) -> None:
    found = place(dlock_url=url)
    assert (found.kind, list(found.addresses)) == (kind, addresses)
    assert {"db": 0} | options(found) == {"db": 0} | how
    assert (found.setting, "p" in options(found).get("password", "")) == ("dlock_url", "password" in how)


def test_what_a_url_cannot_say_stands_in_dlock_transport_options() -> None:
    provider = Rotating()
    more = {**MASTER, "sentinel_kwargs": {"password": "x"}, "ssl": {"ssl_cert_reqs": "none"}}
    found = place(dlock_url="sentinel://a", dlock_transport_options=more | {"credential_provider": provider})
    assert (found.master_name, found.sentinel_options) == ("m", {"password": "x"})
    secure = {"connection_class": SSLConnection, "ssl_cert_reqs": "none"}
    assert options(found) == {"db": 0, "credential_provider": provider, **secure}


@pytest.mark.parametrize("ssl", [True, {}, {"ssl_ca_certs": "/ca"}])
@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "redis+cluster://h", "sentinel://h?master_name=m"])
def test_tls_that_is_asked_for_beside_the_url_is_had_and_verified(url: str, ssl: Any) -> None:
    found = options(place(**more(url, ssl=ssl)))
    assert found["connection_class"] is SSLConnection
    assert found.get("ssl_ca_certs") == ("/ca" if ssl not in (True, {}) else None)
    found.pop("ssl_ca_certs", None)
    assert ServerEndpoint(found).connection(1).cert_reqs == VERIFIED  # type: ignore[attr-defined]  # it is of TLS


def test_what_redis_py_does_not_know_is_refused_in_our_words() -> None:
    for conf, said in (
        ({"dlock_url": "redis://:s3cret@h?sockettimeout=3"}, "'redis://h'; redis-py knows no option 'sockettimeout'"),
        (
            more("sentinel://h", master_name="m", sentinel_kwargs={"pasword": "s3cret"}),
            "'sentinel://h'; sentinel_kwargs: redis-py knows no option 'pasword'",
        ),
    ):
        with pytest.raises(InvalidLockOptions) as raised:
            open_store((place(**conf),), timeout=1, prefix="dlock")
        assert str(raised.value) == f"dlock_url: cannot keep locks at {said}"


@pytest.mark.invariant("locks-use-celerys-connection")
def test_times_and_retries_are_never_taken_from_a_url() -> None:
    asked = "socket_timeout=99&socket_connect_timeout=99&retry_on_timeout=yes&health_check_interval=1"
    found = place(dlock_url=f"redis://h?{asked}&max_connections=1&timeout=9&decode_responses=1&client_name=me")
    assert found.options == {"client_name": "me"}
    made = ServerEndpoint(found.options_at(found.addresses[0])).connection(1.5)
    assert isinstance(made, Connection)
    assert (made.socket_timeout, made.socket_connect_timeout, made.retry._retries) == (1.5, 1.5, 0)


LIST = ["redis://a", "redis://b", "redis://u:s3cret@c/1"]


def test_a_list_of_servers_is_redlock() -> None:
    app = Celery("a", set_as_current=False)
    app.conf.dlock_url = LIST
    assert [one.addresses for one in Settings.of(app).locations] == [(("a", 6379),), (("b", 6379),), (("c", 6379),)]


@pytest.mark.invariant("unusable-setting-ends-the-worker")
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:s3cret@h:port/0", "its port is no number up to 65535, or its password is not percent-encoded"),
        ("redis://u:s3cret@h:99999999/0", "its port is no number"),
        (
            "redis://u:s3/cret@h/0",
            "expected redis://host:port/number of the database (percent-encode / @ : ? # in user and password: p%2Fw",
        ),
        ("redis://u:s3[cret@h/0", "its host cannot be read, or its password is not percent-encoded"),
        ("redis://u:s3cret\u2100@h/0", "its host cannot be read, or its password is not percent-encoded"),
        ("redis://:s3cret@a,redis://:s3cret@b", "for Redlock give a list of URLs and not one text"),
        ("redis://:s3cret@a;redis://:s3cret@b", "for Redlock give a list of URLs and not one text"),
        ("redis://:s3cret@a,b", "this is one server; for Redlock give a list of URLs"),
        ("sentinel://:s3cret@a:1,b:2?master_name=m", "sentinels are separated by semicolons: sentinel://host1:26379;"),
        ("redis+cluster://a;redis+cluster://b", "nodes are separated by commas: redis+cluster://host1:7000,host2:7000"),
        ("redis+cluster://:s3cr@t/s3cret@a:1,b:1", "(percent-encode / @ : ? # in user and password"),
        (b"redis://:s3cret@h", "invalid dlock_url=<bytes>: expected a URL that starts with one of redis://"),
        ({"a": "redis://:s3cret@h"}, "invalid dlock_url=<dict>: expected"),
        (["redis://:s3cret@h", ["redis://:s3cret@h"]], "invalid dlock_url=['redis://h', '<list>']: expected"),
        ("redis://h?credential_provider=s3cret", "credential_provider is no dotted path of a class"),
        ("redis://u:s3#cret@h/0", "its port is no number"),
        ("redis://h/x", "expected redis://host:port/number of the database"),
        ("redis:/h", "expected redis://host:port/number of the database"),
        ("redis://h?ssl_ca_certs=/x", "its ssl_ options ask for rediss://"),
        ("redis://h&password=s3cret", "expected redis://host:port/number of the database"),
        ("redis://h ;password=s3cret", "expected redis://host:port/number of the database"),
        ("redis+cluster://a,b&password=s3cret", "expected redis+cluster://host:port,host:port"),
        ("sentinel://a&password=s3cret?master_name=m", "expected sentinel://host:port;sentinel://host:port/number"),
        ("redis://h?credential_provider=no.such.Class", "cannot be imported: there is no module of that name"),
        ("redis://h?credential_provider=s3cret.it", "cannot be imported: there is no module of that name"),
        ("redis://h?credential_provider=redis.s3cret", "cannot be imported: its module has nothing of that name"),
        ("redis://h?credential_provider=s3cret.1!", "cannot be imported: it is no dotted name"),
        (
            f"redis://h?credential_provider={__name__}.Unmade",
            "credential_provider cannot be made: RuntimeError: no region",
        ),
        ("redis://h?credential_provider=collections.Counter", "is no redis.CredentialProvider"),
        ("sentinel://:s3cret@a;sentinel://:other@b?master_name=m", "its addresses name different passwords"),
        ("sentinel://a/1;sentinel://b/2?master_name=m", "its addresses name different databases"),
        ("sentinel://a;b?master_name=m", "expected sentinel://host:port;sentinel://host:port/number"),
        ("sentinel://:s3cret@a", "dlock_transport_options={'master_name': ...} has to name the primary"),
        ("redis+cluster://h/3", "a Redis Cluster has no database but 0"),
        ("redis+cluster://u:s3cret@a,u:s3cret@b", "user and password stand once, before the first host"),
        ("redis+cluster://", "expected redis+cluster://host:port,host:port"),
        (["redis://:s3cret@a"], "expected an odd number of servers, at least 3, and these are 1;"),
        (LIST[:2], "at least 3, and these are 2; an even number tolerates no more failures"),
        ([*LIST, "redis://d"], "expected an odd number of servers, at least 3, and these are 4"),
        ([*LIST[:2], "redis://:s3cret@a:6379/1"], "redis://a:6379/1 is named twice"),
        ([*LIST[:2], "sentinel://c?master_name=m"], "sentinel://c is more than one server"),
        ([*LIST, 7], "expected a URL that starts with one of"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_without_its_password(url: Any, said: str) -> None:
    message = refusal(dlock_url=url)
    assert message.startswith(("dlock_url", "invalid dlock_url"))
    assert said in message


def test_brackets_in_a_password_are_read_or_refused_as_this_python_does() -> None:
    """Python 3.10 takes them for a part of the password; later ones take them for an address of IPv6."""
    url = "redis://u:s3[cret]@h/0"
    try:
        password = urlsplit(url).password
    except ValueError:
        said = refusal(dlock_url=url)
        assert "its host cannot be read, or its password is not percent-encoded" in said
        assert "cret" not in said
    else:
        found = place(dlock_url=url)
        assert found.options["password"] == password == "s3[cret]"
        assert (found.addresses, found.shown) == ((("h", 6379),), "redis://h/0")


@pytest.mark.invariant("unusable-setting-ends-the-worker")
@pytest.mark.parametrize(
    ("conf", "said"),
    [
        (
            {"dlock_url": "redis://h", "dlock_transport_options": {"master": "m"}},
            "unknown option 'master'; known are cr",
        ),
        ({"dlock_url": "redis://h", "dlock_transport_options": 5}, "invalid dlock_transport_options=<int>: expected"),
        (more("redis://h", [("sentinel_kwargs", {"password": "s3cret"})]), "=<list>: expected a dict with any of"),
        (more("redis://h", "password=s3cret"), "dlock_transport_options=<str>: expected a dict with"),
        (more("redis://h", {"a": 1, 2: 3}), "dlock_transport_options: unknown option '2'"),
        (more("redis://h", credential_provider=("u", "s3cret")), "credential_provider=<tuple> is no redis.Credential"),
        (more("redis://h", ssl={"ca_certs": "/x"}), "unknown option 'ca_certs' in ssl: expected options whose names"),
        (more("redis://h", ssl="s3cret"), "invalid ssl=<str>: expected True, or a dict such as"),
        (more("unix:///s", ssl=True), "a socket of this machine speaks no TLS"),
        (
            more("redis://:s3cret@h", master_name="m"),
            "master_name needs sentinel:// URLs, and dlock_url='redis://h' na",
        ),
        (more("redis+cluster://h", sentinel_kwargs={"username": "u"}), "sentinel_kwargs needs sentinel:// URLs"),
        (more(["redis://a", "redis://b", "redis://c"], master_name="m"), "master_name needs sentinel:// URLs"),
        (more("sentinel://h", master_name=["m"]), "invalid master_name=<list>: expected text"),
        (
            more("sentinel://h", master_name="m", sentinel_kwargs="s3cret"),
            "invalid sentinel_kwargs=<str>: expected a dict",
        ),
        (
            more("sentinel://h", master_name="m", sentinel_kwargs={"ssl": {}}),
            "invalid ssl=<dict> in sentinel_kwargs: expected True",
        ),
        ({"broker": "redis://h", "dlock_transport_options": MASTER}, "needs dlock_url, which is not set"),
    ],
)
def test_dlock_transport_options_are_checked(conf: dict[str, Any], said: str) -> None:
    assert said in refusal(**conf)


# What Celery's users have set already


@pytest.mark.invariant("locks-use-celerys-connection")
@pytest.mark.core
@pytest.mark.parametrize(
    ("conf", "addresses", "how"),
    [
        ({"broker": "redis://u%40x:p%2Fw@h:7/3"}, [("h", 7)], {"username": "u@x", "password": "p/w", "db": 3}),
        (
            {"broker": "redis://h", "broker_user": "u", "broker_password": "p"},
            [("h", 6379)],
            {"username": "u", "password": "p", "db": 0},
        ),
        (
            {"broker": "redis://h", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca"}},
            [("h", 6379)],
            {"connection_class": SSLConnection, "ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca", "db": 0},
        ),
        (
            {"broker": "rediss://h?ssl_cert_reqs=required"},
            [("h", 6379)],
            {"connection_class": SSLConnection, "ssl_cert_reqs": ssl.CERT_REQUIRED, "db": 0},
        ),
        ({"broker": "rediss://h"}, [("h", 6379)], {"connection_class": SSLConnection, "ssl_cert_reqs": 0, "db": 0}),
        ({"broker": "redis://one/1;redis://two/2"}, [("one", 6379)], {"db": 1}),
        (
            {"broker": "sentinel://:p@a:1/2;sentinel://b", "broker_transport_options": MASTER},
            [("a", 1), ("b", 26379)],
            {"password": "p", "db": 2},
        ),
        (
            {"broker": ["sentinel://a:1", "sentinel://b"], "broker_transport_options": MASTER},
            [("a", 1), ("b", 26379)],
            {"db": 0},
        ),
        (
            {"backend": "redis://:p@h/5", "redis_username": "u"},
            [("h", 6379)],
            {"username": "u", "password": "p", "db": 5},
        ),
        ({"backend": "redis://h", "redis_password": "p"}, [("h", 6379)], {"password": "p", "db": 0}),
        (
            {"backend": "rediss://h", "redis_backend_use_ssl": {"ssl_cert_reqs": "none"}},
            [("h", 6379)],
            {"connection_class": SSLConnection, "ssl_cert_reqs": ssl.CERT_NONE, "db": 0},
        ),
        (
            {"backend": "sentinel://:p@a:1/2;sentinel://b:2", "result_backend_transport_options": MASTER},
            [("a", 1), ("b", 2)],
            {"password": "p", "db": 2},
        ),
        (
            {"backend": "redis+socket:///s?virtual_host=4"},
            [],
            {"connection_class": UnixDomainSocketConnection, "path": "/s", "db": 4},
        ),
    ],
)
def test_without_dlock_url_locks_are_where_celery_connects_to_and_as_the_same_user(
    conf: dict[str, Any], addresses: list[tuple[str, int]], how: dict[str, Any]
) -> None:
    found = place(**conf)
    assert (list(found.addresses), options(found)) == (addresses, how)
    assert found.setting == ("result_backend" if "backend" in conf else "broker_url")


def test_sentinel_kwargs_of_the_broker_and_of_the_backend_count() -> None:
    more = {**MASTER, "sentinel_kwargs": {"password": "x"}, "visibility_timeout": 5}
    for conf in (
        {"broker": "sentinel://a", "broker_transport_options": more},
        {"backend": "sentinel://a:26379", "result_backend_transport_options": more},
    ):
        found = place(**conf)  # type: ignore[arg-type]  # as they are
        assert (found.addresses, found.master_name) == ((("a", 26379),), "m")
        assert found.sentinel_options == {"password": "x"}


#: The oldest Celery and Kombu that are supported know no providers.
CELERY_PROVIDES = pytest.mark.skipif(
    not hasattr(KombuConnection(), "credential_provider"), reason="Celery and Kombu 5.5 know no credential providers"
)


@pytest.mark.parametrize(
    "conf",
    [
        {"dlock_url": f"redis://u:p@h?credential_provider={ROTATING}"},
        {"dlock_url": "redis://u:p@h", "dlock_transport_options": {"credential_provider": ROTATING}},
        *(
            pytest.param(conf, marks=CELERY_PROVIDES)
            for conf in (
                {"broker": f"redis://u:p@h?credential_provider={ROTATING}"},
                {"backend": f"redis://u:p@h?credential_provider={ROTATING}"},
                {"backend": "redis://h", "redis_backend_credential_provider": ROTATING},
                {"backend": "redis://h", "redis_backend_credential_provider": Rotating()},
            )
        ),
    ],
)
def test_a_credential_provider_stands_in_the_place_of_user_and_password(conf: dict[str, Any]) -> None:
    found = options(place(**conf))
    assert isinstance(found.pop("credential_provider"), CredentialProvider)
    assert set(found) <= {"db"}


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"broker": "sentinel://:s3cret@a"}, "broker_url: cannot keep locks at 'sentinel://a'; broker_transport_opt"),
        ({"broker": "sentinel://a", "broker_transport_options": {"master_name": 5}}, "broker_url: cannot keep locks"),
        ({"broker": "redis://:s3[cret@h"}, "broker_url: cannot keep locks at 'redis://h'; its host cannot be read"),
        ({"backend": "sentinel://:s3cret@a"}, "result_backend: cannot keep locks at 'sentinel://a'; result_backend_tr"),
        ({"backend": "rediss://:s3cret@h"}, "result_backend: cannot keep locks at 'rediss://h'; A rediss:// URL must"),
        ({"broker": "redis://:s3cret@h/x"}, "broker_url: cannot keep locks at 'redis://h/x'; no number of a database"),
    ],
)
def test_what_celery_itself_could_not_use_is_refused_by_the_settings_name(conf: dict[str, Any], said: str) -> None:
    assert refusal(**conf).startswith(said)


# No password is ever shown


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("sentinel://u:s3cret@a:1/2;sentinel://u:s3cret@b:2?x=s3cret", "sentinel://a:1/2;sentinel://b:2"),
        ("sentinel://u:s3;cret@a;sentinel://u:s3@cret@b", "sentinel://a;sentinel://b"),
        ("redis+cluster://u:s3cret@a:1,b:2", "redis+cluster://a:1,b:2"),
    ],
)
def test_a_url_of_many_hosts_is_shown_without_any_password(url: str, seen: str) -> None:
    assert shown(url) == seen


def test_url_of_mysql_names_servers_account_database_and_options() -> None:
    found = StoreLocation.of("mariadb://u:p%2Fw@h,h2:3307/db?ssl_ca=/ca.pem")
    assert (found.kind, found.addresses) == ("mysql", (("h", 3306), ("h2", 3307)))
    assert found.options == {"user": "u", "password": "p/w", "database": "db", "ssl_ca": "/ca.pem"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://h", "expected mysql://user:password@host:port,host:port/database?option=value"),
        ("mysql:///db", "expected mysql://"),
        ("mysql://h/db?ssl_ca", "expected mysql://"),
        ("mysql://h/db?password=p", "password stands before the query"),
        ("mysql://u:p@a,u:p@b/db", "user and password stand once"),
    ],
)
def test_url_of_mysql_that_cannot_be_used_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidLockOptions, match=re.escape(said)):
        StoreLocation.of(url)


USER, PASSWORD = "user", "s3cret"
#: What a password may be that is not percent-encoded: each of these ends a part of a URL.
PASSWORDS = [PASSWORD, *(f"1{end}{PASSWORD}" for end in ":/?#@[],;&="), f"/{PASSWORD}", f"{PASSWORD}/"]
QUERIES = ["", "?password={}", "?ssl_password={}", "?username={}&db=1", "#{}", "?db={}", "/0?password={}&x=1"]
SCHEMES = ["", "//", "redis:", "redis:/", *(f"{s}://" for s in ("redis", "rediss", "unix", "redis+socket", "sentinel"))]
SCHEMES += [
    "postgresql://",
    "mysql://",
    "redis+cluster://",
    "valkey://",
    "amqp://",
    "redis://h1,redis://",
    "sentinel://h1;sentinel://",
]


def urls_with_secrets() -> Iterator[str]:
    for begin, secret in itertools.product(SCHEMES, PASSWORDS):
        yield from (f"{begin}{user}:{secret}@h:1/0" for user in (USER, ""))
        for query, host in itertools.product(filter(None, QUERIES), ("h", "h:1", f"{USER}:{secret}@h", "h:1,h:2")):
            if "@" not in secret or not query.startswith("#"):  # that is a user with a # in the password
                yield f"{begin}{host}{query.format(secret)}"
    # The host was forgotten. What looks like a port in place of the password, or like a host behind it, is one.
    for begin, secret in itertools.product(SCHEMES, [PASSWORD, f"1:{PASSWORD}", f"1={PASSWORD}"]):
        yield from (f"{begin}{user}:{secret}{end}" for user in (USER, "") for end in ("", "/0"))


def test_no_url_is_shown_with_its_password_however_it_is_misspelt() -> None:
    urls = {*urls_with_secrets(), f"redis://{USER}:/{PASSWORD}"}
    assert len(urls) > 3000
    assert {url: shown(url) for url in urls if PASSWORD in shown(url)} == {}


#: So many of them that each test takes about a second.
PART = 11


@pytest.mark.parametrize("setting", ["dlock_url", "a list", "broker", "backend"])
def test_no_error_and_no_repr_of_a_misspelt_url_shows_its_password(setting: str) -> None:
    leaks = {}
    for url in itertools.islice(urls_with_secrets(), 0, None, PART):
        conf = {"dlock_url": [url, "redis://a", "redis://b"]} if setting == "a list" else {setting: url}
        said = said_of(conf)
        if PASSWORD in said:
            leaks[url] = said
    assert leaks == {}


def said_of(conf: dict[str, Any]) -> str:
    try:
        found = settings_of(**conf)
        for one in found.locations:
            open_store((one,), timeout=1, prefix="dlock").close()
    except InvalidLockOptions as error:
        return str(error)
    return f"{found!r} {[one.shown for one in found.locations]}"


def test_broker_url_with_two_passwords_is_refused_while_another_error_is_handled() -> None:
    """Python 3.11 then reports a KeyError, which said nothing of the setting."""
    try:
        {}["missing"]
    except LookupError:
        with pytest.raises(InvalidLockOptions, match=r"broker_url"):
            settings_of(broker="redis://u:p@h/?password=x")


def test_neither_a_place_nor_the_settings_show_a_password() -> None:
    app = Celery("a", broker="sentinel://u:s3cret@a", set_as_current=False)
    app.conf.broker_transport_options = {**MASTER, "sentinel_kwargs": {"password": "s3cret"}}
    found = Settings.of(app)
    assert found.locations[0].options["password"] == "s3cret"
    assert "s3cret" not in repr(found)
