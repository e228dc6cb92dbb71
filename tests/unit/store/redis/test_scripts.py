"""The headers of the Lua scripts: what is read from them, which are refused, and that every script has one."""

import re
from collections.abc import Iterator
from importlib import resources

import pytest

from celery_dlock.store.redis import scripts
from celery_dlock.store.redis.scripts import PARTS, SCRIPTS, Script
from celery_dlock.store.redis.scripts.header import directives, read_header, with_parts
from celery_dlock.store.redis.scripts.seated import SEAT_SCRIPTS, SHARED_PARTS
from tests.support.scripts import all_variants, shas

HEADER = """-- try: a script of this test.
-- @group once  the task has once_per
-- @group message requires once  there is a message
-- @keys lock  hash: the lock
-- @keys run  string: run mark [once]
-- @args owner  owner and number
-- @args seed  seed of the run [once]
-- @args identity  of the message [message]
-- @reply 1  done
--   always
"""
BODY = "\nreturn 1\n"


def made(text: str = HEADER + BODY, parts: dict[str, str] | None = None) -> Script:
    return Script("try", read_header("try", text), with_parts(text, parts or {}))


def all_scripts() -> list[Script]:
    return [*SCRIPTS.values(), *SEAT_SCRIPTS.values()]


def lua_files() -> Iterator[tuple[str, str]]:
    """Yield path and text of each file."""
    root = resources.files(scripts)
    for folder in ("", "lib/", "seats/"):
        for file in root.joinpath(folder).iterdir():
            if file.name.endswith(".lua"):
                yield f"{folder}{file.name}", file.read_text("utf-8")


LUA_FILES = list(lua_files())


def code_of(text: str) -> str:
    """The text without its comments."""
    return re.sub(r"--.*", "", text)


def test_variant_with_all_groups_names_all_keys_and_arguments() -> None:
    variant = made().variant("once", "message")
    assert variant.keys == ("lock", "run")
    assert variant.args == ("owner", "seed", "identity")
    assert variant.source.decode().startswith(
        "local call = redis.call local KEYS = KEYS local lock, run = KEYS[1], KEYS[2] "
        "local ARGV = ARGV local owner, seed, identity = ARGV[1], ARGV[2], ARGV[3] "
        "local ONCE, MESSAGE = true, true -- try:"
    )


def test_variant_without_groups_declares_their_names_as_nil() -> None:
    variant = made().variant()
    assert (variant.keys, variant.args) == (("lock",), ("owner",))
    assert variant.source.decode().startswith(
        "local call = redis.call local lock = KEYS[1] local owner = ARGV[1] local run, seed, identity "
        "local ONCE, MESSAGE = false, false -- try:"
    )


def test_variants_are_only_the_allowed_sets_of_groups() -> None:
    found = {(variant.keys, variant.args) for variant in all_variants(made())}
    assert found == {
        (("lock",), ("owner",)),
        (("lock", "run"), ("owner", "seed")),
        (("lock", "run"), ("owner", "seed", "identity")),
    }
    assert len(shas(made())) == 3


def test_variant_is_built_once() -> None:
    script = made()
    assert script.variant("once") is script.variant("once")
    assert script.variant("once") is script.variants[True, False]


def test_variant_of_an_unknown_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"invalid group of try\.lua: .*'queue'"):
        made().variant("queue")


def test_variadic_argument_takes_the_rest() -> None:
    variant = made("-- try: x\n-- @keys lock  it\n-- @args owner  it\n-- @args facts...  more\n-- @reply 1\n").variant()
    assert b"local owner = ARGV[1] local facts = {unpack(ARGV, 2)}" in variant.source
    assert variant.packed(("l", "o", "f", "1")).startswith(b"*7\r\n$7\r\nEVALSHA\r\n")
    assert b"\r\n$1\r\n1\r\n$1\r\nl\r\n" in variant.packed(("l", "o"))


def test_variadic_keys_take_the_rest() -> None:
    variant = made("-- try: x\n-- @keys indexes...  them\n-- @args limit  it\n-- @reply 1\n").variant()
    assert b"local indexes = KEYS local limit = ARGV[1]" in variant.source
    assert b"\r\n$1\r\n2\r\n$1\r\na\r\n$1\r\nb\r\n$2\r\n10\r\n" in variant.packed(("a", "b", "10"))


@pytest.mark.parametrize("whole", [False, True])
def test_command_with_a_missing_argument_is_refused(whole: bool) -> None:
    variant = made().variant("once")
    variant.packed(("lock", "run", "owner", "seed"), whole=whole)
    with pytest.raises(ValueError, match=r"invalid call of try\.lua: 3 texts: expected 2 keys and 2 arguments"):
        variant.packed(("lock", "run", "owner"), whole=whole)


def test_whole_command_carries_the_text() -> None:
    variant = made().variant()
    command = variant.packed(("l\u00e9", "o"), whole=True)
    assert command.startswith(b"*5\r\n$4\r\nEVAL\r\n")
    assert variant.source in command
    assert command.endswith(b"$1\r\n1\r\n$3\r\nl\xc3\xa9\r\n$1\r\no\r\n")


def test_malformed_line_of_a_header_is_refused_with_its_number() -> None:
    with pytest.raises(ValueError, match=r"try\.lua:4: 'lock hash: the lock': expected .*two spaces after the name"):
        made(HEADER.replace("lock  hash", "lock hash"))


def test_parts_stand_in_place_of_their_include_line() -> None:
    script = made(
        HEADER + "\nif true then\n  -- @include a b\nend\n", {"a": "-- lib/a: x\nA()", "b": "-- lib/b: x\nB()"}
    )
    assert "if true then\n-- lib/a: x\nA()\n-- lib/b: x\nB()\nend\n" in script.variant().source.decode()


def test_loaded_scripts_are_all_files() -> None:
    files = {path.removesuffix(".lua") for path, _ in LUA_FILES if "/" not in path}
    assert SCRIPTS.keys() == files
    assert all(script.name == name for name, script in SCRIPTS.items())


def test_loaded_seat_scripts_and_parts_are_all_files() -> None:
    loaded = {script.name for script in SEAT_SCRIPTS.values()} | SHARED_PARTS.keys()
    files = {name.removesuffix(".lua") for name, _ in LUA_FILES if name.startswith("seats/")}
    assert loaded == files
    assert all(script.name == f"seats/{name}" for name, script in SEAT_SCRIPTS.items())


@pytest.mark.parametrize("script", SEAT_SCRIPTS.values(), ids=lambda script: script.name)
def test_seat_script_has_all_of_the_plain_script_and_what_its_header_adds(script: Script) -> None:
    plain = SCRIPTS[script.name.removeprefix("seats/")]
    assert script.keys[: len(plain.keys)] == plain.keys
    assert script.args[1:] == plain.args
    assert script.groups == plain.groups
    names = [one.name for one in (*script.keys, *script.args)]
    assert len(names) == len(set(names))
    assert {"seats", "absent", "seat_limit"} <= set(names)


def is_part(name: str) -> bool:
    return name.startswith("lib/") or name.removesuffix(".lua") in SHARED_PARTS


@pytest.mark.parametrize(("name", "text"), LUA_FILES)
def test_script_header_has_a_title_and_only_known_directives(name: str, text: str) -> None:
    assert text.startswith(f"-- {name.removesuffix('.lua')}: ")
    found = {directive for _, directive, _ in directives(text)}
    assert found <= ({"uses", "after"} if is_part(name) else {"group", "keys", "args", "reply"})
    assert is_part(name) or "reply" in found


@pytest.mark.parametrize("script", all_scripts(), ids=lambda script: script.name)
def test_script_header_names_each_parameter_once_and_only_declared_groups(script: Script) -> None:
    names = [one.name for one in (*script.keys, *script.args)]
    assert len(set(names)) == len(names)
    assert {one.group for one in (*script.keys, *script.args)} <= {"", *script.groups}
    assert set(re.findall(r"^-- @group \w+ requires (\w+) ", script.body, re.MULTILINE)) <= set(script.groups)
    assert script.keys
    variadic = [one.variadic for one in (*script.keys[:-1], *script.args[:-1])]
    assert not any(variadic)


@pytest.mark.parametrize("script", all_scripts(), ids=lambda script: script.name)
def test_script_includes_each_part_once_with_what_the_part_uses_and_after_its_parts(script: Script) -> None:
    text = dict(LUA_FILES)[f"{script.name}.lua"]
    used = [part for line in re.findall(r"^ *-- @include (.*)$", text, re.MULTILINE) for part in line.split()]
    assert len(set(used)) == len(used)
    provided = {one.name for one in (*script.keys, *script.args)} | set(script.groups)
    for index, part in enumerate(used):
        for _, directive, rest in directives({**PARTS, **SHARED_PARTS}[part]):
            expected = provided if directive == "uses" else set(used[:index])
            assert set(rest.split()) <= expected, (script.name, part, directive)


@pytest.mark.parametrize(("name", "text"), LUA_FILES)
def test_script_body_reads_keys_and_arguments_by_name_only(name: str, text: str) -> None:
    code = code_of(text)
    assert not re.search(r"\b(KEYS|ARGV)\b", code), name


@pytest.mark.parametrize(("name", "text"), LUA_FILES)
def test_script_header_says_why_it_is_safe_to_send_twice(name: str, text: str) -> None:
    assert is_part(name) or re.search(r"^-- Safe to send twice: ", text, re.MULTILINE), name


@pytest.mark.parametrize("script", all_scripts(), ids=lambda script: script.name)
def test_script_uses_every_name_that_its_header_declares(script: Script) -> None:
    body = code_of(script.variant(*script.groups).source.decode().partition("-- ")[2])
    unused = [one.name for one in (*script.keys, *script.args) if not re.search(rf"\b{one.name}\b", body)]
    # "absent" is a name in the script's slot that no key has, see the keys of a bucket in store/redis/keys.
    assert unused in ([], ["absent"])
