"""From weights to predictions of data frames and files: the estimators, and the ensemble behind them.

Neither Lightning nor Hydra is imported, directly or through others.
"""
