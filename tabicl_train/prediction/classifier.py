"""A pretrained network as a scikit-learn classifier."""

from __future__ import annotations

import contextlib
import enum
import warnings
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_X_y

from priors.real.files import NESTED
from priors.real.preprocessing import Member, differing_by_spaces
from tabicl_train.model.predict import decode
from tabicl_train.prediction.ensemble import Ensemble, refuse_complex
from tabicl_train.prediction.polars_frames import as_pandas

__all__ = ["TabICLClassifier"]

FIRST_TEMPERATURE = 0.9  # as in the `tabicl` package
FOLDS = 5
# Weight of the squared logarithm of the temperature: that of the losses of 5 rows. Without it, perfectly separated
# classes are predicted with certainty: on 75 real tasks the log loss fell by 0.008 +- 0.007, with it by 0.014 +- 0.002.
PULL = 5.0
TEMPERATURES = (0.1, 10.0)  # bounds


@dataclass(repr=False, eq=False)
class TabICLClassifier(ClassifierMixin, Ensemble):
    """Predict the classes of rows from labeled rows, in one forward pass of a pretrained network.

    `fit` prepares the table, and trains nothing. X may be an array, or a data frame of pandas or polars, with numbers,
    booleans, times, strings, categories and missing values.

    Parameters
    ----------
    model : str, Path or TabICL
        A name of weights in the package ("mini" is the newest of "mini-2026-12" and so on; prediction/README.md
        describes them), a run directory, a checkpoint, an export, or a network. A name comes first: "./mini" is a path.
        Of a run, its best weights by validation are taken if there are any, otherwise the newest.
    n_estimators : int
        Size of the ensemble, whose logits are averaged. Members differ in normalization, order of features and
        numbering of classes, and the first one keeps the order of features and classes. Members also take turns in how
        they number categories (three or more, not ordered by pandas): first by their targets, then in sorted order.
        Half of them, and the first one, see columns of more than 30 categories as shrunken effects on the target,
        cross-fitted on the labeled rows. The other half have further columns that tell which values are missing, if
        that is related to the target (chi-squared test of the labeled rows) and the network has no tokens for missing
        values.
    norm_methods : str or tuple of str
        One or some of "none", "power" and "quantile"; members take turns.
    memory_gb : float
        Memory that predictions may take besides the network and the table (GiB), approximately; labeled rows are
        computed in one piece, so many of them may need more.
    device : str, optional
        "cpu", "cuda" and so on; by default CUDA if available.
    random_state : int, optional
        Seed of the ensemble.
    softmax_temperature : float or "auto"
        Logits are divided by it. "auto" chooses it in `fit`, which then takes about five times as long: by the loss of
        labeled rows that are predicted from the others (5-fold cross-validation).
    plugins : str or list of str, optional
        Modules and Python files, such as ["./mine.py"], that define the network; `fit` imports them. So does whoever
        unpickles the estimator, and a file that has changed since then is refused.

    Attributes
    ----------
    classes_ : array of shape (classes,)
        The labels, sorted.
    softmax_temperature_ : float
        The temperature in use.

    Notes
    -----
    With one estimator and the same normalization, the probabilities agree to 1e-5 with those of the `tabicl` package,
    except if

    - a value lies about four standard deviations or more from the mean of the labeled rows: here it is clamped to that
      distance, as in the tables that networks are trained on; the package also adds the logarithm of its distance.
      With two labeled rows most rows are that far away, and "quantile" always puts the extremes there;
    - a column has a standard deviation of 0.001 or less: the package adds 1e-6 to it, so that columns in small units
      fade; here units make no difference;
    - a column has three categories or more, which the package numbers in sorted order.

    References
    ----------
    .. [1] "TabICL: a tabular foundation model for in-context learning on large data", arXiv 2502.05564.
    """

    softmax_temperature: float | str = 0.9
    _parameter_constraints: ClassVar[dict[str, list]] = {
        **Ensemble._parameter_constraints,
        "softmax_temperature": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto"})],
    }

    def fit(self, X: Any, y: Any) -> TabICLClassifier:
        """Prepare the table.

        Parameters
        ----------
        X : array or data frame of shape (rows, features)
            Labeled rows.
        y : array of shape (rows,)
            Their labels, of any type. If all are equal, that class is predicted.

        Returns
        -------
        TabICLClassifier
            Itself.

        Raises
        ------
        ValueError, TypeError
            If the table or a parameter cannot be used.
        """
        self._check_parameters()
        y = as_pandas(y)
        X = self._frame(X, y)
        refuse_complex(y, "y")
        if pd.isna(np.asarray(y, dtype=object)).any():
            raise ValueError("Input y contains NaN.")
        y = as_labels(y)
        _, y = check_X_y(np.broadcast_to(0.0, X.shape), y)  # as many rows as labels, at least one
        if y.dtype != object or isinstance(y[0], str | bytes):  # scikit-learn refuses other objects
            check_classification_targets(y)
        self.classes_, self.y_ = np.unique(y, return_inverse=True)
        if alike := differing_by_spaces(self.classes_):
            warnings.warn(f"y has classes that differ only by spaces: {alike}", stacklevel=2)
        self._prepare(X, len(self.classes_))
        if isinstance(self.softmax_temperature, str):  # "auto"
            self.softmax_temperature_ = self._best_temperature(X)
        else:
            self.softmax_temperature_ = self.softmax_temperature
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predict labels.

        Parameters
        ----------
        X : array or data frame of shape (rows, features)
            Query rows.

        Returns
        -------
        array of shape (rows,)
            The most probable labels.
        """
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict the probabilities of classes.

        Parameters
        ----------
        X : array or data frame of shape (rows, features)
            Query rows.

        Returns
        -------
        array of shape (rows, classes)
            Probabilities, float64, in the order of `classes_`.
        """
        return self._probabilities(self._encode(X))

    def _probabilities(self, encoded: np.ndarray) -> np.ndarray:
        """Return the probabilities of encoded query rows."""
        if self.softmax_temperature == "auto":
            return softmax(self._logits(encoded, 1.0) / self.softmax_temperature_, axis=1)
        return softmax(self._logits(encoded, self.softmax_temperature_), axis=1)

    def _logits(self, encoded: np.ndarray, temperature: float) -> np.ndarray:
        """Average logits over the members.

        Parameters
        ----------
        encoded : ndarray
            (rows, features), query rows.
        temperature : float
            A divisor of logits; with many classes, in each softmax of their tree.

        Returns
        -------
        ndarray
            float64 (rows, classes), logits divided by the temperature, or with many classes logarithms of
            probabilities.
        """
        C = len(self.classes_)
        total = np.zeros((len(encoded), C))
        for members, rows, outputs in self._passes(encoded, partial(decode, temperature=temperature)):
            for number, logits in zip(members, outputs, strict=True):
                shift = self.members_[number].shift  # see `_labels`
                total[rows] += np.roll(logits, -shift, axis=-1)[: rows.stop - rows.start]  # without padding
        return total / len(self.members_)

    def _labels(self, member: Member) -> np.ndarray:
        """Return the classes of the labeled rows as a member numbers them."""
        return (self.y_ + member.shift) % len(self.classes_)

    def _best_temperature(self, X: pd.DataFrame) -> float:
        """Find the temperature with the lowest loss of the labeled rows, predicted in 5-fold cross-validation."""
        # Folds. With a single row of each class, no row can be predicted from others.
        counts = np.bincount(self.y_)
        if counts.max() < 2:
            return FIRST_TEMPERATURE
        options = {**self.get_params(deep=False), "model": self.network_, "softmax_temperature": FIRST_TEMPERATURE}
        seed = check_random_state(self.random_state).randint(2**31)
        splits = StratifiedKFold(min(FOLDS, counts.max()), shuffle=True, random_state=seed)

        # Logits of the rows of each fold, -inf for classes that the other folds do not have.
        logits = []
        labels = []
        with warnings.catch_warnings(action="ignore"):  # about rare classes, and columns that `fit` has warned about
            for others, rows in splits.split(X, self.y_):
                if len(np.unique(self.y_[others])) < 2:
                    continue
                fold = type(self)(**options).fit(X.iloc[others], self.y_[others])
                rows = rows[np.isin(self.y_[rows], fold.classes_)]  # the fold cannot predict other classes
                if len(rows) == 0:
                    continue
                logits_of_fold = np.full((len(rows), len(counts)), -np.inf)
                logits_of_fold[:, fold.classes_] = fold._logits(fold._encode(X.iloc[rows]), 1.0)
                logits.append(logits_of_fold)
                labels.append(self.y_[rows])
        if not logits:
            return FIRST_TEMPERATURE
        return best_temperature(np.concatenate(logits), np.concatenate(labels))


def as_labels(y: Any) -> Any:
    """Return labels as an array of their own type, in which scikit-learn loses no label; other values as they are.

    Nullable and pyarrow types become those of numpy, and objects that are all truth values or numbers likewise. Other
    objects stay, if they have an order.
    """
    # As an array; of types of pandas, the one that numpy has.
    if isinstance(y, pd.DataFrame) and y.shape[1] == 1:
        return as_labels(y.iloc[:, 0]).reshape(-1, 1)
    if isinstance(y, pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        y = pd.Series(y)
        if isinstance(y.dtype, pd.CategoricalDtype):
            y = y.astype(y.cat.categories.dtype)
        numpy_dtype = getattr(y.dtype, "numpy_dtype", None)
        if numpy_dtype is not None and numpy_dtype.kind in "biuf":
            return y.to_numpy(dtype=numpy_dtype)
        y = y.to_numpy()
    if isinstance(y, list | tuple):
        array = np.asarray(y)
        if array.ndim != 1 or {type(label) for label in y} <= {str, np.str_}:
            return array
        objects = np.empty(len(y), object)
        objects[:] = y
        y = objects
    if not isinstance(y, np.ndarray) or y.dtype != object or y.ndim != 1:
        return y

    # Objects of one kind, which have an order.
    types = {type(label) for label in y}
    if all(issubclass(kind, str) for kind in types) or all(issubclass(kind, bytes) for kind in types):
        return y
    are_bools = all(issubclass(kind, bool | np.bool_) for kind in types)
    are_numbers = all(
        issubclass(kind, int | float | np.number) and not issubclass(kind, bool | enum.Enum) for kind in types
    )
    if are_bools or are_numbers:
        array = np.array(y.tolist())
        if array.dtype.kind in "biuf" and array.tolist() == y.tolist():  # not beyond the whole numbers of the type
            return array

    # Objects of several kinds, if they have an order.
    mixes_bools = not are_bools and any(issubclass(kind, bool | np.bool_) for kind in types)  # True is 1
    if not mixes_bools and not any(issubclass(kind, NESTED) for kind in types):
        with contextlib.suppress(TypeError):
            np.sort(y)
            return y
    names = ", ".join(sorted(kind.__name__ for kind in types))
    raise ValueError(
        f"y has labels of the type {names}; convert them first to one type that has an order, such as texts: "
        "[str(label) for label in y]"
    )


def best_temperature(logits: np.ndarray, y: np.ndarray) -> float:
    """Find the temperature T with the lowest regularized loss.

    It is the sum of the cross entropies of softmax(logits / T) and PULL (log T - log FIRST_TEMPERATURE)^2, for logits
    (rows, C) and labels y (rows,).
    """

    def loss(log_temperature: float) -> float:
        log_p = log_softmax(logits / np.exp(log_temperature), axis=1)
        cross_entropy = -log_p[np.arange(len(y)), y].sum()
        return cross_entropy + PULL * (log_temperature - np.log(FIRST_TEMPERATURE)) ** 2

    found = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded")
    return float(np.exp(found.x))
