import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import priors
import tabicl_train
from tabicl_train import register
from tabicl_train.config import options
from tabicl_train.config.compose import compose
from tabicl_train.config.documentation import field_docs, plugin_reference, reference
from tabicl_train.config.schema import RunConfig, StageConfig, flatten
from tabicl_train.run.removed import REMOVED

PARTS = [f.default_factory for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(f.default_factory)]
PARTS += [family.settings for family in register.network.values() if family.settings not in PARTS]
PRIORS = [priors.prior_class(name) for name in priors.prior_names()]
SOURCES = [path for package in (priors, tabicl_train) for path in Path(package.__file__).parent.rglob("*.py")]
COMMANDS = [cls for cls in vars(options).values() if dataclasses.is_dataclass(cls)]


@pytest.mark.parametrize("cls", [RunConfig, StageConfig, *PARTS, *PRIORS, *COMMANDS], ids=lambda cls: cls.__name__)
def test_every_option_has_a_sentence(cls):
    docs = field_docs(cls)
    assert [f.name for f in dataclasses.fields(cls) if f.name not in docs and f.default_factory not in PARTS] == []
    assert all(text.endswith(".") for text in docs.values())
    assert not inspect.getdoc(cls).startswith(f"{cls.__name__}("), "the class has no docstring"


def test_every_key_that_a_message_names_is_a_setting():
    keys = set(flatten(dataclasses.asdict(compose(["experiment=smoke"]))))
    for prior in PRIORS:
        keys |= {f"prior.{field.name}" for field in dataclasses.fields(prior)}
    for family in register.network.values():
        keys |= {f"model.{field.name}" for field in dataclasses.fields(family.settings)}

    sections = "|".join({key.partition(".")[0] for key in keys if "." in key})
    pattern = re.compile(rf"(?<![\w./])(?:{sections})\.[a-z_][a-z_.]*")
    named = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if is_text(node):
                found = {key.rstrip(".") for key in pattern.findall(node.value)}
                named |= found - REMOVED.keys() if path.name == "removed.py" else found
    files = (".csv", ".png", ".ckpt", ".json", ".safetensors")
    named = {key for key in named if not key.endswith(files)}
    assert len(named) > 30

    wrong = []
    for key in named:
        is_free = re.match(r"curriculum\.stages(\.|$)|model\.family", key) or key in REMOVED
        if not is_free and not any(setting.startswith(key) for setting in keys):
            wrong.append(key)
    assert wrong == []


def is_text(node: ast.AST) -> bool:
    """Whether it is a string, but no docstring."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value


def test_the_page_of_all_settings_and_that_of_the_laboratory_have_their_own():
    page = reference()
    assert "Cost: " not in page  # which follows the first sentence of a file, a question in some
    for key in ("`experiment=smoke`", "`trainer.max_steps`", "`curriculum.stages.NAME.rows`", "`prior.preset`"):
        assert key in page
    of_laboratory = plugin_reference("tabicl_train.lab")
    for own in ("`model=sequence_tiny`", "`prior.quantifier`", "`model.max_tokens`", "`sweep=linear`"):
        assert own in of_laboratory and own not in page
