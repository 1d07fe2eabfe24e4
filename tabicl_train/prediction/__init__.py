"""From weights to predictions and public files; imports neither Lightning nor Hydra."""
