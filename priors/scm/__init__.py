"""What mlp_scm and tree_scm, the priors of TabICL v1 (arXiv 2502.05564), are made of."""
