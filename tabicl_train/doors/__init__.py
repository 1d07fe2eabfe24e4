"""The doors: everything with a name is registered here, by this package or by a plug-in.

There is a registry for each kind of thing. This folder also has the plug-ins that fill them, and old module paths that
still work.
"""
