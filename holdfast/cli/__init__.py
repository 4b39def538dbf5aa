"""The `holdfast` command: parse, then call."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, as `command.main` does. Returns the exit code."""
    try:
        # Imported here, so that Ctrl-C during the import also exits with 130.
        from holdfast.cli.command import main as run

        return run(arguments)
    except KeyboardInterrupt:
        return 130


__all__ = ["main"]
