"""Builds and checks dataclasses of options: the one mechanism for runs, commands, priors, optimizers, callbacks, ...

    @dataclass
    class Ring(Prior):
        radius: float = option(1.0, above=0)

    build(Ring, {"radius": 2})           # Ring(radius=2.0), []
    build(Ring, {"radus": 2}, "prior")   # Ring(radius=1.0), ["prior.radus: no such setting; did you mean ...?"]
    check(Ring(radius=-1.0))             # ["radius is -1.0; it must be positive"]

An option is a field with a type and a default. `option` declares what else is known about it; a plain `field` works as
well. A class may have a method `problems`, which lists contradictions with other options or with files. Nothing here
raises an error: each function lists problems, so that all mistakes are reported at once. A problem is one line that
begins with the key.
"""

from __future__ import annotations

import copy
import difflib
import functools
import math
import numbers
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["REQUIRED", "Typed", "build", "check", "closest", "option", "options_of", "plain", "read", "unknown"]

NEEDS_MAPPING = "it must be a mapping, such as {name: 1}"
NEEDS_LIST = "it must be a list, such as [1,2]"
NEEDS_VALUE = "it needs a value"
SCALARS: dict[type, type] = {bool: bool, int: numbers.Integral, float: numbers.Real, str: str}
TRUTH = dict.fromkeys(("true", "yes", "y", "on", "1"), True) | dict.fromkeys(("false", "no", "n", "off", "0"), False)


REQUIRED: Any = "???"  # the default of an option that must be given, as in OmegaConf
WRONG: Any = object()  # takes the place of a value that cannot be read; the option keeps its default


class Typed:
    """A value from a command line. An option of type str takes the text, bool reads the text, others take the value.

    Parameters
    ----------
    text : str or None
        What was typed; None if that is not known, since the value may have been typed in another form.
    value : object
        What it means, such as the number 202410 for 2024_10.
    """

    def __init__(self, text: str | None, value: Any) -> None:
        self.text = text
        self.value = value

    def __str__(self) -> str:
        """Return what was typed."""
        return str(self.value) if self.text is None else self.text


def option(
    default: Any = REQUIRED,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Collection[str] | None = None,
    inf: bool | None = None,
    resume: str | None = None,
    chosen: Callable[[Mapping[str, Any]], Any] | None = None,
    kw_only: bool = False,
) -> Any:
    """Declare an option: a field of a dataclass, with what is known about its values.

    Parameters
    ----------
    default : object
        The default. An option without one must be given. Each object gets its own copy of a list, a dictionary or a
        dataclass; if the default is a class, each object gets a new instance of it.
    at_least, above, at_most, below : float, optional
        Bounds of a number, or of each number in a list.
    choices : collection of str, optional
        The texts that are allowed, also for each element of a list.
    inf : bool, optional
        Whether a number may be inf. Default: numbers must be finite.
    resume : str, optional
        What another value means for a run that is continued, see tabicl_train/config/on_resume.py.
    chosen : callable, optional
        For a section whose options depend on a name among its values: returns the dataclass for the values, or a
        message why there is none.
    kw_only : bool
        See `dataclasses.field`.

    Returns
    -------
    dataclasses.Field
        The field.
    """
    facts: dict[str, Any] = {
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "choices": choices,
        "inf": inf,
        "resume": resume,
        "chosen": chosen,
    }
    metadata = {name: fact for name, fact in facts.items() if fact is not None}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata, kw_only=kw_only)
    if isinstance(default, list | dict) or is_dataclass(default):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata, kw_only=kw_only)
    return field(default=default, metadata=metadata, kw_only=kw_only)


@functools.cache
def options_of(cls: Any) -> dict[str, tuple[Any, Field]]:
    """Return the options of a dataclass by name, each with its type and its field; another class has none."""
    if not is_dataclass(cls):
        return {}
    kinds = get_type_hints(cls)
    return {each.name: (kinds[each.name], each) for each in fields(cls) if each.init}


def default_of(declared: Field) -> Any:
    """Return the default of an option."""
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return REQUIRED if declared.default is MISSING else declared.default


def is_required(value: Any) -> bool:
    """Whether a value is the default of an option that must be given."""
    return isinstance(value, str) and value == REQUIRED


def build(cls: Any, values: Any, key: str = "", keys: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Build an object from its options, and list everything that is wrong with them; see `read` and `check`."""
    built, problems = read(cls, values, key, keys)
    return built, merged(problems, check(built, key))


def read(cls: Any, values: Any, key: str = "", keys: Iterable[str] = (), base: Any = None) -> tuple[Any, list[str]]:
    """Build an object from the options that differ from the defaults.

    Parameters
    ----------
    cls : type
        A dataclass, or a class without options.
    values : mapping
        The options by name; those of a section are a mapping.
    key : str
        The name of the object in messages, such as "model"; "" for the whole configuration.
    keys : iterable of str
        The names of all options of the whole configuration, to suggest one for a name that does not exist.
    base : object, optional
        An object with the defaults. Default: those of the class.

    Returns
    -------
    object
        The object; options that are wrong have their defaults.
    list of str
        Names that do not exist, values of the wrong type, and options that are missing.
    """
    options = options_of(cls)
    given = {} if base is None else {name: getattr(base, name) for name in options}
    if not isinstance(values, Mapping):
        return cls(**given), [f"{key}: {NEEDS_VALUE if plain(values) is None else NEEDS_MAPPING}"]

    # The options that are given.
    problems = []
    for name, value in values.items():
        if name not in options:
            problems.append(unknown(joined(key, name), options, keys, value))
            continue
        kind, declared = options[name]
        default = given.get(name, default_of(declared))
        converted, wrong = convert(value, kind, joined(key, name), declared.metadata.get("chosen"), keys, default)
        problems += wrong
        if converted is not WRONG:
            given[name] = converted

    # The others have their defaults.
    for name, (_, declared) in options.items():
        if is_required(given.setdefault(name, default_of(declared))) and name not in values:
            problems.append(f"{joined(key, name)} is missing")
    return cls(**given), problems


def convert(
    value: Any, kind: Any, key: str, chosen: Callable | None = None, keys: Iterable[str] = (), default: Any = None
) -> tuple[Any, list[str]]:
    """Convert a value to the type of its option.

    Parameters
    ----------
    value : Any
        The value, as it was read.
    kind : Any
        The type, as the option declares it.
    key : str
        The dotted name of the option, for messages.
    chosen : callable, optional
        For an option that is a choice, such as a prior: returns the dataclass for plain values, or a message.
    keys : iterable of str
        Names to suggest for unknown ones.
    default : Any
        The value of the option if this value were not given.

    Returns
    -------
    Any
        The converted value, or WRONG.
    list of str
        The problems with it.
    """
    # A choice, whose class depends on the value.
    if chosen is not None and not is_dataclass(value):
        if plain(value) is None and default is None:
            return None, []
        if not isinstance(value, Mapping):
            return WRONG, [f"{key}: {NEEDS_VALUE if plain(value) is None else NEEDS_MAPPING}"]
        cls = chosen(plain(value))
        if isinstance(cls, str):
            return WRONG, [cls]
        if "name" in value and "name" not in options_of(cls):
            # A configuration holds priors and objectives as plain values: the options and the name.
            options = {name: each for name, each in value.items() if name != "name"}
            built, problems = read(cls, options, key, keys)
            return plain(built) | {"name": plain(value["name"])}, problems
        kind = cls

    # A dataclass of options.
    if isinstance(kind, type) and is_dataclass(kind):
        if isinstance(value, kind):
            return value, []
        return read(kind, value, key, keys, default if type(default) is kind else None)

    # One of several types; a list; a dictionary.
    origin = get_origin(kind) or kind
    if origin in (Union, types.UnionType):
        return convert_to_one(value, get_args(kind), key, keys)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return WRONG, [f"{key}: {NEEDS_VALUE if plain(value) is None else NEEDS_LIST}"]
        items = get_args(kind)
        item = items[0] if items and (origin is list or items[-1] is ...) else Any
        converted = [convert(each, item, key) for each in value]
        problems = [line for _, lines in converted for line in lines]
        if problems:
            return WRONG, [in_list(problems[0], key, plain(value), item)]
        return origin(each for each, _ in converted), []
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return WRONG, [f"{key}: {NEEDS_VALUE if plain(value) is None else NEEDS_MAPPING}"]
        (_, item) = get_args(kind) or (Any, Any)
        by_name = {}
        problems = []
        for name, each in value.items():
            by_name[name], wrong = convert(each, item, joined(key, name), None, keys)
            problems += wrong
        return (WRONG if any(each is WRONG for each in by_name.values()) else by_name), problems
    return convert_scalar(value, kind, key)


def convert_to_one(value: Any, kinds: tuple[Any, ...], key: str, keys: Iterable[str]) -> tuple[Any, list[str]]:
    """Convert a value to the first of several types that it fits."""
    if plain(value) is None and type(None) in kinds:
        return None, []
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    tried = [convert(value, kind, key, None, keys) for kind in kinds]
    for converted, problems in tried:
        if not problems:
            return converted, []
    if len(kinds) == 1 or plain(value) is None:
        return tried[0]
    return WRONG, [f"{key} is {plain(value)!r}; it must be of type {' or '.join(map(type_name, kinds))}"]


def convert_scalar(value: Any, kind: Any, key: str) -> tuple[Any, list[str]]:
    """Convert a value to a type other than a list, a dictionary or a dataclass."""
    # What was typed counts for texts and booleans.
    if isinstance(value, Typed):
        if kind is str and isinstance(value.text, str):
            return value.text, []
        if kind is str and isinstance(value.value, int | float):
            return WRONG, [f"{key}: {value.value} was typed in another form; put it in quotes: '...'"]
        if kind is bool and str(value.text).lower() in TRUTH:
            return TRUTH[str(value.text).lower()], []
    # Otherwise the value counts: a NumPy number is a number, and 2 is 2.0 where a float is asked for.
    value = plain(value)
    if kind in SCALARS:
        if isinstance(value, SCALARS[kind]) and (kind is bool or not isinstance(value, bool)):
            return kind(value), []
        if value is None:
            return WRONG, [f"{key}: {NEEDS_VALUE}"]
        return WRONG, [f"{key} is {value!r}; it must be of type {kind.__name__}"]
    if get_origin(kind) is Literal and value not in get_args(kind):
        return WRONG, [f"{key} is {value!r}; it must be one of {', '.join(map(str, get_args(kind)))}"]
    # Any type, or a class that only the owner of the option can check.
    return value, []


def type_name(kind: Any) -> str:
    """Write a type as in source code: int, list[str]."""
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def plain(value: Any) -> Any:
    """Return the plain values of an object: dictionaries for dataclasses, and values for `Typed` ones."""
    if isinstance(value, Typed):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in options_of(value.__class__)}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def check(options: Any, key: str = "") -> list[str]:
    """List what is wrong with the values of an object of options, and of the objects inside it.

    These are values of the wrong type, numbers that are not finite or outside their bounds, texts that are not among
    the choices, and what the method `problems` of each object lists. Each option is reported once, by the first of
    these.

    Parameters
    ----------
    options : object
        A dataclass object.
    key : str
        Its name in messages; "" for the whole configuration.

    Returns
    -------
    list of str
        The problems.
    """
    problems = wrong_types(options, key)
    # With wrong types, the method `problems` could fail.
    if problems:
        return problems
    problems = declared_problems(options, key)
    is_missing = any(is_required(getattr(options, name)) for name in options_of(options.__class__))
    if is_missing or not hasattr(options, "problems"):
        return problems
    return merged(problems, [in_section(key, line, options) for line in options.problems()])


def wrong_types(options: Any, key: str) -> list[str]:
    """List the values of the wrong type, in an object that was built in Python."""
    problems = []
    for name, (kind, declared) in options_of(options.__class__).items():
        value = getattr(options, name)
        if value is not declared.default and not is_required(value):
            problems += convert(value, kind, joined(key, name))[1]
    return problems


def declared_problems(options: Any, key: str = "") -> list[str]:
    """List values that break the declarations of their options, also inside sections."""
    problems = []
    for name, (_, declared) in options_of(options.__class__).items():
        value = getattr(options, name)
        # A prior or an objective in plain values is checked where it is built.
        if not ("chosen" in declared.metadata and isinstance(value, Mapping)):
            problems += value_problems(value, joined(key, name), declared.metadata)
    return problems


def value_problems(value: Any, key: str, facts: Mapping[str, Any]) -> list[str]:
    """List how a value breaks the declaration of its option."""
    # A section, a dictionary, a list.
    if is_dataclass(value) and not isinstance(value, type):
        return check(value, key)
    if isinstance(value, Mapping):
        return [line for name, each in value.items() for line in value_problems(each, joined(key, name), facts)]
    if isinstance(value, list | tuple):
        problems = [line for each in value for line in value_problems(each, key, facts)]
        return [in_list(problems[0], key, list(value))] if problems else []
    # A text, a number.
    if isinstance(value, str) and value not in facts.get("choices", (value,)):
        return [f"{key} is {value!r}; it must be one of {', '.join(facts['choices'])}"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        rule = broken_rule(value, facts)
        return [f"{key} is {value}; it must {rule}"] if rule else []
    return []


def broken_rule(value: float, facts: Mapping[str, Any]) -> str | None:
    """Return what the declaration of its option requires of a number, as in "be at least 1"; None if it holds."""
    may_be_infinite = facts.get("inf", False)
    if not math.isfinite(value) and not (may_be_infinite and value == math.inf):
        return "be a number or inf" if may_be_infinite else "be a finite number"
    at_least, above, at_most, below = (facts.get(name) for name in ("at_least", "above", "at_most", "below"))
    is_too_low = (at_least is not None and value < at_least) or (above is not None and value <= above)
    is_too_high = (at_most is not None and value > at_most) or (below is not None and value >= below)
    if not is_too_low and not is_too_high:
        return None

    # One bound, or two.
    if at_most is None and below is None:
        if above is None:
            return f"be at least {at_least}"
        return "be positive" if above == 0 else f"be above {above}"
    if at_least is None and above is None:
        return f"be at most {at_most}" if below is None else f"be below {below}"
    if above is None and below is None:
        return f"lie in {at_least}..{at_most}"
    low = f"[{at_least}" if above is None else f"({above}"
    high = f"{at_most}]" if below is None else f"{below})"
    return f"lie in {low}, {high}"


def in_list(problem: str, key: str, values: list, kind: Any = Any) -> str:
    """Turn the problem of an element, which must be of type `kind`, into one of the whole list."""
    if problem == f"{key}: {NEEDS_VALUE}":
        advice = ": put quotes around it" if kind is str else ""  # null, or ?
        return f"{key} is {values}; each value must be of type {type_name(kind)}{advice}"
    _, separator, rule = problem.partition("; it must ")
    return f"{key} is {values}; each value must {rule}" if separator else problem


def merged(first: list[str], second: list[str]) -> list[str]:
    """Join two lists of problems without duplicates; those of the second only if the first has none for their key."""
    keys = {key_of(line) for line in first}
    return list(dict.fromkeys([*first, *(line for line in second if key_of(line) not in keys)]))


def key_of(problem: str) -> str:
    """Return the key at the beginning of a problem."""
    return problem.partition(" ")[0].rstrip(":")


def joined(key: str, name: Any) -> str:
    """Return the key of an option in a section, or in the whole configuration if the section's key is empty."""
    return f"{key}.{name}" if key else str(name)


def in_section(key: str, problem: str, options: Any) -> str:
    """Put the key of a section before a problem of its options, and before the options that the problem suggests."""
    if not key:
        return problem
    first_word = re.split(r"\W", problem, maxsplit=1)[0]
    if first_word not in options_of(options.__class__):
        return f"{key}: {problem}"
    line, question, suggested = problem.partition(": no such setting; did you mean ")
    if not question:
        return joined(key, line)
    suggestions = " or ".join(joined(key, each) for each in suggested.split(" or "))
    return joined(key, line) + question + suggestions


def closest(name: str, names: Iterable[str]) -> list[str]:
    """Return the most similar name, if any. The cutoff is 0.7, since at 0.5 `tabel` was taken for `trainer`."""
    return difflib.get_close_matches(str(name), [str(each) for each in names], n=1, cutoff=0.7)


def unknown(key: str, siblings: Iterable[str], keys: Iterable[str] = (), value: Any = None) -> str:
    """Return the message for a key whose last part does not exist, with suggestions.

    Parameters
    ----------
    key : str
        The key, up to the unknown part.
    siblings : iterable of str
        The names that exist in the same section.
    keys : iterable of str
        All keys; one of them may have the same last part.
    value : object
        The value that was given. If it is a section, as in modle.embed_dim=3, the name in it says more.

    Returns
    -------
    str
        The message.
    """
    # A similar name in the same section.
    section, _, name = key.rpartition(".")
    if not section:
        siblings = dict.fromkeys([*siblings, *(each for each in keys if "." not in each)])
    near = [joined(section, each) for each in closest(name, siblings)]

    # The same or a similar last part in another section.
    by_last_part: dict[str, list[str]] = {}
    for each in keys:
        by_last_part.setdefault(each.rpartition(".")[2], []).append(each)
    setting = name
    while isinstance(value, Mapping) and len(value) == 1:
        ((setting, value),) = value.items()
    if setting == name:
        # max_steps=3 may be a setting in another section.
        near += by_last_part.get(name, [])
    else:
        # In modle.embed_dim=3, the last part is most likely right.
        near = by_last_part.get(setting, near)
    for last in closest(setting, by_last_part) if not near else []:
        near = by_last_part[last]
    if near:
        return f"{key}: no such setting; did you mean {' or '.join(near[:3])}?"
    return f"{key}: no such setting; there are {', '.join(map(str, siblings)) or 'none'}"
