"""The options, and which of them a table gets."""

from __future__ import annotations

from dataclasses import dataclass

from priors.scm.hyperparameters import lasting_rng


@dataclass
class Realism:
    """What synthetic tables may have in common with real ones; priors/README.md explains and shows it."""

    missing: float = 0.0
    """Probability that cells of a table are missing: at random, by value, or in blocks."""
    strength: float | None = None
    """How strong all of it is, from 0 (weak) to 1; null draws the strength for each table."""

    def problems(self) -> list[str]:
        """What is wrong with the values, as messages for the user."""
        return [
            f"realism.{name} is {value!r}; it must lie in 0..1"
            for name, value in vars(self).items()
            if not (value is None and name == "strength") and (type(value) not in (int, float) or not 0 <= value <= 1)
        ]

    def draw(self, seed: tuple[int, ...]) -> dict[str, float]:
        """Strength in 0..1 by option, of those that the table gets.

        Each has a generator of its own, so that none changes the others. A rejected table keeps what it gets, as
        otherwise what is often rejected would become rare.
        """
        drawn = {}
        for name, probability in vars(self).items():
            if name == "strength" or not probability:
                continue
            rng = lasting_rng(seed[:-1], f"realism {name}", seed)
            if rng.random() < probability:
                drawn[name] = rng.random() if self.strength is None else self.strength
        return drawn
