"""How many queries of a network turn to another key with the multipliers of a longer table."""

import pytest
import torch
from networks import small_network

from tabicl_train.lab import ranking
from tabicl_train.lab.entropy import prediction
from tabicl_train.lab.instruments import sites
from tabicl_train.model.recording import logits, recorded


@pytest.mark.parametrize(
    ("rule", "can_turn"),
    [("none", False), ("ssmax", False), ("ssmax_mlp_elementwise", True), ("qassmax_elementwise", True)],
)
def test_queries_turn_only_if_their_elements_have_multipliers_of_their_own(rule, can_turn, monkeypatch):
    monkeypatch.setattr(ranking, "LABELED_ROWS", 30)
    network = small_network(col_scaling=rule, icl_scaling=rule).eval()
    found = ranking.turned_queries(network, 0)
    assert len(found.groupby(["queries", "layer"])) * len(ranking.LONGER) == len(found)
    assert (found["turned"].max() > 0) == can_turn


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
