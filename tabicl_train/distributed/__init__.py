"""Processes, machines and clusters: how a run is launched, stopped and submitted."""
