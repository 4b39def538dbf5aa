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


def seconds_of(time: str) -> float:
    """A time such as 50, 50ms or 0.05s in seconds; a bare number is in milliseconds. Raises ValueError."""
    number, factor = time.strip().lower(), 1e-3
    if number.endswith("ms"):
        number = number.removesuffix("ms")
    elif number.endswith("s"):
        number, factor = number.removesuffix("s"), 1.0
    try:
        return float(number) * factor
    except ValueError:
        raise ValueError(f"{time!r} is not a time, as in 50, 50ms or 0.05s") from None
