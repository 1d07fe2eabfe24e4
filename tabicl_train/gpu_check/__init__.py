"""tabicl-gpu-check: whether a GPU computes what it should, how fast, and with how much memory."""
