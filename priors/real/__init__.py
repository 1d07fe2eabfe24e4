"""From the columns of any data frame to the numbers that a network reads.

Used by the estimators and by priors of real tables; like the rest of `priors`, it knows nothing of networks.
"""
