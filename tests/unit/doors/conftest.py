"""The folder with a plug-in."""

from plugin_folder import fresh  # noqa: F401
