import dataclasses
import inspect

import pytest

import priors
from tabicl_train.config import options
from tabicl_train.config.compose import CONFIG_DIR
from tabicl_train.config.documentation import field_docs, reference
from tabicl_train.config.schema import RunConfig, StageConfig
from tabicl_train.model.config import FAMILIES

PARTS = [f.default_factory for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(f.default_factory)]
PARTS += [settings for settings in FAMILIES if settings not in PARTS]
PRIORS = [priors.prior_class(name) for name in priors.prior_names()]
COMMANDS = [cls for cls in vars(options).values() if dataclasses.is_dataclass(cls)]


@pytest.mark.parametrize("cls", [RunConfig, StageConfig, *PARTS, *PRIORS, *COMMANDS], ids=lambda cls: cls.__name__)
def test_every_option_has_a_sentence(cls):
    docs = field_docs(cls)
    assert [f.name for f in dataclasses.fields(cls) if f.name not in docs and f.default_factory not in PARTS] == []
    assert all(text.endswith(".") for text in docs.values())
    assert not inspect.getdoc(cls).startswith(f"{cls.__name__}("), "the class has no docstring"


def test_the_committed_page_is_the_generated_one():
    assert (CONFIG_DIR / "README.md").read_text() == reference(), (
        "python -m tabicl_train.config.documentation > configs/README.md"
    )
