"""The options, and which of them a table gets."""

from __future__ import annotations

from dataclasses import dataclass

from priors.scm.hyperparameters import lasting_rng


@dataclass
class Realism:
    """What synthetic tables may have in common with real ones; priors/README.md explains and shows it."""

    missing: float = 0.0
    """Probability that cells of a table are missing: at random, by value, or in blocks."""
    tails: float = 0.0
    """Probability that numeric columns of a table have heavy tails, on both sides or on one."""
    rounding: float = 0.0
    """Probability that numeric columns of a table are rounded: to a step, to digits, or to heaped values."""
    shift: float = 0.0
    """Probability that the query rows of a table lie toward one end of a column, or of a direction in several."""
    imbalance: float = 0.0
    """Probability that the classes of a table become more unequal; twice the rows are drawn for it."""
    duplicates: float = 0.0
    """Probability that rows of a table are copies of others, also across labeled and query rows."""
    strength: float | None = None
    """How strong all of it is, from 0 (weak) to 1; null draws the strength for each table."""

    def problems(self) -> list[str]:
        """What is wrong with the values, as messages for the user."""
        return [
            f"realism.{name} is {value!r}; it must lie in 0..1"
            for name, value in vars(self).items()
            if not (value is None and name == "strength") and (type(value) not in (int, float) or not 0 <= value <= 1)
        ]

    def draw(self, seed: tuple[int, ...], is_numeric: bool) -> dict[str, float]:
        """Strength in 0..1 by option, of those that the table gets; is_numeric: whether its target is a number.

        Each has a generator of its own, so that none changes the others. A rejected table keeps what it gets, as
        otherwise what is often rejected would become rare.
        """
        drawn = {}
        for name, probability in vars(self).items():
            if name == "strength" or not probability or (name == "imbalance" and is_numeric):
                continue
            rng = lasting_rng(seed[:-1], f"realism {name}", seed)
            if rng.random() < probability:
                drawn[name] = rng.random() if self.strength is None else self.strength
        return drawn
