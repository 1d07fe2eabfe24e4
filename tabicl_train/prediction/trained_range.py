"""The sizes of the tables that a network was trained on, and whether a real task lies inside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainedRange:
    """(lowest, highest) over the tables of all stages that a run has started.

    Query rows do not count: the network predicts each of them independently of the others.
    """

    labeled_rows: tuple[int, int]
    features: tuple[int, int]

    def holds(self, labeled_rows: int, features: int) -> bool:
        """Whether both numbers of a task lie inside, bounds included."""
        return (
            self.labeled_rows[0] <= labeled_rows <= self.labeled_rows[1]
            and self.features[0] <= features <= self.features[1]
        )

    def __str__(self) -> str:
        (fewest, most), (narrowest, widest) = self.labeled_rows, self.features
        return f"{fewest:,} to {most:,} labeled rows, {narrowest} to {widest} features"


def trained_range(content: dict) -> TrainedRange:
    """The range of a run's checkpoint, from its content."""
    first, started = 0, []
    for stage in content["config"]["curriculum"]["stages"].values():
        if first < max(content["global_step"], 1):
            started.append(stage)
        first += stage["steps"]
    labeled = [round(rows * share) for stage in started for rows, share in extremes(stage)]
    features = [bound for stage in started for bound in stage["features"]]
    return TrainedRange((min(labeled), max(labeled)), (min(features), max(features)))


def extremes(stage: dict) -> list[tuple[int, float]]:
    """(rows, labeled share) of the tables of a stage with the fewest and with the most labeled rows."""
    ranges = [stage["rows"]] * (stage["small_share"] < 1) + [stage["small_rows"]] * (stage["small_share"] > 0)
    return [(rows, share) for bounds in ranges for rows, share in zip(bounds, stage["train_share"], strict=True)]
