"""`tabicl-predict`: reads files of labeled rows and of other rows, and writes predictions of the latter."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Collection
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from priors import PriorError
from priors.real.csv_format import USUAL_FORMAT, CsvFormat, csv_format
from priors.real.files import (
    EXACT,
    FEW_VALUES,
    LeftOut,
    Reading,
    advice_on_decimal,
    as_column,
    column_facts,
    nested_type,
    read_file,
    read_texts,
)
from priors.real.identifiers import IdentifierWarning, identifying_columns
from priors.real.preprocessing import CATEGORY, as_numbers, column_kind, differing_by_spaces, reads_as_numbers
from tabicl_train.config.options import PredictOptions
from tabicl_train.console import counted, first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.model.family import Network
from tabicl_train.model.quantiles import quantile_levels
from tabicl_train.outputs import check_output, existing_problems, input_problems, write_atomically
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.regressor import TabICLRegressor
from tabicl_train.weights import resolve
from tabicl_train.weights.reader import files_of_weights, load_model

ROWS = 1024  # predicted from one move of the progress bar to the next
LINE_SECONDS = 10.0  # between lines without a terminal


def predict_files(options: PredictOptions) -> None:
    """Write the predictions; raises ConfigError."""
    # The files.
    output = Path(options.output)
    if output.suffix != ".csv":
        raise ConfigError([f"output is {options.output!r}; it must be a .csv file"])
    inputs: list[tuple[str, str | Path]] = [("train", options.train), ("test", options.test)]
    inputs += [("checkpoint", path) for path in files_of_weights(options.checkpoint)]
    problems = input_problems("output", output, inputs)
    if not problems:
        problems = existing_problems("output", output, options.overwrite)
    if problems:
        raise ConfigError(problems)

    # The tables and the network, and whether it predicts what they hold.
    train, y, test, wants_numbers = read_tables(options)
    network = load_model(resolve(options.checkpoint, wants_numbers), options.weights)
    predicts_numbers = network_predicts_numbers(options, network, y, wants_numbers)
    check_output(output)

    # The labeled rows, and an estimator for them.
    has_target = np.isfinite(as_numbers(y)) if predicts_numbers else y.notna()
    y = y[has_target]
    X = train.loc[y.index]
    if len(X) < len(train):
        info(f"left out  {counted(len(train) - len(X), 'row')} of {options.train} without a target")
    make: type[TabICLRegressor | TabICLClassifier]
    if predicts_numbers:
        make = TabICLRegressor
        targets = as_numbers(y)
        names = None
        what = "numbers"
    else:
        make = TabICLClassifier
        targets, names = classes_of(y, options)
        for name in names:
            if options.target == f"probability_{name}":
                problem = f"target is {options.target!r}, which is also the output's column for the class {str(name)!r}"
                raise ConfigError([f"{problem}: rename the column in {options.train}"])
        what = counted(len(names), "class")
    columns = counted(X.shape[1], "column")
    asked = "1 row" if len(test) == 1 else f"{len(test):,} rows"
    info(f"predict   {options.target!r} ({what}) of {asked} from {len(X):,} labeled ones with {columns}")

    # Predictions, a part of the rows at a time; warnings are printed once, below the progress bar.
    parts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", IdentifierWarning)  # read_tables has named these columns
        try:
            model = make(network, n_estimators=options.n_estimators)
            model.fit(X, targets)
            encoded = model._encode(test)  # all rows at once, since warnings are about columns
            with tqdm(total=len(test), unit="row", disable=None) as bar:
                next_line = time.monotonic() + LINE_SECONDS
                for start in range(0, len(test), ROWS):
                    rows = encoded[start : start + ROWS]
                    parts.append(output_columns(model, rows, options, names))
                    bar.update(len(rows))
                    if bar.disable and time.monotonic() >= next_line:  # no terminal
                        next_line = time.monotonic() + LINE_SECONDS
                        info(f"predicted {start + len(rows):,} of {len(test):,} rows")
        except (ValueError, TypeError) as error:
            raise ConfigError([first_line(error)]) from None
    for line in dict.fromkeys(str(warning.message) for warning in caught):
        info(f"warning   {line}")

    # The file.
    result = pd.concat(parts)
    if not np.isfinite(result.select_dtypes("number")).all(axis=None):
        problem = f"checkpoint is {options.checkpoint!r}; its predictions are not finite, so nothing is written"
        raise ConfigError([problem])
    try:
        write_atomically(output, lambda file: file.write(result.to_csv(index=False).encode()))
    except OSError as error:
        raise ConfigError([f"output is {options.output!r}; it cannot be written ({error.strerror})"]) from None
    written = ", ".join(map(str, result.columns[:4]))
    if result.shape[1] > 4:
        written += ", ..."
    info(f"written   {output}: {written}")


def read_tables(options: PredictOptions) -> tuple[pd.DataFrame, pd.Series, pd.DataFrame, bool]:
    """Read the labeled rows and the rows to predict.

    Parameters
    ----------
    options : PredictOptions
        The files, and which columns they have.

    Returns
    -------
    X : DataFrame
        The features of the labeled rows.
    y : Series
        Their targets, some of which may be missing.
    test : DataFrame
        The rows to predict, with the same columns.
    wants_numbers : bool
        Whether the targets are numbers.

    Raises
    ------
    ConfigError
        If a file cannot be read or lacks a column, or a column cannot be used.
    """
    # The two files.
    form = format_of(options)
    reading = Reading()
    train = read_input(options.train, form, targets=[options.target], reading=reading)
    # Categories that are texts here are read as texts there, too, even if they all look like numbers in the test file.
    texts = []
    for name in train:
        is_text = pd.api.types.infer_dtype(train[name].astype(object)) == "string"
        if is_text and column_kind(train[name]) == CATEGORY:  # not of dates
            texts.append(name)
    reading_test = Reading()
    test = read_input(options.test, form, texts, [options.target], reading_test)
    for remark in dict.fromkeys([*reading.remarks, *reading_test.remarks]):  # what is true of both is said once
        paths = {options.train: reading, options.test: reading_test}
        where = ", ".join(path for path, of_path in paths.items() if remark in of_path.remarks)
        info(f"warning   {where}: {remark}")

    # The columns that are used.
    nameless = [name for name in train if re.fullmatch(r"Unnamed: \d+", str(name))]
    if nameless:
        info(f"left out  {counted(len(nameless), 'column')} of {options.train} without a name: perhaps row numbers")
    unknown = [name for name in (options.target, *options.drop) if name not in train]
    if unknown:
        examples = ", ".join(map(str, train.columns[:20]))
        raise ConfigError([f"{options.train} has no column {name!r}; it has {examples}" for name in unknown])
    if options.target in options.drop:
        raise ConfigError([f"drop leaves out the target {options.target!r}"])
    y = train[options.target]
    X = train.drop(columns=[options.target, *options.drop, *nameless])
    if X.shape[1] == 0:
        raise ConfigError([f"{options.train} has no column other than {options.target!r}"])
    if len(test) == 0:
        raise ConfigError([f"{options.test} has no rows"])
    missing = [str(name) for name in X if name not in test]
    if missing:
        raise ConfigError([f"{options.test} lacks the column {name!r} of {options.train}" for name in missing])
    test = test[X.columns]

    # Columns that cannot be used, or that should perhaps be used otherwise.
    for path, frame in ((options.train, X), (options.test, test)):
        for name, values in frame.items():
            kind = nested_type(values)
            if kind is not None:
                advice = f"drop=[{name}] leaves it out"
                raise ConfigError([f"{path}: the column {name!r} holds values of the type {kind}; {advice}"])
    for name in texts:
        advice = advice_on_decimal(X[name]) if name in X else ""
        if advice:
            info(f"warning   {name!r} holds text such as {X[name].dropna().iloc[0]!r}{advice}")
    for name, reason in identifying_columns(X).items():
        info(f"warning   {name!r} looks like an identifier ({reason}) and is used; drop=[{name}] leaves it out")
    return X, y, test, has_numbers(options, y)


def format_of(options: PredictOptions) -> CsvFormat:
    return csv_format(options.separator, options.decimal, options.missing_words)


def read_input(
    path: str,
    form: CsvFormat = USUAL_FORMAT,
    texts: Collection[str] = (),
    targets: Collection[str] | None = (),
    reading: Reading | None = None,
) -> pd.DataFrame:
    """Read a file; says how, unless it tells `reading`."""
    says = reading is None
    reading = reading or Reading()
    try:
        frame = read_file(Path(path), texts, form, targets, reading)
    except PriorError as error:
        raise ConfigError([str(error)]) from None
    for remark in reading.remarks if says else []:
        info(f"warning   {path}: {remark}")
    return frame


def has_numbers(options: PredictOptions, y: pd.Series) -> bool:
    """Whether a target is a number; raises ConfigError if it is neither a number nor a class."""
    name = f"the target {options.target!r} of {options.train}"
    try:
        column, kind = as_column(y)
    except LeftOut as error:
        raise ConfigError([f"{name}: {error}"]) from None
    facts = column_facts(options.target, kind, column)
    if kind == "time":
        raise ConfigError([f"{name} has times, which cannot be predicted"])
    if kind == "category" and options.task == "regression":
        held = "whole numbers that float64 cannot tell apart" if reads_as_numbers(y) else "text"
        raise ConfigError([f"task is 'regression', but {name} holds {held}, such as {column[0]!r}"])
    if kind == "category" and facts.distinct > facts.known / 2:
        raise ConfigError([f"{name} has {facts.distinct} different texts in {counted(facts.known, 'row')}"])
    if options.task is not None:
        return options.task == "regression"
    return kind == "number" and facts.distinct > FEW_VALUES


def network_predicts_numbers(options: PredictOptions, network: Network, y: pd.Series, wants_numbers: bool) -> bool:
    """Whether the network predicts numbers, not classes; raises ConfigError if it cannot predict the target."""
    predicts_numbers = network.config.is_regression
    if predicts_numbers == wants_numbers:
        return predicts_numbers
    if predicts_numbers and options.task is None and reads_as_numbers(y):  # a few numbers, first taken for classes
        return True
    predicted = "numbers" if predicts_numbers else "classes"
    target = f"the target {options.target!r} of {options.train}"
    problem = f"checkpoint is {options.checkpoint!r}, which predicts {predicted}, but {target} has "
    problem += "numbers" if wants_numbers else "classes"
    if wants_numbers and options.task is None:
        problem += "; task=classification takes them for classes"
    raise ConfigError([problem])


def classes_of(y: pd.Series, options: PredictOptions) -> tuple[np.ndarray, np.ndarray]:
    """Number the classes of rows from 0.

    Parameters
    ----------
    y : Series
        The classes as pandas reads them, none of them missing.
    options : PredictOptions
        The file that they are from.

    Returns
    -------
    numbers : ndarray
        int64 (rows,). Whole numbers are in their order, all other classes in that of their texts.
    names : ndarray
        Objects (classes,), the classes as the file writes them.
    """
    # The classes, each with the ways in which it is written.
    texts = texts_of(y, options)
    is_number = y.dtype.kind in "iuf"
    texts_of_class: dict[Decimal | str, list[str]] = {}
    for row, text in texts.drop_duplicates().items():
        # The number that the text stands for, since the floats of pandas are not exact beyond 2**53.
        name = Decimal(text.strip().replace(",", ".")) if is_number else str(y.loc[row])
        texts_of_class.setdefault(name, []).append(text)

    # Their order.
    order: list
    if is_number and not is_whole(y):
        order = sorted(texts_of_class, key=lambda number: str(float(number)))
    else:
        order = sorted(texts_of_class)  # type: ignore[type-var]  # of numbers alone, or of texts alone
    number_of_text = {}
    for number, name in enumerate(order):
        for text in texts_of_class[name]:
            number_of_text[text] = number
        if len(texts_of_class[name]) > 1:
            ways = ", ".join(map(repr, texts_of_class[name]))
            info(f"warning   {options.target!r} has a class that is written in several ways: {ways}")
    if not is_number and (alike := differing_by_spaces(order)):
        info(f"warning   {options.target!r} has classes that differ only by spaces: {alike}")
    first_texts = [texts_of_class[name][0] for name in order]
    names = [text.strip() for text in first_texts] if is_number else first_texts
    return texts.map(number_of_text).to_numpy(), np.array(names, object)


def texts_of(y: pd.Series, options: PredictOptions) -> pd.Series:
    """Return classes as a CSV file writes them; those of other files as text, whole numbers without a point."""
    path = Path(options.train)
    if path.suffix.lower() == ".csv":
        return read_texts(path, options.target, format_of(options)).loc[y.index]
    if y.dtype.kind == "f" and is_whole(y) and (y.abs() < EXACT).all():
        y = y.astype("int64")
    return y.astype(object).map(str)


def is_whole(y: pd.Series) -> bool:
    """Return whether all values are whole numbers."""
    return y.dtype.kind in "iuf" and bool((y == y.round()).all())


def output_columns(
    model: TabICLClassifier | TabICLRegressor, encoded: np.ndarray, options: PredictOptions, names: np.ndarray | None
) -> pd.DataFrame:
    """Return the columns of the output for some encoded rows; names: of the classes."""
    if isinstance(model, TabICLClassifier):
        assert names is not None
        p = model._probabilities(encoded)
        columns = {f"probability_{name}": p[:, i] for i, name in enumerate(names)}
        return pd.DataFrame({options.target: names[p.argmax(axis=1)], **columns})
    # The mean is that of the network's own quantiles, so that all three come from one prediction.
    network_levels = quantile_levels(model.network_.config.outputs).double().tolist()
    lower = (1 - options.coverage) / 2
    upper = (1 + options.coverage) / 2
    quantiles = model._quantiles_at(encoded, [*network_levels, lower, upper])
    return pd.DataFrame(
        {
            options.target: quantiles[:, : len(network_levels)].mean(axis=1),
            f"{options.target}_lower": quantiles[:, -2],
            f"{options.target}_upper": quantiles[:, -1],
        }
    )
