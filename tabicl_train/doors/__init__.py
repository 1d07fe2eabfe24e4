"""The doors, by which everything that has a name comes in, ours and that of others.

A registry for each kind of thing, the plug-ins that fill them, and old module paths that still work.
"""
