"""The run and the table of the laboratory's tests."""

from lab_experiments import run_dir, table  # noqa: F401
