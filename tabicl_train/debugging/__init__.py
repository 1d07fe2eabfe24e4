"""Debugging tools for runs and priors: replay, and the actions of tabicl-prior."""
