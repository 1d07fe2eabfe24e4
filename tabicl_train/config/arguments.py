"""Parses key=value arguments of the commands other than tabicl-train, without Hydra."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tabicl_train.config.documentation import class_doc, default_of, field_docs, value_text
from tabicl_train.config.suggestions import unknown_key, wrong_type
from tabicl_train.errors import ConfigError


def parse(options: type, arguments: list[str]) -> Any:
    """key=value arguments as an instance of a dataclass of options; raises ConfigError with everything wrong."""
    schema = OmegaConf.structured(options)
    keys = list(schema)
    problems, given = [], set()
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            problems.append(f"{text!r} is not of the form key=value")
        elif key not in keys:
            problems.append(unknown_key("", key, keys))
        else:
            given.add(key)
            try:
                schema[key] = read_value(value)
            except OmegaConfBaseException as error:
                is_null = read_value(value) is None
                problems.append(f"{key} is {value or 'empty'}; it needs a value" if is_null else wrong_type(key, error))
    problems += [f"{key} is missing" for key in keys if OmegaConf.is_missing(schema, key) and key not in given]
    if problems:
        mistake = ConfigError(problems)
        mistake.add_note(f"usage: {usage(options)}")
        raise mistake
    return OmegaConf.to_object(schema)


def read_value(text: str) -> Any:
    """A value in YAML, its numbers as text: the options have types, and a folder may be called 2024_10.

    What is no YAML, such as a path with an opening quote, is plain text.
    """
    if text in ("", "null"):
        return None
    try:
        return yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError:
        return text


def usage(options: type) -> str:
    return class_doc(options).splitlines()[0]


def help_text(options: type, prefix: str = "") -> str:
    """Usage, description, and every option with its default.

    prefix: of the options on the command line
    """
    description = class_doc(options).partition("\n")[2].strip("\n")
    lines = [f"usage: {usage(options)}", "", description, ""]
    for field in dataclasses.fields(options):
        default = default_of(field)
        shown = "" if default in (MISSING, None) else f" (default: {value_text(default)})"
        lines.append(option_line(prefix + field.name, field_docs(options)[field.name] + shown))
    return "\n".join(lines)


def option_line(key: str, text: str, width: int = 22) -> str:
    """A key and, beside it, what it means, wrapped to the width of a terminal."""
    return textwrap.fill(f"{key:<{width - 4}}  {text}", 110, initial_indent="  ", subsequent_indent=" " * width)
