"""A value is what was typed: text as it stands, and lists and dictionaries without anything that YAML leaves out."""

import re

import pytest

from tabicl_train.config.compose import Composer, compose, parse_options
from tabicl_train.config.options import PredictOptions, ReportOptions, SubmitOptions, SweepConfig
from tabicl_train.errors import ConfigError
from tabicl_train.sweep.plan import read_settings

TEXTS = ["a #1", "a: b", "{x}", "${x}", "${", "???", " a ", "'q'", "&a", "!x", "- a", "a\nb", "1_0", "\\a", "%"]
FILES = ["train=a", "test=b", "output=c.csv"]


@pytest.mark.parametrize("text", [*TEXTS, "[x]", "null"])
def test_text_of_a_command_is_taken_as_it_was_typed(text):
    options = parse_options(PredictOptions, [f"{name}={text}" for name in ("train", "target", "test", "output")])
    assert [options.train, options.target, options.test, options.output] == [text] * 4
    assert parse_options(PredictOptions, [*FILES, "target=y", f"weights={text}"]).weights == (
        None if text == "null" else text
    )
    if text in TEXTS:  # where a list is possible, [x] is one
        assert parse_options(ReportOptions, [f"run_dir={text}"]).run_dir == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a, 'b #1',\"c\\n\",007,true,null]", ["a", "b #1", "c\n", "007", "true", "null"]),
        ("['${x}','???',a|b,\n c]", ["${x}", "???", "a|b", "c"]),
        ("[]", []),
        *((text, None) for text in ("[a] # b", "[a #1,b]", "[a,b", "[a\n b]", "['a\nb']", "[&x a,*x]", "[!!str a]")),
        *((text, None) for text in ("[a] b", "[a,,b]", "[[a]]", "[{a: 1}]", "a", "{x}", "", "null", "${x}")),
        ("['?']", ["?"]),
    ],
)
def test_a_list_loses_nothing(text, expected):
    words = [*FILES, "target=y", f"drop={text}"]
    if expected is not None:
        assert parse_options(PredictOptions, words).drop == expected
        return
    with pytest.raises(ConfigError, match=r"^drop[: ]") as caught:
        parse_options(PredictOptions, words)
    assert len(caught.value.problems) == 1 and "\n" not in caught.value.problems[0]


@pytest.mark.parametrize("text", ["[?]", "[a: b]", "[[a]]"])
def test_a_list_that_holds_dictionaries_for_yaml_needs_quotes(text):
    with pytest.raises(ConfigError, match="in quotes"):
        parse_options(PredictOptions, [*FILES, "target=y", f"missing_words={text}"])


def test_a_dictionary_loses_nothing_and_numbers_are_plain():
    assert parse_options(SubmitOptions, ["sbatch={mem: 64G, a: '#1'}"]).sbatch == {"mem": "64G", "a": "#1"}
    wrong = ["{a: 1, a: 2}", "{a: b #1}", "{a: 1} # b", "{a: ${x}}", "{a: ???}", "a", "[a]"]
    words = [f"sbatch={text}" for text in wrong]
    for word in [*words, "nodes=2 # two", "nodes=${x}", "nodes=???", "nodes=", "hours=[1]"]:
        with pytest.raises(ConfigError) as caught:
            parse_options(SubmitOptions, [word])
        (problem,) = caught.value.problems
        assert problem.startswith(word.partition("=")[0]) and "\n" not in problem


@pytest.mark.parametrize(
    "text", [text for text in TEXTS if text not in ("{x}", "${x}", "${", "???", "'q'")] + ["sort(a)"]
)
def test_text_of_a_run_is_taken_as_it_was_typed(text):
    assert compose(["experiment=smoke", f"run_dir={text}"]).run_dir == text
    assert str(read_settings(SweepConfig(), [f"run_dir={text}"], Composer(), []).folder) == text
    quoted = text.replace("'", "\\'")
    assert compose(["experiment=smoke", f"run_dir='{quoted}'"]).run_dir == text


@pytest.mark.parametrize("text", ["{x}", "[x]", "{a: 1}", "${x}", "${", "???", "a,b", "choice(a)"])
def test_what_is_not_text_for_hydra_is_one_line_of_error(text):
    with pytest.raises(ConfigError, match=r"run_dir[^\n]*$") as caught:
        compose(["experiment=smoke", f"run_dir={text}"])
    assert len(caught.value.problems) == 1


def test_elements_of_a_list_of_a_run_are_not_converted():
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", "validation.suites=['true',007,a b]"])
    named = [re.search("there is no suite '(.*)'", problem)[1] for problem in caught.value.problems]
    assert named == ["true", "007", "a b"]
    for text in ("[true]", "[a,1e3]", "[1_0]"):
        with pytest.raises(ConfigError, match=r"put it in quotes"):
            compose(["experiment=smoke", f"validation.suites={text}"])
