"""Tables on disk: the files (shards), and the command that fills them (dump)."""
