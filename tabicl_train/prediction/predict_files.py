"""`tabicl-predict`: reads files of labeled rows and of other rows, and writes predictions of the latter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from priors import PriorError
from priors.real.files import LeftOut, as_column, facts_of, read_file
from priors.real.preprocessing import CATEGORY, as_numbers, kind_of, reads_as_numbers
from priors.real.tasks import FEW_VALUES, is_identifier
from tabicl_train.config.options import PredictOptions
from tabicl_train.console import counted, first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.model.quantiles import levels
from tabicl_train.model.tabicl import TabICL
from tabicl_train.outputs import check_output, write_atomically
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.export import load_model
from tabicl_train.prediction.fine_tune import LINE_SECONDS, clock
from tabicl_train.prediction.regressor import TabICLRegressor
from tabicl_train.weights import resolve

ROWS = 1024  # predicted from one move of the progress bar to the next


def predict_files(options: PredictOptions) -> None:
    """Write the predictions; raises ConfigError."""
    output = Path(options.output)
    if output.suffix != ".csv":
        raise ConfigError([f"output is {options.output!r}; it must be a .csv file"])
    if output.exists() and not options.overwrite:
        raise ConfigError([f"output is {options.output!r}, which is there already: set overwrite=true"])
    train, y, test, wants_numbers = read_tables(options)
    network = load_model(resolve(options.checkpoint, wants_numbers), options.weights)
    wants_numbers = kind_of_prediction(options, network, y, wants_numbers)
    check_output(output)

    y = y[np.isfinite(as_numbers(y)) if wants_numbers else y.notna()]
    if unknown := len(train) - len(y):
        info(f"left out  {counted(unknown, 'row')} of {options.train} without a target")
    X, columns = train.loc[y.index], counted(train.shape[1], "column")
    what = "numbers" if wants_numbers else counted(y.nunique(), "class")
    info(f"predict   {options.target!r} ({what}) of {len(test):,} rows from {len(X):,} labeled ones with {columns}")
    make = TabICLRegressor if wants_numbers else TabICLClassifier
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        try:
            model = make(network, n_estimators=options.n_estimators)
            model.fit(X, as_numbers(y) if wants_numbers else labels(y))
            with tqdm(total=len(test), unit="row", disable=None) as bar:
                parts, next_line = [], clock() + LINE_SECONDS
                for start in range(0, len(test), ROWS):
                    some = test.iloc[start : start + ROWS]
                    parts.append(predictions(model, some, options))
                    bar.update(len(some))
                    if bar.disable and clock() >= next_line:  # no terminal
                        next_line = clock() + LINE_SECONDS
                        info(f"predicted {start + len(some):,} of {len(test):,} rows")
        except (ValueError, TypeError) as error:
            raise ConfigError([first_line(error)]) from None
    for line in dict.fromkeys(str(warning.message) for warning in found):
        info(f"warning   {line}")
    try:
        write_atomically(output, lambda file: file.write(pd.concat(parts).to_csv(index=False).encode()))
    except OSError as error:
        raise ConfigError([f"output is {options.output!r}; it cannot be written ({error.strerror})"]) from None
    info(f"written   {output}: {', '.join(map(str, parts[0].columns[:4]))}{', ...' if parts[0].shape[1] > 4 else ''}")


def read_tables(options: PredictOptions) -> tuple[pd.DataFrame, pd.Series, pd.DataFrame, bool]:
    """Read labeled rows, their targets, rows to predict with the same columns, and whether the targets are numbers."""
    train = read(options.train)
    texts = [name for name in train if pd.api.types.infer_dtype(train[name].astype(object)) == "string"]
    texts = [name for name in texts if kind_of(train[name]) == CATEGORY]
    test = read(options.test, texts)
    dropped = [*options.drop, *(name for name in train if re.fullmatch(r"Unnamed: \d+", str(name)))]
    if nameless := dropped[len(options.drop) :]:
        info(f"left out  {counted(len(nameless), 'column')} of {options.train} without a name: perhaps row numbers")
    if unknown := [name for name in (options.target, *options.drop) if name not in train]:
        known = ", ".join(map(str, train.columns[:20]))
        raise ConfigError([f"{options.train} has no column {name!r}; it has {known}" for name in unknown])
    if options.target in options.drop:
        raise ConfigError([f"drop leaves out the target {options.target!r}"])
    y = train[options.target]
    X = train.drop(columns=[options.target, *dropped])
    if X.shape[1] == 0:
        raise ConfigError([f"{options.train} has no column beside {options.target!r}"])
    if len(test) == 0:
        raise ConfigError([f"{options.test} has no rows"])
    if missing := [str(name) for name in X if name not in test]:
        raise ConfigError([f"{options.test} lacks the column {name!r} of {options.train}" for name in missing])
    for name in (str(name) for name in X if is_identifier(str(name), X[name].nunique(), len(X))):
        info(f"warning   {name!r} looks like an identifier; drop=[{name}] leaves it out")
    return X, y, test[X.columns], has_numbers(options, y)


def read(path: str, texts: Collection[str] = ()) -> pd.DataFrame:
    try:
        return read_file(Path(path), texts)
    except PriorError as error:
        raise ConfigError([str(error)]) from None


def has_numbers(options: PredictOptions, y: pd.Series) -> bool:
    """Whether a target is a number; raises ConfigError if it is neither a number nor a class."""
    name = f"the target {options.target!r} of {options.train}"
    try:
        column, kind = as_column(y)
    except LeftOut as error:
        raise ConfigError([f"{name}: {error}"]) from None
    facts = facts_of(options.target, kind, column)
    if kind == "time":
        raise ConfigError([f"{name} has times, which are not predicted"])
    if kind == "category" and options.task == "regression":
        raise ConfigError([f"task is 'regression', but {name} holds text, such as {column[0]!r}"])
    if kind == "category" and facts.distinct > facts.known / 2:
        raise ConfigError([f"{name} has {facts.distinct} different texts in {counted(facts.known, 'row')}"])
    if options.task is not None:
        return options.task == "regression"
    return kind == "number" and facts.distinct > FEW_VALUES


def kind_of_prediction(options: PredictOptions, network: TabICL, y: pd.Series, wants_numbers: bool) -> bool:
    """Whether numbers are predicted; raises ConfigError if the network cannot predict the target."""
    predicts_numbers = network.config.is_regression
    if predicts_numbers == wants_numbers or (options.task is None and predicts_numbers and reads_as_numbers(y)):
        return predicts_numbers
    name, kinds = f"the target {options.target!r} of {options.train}", ("classes", "numbers")
    problem = f"checkpoint is {options.checkpoint!r}, which predicts {kinds[predicts_numbers]}, but {name} has "
    advice = "; task=classification takes them for classes" if options.task is None and wants_numbers else ""
    raise ConfigError([f"{problem}{kinds[wants_numbers]}{advice}"])


def labels(y: pd.Series) -> np.ndarray:
    """Return classes as integers, which pandas reads as floats if some are missing, or else as text."""
    if y.dtype.kind in "iuf" and (y == y.round()).all():
        return y.astype("int64").to_numpy()
    return y.astype(str).to_numpy(object)


def predictions(model: TabICLClassifier | TabICLRegressor, X: pd.DataFrame, options: PredictOptions) -> pd.DataFrame:
    """Return the columns of the output for some rows."""
    if isinstance(model, TabICLClassifier):
        p = model.predict_proba(X)
        columns = {f"probability_{name}": p[:, i] for i, name in enumerate(model.classes_)}
        return pd.DataFrame({options.target: model.classes_[p.argmax(axis=1)], **columns})
    # The mean is that of the network's own quantiles, so that all three come from one prediction.
    own = levels(model.network_.config.outputs).double().tolist()
    q = model.predict_quantiles(X, [*own, (1 - options.coverage) / 2, (1 + options.coverage) / 2])
    ends = {f"{options.target}_lower": q[:, -2], f"{options.target}_upper": q[:, -1]}
    return pd.DataFrame({options.target: q[:, : len(own)].mean(axis=1), **ends})
