"""Settings of a network: all problems are reported."""

import subprocess
import sys

import pytest

from priors.options import check
from tabicl_train.model import TabICL, TabICLConfig


def test_the_presets_have_no_problems():
    assert check(TabICLConfig()) == []
    assert check(TabICLConfig.v1()) == []
    assert check(TabICLConfig(max_classes=0, num_quantiles=99)) == []


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(embed_dim=100), ["embed_dim (100) is not divisible by col_num_heads (8)", "row_num_heads"]),
        (dict(embed_dim=96, row_num_cls=2, icl_num_heads=5), ["row_num_cls * embed_dim (2 * 96)"]),
        (dict(embed_dim=24), ["embed_dim / row_num_heads is 3; it must be even"]),
        (dict(max_classes=11), ["max_classes is 11"]),
        (dict(col_scaling="softmax"), ["col_scaling is 'softmax'; it must be one of none, ssmax"]),
        (dict(col_grouping="same"), ["col_grouping is 'same'; it must be one of none, circular, disjoint"]),
        (dict(col_group_size=0), ["col_group_size is 0"]),
        (dict(col_affine=True), ["col_affine"]),
        (dict(dropout=1.0), ["dropout"]),
        (dict(scaling_bound=-1.0), ["scaling_bound is -1.0; it must be above 0"]),
        (dict(row_rope_base=0.0), ["row_rope_base"]),
        (dict(checkpoint_rows=-1), ["checkpoint_rows"]),
        (dict(embed_dim=0, icl_num_heads=0), ["embed_dim is 0", "icl_num_heads is 0"]),
        (dict(row_num_blocks=0, icl_num_blocks=0, ff_factor=0), ["row_num_blocks", "icl_num_blocks", "ff_factor"]),
        (dict(icl_scaling="ssa", ssa_exponent=1.0), ["ssa_exponent is 1.0; it must be above 1"]),
        (
            dict(ssa_exponent=2.0),
            ["ssa_exponent has no effect, since col_scaling is qassmax_elementwise and"],
        ),
        (dict(col_scaling="ssa", dropout=0.1), ["col_scaling is ssa, which needs dropout=0; it is 0.1"]),
        (
            dict(col_scaling="none", icl_scaling="ssa_trainable", scaling_bound=9.0),
            ["scaling_bound has no effect, since col_scaling is none and icl_scaling is ssa_trainable"],
        ),
        (dict(num_quantiles=99), ["num_quantiles has no effect, since max_classes is 10; regression has 0"]),
        (dict(max_classes=0, num_quantiles=0), ["num_quantiles is 0; it must be at least 1"]),
        (dict(max_classes=-1, dropout=-1.0, col_scaling="x"), ["max_classes", "dropout", "col_scaling"]),
    ],
)
def test_problems(options, expected):
    problems = check(TabICLConfig(**options))
    assert len(problems) == len(expected), problems
    for text in expected:
        assert any(text in problem for problem in problems), problems
    with pytest.raises(ValueError, match="cannot be built") as error:
        TabICL(TabICLConfig(**options))
    assert all(problem in str(error.value) for problem in problems)


def test_it_is_read_without_torch():
    code = "import sys; from tabicl_train.model import TabICLConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_bound_and_fp32_attention_reach_their_layers():
    network = TabICL(TabICLConfig(scaling_bound=9.0, embed_dim=16, col_attention_fp32=True, icl_num_blocks=1))
    assert {scaling.bound for _, scaling in network.named_scalings()} == {9.0}
    blocks = [*network.col_embedder.tf_col["blocks"]]
    assert all(b.multihead_attn1.attn.fp32 and b.multihead_attn2.attn.fp32 for b in blocks)
    assert not any(b.attn.fp32 for b in network.icl_predictor.tf_icl["blocks"])
