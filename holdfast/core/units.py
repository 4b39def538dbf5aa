"""Units of options, converted to those of the code: bytes and seconds."""

from __future__ import annotations


def bytes_of_gb(size: float) -> int:
    """A size in GB (10⁹ bytes) in whole bytes."""
    return int(size * 1e9)


def bytes_of_mb(size: float) -> int:
    """A size in MB (10⁶ bytes) in whole bytes."""
    return int(size * 1e6)


def seconds_of_ms(time: float) -> float:
    """A time in milliseconds in seconds."""
    return time / 1000


def seconds_of_days(time: float) -> float:
    """A time in days in seconds."""
    return time * 86400
