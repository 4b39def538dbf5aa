"""`holdfast completion`: a script with which a shell completes commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

SHELLS = ("bash", "zsh", "fish")
Options = Mapping[str, tuple[str, Sequence[str]]]
"""Flags, each with its help text and the words that it accepts; no words if it accepts any value."""

BASH = """\
_holdfast() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$cur"))
        return
    fi
    case "${{COMP_WORDS[1]}} $prev" in
{words}
    esac
    if [ "${{cur:0:1}}" = - ]; then
        case "${{COMP_WORDS[1]}}" in
{flags}
        esac
        return
    fi
    COMPREPLY=($(compgen -f -- "$cur"))
}}
complete -o filenames -F _holdfast holdfast
"""


def options_of(parser: argparse.ArgumentParser) -> Options:
    """Return the flags of a command's parser."""
    found = {}
    for action in parser._actions:
        for flag in action.option_strings:
            help = (action.help or "").replace("%%", "%")
            found[flag] = help.split(";")[0], [str(choice) for choice in action.choices or ()]
    return found


def bash(commands: Mapping[str, tuple[str, Options]]) -> str:
    """Return the script for bash. `commands` maps each command to its help text and options."""
    words = [
        f'        "{name} {flag}") COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$cur")); return ;;'
        for name, (_, options) in commands.items()
        for flag, (_, choices) in options.items()
        if choices
    ]
    flags = [
        f'            {name}) COMPREPLY=($(compgen -W "{" ".join(options)}" -- "$cur")) ;;'
        for name, (_, options) in commands.items()
    ]
    return BASH.format(commands=" ".join(commands), words="\n".join(words), flags="\n".join(flags))


def zsh(commands: Mapping[str, tuple[str, Options]]) -> str:
    """Return the script for zsh, which can run the script for bash."""
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{bash(commands)}"


def fish(commands: Mapping[str, tuple[str, Options]]) -> str:
    """Return the script for fish, with help texts."""
    lines = [
        f"complete -c holdfast -n __fish_use_subcommand -a {name} -d {quoted(help)}"
        for name, (help, _) in commands.items()
    ]
    for name, (_, options) in commands.items():
        for flag, (help, choices) in options.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            words = f" -x -a {quoted(' '.join(choices))}" if choices else ""
            lines.append(
                f"complete -c holdfast -n '__fish_seen_subcommand_from {name}' {kind}{words} -d {quoted(help)}"
            )
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Quote a text as one word in fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
