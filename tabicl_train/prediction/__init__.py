"""From weights to predictions and exports; imports neither Lightning nor Hydra."""
