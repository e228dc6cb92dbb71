"""The variants of the Lua scripts that the library can send."""

import itertools
import re
from collections.abc import Iterator

from celery_dlock.store.redis.scripts import Script, ScriptVariant

_REQUIRES = re.compile(r"^-- @group (\w+) requires (\w+) ", re.MULTILINE)


def all_variants(script: Script) -> Iterator[ScriptVariant]:
    """Yield every allowed variant: one that has a group also has the group that it requires."""
    required = dict(_REQUIRES.findall(script.body))
    for present in itertools.product((True, False), repeat=len(script.groups)):
        chosen = dict(zip(script.groups, present, strict=True))
        if all(chosen.get(required.get(group, ""), True) for group in script.groups if chosen[group]):
            yield script.variants[present]


def shas(script: Script) -> frozenset[str]:
    """Return the SHA-1 of every variant."""
    return frozenset(variant.sha for variant in all_variants(script))
