"""The version, written here alone; the package's metadata is made from it."""

__version__ = "0.1.0"
