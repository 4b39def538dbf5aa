"""The `holdfast` command: parse, then call."""

from holdfast.cli.command import main

__all__ = ["main"]
