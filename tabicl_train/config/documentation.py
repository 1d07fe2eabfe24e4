"""Reads the documentation of options: the string under each field of a dataclass."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import textwrap
from typing import Any, get_origin, get_type_hints


def class_doc(cls: type) -> str:
    """The text of a dataclass's docstring, without the sections that numpydoc underlines."""
    doc = inspect.getdoc(cls)
    assert doc is not None  # Python writes the docstring of a dataclass that has none
    return re.split(r"\n\n\w+\n-+\n", doc)[0]


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The sentence under each field of a dataclass and of the dataclasses it inherits from, by field name.

    Python does not keep these strings, so they are read from the source. Fields without one are left out.
    """
    docs = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(definition, ast.ClassDef)
            for field, below in itertools.pairwise(definition.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs


def type_text(cls: type, name: str) -> str:
    """The type of a field as a reader of YAML knows it: `int or null` for `int | None`."""
    hint = get_type_hints(cls)[name]
    text = re.sub(r"\w+\.", "", hint.__name__ if isinstance(hint, type) and not get_origin(hint) else str(hint))
    return text.replace(" | ", " or ").replace("None", "null")


def default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def value_text(value: Any) -> str:
    """A value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)
