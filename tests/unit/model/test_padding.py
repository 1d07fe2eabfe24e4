"""Padded packs: the same losses and gradients, and few sizes."""

from collections import Counter

import pytest
import torch
from networks import small_network

from tabicl_train.check.gpu.small import MIXED
from tabicl_train.config.compose import compose
from tabicl_train.model import padding
from tabicl_train.model.family import random_tables
from tabicl_train.model.pack import Pack
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.stream.steps import typical_size_of_stage
from tabicl_train.training.objectives import losses_of


@pytest.fixture
def unwritten_memory_is_nan():
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before[0])
    settings.fill_uninitialized_memory = before[1]


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("options", [{}, {"max_classes": 0, "col_grouping": "none"}])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_padded_pack_has_the_losses_and_gradients_of_its_tables(options, number):
    network = small_network(**options)
    weights = [p for p in network.parameters() if p.requires_grad]
    pack = Pack.of(random_tables(network.config, MIXED, torch.Generator().manual_seed(0)))
    totals = padding.totals_of(MIXED, network.config.row_num_cls)
    typical = padding.mean_size([MIXED], 128, 9 + network.config.row_num_cls, network.config.row_num_cls)
    # Each total has room for its pads.
    typical = typical._replace(totals=padding.Totals(*(int(total * (1.2 + 0.3 * number)) + 9 for total in totals)))
    padded = network.padded(network.config, pack, typical)
    assert len(padded.X) > pack.cells and len(padded.y) > pack.rows
    # What pads read has no effect.
    padded.X[pack.cells :] = torch.randn(len(padded.X) - pack.cells, generator=torch.Generator().manual_seed(1)) * 100
    padded.y[pack.rows :] = 1
    found = []
    for each in (padded, pack):
        losses = losses_of(network, each)
        found.append([losses, *torch.autograd.grad(losses.mean(), weights, materialize_grads=True)])
    for with_pads, expected in zip(*found, strict=True):
        torch.testing.assert_close(with_pads, expected, rtol=1e-6, atol=1e-6 * max(1, expected.abs().max().item()))


def test_few_sizes_fit_all_packs_of_a_run():
    config = compose(["experiment=mini", "run_dir=x", "trainer.accelerator=cpu", "curriculum.stages.short.tables=64"])
    typical = typical_size_of_stage(config.curriculum, config.model, config.seed, 0)
    sizes = Counter()
    padded = exact = 0
    for step in range(0, 400, 4):
        plan = plan_step(config.curriculum, config.model, config.seed, step)
        shapes = [(g.spec.num_rows, g.spec.train_size, g.spec.num_features) for g in plan.groups for _ in g.tables]
        size, _ = padding.round_up(shapes, typical, config.model.row_num_cls)
        sizes[size] += 1
        padded += size.totals.tokens
        exact += padding.totals_of(shapes, config.model.row_num_cls).tokens
    assert len(sizes) <= 8
    assert padded < 1.3 * exact


def test_tables_that_do_not_fit_are_not_padded():
    typical = padding.mean_size([[(20, 12, 3)] * 4], 20, 7, 4)
    assert padding.round_up([(20, 12, 3)] * 4, typical, 4) is not None
    assert padding.round_up([(20, 12, 3)] * 3, typical, 4) is None  # other tables a step
    assert padding.round_up([(400, 12, 3)] * 4, typical, 4) is None  # longer


def test_kernels_are_told_the_most_rows_of_a_program():
    network = small_network(row_num_cls=1)
    pack = Pack.of(random_tables(network.config, ((20, 12, 3),) * 4, torch.Generator().manual_seed(0)))
    totals = padding.totals_of(pack.shapes, 1)
    # Many more rows than tokens: most pads are a CLS token alone.
    more = {"columns": 2, "labeled_tokens": 10, "query_tokens": 10, "labeled_rows": 80, "query_rows": 80}
    more["programs_32"] = 300
    totals = totals._replace(**{name: getattr(totals, name) + number for name, number in more.items()})
    padded = network.padded(network.config, pack, padding.Size(4, totals, 200, 12))
    programs = padded.layout.open().rows.within.programs
    first, number, most_rows = programs.launches[0].tolist()
    assert programs.programs[first : first + number, 2].max() <= most_rows
