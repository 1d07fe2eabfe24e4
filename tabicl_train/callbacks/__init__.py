"""What watches or keeps a run, one behavior a file; each can be removed without breaking the training step."""
