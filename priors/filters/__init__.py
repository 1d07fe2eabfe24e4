"""The filter of finished tables by how predictable their target is, and the trees that predict it."""
