"""The page that adds a scaling rule, executed; what a rule that is listed must work with."""

from pathlib import Path

import pytest
import torch
from networks import draw_batch, forward_batch, small_network

from tabicl_train import register
from tabicl_train.errors import ConfigError
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.public_config import to_public

PAGE = Path(__file__).parents[3] / "tabicl_train/EXTEND.md"


@pytest.fixture
def page():
    """The names that the page's Python defines, while its rule is registered."""
    known, names = dict(register.scaling._entries), {}
    try:
        exec(PAGE.read_text().partition("```python\n# power.py\n")[2].partition("```")[0], names)
        yield names
    finally:
        register.scaling._entries = known


def test_the_rule_of_the_page_is_trained_and_refused_where_it_does_not_exist(page):
    assert TabICLConfig(col_scaling="power", icl_scaling="power", scaling_bound=9.0).problems() == []
    (problem,) = SequenceConfig(scaling="power").problems()
    assert problem == "scaling is 'power'; it must be one of none, ssa, ssa_trainable"
    network = small_network(icl_scaling="power")
    layer = dict(network.named_scalings())["icl.0"]
    assert type(layer) is page["Power"]
    X, y_train, _ = draw_batch(2, 20, 4, 12)
    forward_batch(network, X, y_train).square().sum().backward()
    assert layer.exponents.grad.abs().max() > 0
    expected = layer.scales.detach() * 12 ** layer.exponents.detach()
    torch.testing.assert_close(layer.multipliers(12)[:, 0], expected)
    gated = small_network().config  # whose queries have gates in addition
    more = TabICL.forward_flops(gated, 20, 12, 4) - TabICL.forward_flops(network.config, 20, 12, 4)
    assert more == pytest.approx(gates(gated)) and more > 0
    both = TabICLConfig(col_scaling="power", icl_scaling="power")
    names = r"no model\.col_scaling=power and no model\.icl_scaling=power, it has none, ssmax, .*; format=hub"
    with pytest.raises(ConfigError, match=names):
        to_public(both)


def gates(config: TabICLConfig) -> float:
    """FLOPs of the gates of QASSMax in a table of 20 rows, of which 12 are labeled."""
    rule = register.scaling[config.icl_scaling]
    return (20 * (config.icl_num_blocks - 1) + 8) * rule.flops(config.row_dim, config.icl_num_heads)
