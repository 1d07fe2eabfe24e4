"""The causal graph behind a table: a plan, then nodes and raw columns (TabICLv2, arXiv 2602.11139, appendix)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit

from priors.finish import split_rows
from priors.floats import FASTMATH, SUMS, log1p_exp
from priors.graph.activations import mean_and_inverse_std
from priors.graph.converters import Categorical, Converter, Numeric, convert_numeric
from priors.graph.functions import Function, Points, draw_function
from priors.graph.scalars import LOCAL, Scalars, Weights
from priors.random import normal_array, rng_at
from priors.table import TableSpec

TARGET = -1  # the index of the target among the columns
MULTI_FUNCTIONS = ("concat", "aggregate")
AGGREGATIONS = ("sum", "product", "max", "logsumexp")
MAX_CARDINALITY = 200  # largest number of categories of a feature
RELEASED_CARDINALITY = 9  # the same in the released preset
MAX_NODES = 32  # of the graph, before those that no column depends on are removed


@dataclass
class Column:
    """A raw column and its converter. Features have the indices 0, 1, ..., the target has TARGET."""

    index: int
    converter: Converter

    @property
    def name(self) -> str:
        return "y" if self.index == TARGET else f"x{self.index}"

    def __str__(self) -> str:
        return f"{self.name}: {self.converter}"


@dataclass
class Node:
    """A node of the graph that is computed.

    parents: indices of its parents, which are computed before it
    width: values per row; the columns' slices come first, those of numeric columns before those of categorical ones
    weights: of the values, which are multiplied by them
    importance: factor of all values, for the node's children
    noise: standard deviation of the Gaussian noise on the values; 0 for none
    points: the values of a root; None in other nodes
    combine: "concat" (one function of all parents) or an aggregation (of one function per parent); "" in a root
    functions: one or one per parent; none in a root
    """

    index: int
    parents: list[int]
    width: int
    columns: list[Column]
    weights: Weights = field(repr=False)
    importance: float
    noise: float = 0.0
    points: Points | None = None
    combine: str = ""
    functions: list[Function] = field(default_factory=list)

    def __str__(self) -> str:
        if self.points:
            values = str(self.points)
        else:
            parents = [f"{parent} {function}" for parent, function in self.edges()]
            values = f"{self.combine} of {'; '.join(parents)}"
        lines = [f"node {self.index} (width {self.width}): {values}"]
        lines += [f"    {column}" for column in self.columns]
        return "\n".join(lines)

    def edges(self) -> list[tuple[int, Function]]:
        """Each parent with the function that reads it."""
        functions = self.functions
        # One function reads all parents.
        if self.combine == "concat":
            functions = functions * len(self.parents)
        return list(zip(self.parents, functions, strict=True))


@dataclass
class GraphPlan:
    """All decisions about a table of graph_scm; those of a node are drawn when it is reached.

    num_classes: 0 for a numeric target
    warp_flow: see Numeric
    node_noise: whether there is noise on the nodes
    cardinalities: of each column, the target's last; 0 for a numeric one
    parents: of each node of the graph, including those that no column depends on, which are not computed
    columns: indices of the columns of each computed node, numeric ones first. The order of the nodes is that in which
        they are computed: parents first, the target's node and its ancestors before all others
    scalars: source of the decisions
    drawn: the nodes that have been drawn
    """

    address: tuple[int, ...]
    num_rows: int
    train_size: int
    num_features: int
    num_classes: int
    warp_flow: bool
    node_noise: bool
    cardinalities: list[int]
    parents: list[list[int]]
    columns: dict[int, list[int]]
    scalars: Scalars = field(repr=False, compare=False)
    drawn: list[Node] = field(default_factory=list, repr=False, compare=False)

    @property
    def nodes(self) -> list[Node]:
        """All computed nodes; those that have not been drawn are drawn now."""
        return list(self.draw_nodes())

    def draw_nodes(self) -> Iterator[Node]:
        """Draw the nodes one after the other; those that were drawn before are the same again."""
        # Many tables are rejected for their labels, so that the nodes after that of the target are not needed.
        for position, index in enumerate(self.columns):
            if position == len(self.drawn):
                self.drawn.append(draw_node(self, index))
            yield self.drawn[position]

    def __str__(self) -> str:
        target = f"{self.num_classes} classes" if self.num_classes else "numeric target"
        head = (
            f"graph_scm {self.address}: {self.num_rows} rows, {self.num_features} features, "
            f"{target}; {len(self.columns)} of {len(self.parents)} nodes computed"
        )
        return "\n".join([head, *map(str, self.draw_nodes())])


def draw_cardinalities(scalars: Scalars, num_features: int, limit: int) -> list[int]:
    """Draw the number of categories of each categorical feature, at most `limit`; other features are numeric."""
    # The share of categorical features is 0 in 29 % of the tables, and 1 in 12 %.
    share = min(max(scalars.real(LOCAL, -0.5, 1.2), 0.0), 1.0)
    num_categorical = round(num_features * share)
    # Those of some features are independent, those of the others follow one distribution of the table, up to 9.
    num_independent = scalars.integer(LOCAL, 0, num_categorical + 1, edges=True)
    shared_limit = min(9, limit)
    cardinalities = []
    for feature in range(num_categorical):
        if feature < num_independent:
            cardinalities.append(scalars.integer(LOCAL, 2, limit + 1, log=True))
        else:
            cardinalities.append(scalars.integer("cardinality", 2, shared_limit + 1, log=True))
    return cardinalities


def draw_parents(rng: np.random.Generator, num_nodes: int, offset: float = 0.0) -> list[list[int]]:
    """Draw the parents of each node of a random Cauchy DAG.

    Edge i -> j (i < j) has probability sigmoid(A + offset + B_j + C_i), with A, B_j and C_i standard Cauchy.
    """
    a = rng.standard_cauchy()
    b = rng.standard_cauchy(num_nodes)
    c = rng.standard_cauchy(num_nodes)
    # Cauchy draws have any size, and exp overflows at 710.
    logits = np.clip(a + offset + b[:, None] + c[None, :], -700, 700)
    edges = (rng.random((num_nodes, num_nodes)) < 1 / (1 + np.exp(-logits))).tolist()  # [child][parent]
    return [[parent for parent in range(child) if edges[child][parent]] for child in range(num_nodes)]


def ancestors(parents: list[list[int]]) -> list[int]:
    """Return the node itself and its ancestors, for each node, as a bit mask: bit i of entry j is set if i is one."""
    masks: list[int] = []
    for node, its_parents in enumerate(parents):
        # Parents come first, so their masks are complete.
        mask = 1 << node
        for parent in its_parents:
            mask |= masks[parent]
        masks.append(mask)
    return masks


def place_columns(scalars: Scalars, num_nodes: int, count: int) -> list[int]:
    """Draw the node of each of `count` columns: uniform over a random subset of the nodes."""
    num_candidates = scalars.integer("column_nodes", 1, num_nodes + 1)
    candidates = scalars.rng.permutation(num_nodes)[:num_candidates]
    return candidates[scalars.rng.integers(num_candidates, size=count)].tolist()


def draw_plan(prior: Any, spec: TableSpec, seed: tuple[int, ...]) -> GraphPlan:
    """Draw which columns of a table are categorical, a graph, and the nodes that hold the columns."""
    # The order of the draws decides what a seed means: another order needs another STREAM_VERSION.
    released = prior.preset == "released"
    scalars = Scalars(rng_at(seed, "plan"), skewed_choices=not released)
    num_classes = scalars.integer(LOCAL, 2, spec.max_classes + 1) if spec.max_classes else 0
    if released:
        limit = scalars.integer("cardinality_limit", 2, RELEASED_CARDINALITY + 1, log=True)
    else:
        limit = scalars.integer(LOCAL, 2, MAX_CARDINALITY + 1, log=True)
    num_features = spec.num_features
    cardinalities = draw_cardinalities(scalars, num_features, limit)

    # The graph, and the nodes of the columns. Sets of nodes are bit masks.
    while True:
        num_nodes = scalars.integer("nodes", 2, MAX_NODES + 1, log=True)
        parents = draw_parents(scalars.rng, num_nodes)
        masks = ancestors(parents)
        feature_nodes = place_columns(scalars, num_nodes, num_features)
        target_node = place_columns(scalars, num_nodes, 1)[0]
        behind_target = masks[target_node]
        behind_features = 0
        for node in feature_nodes:
            behind_features |= masks[node]
        if not prior.filter_unpredictable_graphs or behind_features & behind_target:
            break

    # The nodes that are computed: those behind the target first, parents before their children.
    needed = behind_features | behind_target
    first = [i for i in range(num_nodes) if behind_target >> i & 1]
    others = [i for i in range(num_nodes) if (needed & ~behind_target) >> i & 1]
    columns: dict[int, list[int]] = {node: [] for node in first + others}

    # Their columns. The first features are the categorical ones, but in a node numeric columns come first.
    categorical = list(range(len(cardinalities)))
    numeric = list(range(len(cardinalities), num_features))
    if num_classes:
        categorical.append(TARGET)
    else:
        numeric.append(TARGET)
    node_of_column = [*feature_nodes, target_node]
    for index in numeric + categorical:
        columns[node_of_column[index]].append(index)
    return GraphPlan(
        address=seed,
        num_rows=spec.num_rows,
        train_size=spec.train_size,
        num_features=num_features,
        num_classes=num_classes,
        warp_flow=released,
        node_noise=prior.node_noise,
        cardinalities=[*cardinalities, *[0] * (num_features - len(cardinalities)), num_classes],
        parents=parents,
        columns=columns,
        scalars=scalars,
    )


def draw_column(plan: GraphPlan, index: int) -> Column:
    """Draw the converter of a column."""
    cardinality = plan.cardinalities[index]
    if cardinality:
        return Column(index, Categorical.draw(plan.scalars, cardinality, plan.num_rows))
    return Column(index, Numeric.draw(plan.scalars, plan.warp_flow))


def draw_node(plan: GraphPlan, index: int) -> Node:
    """Draw a node, after its parents."""
    scalars = plan.scalars
    num_rows = plan.num_rows
    # The columns and their slices, in addition to the width of the node itself. As in draw_plan, the order of all draws
    # here decides what a seed means.
    columns = [draw_column(plan, column) for column in plan.columns[index]]
    width = scalars.integer("width", 1, 32, log=True) + sum(column.converter.width for column in columns)
    parents = plan.parents[index]

    # What all nodes have.
    node = Node(
        index,
        parents,
        width,
        columns,
        weights=Weights.draw(scalars, width),
        importance=scalars.real("importance", 0.1, 10.0, log=True),
        noise=scalars.real("noise", 1e-5, 1.0, log=True) if plan.node_noise else 0.0,
    )

    # Where the values come from: random points, one function of all parents, or one function of each parent.
    width_of = {other.index: other.width for other in plan.drawn}
    widths = [width_of[parent] for parent in parents]
    if not parents:
        node.points = Points.draw(scalars, width, num_rows)
    elif scalars.choice("combine", MULTI_FUNCTIONS) == "concat":
        node.combine = "concat"
        node.functions = [draw_function(scalars, sum(widths), width, num_rows)]
    else:
        node.combine = scalars.choice("aggregation", AGGREGATIONS)
        node.functions = [draw_function(scalars, width_of_parent, width, num_rows) for width_of_parent in widths]
    return node


@np.errstate(all="ignore")  # values that are not finite reject the table
def execute_plan(plan: GraphPlan) -> tuple[np.ndarray, np.ndarray]:
    """Raw columns float32 (num_rows, num_features) and labels int64 or, for a numeric target, float32 (num_rows,)."""
    rng = rng_at(plan.address, "execute")
    numeric_target = plan.num_classes == 0
    # A numeric target is the last column: its index, -1, modulo their number.
    columns = np.empty((plan.num_features + numeric_target, plan.num_rows), np.float32)
    labels = order = None
    # The last node that reads the values of another one, after which these are dropped.
    last_reader: dict[int, int] = {}
    for index in plan.columns:
        for parent in plan.parents[index]:
            last_reader[parent] = index

    values: dict[int, np.ndarray] = {}
    for node in plan.draw_nodes():
        x = compute_node(node, values, plan.num_rows, rng)  # (width, N)
        scale_features(x, node.weights.compute(rng)[0])
        has_readers = node.index in last_reader

        # Numeric columns, all at once: the first slices of x, each of width 1.
        numeric = [column for column in node.columns if isinstance(column.converter, Numeric)]
        if numeric:
            part = x[: len(numeric)]
            raw, flow = convert_numeric(part, [column.converter for column in numeric])
            columns[[column.index for column in numeric]] = raw
            if has_readers and flow is not part:
                part[:] = flow

        # Categorical columns, the next slices.
        start = len(numeric)
        for column in node.columns[start:]:
            stop = start + column.converter.width
            part = x[start:stop]
            category, flow = column.converter(part, rng, has_readers)
            if column.index == TARGET:
                # Many tables are rejected for their labels: at once, before other nodes are computed.
                labels = category
                order = split_rows(labels, plan.num_classes, plan.train_size, rng)
            else:
                columns[column.index] = category
            if has_readers and flow is not part:
                part[:] = flow
            start = stop

        # What the children read.
        if has_readers:
            if node.noise:
                x += normal_array(rng, *x.shape) * np.float32(node.noise)
            x *= np.float32(node.importance)
            values[node.index] = x
        for parent in node.parents:
            if last_reader[parent] == node.index:
                del values[parent]

    if numeric_target:
        return columns[:-1].T, columns[-1]
    # Otherwise labeled and query rows would hold different classes.
    if order is not None:
        columns = columns[:, order]
        labels = labels[order]
    return columns.T, labels


def compute_node(node: Node, values: dict[int, np.ndarray], num_rows: int, rng: np.random.Generator) -> np.ndarray:
    """The node's values before scaling, (width, N): random points, or functions of its parents' values."""
    if node.points:
        return node.points.compute(num_rows, rng)
    if node.combine == "concat":
        all_parents = np.concatenate([values[parent] for parent in node.parents])
        return node.functions[0](all_parents, rng)
    (first_parent, first_function), *other_edges = node.edges()
    out = first_function(values[first_parent], rng)
    for parent, function in other_edges:
        out = combine(node.combine, out, function(values[parent], rng))
    return out


def combine(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Aggregate the outputs of two parents' functions; one of AGGREGATIONS."""
    match how:
        case "sum":
            return a + b
        case "product":
            return a * b
        case "max":
            return np.maximum(a, b)
    out = np.empty_like(a)
    logsumexp(a, b, out)
    return out


@njit("void(f4[:, ::1], f4[::1])", cache=True, fastmath=SUMS, error_model="numpy")
def scale_features(x, weights):
    """Standardized features of x (n, N) times weights (n,), over the root mean square of the rows' norms, in place."""
    n = x.shape[0]
    mean = np.empty(n, np.float32)
    factor = np.empty(n, np.float32)
    square = np.float32(0.0)
    for i in range(n):
        mean[i], inverse_std = mean_and_inverse_std(x[i])
        # The deviation of the standardized feature, std / (std + 1e-4), times the weight
        weight = weights[i] / (np.float32(1.0) + np.float32(1e-4) * inverse_std)
        square += weight * weight
        factor[i] = inverse_std * weight
    # As every feature has deviation 1, the norm of the weights is the root mean square of the rows' norms.
    norm = np.sqrt(square) + np.float32(1e-8)
    for i in range(n):
        row, center, multiplier = x[i], mean[i], factor[i] / norm
        for j in range(len(row)):
            row[j] = (row[j] - center) * multiplier


@njit("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])", cache=True, fastmath=FASTMATH, error_model="numpy")
def logsumexp(a, b, out):
    """log(e^a + e^b)."""
    for i in range(a.shape[0]):
        p, q, row = a[i], b[i], out[i]
        for j in range(len(row)):
            # The maximum passes over NaN, which the last term keeps.
            high = max(p[j], q[j])
            lost = (p[j] + q[j]) * np.float32(0.0)
            row[j] = high + log1p_exp(min(p[j], q[j]) - high) + lost
