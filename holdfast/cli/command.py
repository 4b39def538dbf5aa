"""`holdfast`: its commands, their flags, and how each way to end becomes an exit code."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import uvloop

from holdfast.cli import bench, chat, plan, profile, serve
from holdfast.cli.flags import ConfigT, Parser, UsageError, add_flags, build, flag_of, read_file, signed
from holdfast.cli.talkers import ChatError
from holdfast.core.config import BUILTIN_MODEL, EngineConfig
from holdfast.core.version import __version__
from holdfast.engine.client import EngineDead, EngineStartError
from holdfast.lab.planning import SHARED_OPTIONS
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import WorkloadConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import StoreError

EXAMPLES = """\
examples:
  holdfast serve                              serve the built-in model on http://127.0.0.1:8000
  holdfast serve ~/models/Llama-3.2-1B        serve a Hugging Face checkpoint
  holdfast chat                               talk to the built-in model, right here
  holdfast chat --url http://127.0.0.1:8000   talk to a server that runs
  holdfast profile                            measure the device, for serve --tbt-target
  holdfast bench --url http://127.0.0.1:8000  measure a server under load
  holdfast plan mistral-7b --device h200      how to serve it, and what it sustains
"""
MODEL_HELP = f"{BUILTIN_MODEL}, which is built in (default), or the directory of a Hugging Face checkpoint"
BAD_USAGE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 for what failed, 2 for what was asked wrongly, 130 for Ctrl-C.

    A start that the engine refuses counts as asked wrongly: a model that is not there or not understood, too little
    memory for the options given. So does a store that cannot be opened.
    """
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        parser = make_parser()
        options, unknown = parser.parse_known_args(signed(given))
        if options.command is None:
            parser.print_help()
            return 0
        if unknown:
            raise UsageError(unknown_flag(unknown[0], options.command))
        file = options_in(options.config, options.command) if options.config else {}
        asked = Asked(vars(options), file, given[given.index(options.command) + 1 :])
        return COMMANDS[options.command].run(asked)
    except (UsageError, EngineStartError, StoreError) as error:
        return complain(str(error), BAD_USAGE)
    except (EngineDead, ChatError, OSError) as error:
        return complain(str(error), 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


def complain(reason: str, code: int) -> int:
    """One line on stderr."""
    print(f"holdfast: {' '.join(reason.split())}", file=sys.stderr)
    return code


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command runs, what its help says, and the configs whose fields are its options.

    Each of these has the title of its group.
    """

    run: Callable[[Asked], int]
    """Gives the exit code. Raises UsageError."""
    help: str
    description: str
    options: Mapping[type, str]
    engine_without: Sequence[str] = ("model",)
    """Options of the engine that it does not take, or takes otherwise."""
    model: str = MODEL_HELP

    @property
    def configs(self) -> tuple[type, ...]:
        """Its configs, the engine's first: what another names as the engine does is that other's."""
        return (EngineConfig, *(config for config in self.options if config is not EngineConfig))

    @property
    def flags(self) -> list[str]:
        """All its flags."""
        names = [
            field.name for config in self.options for field in fields(config) if field.name not in self.without(config)
        ]
        return [flag_of(name) for name in names]

    def without(self, config: type) -> Sequence[str]:
        """The fields of a config that are no options of this command."""
        return self.engine_without if config is EngineConfig else ()


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="holdfast",
        description="Serve language models, and talk to them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        # The first line of help does not list the options: they follow below, and are too many to be listed twice.
        usage = f"holdfast {name} [MODEL] [OPTION ...]"
        added = parsers.add_parser(
            name, usage=usage, help=command.help, description=command.description, allow_abbrev=False
        )
        added.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=command.model)
        added.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file with any of the options below, as in `max_model_len: 4096`; flags win over it",
        )
        for config, title in command.options.items():
            add_flags(added, config, title, without=command.without(config))
    return parser


def unknown_flag(given: str, command: str) -> str:
    """What to say of a flag that there is not, or of a word too many."""
    if not given.startswith("-"):
        return f"{command} takes one MODEL, and there is {given} besides"
    asked = given.partition("=")[0]
    meant = any(asked in other.flags for other in COMMANDS.values())  # another command has it
    near = [] if meant else difflib.get_close_matches(asked, COMMANDS[command].flags, n=1)
    hint = f"did you mean {near[0]}?" if near else f"holdfast {command} --help lists what there is"
    return f"unknown option {given}; {hint}"


def options_in(path: str, command: str) -> dict[str, Any]:
    """The options in a YAML file. Raises UsageError, also for those of the engine that the command does not take."""
    file = read_file(path, COMMANDS[command].configs)
    for name in file:
        if name != "model" and flag_of(name) not in COMMANDS[command].flags:
            raise UsageError(f"{path}: unknown option {name}; holdfast {command} --help lists what there is")
    return file


@dataclass(frozen=True)
class Asked:
    """What the user gave a command: flags, a file's options, and the words themselves."""

    flags: Mapping[str, Any]
    file: Mapping[str, Any]
    words: Sequence[str]

    @property
    def model(self) -> str | None:
        """The model that is named, if one is."""
        named: str | None = self.flags.get("model", self.file.get("model"))
        return named

    def config(self, kind: type[ConfigT], environment: Mapping[str, Any] | None = None) -> ConfigT:
        """A config: flags win over the file, the file over the environment. Raises UsageError for what cannot be."""
        return build(kind, self.flags, self.file, environment or {})


def run_serve(asked: Asked) -> int:
    """`holdfast serve`."""
    keys = environment_keys()
    server = asked.config(ServerConfig, {"api_key": keys} if keys else {})
    code: int = uvloop.run(serve.run(asked.config(EngineConfig), server))
    return code


def run_chat(asked: Asked) -> int:
    """`holdfast chat`."""
    talk = asked.config(chat.ChatConfig, client_key())
    if talk.url is not None:
        refuse_engine_flags(asked.flags, "a model that runs here; leave it out with --url", but=("model",))
    code: int = uvloop.run(chat.run(talk, asked.config(EngineConfig), asked.model))
    return code


def run_profile(asked: Asked) -> int:
    """`holdfast profile`."""
    measuring = profile.run(asked.config(profile.ProfileConfig), asked.config(EngineConfig))
    code: int = uvloop.run(measuring)
    return code


def run_bench(asked: Asked) -> int:
    """`holdfast bench`: it brings its own event loop, if it needs one."""
    measured = asked.config(bench.BenchConfig, client_key())
    if measured.url is not None:
        refuse_engine_flags(asked.flags, "a model that runs here; leave it out with --url", but=("seed",))
    if measured.simulate is not None:
        refuse_engine_flags(asked.flags, "a real engine; leave it out with --simulate", but=bench.SIMULATED_OPTIONS)
    try:
        return bench.run(measured, asked.config(WorkloadConfig), asked.config(EngineConfig), asked.words)
    except ValueError as error:
        raise UsageError(str(error)) from None


def run_plan(asked: Asked) -> int:
    """`holdfast plan`."""
    shared = [{name: given[name] for name in SHARED_OPTIONS if name in given} for given in (asked.flags, asked.file)]
    try:
        return plan.run(
            asked.config(plan.PlanConfig),
            asked.config(WorkloadConfig),
            build(EngineConfig, *shared),
            asked.model,
            asked.words,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


COMMANDS = {
    "serve": Command(
        run=run_serve,
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. Without any argument it serves the built-in model.",
        options={ServerConfig: "the server", EngineConfig: "the engine"},
    ),
    "chat": Command(
        run=run_chat,
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal: one that runs here, or behind the URL of any server with "
        "OpenAI's API. Lines may come from a pipe as well.",
        options={chat.ChatConfig: "the conversation", EngineConfig: "the engine, when the model runs here"},
    ),
    "profile": Command(
        run=run_profile,
        help="measure a model's pace on this device, for --tbt-target and simulations",
        description="Measure how long steps of a model take on this device, and keep it: `holdfast serve --tbt-target` "
        "goes by it, and `holdfast bench --simulate` too.",
        options={profile.ProfileConfig: "the profile", EngineConfig: "the engine"},
    ),
    "bench": Command(
        run=run_bench,
        help="measure a model or a server under load, or simulate one",
        description="Put a model that runs here under load, or any server with OpenAI's API (--url), or a device that "
        "was measured (--simulate), where the engine's own scheduler runs over a virtual clock.",
        options={
            WorkloadConfig: "the workload",
            bench.BenchConfig: "the measurement",
            EngineConfig: "the engine, when the model runs here or is simulated",
        },
    ),
    "plan": Command(
        run=run_plan,
        help="find out how to serve a model on which devices, by simulation",
        description="Simulate schedulers, budgets, layouts over devices and host tiers under a workload, and say which "
        "of them sustains the most within limits, and with which command. MODEL is a checkpoint's directory, a "
        "config.json, or a known shape by name.",
        options={
            WorkloadConfig: "the workload",
            plan.PlanConfig: "the plan",
            EngineConfig: "the engine, the same for all candidates",
        },
        engine_without=[field.name for field in fields(EngineConfig) if field.name not in SHARED_OPTIONS],
        model=f"a checkpoint's directory, a config.json, or one of {', '.join(sorted(MODELS))}",
    ),
}


def refuse_engine_flags(flags: Mapping[str, object], why: str, but: Sequence[str]) -> None:
    """Refuse options of the engine that would be ignored. Raises UsageError for the first that is not among `but`."""
    for field in fields(EngineConfig):
        if field.name in flags and field.name not in but:
            name = "MODEL" if field.name == "model" else flag_of(field.name)
            raise UsageError(f"{name} is for {why}")


def environment_keys() -> list[str]:
    """API keys from HOLDFAST_API_KEY, comma-separated."""
    return [key.strip() for key in os.environ.get("HOLDFAST_API_KEY", "").split(",") if key.strip()]


def client_key() -> dict[str, str]:
    """The key that a client sends, as an option: the first of the environment's."""
    keys = environment_keys()
    return {"api_key": keys[0]} if keys else {}
