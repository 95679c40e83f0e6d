"""The version, in one place; the changelog names the same one."""

__version__ = "0.1.0"
