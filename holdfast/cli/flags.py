"""Flags and YAML keys. They are generated from the config dataclasses, the only source of options and help texts."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from holdfast.cli.hints import OTHER_NAMES
from holdfast.files.regular import read_text

ConfigT = TypeVar("ConfigT")


class UsageError(Exception):
    """The command line is invalid. The message is one line. Exit code 2."""


class CommandError(Exception):
    """The command failed. The message is for the user. Exit code 1."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a UsageError with one line instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists what there is)")


def signed(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with negative numbers joined to the flags before them.

    Otherwise argparse would read -3ms as a flag, and report that the flag before it lacks a value.
    """
    joined: list[str] = []
    for word in words:
        if joined and re.match(r"--[^=]+$", joined[-1]) and re.match(r"-(\d|\.\d|inf|nan)", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


LETTERS = {"prompt": "-p"}
"""Short forms of flags, by field."""


def add_flags(
    parser: argparse.ArgumentParser, config: type, title: str, names: Sequence[str], shown: Sequence[str] | None = None
) -> None:
    """Add a flag for each of these fields of a config. `max_model_len` becomes --max-model-len; a bool, --x and --no-x.

    A flag that is not given sets no attribute, so that the file or the default applies. The help shows the fields in
    `shown`, by default all.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    by_name = {field.name: field for field in dataclasses.fields(config)}
    for name in names:
        argument = _argument(by_name[name], hints[name])
        if shown is not None and name not in shown:
            argument["help"] = argparse.SUPPRESS
        group.add_argument(*filter(None, (LETTERS.get(name), flag_of(name))), **argument)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


class Named(tuple[str, ...]):
    """Named values of a flag. Any `module:object` also counts as one of them."""

    def __contains__(self, given: object) -> bool:
        return super().__contains__(given) or ":" in str(given)


def _argument(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kind, *others = [each for each in typing.get_args(hint) if each is not types.NoneType] if union else [hint]
    if kind is bool:
        return given | {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return given | {"choices": typing.get_args(kind)}
    if field.metadata["named"]:
        return given | {"choices": Named(field.metadata["named"])}
    if kind == tuple[float, ...]:
        return given | {"type": numbers, "metavar": "X,X,…"}
    if typing.get_origin(kind) is tuple:
        return given | {"action": "append", "metavar": field.name.split("_")[-1].upper()}
    if field.metadata["unit"] == "ms":
        return given | {"type": milliseconds, "metavar": "MS"}
    metavar = {int: "N", float: "X", str: "TEXT"}[kind]
    words = tuple(word for other in others for word in typing.get_args(other))
    if field.metadata["bare"] is not None:
        given |= {"nargs": "?", "const": field.metadata["bare"]}
    if not words:
        return given | {"type": kind, "metavar": metavar}

    def number_or_word(text: str) -> Any:
        return text if text in words else kind(text)

    number_or_word.__name__ = " or ".join((kind.__name__, *words))  # argparse shows this name in its error.
    return given | {"type": number_or_word, "metavar": "|".join((metavar, *words))}


def numbers(text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers. Raises ArgumentTypeError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers between commas, as in 1,2,4") from None


def milliseconds(text: str) -> float:
    """Parse a time such as 50, 50ms or 0.05s. Returns milliseconds. Raises ArgumentTypeError."""
    number, factor = text.strip(), 1.0
    if number.endswith("ms"):
        number = number[:-2]
    elif number.endswith("s"):
        number, factor = number[:-1], 1000.0
    try:
        return float(number) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, as in 50, 50ms or 0.05s") from None


def full_url(given: str) -> str:
    """Return a server's URL. Adds the scheme if it is missing, as in localhost:8123 or :8123."""
    if re.fullmatch(r":\d+(/\S*)?", given):
        given = f"127.0.0.1{given}"
    if "://" not in given and re.match(r"(localhost|\[[0-9a-fA-F:]+\]|[\w.-]+(?=[:.]))[\w.-]*(:\d+)?(/|$)", given):
        return f"http://{given}"
    return given


def check_url(url: str | None) -> None:
    """Raises ValueError unless `url` is None or the URL of a server."""
    if url is None:
        return
    try:
        valid = re.match(r"https?://\S+$", url) and urlsplit(url).hostname and urlsplit(url).port != 0
    except ValueError:  # A port that is not a number, or brackets without an address.
        valid = False
    if not valid:
        raise ValueError(f"url is {url}; it must look like http://127.0.0.1:8000")


def require_at_least_1(config: Any, *names: str) -> None:
    """Raises ValueError if one of these options is below 1. None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def require_positive(config: Any, *names: str) -> None:
    """Raises ValueError if one of these options, or a number in it, is not positive and finite. None is allowed."""
    for name in names:
        given = getattr(config, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value:g}; it must be above 0")


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    shown = field.default
    if shown in (None, (), ""):
        return text
    if isinstance(shown, bool):
        shown = "on" if shown else "off"
    elif isinstance(shown, tuple):
        shown = ",".join(f"{each:g}" for each in shown)
    return f"{text} (default: {shown})"


def read_file(path: str, configs: Sequence[type]) -> dict[str, Any]:
    """Return the options in a YAML file, checked against the fields of `configs`. Keys may contain - or _.

    Raises UsageError, which suggests the nearest option for an unknown key.
    """
    import yaml

    try:
        data = yaml.safe_load(read_text(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold one option a line, as in `max_model_len: 4096`")
    try:
        return checked(data, configs)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def checked(data: Mapping[Any, Any], configs: Sequence[type]) -> dict[str, Any]:
    """Check options by name against the fields of `configs`. If several have a field of that name, the last one counts.

    Raises UsageError.
    """
    import msgspec

    hints = {name: hint for config in configs for name, hint in typing.get_type_hints(config).items()}
    times = {field.name for config in configs for field in dataclasses.fields(config) if field.metadata["unit"] == "ms"}
    options = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            here = OTHER_NAMES.get(flag_of(name), "--").removeprefix("--").replace("-", "_")
            if here.removeprefix("no_") in hints:
                raise UsageError(f"unknown option {key}; here it is {here}")
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0)
            raise UsageError(f"unknown option {key}; the nearest is {near[0]}")
        try:
            timed = milliseconds(value) if name in times and isinstance(value, str) else value
            options[name] = msgspec.convert(timed, hints[name])
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{key}: {error}") from None
        except msgspec.ValidationError as error:
            words = typing.get_args(hints[name]) if typing.get_origin(hints[name]) is Literal else ()
            choices = f"; choose from {', '.join(words)}" if words else ""
            raise UsageError(f"{key}: {str(error).partition(' - at ')[0]}{choices}") from None
    return options


def build(config: type[ConfigT], *sources: Mapping[str, Any]) -> ConfigT:
    """Build a config from options. An earlier source overrides a later one. Raises UsageError for an invalid value."""
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for source in sources:
        for name in fields.keys() & source.keys() - given.keys():
            value = source[name]
            if name == "url" and isinstance(value, str):
                value = full_url(value)
            given[name] = tuple(value) if isinstance(value, list) else value
    for name in fields:
        if name in given and fields[name].default != "":
            refuse_empty(name, given[name])
    try:
        return config(**given)
    except ValueError as error:
        raise UsageError(str(error)) from None


def refuse_empty(name: str, value: Any) -> None:
    """Raises UsageError if `value` is empty text, or a tuple with empty text in it.

    A shell gives empty text for a variable that is not set. Taken as it is, it could mean the default store, or all
    addresses of the machine.
    """
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and not text.strip():
            raise UsageError(f"{name} is empty; give it a value, or leave it out")
