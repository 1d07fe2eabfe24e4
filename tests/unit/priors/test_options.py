"""The builder of options: what is wrong with values is listed all at once, by the key that was given."""

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest

from priors.options import Typed, build, check, merged, option, read


@dataclasses.dataclass
class Section:
    size: int = option(3, at_least=1)
    kind: str = option("round", choices=("round", "flat"))


@dataclasses.dataclass
class Options:
    number: float = option(1.0, above=0)
    share: float = option(0.5, at_least=0, below=1)
    limit: float = option(1.0, inf=True)
    pair: list[int] = option([1, 2], at_least=1)
    words: list[str] = option([])
    section: Section = option(Section(size=5))
    sections: dict[str, Section] = option({})
    either: str | list[str] | None = None
    mode: Literal["a", "b"] = "a"
    anything: Any = None

    def problems(self) -> list[str]:
        return [f"number is {self.number}, which is above limit"] if self.number > self.limit else []


@dataclasses.dataclass
class Plain:  # of a plug-in: no option() and no problems()
    depth: int
    rate: float = 0.1
    seeds: list = dataclasses.field(default_factory=list)


def test_values_become_an_object_with_copies_of_defaults():
    built, problems = build(Options, {"number": 2, "limit": float("inf"), "section": {"kind": "flat"}, "pair": (1, 4)})
    assert problems == []
    assert (built.number, type(built.number), built.pair) == (2.0, float, [1, 4])
    assert built.section == Section(size=5, kind="flat"), "a section starts from the default of its parent"
    assert build(Options, {"sections": {"a": {"kind": "flat"}}})[0].sections == {"a": Section(kind="flat")}
    built.words.append("x")
    built.section.size = 9
    assert Options() == build(Options, {})[0]
    assert build(Plain, {"depth": np.int64(2), "rate": 1}) == (Plain(2, 1.0), [])


def test_everything_that_is_wrong_is_listed_at_once():
    wrong = {
        "numbr": 2,
        "share": 1,
        "limit": float("nan"),
        "pair": [0, 2],
        "words": ["a", None],
        "section": {"siez": 1, "size": 0, "kind": "square"},
        "sections": {"a": {"size": "x"}, "b": 3},
        "either": 3,
        "mode": "c",
    }
    built, problems = build(Options, wrong, "prior", ["seed", "trainer.mode"])
    assert sorted(problems) == [
        "prior.either is 3; it must be of type str or list[str]",
        "prior.limit is nan; it must be a number or inf",
        "prior.mode is 'c'; it must be one of a, b",
        "prior.numbr: no such setting; did you mean prior.number?",
        "prior.pair is [0, 2]; each value must be at least 1",
        "prior.section.kind is 'square'; it must be one of round, flat",
        "prior.section.siez: no such setting; did you mean prior.section.size?",
        "prior.section.size is 0; it must be at least 1",
        "prior.sections.a.size is 'x'; it must be of type int",
        "prior.sections.b: it must be a mapping, such as {name: 1}",
        "prior.share is 1.0; it must lie in [0, 1)",
        "prior.words is ['a', None]; each value must be of type str: put quotes around it",
    ]
    assert built.words == [] and built.mode == "a", "what cannot be read leaves the default"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (3, "x: it must be a mapping, such as {name: 1}"),
        (None, "x: it needs a value"),
        ({"number": None}, "x.number: it needs a value"),
        ({"number": True}, "x.number is True; it must be of type float"),
        ({"number": "1"}, "x.number is '1'; it must be of type float"),
        ({"number": -1}, "x.number is -1.0; it must be positive"),
        ({"number": 2}, "x.number is 2.0, which is above limit"),
        ({"pair": 3}, "x.pair: it must be a list, such as [1,2]"),
        ({"section": 3}, "x.section: it must be a mapping, such as {name: 1}"),
        ({"share": float("-inf")}, "x.share is -inf; it must be a finite number"),
        ({"words": [3]}, "x.words is [3]; each value must be of type str"),
        ({"color": 3}, "x.color: no such setting; there are number, share, limit, pair"),
    ],
)
def test_single_problems(values, problem):
    (found,) = build(Options, values, "x")[1]
    assert found.startswith(problem)


def test_an_option_without_a_default_is_missing_once():
    assert build(Plain, {"rate": 2.0}, "callbacks.plain")[1] == ["callbacks.plain.depth is missing"]
    assert build(Plain, {"depth": "x"})[1] == ["depth is 'x'; it must be of type int"]


def test_an_object_that_was_made_in_python_is_checked_too():
    assert check(Options(number="x", pair=[0]), "x") == ["x.number is 'x'; it must be of type float"]
    assert check(Options(pair=[0], section=Section(size=0)), "x") == [
        "x.pair is [0]; each value must be at least 1",
        "x.section.size is 0; it must be at least 1",
    ]
    assert check(Plain(depth=np.int64(3), rate=np.float32(0.5))) == []


def test_text_is_taken_as_it_was_typed():
    values = {"words": [Typed("007", 7)], "either": Typed("1_0", 10), "number": Typed("1_0", 10)}
    assert read(Options, values)[0] == Options(words=["007"], either="1_0", number=10.0)
    (problem,) = read(Options, {"words": [Typed(None, True)]}, "x")[1]
    assert problem == "x.words: True was typed in another form; put it in quotes: '...'"


def test_of_two_lists_each_key_has_the_first_message():
    assert merged(["a is 1", "b: no"], ["b is wrong", "c is 2", "c is 2"]) == ["a is 1", "b: no", "c is 2"]
