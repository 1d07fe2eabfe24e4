"""Kernels that the network's operations choose among; each is imported only where it runs."""
