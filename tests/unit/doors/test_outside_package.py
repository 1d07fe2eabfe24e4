"""A package outside this repository registers a prior and configuration files."""

import re
from pathlib import Path

import pytest
from command_line import command
from configurations import problems

from priors import TableSpec
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior

PAGE = Path(__file__).parents[3] / "tabicl_train/EXTEND.md"

FILES = {
    "__init__.py": "",
    "ring.py": PAGE.read_text().partition("```python\n# ring.py\n")[2].partition("```")[0],
    "configs/prior/ring.yaml": "defaults: [schema/ring]\nradius: 1.5\n",
    "configs/model/minute.yaml": "defaults: [tiny]\nembed_dim: 8\n",
    "configs/experiment/outside.yaml": "# @package _global_\n"
    "defaults: [override /prior: ring, override /model: minute, override /curriculum: smoke]\n",
}
OLD_GROUPS = "[tabicl_train.priors]\nring = {0}.ring:Ring\n\n[tabicl_train.configs]\noutside = {0}.configs\n"


def install(folder: Path, package: str, entry_points: str) -> None:
    """What pip leaves of a package's metadata."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize(
    ("package", "entry_points"),
    [("outside", "[tabicl_train.plugins]\nring = {0}.ring\n"), ("outside_before", OLD_GROUPS)],
)
@pytest.mark.filterwarnings("ignore:tabicl_train.:DeprecationWarning")
def test_an_installed_package_brings_its_prior_and_configurations(package, entry_points, fresh, tmp_path, monkeypatch):
    install(tmp_path, package, entry_points.format(package))
    for name, content in FILES.items():
        file = tmp_path / package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    config = compose(["experiment=outside", "prior.radius=1.2"])
    assert config.model.embed_dim == 8
    assert config.prior == {"name": "ring", "radius": 1.2}
    assert configured_prior(config.prior).sample(TableSpec(200, 100, 2), 0).X.shape == (200, 2)
    (plugin,) = config.plugins_used()
    assert (plugin["module"], plugin["uses"]) == (package, [["prior", "ring"]])
    printed = command("train", "experiment=outside", "--cfg", "job").stdout
    assert "  radius: 1.5\n" in printed and "  embed_dim: 8\n" in printed
    assert "minute, " in command("train", "--help").stdout


@pytest.mark.parametrize(
    ("group", "entry", "setting", "words"),
    [
        ("priors", "sums = missing:Sums", "prior=sums", "sums = 'missing:Sums' cannot be loaded: ModuleNotFoundError"),
        ("priors", "sums = json:loads", "prior=sums", "the prior sums = <function loads at .* is not a subclass"),
        ("priors", "mlp_scm = json:loads", "prior=mlp", "mlp_scm of the package broken .* two priors are called"),
        ("configs", "own = nowhere.configs", "experiment=own", "own of the package broken cannot be imported: Module"),
    ],
)
def test_a_broken_package_of_an_old_group_is_named_by_what_asks_for_it(
    group, entry, setting, words, fresh, tmp_path, monkeypatch
):
    install(tmp_path, "broken", f"[tabicl_train.{group}]\n{entry}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(DeprecationWarning, match=rf"^tabicl_train\.{group}, the group of .* of the package broken"):
        compose(["experiment=smoke"])
    (problem,) = problems("experiment=smoke", setting)
    assert re.search(words, problem)
