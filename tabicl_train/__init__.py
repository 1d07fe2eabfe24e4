"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""

__all__ = ["FineTune", "TabICLClassifier", "TabICLRegressor"]


def __getattr__(name: str):
    # on first use: scikit-learn and torch take seconds to import, and commands that only check arguments need neither
    if name == "FineTune":
        from tabicl_train.prediction.fine_tune import FineTune

        return FineTune
    if name == "TabICLClassifier":
        from tabicl_train.prediction.classifier import TabICLClassifier

        return TabICLClassifier
    if name == "TabICLRegressor":
        from tabicl_train.prediction.regressor import TabICLRegressor

        return TabICLRegressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
