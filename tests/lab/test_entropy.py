"""tabicl-lab entropy: what it measures on drawn tables and on rows of a file, and its folder."""

import numpy as np
import pandas as pd
import pytest
from command_line import command

from priors import TableSpec, build_prior
from tabicl_train.lab.entropy import Options, drawn_tables, real_tables
from tabicl_train.lab.instruments import COLUMNS, INDUCING, LABELED, QUERY, measure, recorded, sites
from tabicl_train.model.pack import Pack
from tabicl_train.prediction.export import load_model


@pytest.fixture(scope="module")
def network(run_dir):
    return load_model(str(run_dir))


def test_drawn_tables_are_the_priors(network):
    """The rows of the tables at (seed, n, table), the same in every call."""
    options = Options("", "", prior="dummy", rows=[30, 20], tables=2, features=4, seed=3)
    passes = list(drawn_tables(options, network))
    assert [(n, table) for n, table, *_ in passes] == [(20, 0), (20, 1), (30, 0), (30, 1)]
    *_, model, predict = passes[3]
    table = build_prior("dummy").sample(TableSpec(30 + 256, 30, 4, 10), (3, 30, 1))
    expected = network(Pack.of([(table.X, table.y, 30)])).detach()
    np.testing.assert_allclose(predict().detach(), expected, rtol=1e-4, atol=1e-5)
    found = measure(model, predict)
    assert set(found["n"]) == {30} and dict(found.groupby("queries")["measured"].max()) == {
        INDUCING: 4 * table.X.shape[1], LABELED: 30, QUERY: 256,
    }  # fmt: skip


def test_rows_of_a_file_are_random_and_the_others_are_predicted(network, table):
    options = Options("", "", table=str(table), target="class", rows=[40], tables=2)
    tokens = []
    for n, _, model, predict in real_tables(options, network):
        calls = {}
        with recorded({site[:2]: site.attention for site in sites(model)}, calls.__setitem__):
            p = predict()
        assert n == 40 and len(p) == 80 - 40
        ((labeled, queries), *_) = (list(calls["icl", 0].sequences()),)
        assert len(labeled.k) == len(labeled.q) == 40 and len(queries.q) == 40
        tokens.append(labeled.context.detach())
    assert not np.allclose(*tokens)


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["rows=[]"], "rows is empty"),
        (["rows=[5]"], "rows is 5"),
        (["prior=nothing"], "prior is 'nothing'; there are"),
        (["table=FILE", "target=class", "rows=[40,80]"], "rows has 80"),
        (["tables=0"], "tables is 0"),
    ],
)
def test_mistakes_are_named(settings, problem, run_dir, table, tmp_path):
    settings = [text.replace("FILE", str(table)) for text in settings]
    result = command("lab", "entropy", f"folder={tmp_path}/page", f"checkpoint={run_dir}", *settings)
    assert result.returncode == 2 and problem in result.stderr and not (tmp_path / "page").exists()


@pytest.mark.slow
@pytest.mark.slow
def test_the_command_writes_figure_table_and_page(run_dir, tmp_path):
    settings = ["prior=dummy", "rows=[100,20,50]", "small=true", "features=3"]
    result = command("lab", "entropy", f"folder={tmp_path}/entropy", f"checkpoint={run_dir}", *settings)
    assert result.returncode == 0, result.stderr
    frame = pd.read_csv(tmp_path / "entropy" / "entropy.csv")
    assert list(frame) == ["table", *COLUMNS] and set(frame["n"]) == {20, 50} and set(frame["table"]) == {0}
    assert frame["entropy"].between(0, 1).all() and frame["top_weight"].between(0, 1).all()
    text = (tmp_path / "entropy" / "README.md").read_text()
    own = frame[(frame["queries"] == QUERY) & (frame["layer"] == 1)].groupby("n")["entropy"].mean()
    assert f"| in context: query rows | 1 | {own[20]:.3f} -> {own[50]:.3f} |" in text
    assert "![" in text and (tmp_path / "entropy" / "entropy.png").stat().st_size > 20_000
