"""`holdfast`: its commands, their flags, and how each way to end becomes an exit code."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import uvloop

from holdfast.bench.choice import WorkloadConfig
from holdfast.cli import bench, chat, plan, profile, serve
from holdfast.cli.flags import Parser, UsageError, add_flags, build, flag_of, read_file, signed
from holdfast.cli.talkers import ChatError
from holdfast.core.config import BUILTIN_MODEL, EngineConfig
from holdfast.core.version import __version__
from holdfast.engine.client import EngineDead, EngineStartError
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import StoreError
from holdfast.simulator.plan import SHARED_OPTIONS
from holdfast.simulator.shapes import MODELS

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


UNPLANNED = [field.name for field in fields(EngineConfig) if field.name not in SHARED_OPTIONS]
"""What of an engine `holdfast plan` does not take."""


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
        if options.command == "bench":
            return run_bench(vars(options), given[given.index("bench") + 1 :])
        if options.command == "plan":
            return run_plan(vars(options), given[given.index("plan") + 1 :])
        code: int = uvloop.run(start(options))
        return code
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
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    server = commands.add_parser(
        "serve",
        usage=usage("serve"),
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. Without any argument it serves the built-in model.",
        allow_abbrev=False,
    )
    add_model(server)
    add_flags(server, ServerConfig, "the server")
    add_flags(server, EngineConfig, "the engine", without=("model",))

    talk = commands.add_parser(
        "chat",
        usage=usage("chat"),
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal: one that runs here, or behind the URL of any server with "
        "OpenAI's API. Lines may come from a pipe as well.",
        allow_abbrev=False,
    )
    add_model(talk)
    add_flags(talk, chat.ChatConfig, "the conversation")
    add_flags(talk, EngineConfig, "the engine, when the model runs here", without=("model",))

    measure = commands.add_parser(
        "profile",
        usage=usage("profile"),
        help="measure a model's pace on this device, for --tbt-target and simulations",
        description="Measure how long steps of a model take on this device, and keep it: `holdfast serve --tbt-target` "
        "goes by it, and `holdfast bench --simulate` too.",
        allow_abbrev=False,
    )
    add_model(measure)
    add_flags(measure, profile.ProfileConfig, "the profile")
    add_flags(measure, EngineConfig, "the engine", without=("model",))

    load = commands.add_parser(
        "bench",
        usage=usage("bench"),
        help="measure a model or a server under load, or simulate one",
        description="Put a model that runs here under load, or any server with OpenAI's API (--url), or a device that "
        "was measured (--simulate), where the engine's own scheduler runs over a virtual clock.",
        allow_abbrev=False,
    )
    add_model(load)
    add_flags(load, WorkloadConfig, "the workload")
    add_flags(load, bench.BenchConfig, "the measurement")
    add_flags(load, EngineConfig, "the engine, when the model runs here or is simulated", without=("model",))

    ahead = commands.add_parser(
        "plan",
        usage=usage("plan"),
        help="find out how to serve a model on which devices, by simulation",
        description="Simulate schedulers, budgets, layouts over devices and host tiers under a workload, and say which "
        "of them sustains the most within limits, and with which command. MODEL is a checkpoint's directory, a "
        "config.json, or a known shape by name.",
        allow_abbrev=False,
    )
    add_model(ahead, f"a checkpoint's directory, a config.json, or one of {', '.join(sorted(MODELS))}")
    add_flags(ahead, WorkloadConfig, "the workload")
    add_flags(ahead, plan.PlanConfig, "the plan")
    add_flags(ahead, EngineConfig, "the engine, the same for all candidates", without=UNPLANNED)
    return parser


def usage(command: str) -> str:
    """A command's first line of help: its options are listed below, and are too many to be listed twice."""
    return f"holdfast {command} [MODEL] [OPTION ...]"


def add_model(parser: argparse.ArgumentParser, told: str = MODEL_HELP) -> None:
    """What a command that takes a model takes before its flags."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=told)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with any of the options below, as in `max_model_len: 4096`; flags win over it",
    )


CONFIGS: dict[str, tuple[type, ...]] = {
    "serve": (ServerConfig, EngineConfig),
    "chat": (chat.ChatConfig, EngineConfig),
    "profile": (profile.ProfileConfig, EngineConfig),
    "bench": (WorkloadConfig, bench.BenchConfig, EngineConfig),
    "plan": (WorkloadConfig, EngineConfig, plan.PlanConfig),
}
"""Whose fields are the options of a command."""


def unknown_flag(given: str, command: str) -> str:
    """What to say of a flag that there is not, or of a word too many."""
    if not given.startswith("-"):
        return f"{command} takes one MODEL, and there is {given} besides"
    names = [field.name for config in CONFIGS[command] for field in fields(config)]
    flags = [flag_of(name) for name in names if command != "plan" or name not in UNPLANNED]
    asked = given.partition("=")[0]
    every = [field for configs in CONFIGS.values() for config in configs for field in fields(config)]
    meant = asked in {flag_of(field.name) for field in every}
    near = [] if meant else difflib.get_close_matches(asked, flags, n=1)  # another command has it
    hint = f"did you mean {near[0]}?" if near else f"holdfast {command} --help lists what there is"
    return f"unknown option {given}; {hint}"


async def start(options: argparse.Namespace) -> int:
    """Make the configs of the chosen command and call it."""
    flags = vars(options)
    keys = environment_keys()
    if options.command == "serve":
        file = read_file(options.config, CONFIGS["serve"]) if options.config else {}
        server = build(ServerConfig, flags, file, {"api_key": keys} if keys else {})
        return await serve.run(build(EngineConfig, flags, file), server)
    if options.command == "profile":
        file = read_file(options.config, CONFIGS["profile"]) if options.config else {}
        return await profile.run(build(profile.ProfileConfig, flags, file), build(EngineConfig, flags, file))
    file = read_file(options.config, CONFIGS["chat"]) if options.config else {}
    talk = build(chat.ChatConfig, flags, file, {"api_key": keys[0]} if keys else {})
    if talk.url is not None:
        refuse_engine_flags(flags, "a model that runs here; leave it out with --url", but=("model",))
    return await chat.run(talk, build(EngineConfig, flags, file), flags.get("model", file.get("model")))


def run_bench(flags: Mapping[str, Any], arguments: Sequence[str]) -> int:
    """Make the configs of `bench` and call it: it brings its own event loop, if it needs one."""
    keys = environment_keys()
    file = read_file(flags["config"], CONFIGS["bench"]) if flags["config"] else {}
    measured = build(bench.BenchConfig, flags, file, {"api_key": keys[0]} if keys else {})
    if measured.url is not None:
        refuse_engine_flags(flags, "a model that runs here; leave it out with --url", but=("seed",))
    if measured.simulate is not None:
        refuse_engine_flags(flags, "a real engine; leave it out with --simulate", but=bench.SIMULATED_OPTIONS)
    try:
        return bench.run(measured, build(WorkloadConfig, flags, file), build(EngineConfig, flags, file), arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None


def run_plan(flags: Mapping[str, Any], arguments: Sequence[str]) -> int:
    """Make the configs of `plan` and call it."""
    file = read_file(flags["config"], CONFIGS["plan"]) if flags["config"] else {}
    shared = [{name: source[name] for name in SHARED_OPTIONS if name in source} for source in (flags, file)]
    try:
        return plan.run(
            build(plan.PlanConfig, flags, file),
            build(WorkloadConfig, flags, file),
            build(EngineConfig, *shared),
            flags.get("model", file.get("model")),
            arguments,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def refuse_engine_flags(flags: Mapping[str, object], why: str, but: Sequence[str]) -> None:
    """Refuse options of the engine that would be ignored. Raises UsageError for the first that is not among `but`."""
    for field in fields(EngineConfig):
        if field.name in flags and field.name not in but:
            name = "MODEL" if field.name == "model" else flag_of(field.name)
            raise UsageError(f"{name} is for {why}")


def environment_keys() -> list[str]:
    """API keys from HOLDFAST_API_KEY, comma-separated."""
    return [key.strip() for key in os.environ.get("HOLDFAST_API_KEY", "").split(",") if key.strip()]
