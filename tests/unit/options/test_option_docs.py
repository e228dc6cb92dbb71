"""The docstrings of the fields of LockOptions, from which the options reference is generated."""

import ast
import inspect
import textwrap

import pytest

from celery_dlock import LockOptions
from celery_dlock.options.lock_options import OPTIONS

REQUIRES = {name: option.needs.text for name, option in OPTIONS.items() if option.needs}


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring that follows each annotated field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(following.value, ast.Constant)
            docs[field.target.id] = inspect.cleandoc(str(following.value.value))
    return docs


def test_every_option_has_a_docstring() -> None:
    assert tuple(field_docs(LockOptions)) == LockOptions.names()


@pytest.mark.parametrize("option", REQUIRES)
def test_docstring_of_dependent_option_states_its_requirement(option: str) -> None:
    doc = " ".join(field_docs(LockOptions)[option].replace("``", "").split())
    assert f"Requires {REQUIRES[option]}." in doc
