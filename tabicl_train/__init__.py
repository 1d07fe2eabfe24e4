"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""

__all__ = ["TabICLClassifier"]


def __getattr__(name: str):
    # on first use: scikit-learn and torch take seconds to import, and commands that only check arguments need neither
    if name == "TabICLClassifier":
        from tabicl_train.prediction.classifier import TabICLClassifier

        return TabICLClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
