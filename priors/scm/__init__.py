"""What mlp_scm and tree_scm are made of."""
