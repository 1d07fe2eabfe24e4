"""The base of the classifier and the regressor: tables as numbers, the members of the ensemble, and the network."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import datetime
import decimal
import inspect
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from priors.real.identifiers import warn_of_identifiers
from priors.real.preprocessing import (
    NORM_METHODS,
    FeatureEncoder,
    Member,
    Normalizer,
    draw_members,
    warn_of_resemblances,
)
from tabicl_train import NO_FINE_TUNE
from tabicl_train.console import first_line
from tabicl_train.doors import plugins, register
from tabicl_train.doors.plugins import Plugin
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_name, named_parts
from tabicl_train.model.encoding import CPU_PART
from tabicl_train.model.family import Network, encodes
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import encode, pack_of_queries, represent, representation_problem
from tabicl_train.outputs import expand_home
from tabicl_train.prediction.polars_frames import as_pandas
from tabicl_train.run.checkpoint import non_finite, state_dict_problem
from tabicl_train.weights import resolve
from tabicl_train.weights.reader import load_model

T = TypeVar("T")
EMBEDDINGS_PER_TOKEN = 16  # in float32, in memory during a prediction; measured
PASS_VALUES = {"cpu": CPU_PART, "cuda": 2**24}  # embedding values of a pass, within the limits of its rows
# Query rows of a pass. On a CPU, a single row takes as long as a whole pass: 0.017 s with 64 rows of 5 features and two
# members. With 128 rows a pass took 0.028 s, and 2,000 rows 0.44 instead of 0.48 s.
LEAST_ROWS = 16
MOST_ROWS = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True)
class Sizes:
    """How much an ensemble computes at a time.

    Parameters
    ----------
    members : int
        Of a pass.
    rows : int
        Query rows of a pass.
    kept : int
        So many members have their state kept for later predictions.
    tokens : int
        Cells in memory at a time, see `encode`.
    """

    members: int
    rows: int
    kept: int
    tokens: int


@dataclass(frozen=True)
class Pass:
    """One pass of the network: some members of an ensemble predict some query rows.

    Parameters
    ----------
    members : range
        The numbers of the members.
    rows : slice
        The query rows that are predicted; in the last pass, padding follows them.
    """

    members: range
    rows: slice


@dataclass(frozen=True)
class PassPlan:
    """How an ensemble predicts query rows, decided before anything is computed.

    All passes have the same number of rows, so that a prediction does not depend on the other query rows: the shape of
    a matrix product changes the order of its sums.

    Parameters
    ----------
    groups : list of range
        The numbers of the members that go through the network together.
    passes : list of Pass
        In the order of their computation, one group after the other.
    padding : int
        Rows that are added after the query rows, to fill the last pass.
    """

    groups: list[range]
    passes: list[Pass]
    padding: int

    def passes_of(self, groups: list[range]) -> list[Pass]:
        """Return the passes of some groups."""
        return [one for one in self.passes if one.members in groups]


def plan_passes(num_members: int, num_rows: int, together: int, size: int) -> PassPlan:
    """Plan the passes of some query rows, with `together` members and `size` rows in each."""
    groups = []
    for first in range(0, num_members, together):
        groups.append(range(first, min(first + together, num_members)))
    passes = []
    for group in groups:
        for start in range(0, num_rows, size):
            passes.append(Pass(group, slice(start, min(start + size, num_rows))))
    return PassPlan(groups, passes, padding=-num_rows % size)


@dataclass(repr=False, eq=False)
class Ensemble(BaseEstimator):
    """A pretrained network with the members of an ensemble; see TabICLClassifier for the parameters."""

    model: str | Path | Network = "mini"
    n_estimators: int = 8
    norm_methods: str | tuple[str, ...] = ("power", "none")  # alone, power is 0.0025 of ROC AUC better than none
    memory_gb: float = 4.0
    device: str | None = None
    random_state: int | None = 0
    plugins: str | Path | Sequence[str | Path] | None = field(default=None, kw_only=True)
    _parameter_constraints: ClassVar[dict[str, list]] = {
        "model": [str, os.PathLike, Network],
        "n_estimators": [Interval(Integral, 1, None, closed="left")],
        "norm_methods": [StrOptions(set(NORM_METHODS)), "array-like"],
        "memory_gb": [Interval(Real, 0, None, closed="neither")],
        "device": [str, torch.device, None],
        "random_state": ["random_state"],
        "plugins": [str, os.PathLike, "array-like", None],
    }

    def __new__(cls, *arguments: Any, **parameters: Any) -> Ensemble:
        # Not in __init__, whose arguments scikit-learn takes for the parameters of the estimator.
        if "fine_tune" in parameters:
            raise TypeError(NO_FINE_TUNE)
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        # Otherwise inspect, and with it help() and scikit-learn's checks, would show the signature of __new__.
        super().__init_subclass__(**options)
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def _prepare(self, X: pd.DataFrame, num_classes: int) -> None:
        """Fit everything except the labels, `y_`, which are set before; a regressor has num_classes=0."""
        self._plugins = plugins.load(self.plugins)
        self.network_ = load_or_copy(self.model, regression=num_classes == 0).eval()
        target = np.eye(num_classes)[self.y_] if num_classes else self.y_[:, None]
        self.encoder_ = FeatureEncoder(self.network_.config.missing_values).fit(X, target)
        warn_of_resemblances(X, self.encoder_.kinds)
        warn_of_identifiers(X, self.encoder_.kinds)
        self.X_ = self.encoder_.crossfitted(self.encoder_.transform(X), target)
        self.normalizers_ = {method: Normalizer(method).fit(self.X_) for method in self._norm_methods}
        rng = check_random_state(self.random_state)
        self.members_ = draw_members(rng, self.n_estimators, self._norm_methods, self.encoder_.views, num_classes)
        self._move()
        self._kept: dict[tuple[torch.dtype | None, range], Any] = {}  # by autocast's dtype, and the members of a pass

    @property
    def _norm_methods(self) -> list[str]:
        return [self.norm_methods] if isinstance(self.norm_methods, str) else list(self.norm_methods)

    def _move(self) -> None:
        """Choose the device, also after an estimator from another machine was loaded, and move the network there."""
        self.device_ = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network_.to(self.device_)

    def export(self, path: str | Path) -> None:
        """Write the network of a fitted estimator to a file or folder.

        Parameters
        ----------
        path : str or Path
            A file .ckpt, .pt, .pth, .safetensors or .onnx, or a folder for the Hugging Face format; an existing one is
            replaced. All but ONNX can be passed as `model`. The network does not hold the rows of `fit`.

        Raises
        ------
        ConfigError
            If the name has no known format, the format cannot express the network, or the file cannot be written.
        """
        from tabicl_train.weights.export import check_format, export_weights
        from tabicl_train.weights.pretrained import Pretrained

        check_is_fitted(self)
        weights = {name: weight.cpu() for name, weight in self.network_.state_dict().items()}
        config = self.network_.config
        needed = register.plugins_used(named_parts(config))
        origin = {"plugins": needed} if needed else {}
        output = expand_home(path)
        export_weights(Pretrained(config, weights, origin), output, check_format(output, None))

    def embed(self, X: Any) -> np.ndarray:
        """Return the representations of rows that in-context learning reads.

        Parameters
        ----------
        X : array or data frame of shape (rows, features)
            Rows. Those of `fit` are represented as rows without a label, too.

        Returns
        -------
        array of shape (members, rows, D)
            Float32, of each member of the ensemble. They are not averaged, since members see the columns in other
            orders; the first one keeps the order of the table. They depend on the labeled rows. A row gets the same
            values whichever rows it is represented with. D is model.row_num_cls * model.embed_dim.

        Raises
        ------
        ConfigError
            If the network has no such representations.

        References
        ----------
        The outputs of the CLS tokens in Qu et al., TabICL, arXiv 2502.05564, "Context-aware row-wise interaction"; with
        target-aware columns (arXiv 2602.11139), they depend on the labels of the labeled rows as well.
        """
        encoded = self._encode(X)
        problem = representation_problem(self.network_)
        if problem is not None:
            raise ConfigError([problem])
        parts: list[list[np.ndarray]] = [[] for _ in self.members_]  # of each member, one of each pass
        for members, rows, vectors in self._passes(encoded, represent):
            for number, part in zip(members, vectors, strict=True):
                parts[number].append(part[: rows.stop - rows.start])  # without padding
        return np.stack([np.concatenate(parts_of_member) for parts_of_member in parts])

    def _labels(self, member: Member) -> np.ndarray:
        """Return the labels of the labeled rows as a member sees them."""
        raise NotImplementedError

    def _encode(self, X: Any) -> np.ndarray:
        """Encode query rows, float64 (rows, features), NaN where missing if the network supports that.

        The public methods call it directly, so that its warning names the line that calls them.
        """
        check_is_fitted(self)
        return self.encoder_.transform(self._frame(X))

    def _passes(
        self, encoded: np.ndarray, compute: Callable[..., torch.Tensor]
    ) -> Iterator[tuple[range, slice, np.ndarray]]:
        """Compute something for query rows, pass by pass.

        Parameters
        ----------
        encoded : ndarray
            (rows, features), query rows.
        compute : callable
            `decode` or `represent`.

        Yields
        ------
        members : range
            The numbers of some members.
        rows : slice
            Some query rows.
        outputs : ndarray
            float32 (members, rows, width), what is computed for them; behind the last row there may be padding.
        """
        # Which members and rows are computed together.
        num_classes = len(getattr(self, "classes_", ()))  # a regressor has none
        sizes = self._sizes(num_classes)
        plan = plan_passes(len(self.members_), len(encoded), sizes.members, sizes.rows)
        device = self.device_
        dtype = autocast_dtype(device)

        # Rows as the members see them; labeled ones only if they have to be encoded.
        padding = np.repeat(encoded[-1:], plan.padding, axis=0)
        queries = self._tables(np.concatenate([encoded, padding]))
        has_all_states = all((dtype, group) in self._kept for group in plan.groups)
        labeled = {} if has_all_states else self._tables(self.X_)

        def encode_group(group: range) -> Any:
            """Encode the labeled rows for some members, or return what was kept of an earlier prediction."""
            state = self._kept.get((dtype, group))
            if state is not None:
                return state
            members = [self.members_[number] for number in group]
            tables = []
            for X, member in zip(self._rows(labeled, members), members, strict=True):
                y = torch.from_numpy(self._labels(member)).to(device)
                tables.append((X, y, len(y)))
            with torch.autocast(device.type, dtype, dtype is not None):
                state = encode(self.network_, Pack.of(tables), num_classes, sizes.tokens)
            if group.stop <= sizes.kept:
                self._kept[dtype, group] = state
            return state

        def compute_pass(one: Pass, state: Any) -> np.ndarray:
            """Compute the query rows of a pass, and the padding after them."""
            members = [self.members_[number] for number in one.members]
            padded = slice(one.rows.start, one.rows.start + sizes.rows)
            rows = {method: table[padded] for method, table in queries.items()}
            with torch.autocast(device.type, dtype, dtype is not None):
                pack = pack_of_queries(self._rows(rows, members))
                outputs = compute(self.network_, state, pack, tokens=sizes.tokens)
            return outputs.float().cpu().numpy().reshape(len(members), sizes.rows, -1)

        # Groups of members, as many at a time as there are threads, then their passes.
        with side_by_side(device) as (run, threads):
            # A single group is encoded on all cores. Its bits depend on their number, but are the same for all rows.
            run_encode = run if len(plan.groups) > 1 else map
            for groups in batched(plan.groups, threads):
                states = dict(zip(groups, run_encode(encode_group, groups), strict=True))
                for passes in batched(plan.passes_of(groups), threads):
                    states_of_passes = [states[one.members] for one in passes]
                    for one, outputs in zip(passes, run(compute_pass, passes, states_of_passes), strict=True):
                        yield one.members, one.rows, outputs

    def _tables(self, encoded: np.ndarray) -> dict[str, np.ndarray]:
        """Normalize encoded rows by each method, float32 (rows, features)."""
        return {method: normalizer.transform(encoded) for method, normalizer in self.normalizers_.items()}

    def _rows(self, tables: dict[str, np.ndarray], members: list[Member]) -> list[torch.Tensor]:
        """Return the rows of a table for each member, on the device."""
        tables_of_members = []
        for member in members:
            rows = tables[member.norm_method][:, member.features]
            tables_of_members.append(torch.from_numpy(rows).to(self.device_))
        return tables_of_members

    def _sizes(self, num_classes: int) -> Sizes:
        """Choose how much is computed at a time.

        It depends only on the fitted estimator, so that a prediction does not depend on the other query rows.

        Parameters
        ----------
        num_classes : int
            The classes of the table; 0 for regression.
        """
        # The table and the network. A token is a cell.
        network = type(self.network_)
        config = self.network_.config
        n = len(self.X_)
        features = max(len(member.features) for member in self.members_)
        embedding = network.embedding_width(config)
        on_cpu = self.device_.type == "cpu"
        device = "cpu" if on_cpu else "cuda"

        # Half of the memory, in bytes, is for the states of members that are kept for later predictions.
        memory = self.memory_gb * 2**30 / 2
        kept = int(memory / network.encoded_bytes(config, n, features, num_classes))

        # The other half is for passes: one, or on a CPU one in each thread.
        values_per_token = EMBEDDINGS_PER_TOKEN * embedding + config.outputs / features  # a row also has 999 quantiles
        threads = torch.get_num_threads() if on_cpu else 1
        tokens = int(memory / (4 * values_per_token) / threads)

        # On a GPU, more tables at once take hardly longer; on a CPU, members are computed in parallel threads instead.
        members = 1
        if not on_cpu:
            members = max(1, min(len(self.members_), tokens // (n * features), kept))

        # Query rows of a pass, at first as many as its embedding values and the memory allow.
        if encodes(network):
            rows = min(PASS_VALUES[device] // embedding, tokens) // (members * features)
            most = MOST_ROWS[device]
        else:  # each pass computes the labeled rows again, so it has about as many query rows
            rows = n
            most = MOST_ROWS["cuda"]
        rows = min(max(rows, LEAST_ROWS), most)
        rows = 2 ** (rows.bit_length() - 1)  # a power of two, for tiles of matrix products
        return Sizes(members=members, rows=rows, kept=kept, tokens=tokens)

    def _frame(self, X: Any, *y: Any) -> pd.DataFrame:
        """Return X as a data frame; without labels, its columns must be those of fit."""
        X = as_pandas(X)
        if isinstance(X, pd.DataFrame):
            frame = X
        else:
            refuse_complex(X, "X")
            frame = pd.DataFrame(check_array(X, dtype=None, ensure_all_finite=False))
        for name, column in frame.items():
            refuse_complex(column, f"column {name!r} of X")
        if any(map(is_date_or_decimal, frame.dtypes)):  # pandas converts such objects to numbers, but not these types
            columns = []
            for _, column in frame.items():
                columns.append(column.astype(object) if is_date_or_decimal(column.dtype) else column)
            frame = pd.concat(columns, axis=1)
        check_array(np.broadcast_to(0.0, frame.shape))  # raises for a frame without rows or columns
        validate_data(self, X, *y, reset=bool(y), skip_check_array=True)
        return frame

    def _check_parameters(self) -> None:
        self._validate_params()
        methods = self._norm_methods
        if not methods or any(method not in NORM_METHODS for method in methods):
            raise ValueError(f"norm_methods is {self.norm_methods!r}; it must be any of {', '.join(NORM_METHODS)}")
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (AssertionError, RuntimeError) as error:  # such as a torch without CUDA, and a machine without GPU
                raise ValueError(f"device is {str(self.device)!r}; torch cannot use it: {first_line(error)}") from None

    def __reduce__(self):
        # In a pickle the plug-ins come before the state, and are imported before the network is unpickled.
        needed = plugins.Needed(tuple(self._needed_plugins()))
        return plugins.build_after, (needed, copyreg.__newobj__, type(self)), self.__getstate__()

    def _needed_plugins(self) -> list[Plugin]:
        """Return the plug-ins of the argument, and those of the networks that the estimator holds."""
        needed = self._named_plugins()
        for value in vars(self).values():
            if isinstance(value, Network):
                classes = {type(part) for part in value.modules()}
                needed += plugins.defining([*classes, type(value.config)])
                # A network of `dense` is found by its registration, which may be in another file than its classes.
                module = register.network.plugin(family_name(type(value.config)))
                if module is not None:
                    needed += [plugin for plugin in plugins.named() if plugin == plugins.of_module(module)]
        return list(dict.fromkeys(needed))

    def _named_plugins(self) -> list[Plugin]:
        """Return the plug-ins of the argument, as `fit` has loaded them if it was called."""
        return list(getattr(self, "_plugins", None) or plugins.find(self.plugins))

    def __getstate__(self):
        state = super().__getstate__()
        if self.plugins is not None:  # whoever unpickles it may work in another folder
            state = state | {"plugins": [plugin.source for plugin in self._named_plugins()]}
        if "_kept" not in state:  # not fitted
            return state
        state = state | {"_kept": {}}  # predictions recompute it
        if self.device_.type != "cpu":
            for name, value in state.items():
                if isinstance(value, Network):
                    state[name] = copy.deepcopy(value).cpu()
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        if "network_" in state:
            try:
                self._move()
            except (AssertionError, RuntimeError) as error:  # torch has no such device
                warnings.warn(f"device={self.device!r} is not available, so the CPU is used: {error}", stacklevel=2)
                self.device_ = torch.device("cpu")

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags


def is_date_or_decimal(dtype: Any) -> bool:
    """Whether a type is Arrow's date or decimal."""
    return isinstance(dtype, pd.ArrowDtype) and dtype.type in (datetime.date, decimal.Decimal)


def refuse_complex(values: Any, name: str) -> None:
    """Raise ValueError for complex numbers, whose imaginary parts pandas would drop.

    scikit-learn's message, which is about arrays only, has the whole array in it.
    """
    array = np.asarray(values)
    is_complex = array.dtype.kind == "c"
    if array.dtype.kind == "O":
        is_complex = any(isinstance(value, complex | np.complexfloating) for value in array.ravel())
    if is_complex:
        raise ValueError(f"Complex data not supported: {name} has complex numbers; give real and imaginary parts")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype in this thread, which other threads must set again; None without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@contextlib.contextmanager
def side_by_side(device: torch.device) -> Iterator[tuple[Callable[..., Iterator], int]]:
    """Yield a `map` on as many threads as torch uses on a CPU, each on one core, and their number.

    Passes are too small for torch's own threads. With two of these, attention to 15 keys gave different bits at
    different positions, as the buffer of the second thread is not aligned.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1:
        yield map, 1
        return
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool.map, threads
    finally:
        torch.set_num_threads(threads)  # for threads that start later; it has not changed for this thread


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield `size` values at a time, as itertools.batched of Python 3.12."""
    rest = iter(values)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def load_or_copy(model: str | Path | Network, regression: bool) -> Network:
    """Load the network in a file, or copy one, since it may be trained further; raises ValueError for another task."""
    if isinstance(model, Network):
        network = copy.deepcopy(model).float()
        weights = network.state_dict()
        problem = state_dict_problem(weights) or non_finite(weights)
        if problem is not None:  # as for files
            raise ConfigError([f"model: {problem}; use other weights, such as an earlier checkpoint of the run"])
    else:
        try:
            network = load_model(resolve(model, regression))
        except ConfigError as error:  # about an option of the commands, which is a parameter here
            problems = [re.sub("^checkpoint is ", "model is ", problem) for problem in error.problems]
            raise ConfigError(problems) from None
    if network.config.is_regression != regression:
        if regression:
            raise ValueError("The network predicts classes, and this is a regressor.")
        raise ValueError("The network predicts numbers, and this is a classifier.")
    return network
