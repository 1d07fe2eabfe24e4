"""A package outside this repository registers a prior and configuration files."""

import sys
from pathlib import Path

import pytest
from command_line import command
from configurations import problems

from priors import TableSpec
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior

PAGE = Path(__file__).parents[3] / "tabicl_train/EXTEND.md"
RING = PAGE.read_text().partition("```python\n# ring.py\n")[2].partition("```")[0]
UNREGISTERED = RING.replace('@register.prior("ring")\n', "")

FILES = {
    "outside/configs/prior/ring.yaml": "defaults: [schema/ring]\nradius: 1.5\n",
    "outside/configs/model/minute.yaml": "defaults: [tiny]\nembed_dim: 8\n",
    "outside/configs/experiment/outside.yaml": "# @package _global_\n"
    "defaults: [override /prior: ring, override /model: minute, override /curriculum: smoke]\n",
}


def install(folder: Path, package: str, priors: str = "", configs: str = "", plugin: str = "") -> None:
    """What pip leaves of a package's metadata; the groups of priors and configs are those of earlier versions."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[tabicl_train.priors]\n{priors}\n\n[tabicl_train.configs]\n{configs}\n\n[tabicl_train.plugins]\n{plugin}\n"
    )


@pytest.mark.parametrize(
    ("entries", "init", "ring"),
    [
        ({"plugin": "outside = outside"}, "from outside import ring\n", RING),
        ({"priors": "ring = outside.ring:Ring", "configs": "outside = outside.configs"}, "", UNREGISTERED),
    ],
    ids=["one entry point", "earlier groups"],
)
def test_an_installed_package_brings_its_prior_and_configurations(entries, init, ring, fresh, tmp_path, monkeypatch):
    install(tmp_path, "outside", **entries)
    for name, content in {**FILES, "outside/__init__.py": init, "outside/ring.py": ring}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("outside", "outside.ring"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    config = compose(["experiment=outside", "prior.radius=1.2"])
    assert config.model.embed_dim == 8
    assert config.prior == {"name": "ring", "radius": 1.2}
    assert configured_prior(config.prior).sample(TableSpec(200, 100, 2), 0).X.shape == (200, 2)
    printed = command("train", "experiment=outside", "--cfg", "job").stdout
    assert "  radius: 1.5\n" in printed and "  embed_dim: 8\n" in printed
    assert "minute, " in command("train", "--help").stdout


@pytest.mark.parametrize(
    ("priors", "configs", "words"),
    [
        ("sums = missing:Sums", "", "package broken: the prior sums = 'missing:Sums' cannot be loaded (ModuleNotFound"),
        ("sums = json", "", "package broken: the prior sums = 'json' is no subclass"),
        ("mlp_scm = json", "", "two priors are called 'mlp_scm': of package broken and of tabicl-train itself"),
        ("", "own = nowhere.configs", "package broken: its entry point own = 'nowhere.configs' is no folder of config"),
    ],
)
def test_a_broken_package_is_named(priors, configs, words, tmp_path, monkeypatch):
    install(tmp_path, "broken", priors, configs)
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems("experiment=smoke")
    assert words in problem
