"""Debugging tools for runs and priors: preflight, replay, and the actions of tabicl-prior."""
