"""How many queries of a network turn to another key with the multipliers of a longer table."""

import math

import pytest
import torch
from networks import small_network

from tabicl_train.errors import ConfigError
from tabicl_train.lab import ranking
from tabicl_train.lab.entropy import prediction
from tabicl_train.lab.instruments import sites
from tabicl_train.model.recording import INDUCING, LABELED, QUERY, logits, recorded


@pytest.mark.parametrize("rule", ["none", "ssmax", "ssa", "ssmax_mlp_elementwise", "qassmax_elementwise"])
def test_queries_turn_only_if_their_elements_have_multipliers_of_their_own(rule, monkeypatch):
    monkeypatch.setattr(ranking, "LABELED_ROWS", 30)
    monkeypatch.setattr(ranking, "FACTOR", 1.0001)  # random weights are nearly even
    network = small_network(col_scaling=rule, icl_scaling=rule).eval()
    found = ranking.turned_queries(network, 0)
    turned = found.groupby(["queries", "layer"])["turned"].max()
    assert set(turned.index) == {(INDUCING, 0), (INDUCING, 1), (LABELED, 0), (QUERY, 0), (QUERY, 1)}
    of_last_layer = found[(found["queries"] == QUERY) & (found["layer"] == 1)]
    hits = of_last_layer[["label_before", "label_now"]]
    if rule.endswith("elementwise"):
        assert turned[INDUCING].min() > 0 and turned[LABELED, 0] > 0 and turned[QUERY, 1] > 0
        assert hits.apply(lambda column: column.between(0, 1)).all(axis=None)
    else:
        assert (turned == 0).all()
        assert hits.isna().all(axis=None)


def test_a_query_turns_if_both_keys_have_led_by_the_factor():
    lead = math.log(ranking.FACTOR)
    before = torch.tensor(
        [[2 * lead, 0.0, -9.0], [2 * lead, 0.0, -9.0], [0.9 * lead, 0.0, -9.0], [2 * lead, 0.0, -9.0]]
    )
    now = torch.tensor([[0.0, 2 * lead, -9.0], [0.0, 0.9 * lead, -9.0], [0.0, 2 * lead, -9.0], [9.0, 0.0, 0.0]])
    key_before, key_now, has_turned = ranking.compare_first_keys(before, now)
    assert key_before.tolist() == [0, 0, 0, 0]
    assert key_now.tolist() == [1, 1, 1, 0]
    assert has_turned.tolist() == [True, False, False, False]


@torch.no_grad()
def test_scores_are_those_of_the_layer_at_the_length_of_the_table():
    network = small_network(col_scaling="qassmax_elementwise", icl_scaling="qassmax_elementwise").eval()
    calls = {}
    with recorded({site: site.attention for site in sites(network)}, calls.__setitem__):
        prediction(network, "dummy", 30, 0)()
    for site, sequences in calls.items():
        for sequence in sequences:
            expected = logits(site.attention, sequence.q, sequence.k)
            torch.testing.assert_close(ranking.scores_of_keys(site, sequence, 30), expected)


def test_weights_need_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="weights is 'ema'; it needs a checkpoint, and none is given"):
        ranking.run(ranking.RankingOptions(folder=str(tmp_path / "x"), weights="ema"))
    assert not (tmp_path / "x").exists()
