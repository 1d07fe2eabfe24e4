"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""

__all__ = ["FineTune", "TabICLClassifier", "TabICLRegressor"]


def __getattr__(name: str):
    # on first use: scikit-learn and torch take seconds to import, and commands that only check arguments need neither
    if name in __all__:
        from tabicl_train.prediction import classifier, fine_tune, regressor

        return next(vars(module)[name] for module in (classifier, fine_tune, regressor) if name in vars(module))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
