"""Attention for the shapes of this network where torch's own is slow, each kernel with its own backward pass."""
