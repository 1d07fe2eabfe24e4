"""tabicl-lab entropy: what it measures on drawn tables and on rows of a file, and its folder."""

import numpy as np
import pandas as pd
import pytest
from command_line import command

from priors import TableSpec, build_prior
from tabicl_train.lab.entropy import prediction
from tabicl_train.lab.folder import SMALL_FORM
from tabicl_train.lab.instruments import COLUMNS, measure
from tabicl_train.model.pack import Pack
from tabicl_train.model.recording import INDUCING, LABELED, QUERY
from tabicl_train.weights.reader import load_model


def test_tables_are_those_of_the_prior(run_dir):
    network = load_model(str(run_dir))
    predict = prediction(network, "dummy", 30, 1)
    table = build_prior("dummy").sample(TableSpec(30 + 256, 30, 10, 10), (0, 30, 1))
    expected = network(Pack.of([(table.X, table.y, 30)])).detach()
    np.testing.assert_allclose(predict().detach(), expected, rtol=1e-4, atol=1e-5)
    found = measure(network, predict)
    assert set(found["n"]) == {30} and dict(found.groupby("queries")["measured"].max()) == {
        INDUCING: 4 * table.X.shape[1], LABELED: 30, QUERY: 256,
    }  # fmt: skip


def test_mistakes_are_named(run_dir, tmp_path):
    result = command("lab", "entropy", f"folder={tmp_path}/x", f"checkpoint={run_dir}", "rows=[5,20]", "prior=nothing")
    assert result.returncode == 2 and not (tmp_path / "x").exists()
    assert "rows is [5, 20]; each value must be at least 10" in result.stderr
    assert "prior is 'nothing'" in result.stderr


@pytest.mark.slow
def test_the_command_writes_figure_table_and_page(run_dir, tmp_path):
    settings = ["prior=dummy", "rows=[100,20,50]", "small=true"]
    result = command("lab", "entropy", f"folder={tmp_path}/entropy", f"checkpoint={run_dir}", *settings)
    assert result.returncode == 0, result.stderr
    frame = pd.read_csv(tmp_path / "entropy" / "entropy.csv")
    assert list(frame) == ["table", *COLUMNS]
    assert set(frame["n"]) == {20, 50}
    assert set(frame["table"]) == {0}
    assert frame["entropy"].between(0, 1).all()
    assert frame["top_weight"].between(0, 1).all()
    text = (tmp_path / "entropy" / "README.md").read_text()
    own = frame[(frame["queries"] == QUERY) & (frame["layer"] == 1)].groupby("n")["entropy"].mean()
    assert f"| in context: query rows | 1 | {own[20]:.3f} -> {own[50]:.3f} |" in text
    assert "![" in text
    assert SMALL_FORM in text
    assert (tmp_path / "entropy" / "entropy.png").stat().st_size > 20_000
