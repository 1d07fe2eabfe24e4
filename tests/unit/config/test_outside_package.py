"""A package outside this repository registers a prior and configuration files."""

from pathlib import Path

from command_line import command

from priors import TableSpec
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior

PAGE = Path(__file__).parents[3] / "tabicl_train/EXTEND.md"
RING = PAGE.read_text().partition("```python\n# ring.py\n")[2].partition("```")[0]

FILES = {
    "outside/__init__.py": "import outside.ring",
    "outside/ring.py": RING,
    "outside/configs/prior/ring.yaml": "defaults: [schema/ring]\nradius: 1.5\n",
    "outside/configs/model/minute.yaml": "defaults: [tiny]\nembed_dim: 8\n",
    "outside/configs/experiment/outside.yaml": "# @package _global_\n"
    "defaults: [override /prior: ring, override /model: minute, override /curriculum: smoke]\n",
}


def test_an_installed_package_brings_its_prior_and_configurations(tmp_path, monkeypatch, fresh):
    metadata = tmp_path / "outside-1.0.dist-info"  # what pip leaves of a package's metadata
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tabicl_train.plugins]\noutside = outside\n")
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    config = compose(["experiment=outside", "prior.radius=1.2"])
    assert config.model.embed_dim == 8
    assert config.prior == {"name": "ring", "radius": 1.2}
    assert configured_prior(config.prior).sample(TableSpec(200, 100, 2), 0).X.shape == (200, 2)
    printed = command("train", "experiment=outside", "--cfg", "job").stdout
    assert "  radius: 1.5\n" in printed and "  embed_dim: 8\n" in printed
    assert "minute, " in command("train", "--help").stdout
