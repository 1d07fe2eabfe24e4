import dataclasses
import inspect

import pytest

import priors
from tabicl_train.config import options
from tabicl_train.config.documentation import field_docs, type_text
from tabicl_train.config.folders import CONFIG_DIR
from tabicl_train.config.reference import first_sentence, reference
from tabicl_train.config.schema import RunConfig, StageConfig
from tabicl_train.model.families import FAMILIES

PARTS = [f.default_factory for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(f.default_factory)]
PARTS += [settings for settings in FAMILIES if settings not in PARTS]
PRIORS = [priors.prior_class(name) for name in priors.prior_names()]
COMMANDS = [cls for cls in vars(options).values() if dataclasses.is_dataclass(cls)]


@pytest.mark.parametrize("cls", [RunConfig, StageConfig, *PARTS, *PRIORS, *COMMANDS], ids=lambda cls: cls.__name__)
def test_every_option_has_a_sentence(cls):
    docs = field_docs(cls)
    assert [f.name for f in dataclasses.fields(cls) if f.name not in docs] == []
    assert all(text.endswith(".") for text in docs.values())
    assert not inspect.getdoc(cls).startswith(f"{cls.__name__}("), "the class has no docstring"


def test_the_committed_page_is_the_generated_one():
    assert (CONFIG_DIR / "README.md").read_text() == reference(), (
        "python -m tabicl_train.config.reference > configs/README.md"
    )


def test_the_page_has_every_key_with_type_default_and_sentence():
    page = reference()
    for row in (
        "| `trainer.max_steps` | int or null | `null` | Stop the run after this many steps;",
        "| `curriculum.stages.NAME.rows` | list[int] | `[1024, 1024]` | Range [lowest, highest] of the rows",
        "| `curriculum.stages` | dict[str, StageConfig] | `{}` |",
        "| `prior.folder` | str |",
        "| `experiment=demo` | From nothing to useful weights",
    ):
        assert row in page, row
    assert all(first_sentence(file) for file in CONFIG_DIR.glob("*/*.yaml"))


@dataclasses.dataclass
class Parent:
    """Fields that another class inherits."""

    inherited: int = 0
    """Of the parent."""
    replaced: int = 0
    """Replaced below."""


@dataclasses.dataclass
class Child(Parent):
    """Some fields."""

    replaced: str | None = None
    """Two lines
    of text."""
    silent: list[float] = dataclasses.field(default_factory=list)
    # a comment is no documentation

    def method(self) -> None:
        """Neither is this."""


def test_sentences_are_read_from_the_class_and_its_parents():
    assert field_docs(Child) == {"inherited": "Of the parent.", "replaced": "Two lines of text."}
    assert [type_text(Child, name) for name in ("inherited", "replaced", "silent")] == [
        "int", "str or null", "list[float]",
    ]  # fmt: skip
