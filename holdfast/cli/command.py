"""`holdfast`: its commands, their options, and the exit codes.

Importing this module is cheap, so that help and usage errors come at once. The modules of a command are imported only
when it is used: configs when the options are parsed, all others when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.cli.completion import SCRIPTS, SHELLS, options_of
from holdfast.cli.flags import CommandError, ConfigT, Parser, UsageError, add_flags, build, flag_of, read_file, signed
from holdfast.cli.hints import advice, nearest
from holdfast.cli.topics import common, titled
from holdfast.core.config import BUILTIN_MODEL, KEY_VARIABLE, OPERATOR_VARIABLE, AppConfig
from holdfast.core.version import __version__
from holdfast.files.regular import file_fault
from holdfast.lm.config import EngineConfig

if TYPE_CHECKING:
    from holdfast.cluster.config import ClusterConfig
    from holdfast.server.config import ServerConfig

EXAMPLES = """\
examples:
  holdfast serve                              serve the built-in model on http://127.0.0.1:8000
  holdfast serve Qwen/Qwen3-0.6B              serve a model of the Hugging Face Hub
  holdfast serve ~/models/Llama-3.2-1B        serve a checkpoint in a directory
  holdfast serve --app dates                  serve an application of cells
  holdfast chat                               talk to the built-in model, right here
  holdfast chat --url http://127.0.0.1:8000   talk to a server that runs
  holdfast batch requests.jsonl               answer a file of requests
  holdfast tune examples.jsonl                tune an adapter to examples
  holdfast profile                            measure the device, for serve --tbt-target
  holdfast bench --url http://127.0.0.1:8000  measure a server under load
  holdfast plan mistral-7b --device h200      how to serve it, and what it sustains
  holdfast keys add acme --expires 90d        give a client of a server a key
  source <(holdfast completion bash)          complete commands and options in this shell
"""
HINTS = {
    "run": "holdfast chat MODEL talks to a model, and holdfast serve MODEL serves it",
    "pull": "holdfast serve OWNER/NAME fetches a model of the Hugging Face Hub when it first serves it",
    "list": "a server has one model and its adapters; curl URL/v1/models lists them",
    "generate": "holdfast chat -p PROMPT answers one prompt",
    "train": "holdfast tune DATA tunes an adapter",
    "stop": "Ctrl-C or SIGTERM ends a server",
}
"""Names of other programs' commands, each with the command that does the same here."""
HINTS |= {"ls": HINTS["list"], "ps": HINTS["list"], "show": HINTS["list"], "download": HINTS["pull"],
          "complete": HINTS["generate"], "start": HINTS["run"]}  # fmt: skip
MODEL_HELP = (
    f"{BUILTIN_MODEL}, which is built in (default), an id of the Hugging Face Hub (owner/name), the directory of a "
    "checkpoint, or a GGUF file"
)
BAD_USAGE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0 for success, 1 for a failure, 2 for bad usage, 130 for Ctrl-C.

    Bad usage includes a start that the engine refuses (a missing or unsupported model, or options that need more memory
    than there is), and a conversation store that cannot be opened.
    """
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        # No option before the command takes a value, so the first word that is not an option is the command.
        command = next((word for word in given if not word.startswith("-")), None)
        if command in HINTS:
            raise UsageError(f"there is no command {command}: {HINTS[command]}")
        if command is not None and command not in COMMANDS:
            raise UsageError(f"there is no command {command}; {nearest(command, COMMANDS)}")
        parser = make_parser(command, whole="--help-all" in given)
        options, unknown = parser.parse_known_args(signed(given))
        if options.command is None:
            parser.print_help()
            return 0
        if unknown:
            raise UsageError(unknown_flag(unknown[0], options.command))
        file = options_in(options.config, options.command) if options.config else {}
        return run(options.command, Asked(vars(options), file, given[given.index(options.command) + 1 :]))
    except UsageError as error:
        return complain(str(error), BAD_USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def run(command: str, asked: Asked) -> int:
    """Run a parsed command. Returns the exit code. Raises UsageError, KeyboardInterrupt."""
    try:
        return load_command(command).run(asked)
    except UsageError:
        raise
    except BaseException as error:
        import asyncio  # Imported late, because `serve` starts its engine before it imports any of these.

        from holdfast.engine.client.connection import EngineDead, EngineStartError
        from holdfast.server.conversations.values import StoreError

        match error:
            case EngineStartError() | StoreError():
                return complain(str(error), BAD_USAGE)
            case EngineDead() | CommandError():
                return complain(str(error), 1)
            case OSError():
                return complain(file_fault(error), 1)
            case asyncio.CancelledError():
                return INTERRUPTED
        raise


def complain(reason: str, code: int) -> int:
    """Print a reason in one line on standard error. Returns `code`."""
    print(f"holdfast: {' '.join(reason.split())}", file=sys.stderr)
    return code


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: the configs whose fields are its options, and the function that runs it."""

    run: Callable[[Asked], int]
    """Runs the command, and returns the exit code. Raises UsageError."""
    description: str
    groups: Mapping[type, str]
    """Title in the help of each config's options."""
    engine_without: Sequence[str] = ("model",)
    """Fields of EngineConfig that are not options of the command, or that it takes in another way."""
    model: str = MODEL_HELP
    """Help text of MODEL."""
    operand: str = "MODEL"
    """Name of the positional argument. `model` is its help text, even if it is not a model."""
    others: Sequence[tuple[str, str]] = ()
    """Names of further positional arguments, each with its help text."""

    @property
    def flags(self) -> list[str]:
        """All flags of the command."""
        names = [
            field.name for config in self.groups for field in fields(config) if field.name not in self.without(config)
        ]
        return ["--help-all", *(flag_of(name) for name in names)]

    def without(self, config: type) -> Sequence[str]:
        """Return the fields of a config that are not options of this command."""
        return self.engine_without if config is EngineConfig else ()


def make_parser(command: str | None, *, whole: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line. Only `command` gets its options, because each command's need an import.

    Unless `whole`, the help shows only the common options.
    """
    parser = Parser(
        prog="holdfast",
        description="Serve language models, and talk to them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, (help, load) in COMMANDS.items():
        # The usage line does not list the options, because the help below it does.
        operand = OPERANDS.get(name, "[MODEL]")
        usage = f"holdfast {name} {operand} [OPTION ...]"
        added = parsers.add_parser(name, usage=usage, help=help, allow_abbrev=False)
        if name == command:
            add_options(added, load(), whole=whole)
    return parser


def add_options(parser: argparse.ArgumentParser, command: Command, *, whole: bool) -> None:
    """Add MODEL, --config, and a flag for each field of the command's configs.

    If `whole`, the help shows all of them by topic, otherwise only the common ones.
    """
    parser.description = command.description
    name = command.operand
    parser.add_argument(name.lower(), nargs="?", default=argparse.SUPPRESS, metavar=name, help=command.model)
    for other, help in command.others:
        parser.add_argument(other.lower(), nargs="?", default=argparse.SUPPRESS, metavar=other, help=help)
    parser.set_defaults(config=None)
    hidden = 0
    if command.groups:
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file with any of the options, as in `max_model_len: 4096`; flags win over it",
        )
        parser.add_argument("--help-all", action="help", help="show this message with every option, and exit")
    for config, title in command.groups.items():
        names = [field.name for field in fields(config) if field.name not in command.without(config)]
        if whole:
            for topic, members in titled(config, title, names):
                add_flags(parser, config, topic, members)
        else:
            shown = common(config, names)
            hidden += len(names) - len(shown)
            add_flags(parser, config, title, [*shown, *(name for name in names if name not in shown)], shown)
    if hidden:
        parser.epilog = f"{hidden} more options: {parser.prog} --help-all"


def unknown_flag(given: str, command: str) -> str:
    """Return the message for an unknown flag, or for a second MODEL."""
    if not given.startswith("-"):
        taken = load_command(command)
        names = " and one ".join((taken.operand, *(name for name, _ in taken.others)))
        return f"{command} takes one {names}, and there is {given} besides"
    asked = given.partition("=")[0]
    return f"unknown option {given}; {instead_of(asked, command)}"


def instead_of(asked: str, command: str) -> str:
    """Return what to use in place of an option that a command does not have."""
    loaded = load_command(command)
    others = [name for name, (_, load) in COMMANDS.items() if name != "engine" and asked in load().flags]
    return advice(asked, command, loaded.flags, others, operand=loaded.operand)


def options_in(path: str, command: str) -> dict[str, Any]:
    """Return the options in a YAML file. Raises UsageError, also for an option that the command does not have."""
    loaded = load_command(command)
    # The engine comes first, because the last config wins if two have a field of the same name.
    configs = sorted(loaded.groups, key=lambda config: config is not EngineConfig)
    file, flags = read_file(path, configs), loaded.flags
    for name in file:
        if name != "model" and flag_of(name) not in flags:
            raise UsageError(f"{path}: unknown option {name}; {instead_of(flag_of(name), command)}")
    return file


@dataclass(frozen=True)
class Asked:
    """A parsed command line: its flags, the options of its file, and the words after the command."""

    flags: Mapping[str, Any]
    file: Mapping[str, Any]
    words: Sequence[str]

    @property
    def model(self) -> str | None:
        """MODEL; None if it is not given."""
        named: str | None = self.flags.get("model", self.file.get("model"))
        return named

    @property
    def given(self) -> Mapping[str, Any]:
        """The options of the command line and of its file."""
        return {**self.file, **self.flags}

    def config(self, kind: type[ConfigT], environment: Mapping[str, Any] | None = None) -> ConfigT:
        """Build a config. Flags override the file, and the file overrides the environment. Raises UsageError."""
        return build(kind, self.flags, self.file, environment or {})


def serve_command() -> Command:
    """Return the command `holdfast serve`."""
    from holdfast.cluster.config import ClusterConfig
    from holdfast.server.config import ServerConfig

    def run(asked: Asked) -> int:
        server, engine, apps, cluster, threads = serve_configs(asked)
        # Imported here, because the help needs only the options.
        from holdfast.engine.checkpoint import Checkpoint, settled
        from holdfast.engine.logs import FORMAT_VARIABLE
        from holdfast.engine.spawn import EngineProcess
        from holdfast.server.address import check_tls, listen, reserve, reserve_grpc

        with value_errors_as_usage():
            check_tls(server)
        bind = reserve if server.api_processes > 1 else listen
        with bind(server) as listener, ExitStack() as held:
            if server.grpc_port is not None:
                port = held.enter_context(reserve_grpc(server)).getsockname()[1]
                server = replace(server, grpc_port=port)
            process = None
            if engine is not None and not cluster.engines:
                with value_errors_as_usage():
                    found = Checkpoint.of(engine)
                if cluster.ray is None:
                    engine = settled(engine, found)
                    os.environ[FORMAT_VARIABLE] = server.log_format  # the engine's process reads it at once
                    process = held.enter_context(EngineProcess(engine.first_device))
            from holdfast.cli import serve  # This takes half a second, during which the engine loads PyTorch.

            return run_in_loop(serve.run(engine, server, apps, listener, process, cluster=cluster, threads=threads))

    return Command(
        run=run,
        description="Serve a model over HTTP, with OpenAI's API. Without any argument it serves the built-in model. "
        "With --app it serves applications of cells, over the Open Inference Protocol: alone, or next to MODEL.",
        groups={
            ServerConfig: "the server",
            EngineConfig: "the engine",
            ClusterConfig: "replicas of the engine",
            AppConfig: "applications of cells",
        },
    )


class ServeConfigs(NamedTuple):
    """The configs of `holdfast serve`."""

    server: ServerConfig
    engine: EngineConfig | None
    """Config of the engine; None if only applications are served."""
    apps: AppConfig
    cluster: ClusterConfig
    threads: int | None
    """Number of CPU threads of each application's engine; None for PyTorch's default."""


def serve_configs(asked: Asked) -> ServeConfigs:
    """Return the configs of `holdfast serve`, with the keys from the environment. Raises UsageError."""
    from holdfast.cluster.config import ClusterConfig
    from holdfast.server.config import ServerConfig

    keys = environment_keys()
    if KEY_VARIABLE in os.environ and not keys:
        raise UsageError(f"{KEY_VARIABLE} is set but holds no key; set a key, or unset it to serve without one")
    operators = environment_keys(OPERATOR_VARIABLE)
    given = {"api_key": keys, "operator_key": operators}
    server = asked.config(ServerConfig, {name: each for name, each in given.items() if each})
    engine, apps, cluster = asked.config(EngineConfig), asked.config(AppConfig), asked.config(ClusterConfig)
    if server.contract and engine.contracts == "auto":  # else an engine without a profile would refuse every request
        engine = replace(engine, contracts="on")
    alone = bool(apps.app) and asked.model is None and not cluster.engines
    if alone:
        refuse_engine_flags(asked.given, "a language model; name MODEL to serve one next to --app", but=("threads",))
    else:
        with value_errors_as_usage():
            cluster.check(engine, server.tuning_state)
    if server.api_processes > 1:
        if apps.app:
            raise UsageError(
                "--app is given, and --api-processes: applications are served by one; leave out one of both"
            )
        from holdfast.server import supervisor

        with value_errors_as_usage():
            supervisor.check(server, cluster)
    if cluster.engines:
        refuse_engine_flags(asked.given, "an engine that is started here; give it to holdfast engine", but=())
    if not apps.app:
        if server.grpc_port is not None:
            raise UsageError("--grpc-port is for applications; name one with --app")
        for field in fields(AppConfig):
            if field.name in asked.given:
                raise UsageError(f"{flag_of(field.name)} is for applications; name one with --app")
    return ServeConfigs(server, None if alone else engine, apps, cluster, engine.threads)


def engine_command() -> Command:
    """Return the command `holdfast engine`."""
    from holdfast.cli import engine as alone

    def run(asked: Asked) -> int:
        listen, engine = asked.config(alone.ListenConfig), asked.config(EngineConfig)
        return run_in_loop(alone.run(listen, engine))

    return Command(
        run=run,
        description="Run an engine without a server. Servers attach to it with `holdfast serve --engines ADDRESS`, "
        "one or several, and any of them may end: the engine keeps its cache and goes on.",
        groups={alone.ListenConfig: "the address", EngineConfig: "the engine"},
    )


def chat_command() -> Command:
    """Return the command `holdfast chat`."""
    from holdfast.cli import chat

    def run(asked: Asked) -> int:
        talk = asked.config(chat.ChatConfig, client_key())
        if talk.url is not None:
            refuse_engine_flags(asked.flags, "a model that runs here; leave it out with --url", but=("model",))
        return run_in_loop(chat.run(talk, asked.config(EngineConfig), asked.model))

    return Command(
        run=run,
        description="Talk to a model in the terminal. The model runs here, or at the URL of any server with "
        "OpenAI's API. Lines may also come from a pipe.",
        groups={chat.ChatConfig: "the conversation", EngineConfig: "the engine, when the model runs here"},
    )


def batch_command() -> Command:
    """Return the command `holdfast batch`."""
    from holdfast.cli import batch

    def run(asked: Asked) -> int:
        config = asked.config(batch.BatchConfig, client_key())
        if "file" not in asked.flags:
            raise UsageError("name the FILE whose lines are to be answered")
        if config.url is not None:
            refuse_engine_flags(asked.flags, "a model that runs here; leave it out with --url", but=())
        return run_in_loop(batch.run(config, asked.config(EngineConfig), asked.flags["file"]))

    return Command(
        run=run,
        description="Answer the requests in a file, in OpenAI's format for batches: one JSON object a line. The model "
        "runs here, or at the URL of a server. A run that was stopped goes on with the same command.",
        groups={batch.BatchConfig: "the batch", EngineConfig: "the engine, when the model runs here"},
        engine_without=(),
        model="the requests: JSON lines with custom_id, method, url and body",
        operand="FILE",
    )


def tune_command() -> Command:
    """Return the command `holdfast tune`."""
    from holdfast.cli import tune

    def run(asked: Asked) -> int:
        config = asked.config(tune.TuneConfig, client_key())
        if "data" not in asked.flags:
            raise UsageError("name the DATA to learn: a file of examples")
        if config.url is not None:
            but = ("model", *tune.ENGINE_WITHOUT)
            refuse_engine_flags(asked.flags, "a model that runs here; leave it out with --url", but=but)
        given = [
            {name: value for name, value in had.items() if name not in tune.ENGINE_WITHOUT}
            for had in (asked.flags, asked.file)
        ]
        here = config.url is None
        engine = build(EngineConfig, {"tuning": here, "dora": here and config.dora}, *given)
        return run_in_loop(tune.run(config, engine, asked.flags["data"], asked.model))

    return Command(
        run=run,
        description="Tune a LoRA adapter to the examples in a file: JSON lines with messages, or with prompt and "
        "completion. The model runs here, or at the URL of a server. Ctrl-C pauses the run, and the same command "
        "goes on with it.",
        groups={tune.TuneConfig: "the tuning", EngineConfig: "the engine, when the model runs here"},
        engine_without=tune.ENGINE_WITHOUT,
        model="the examples: JSON lines with messages, or with prompt and completion",
        operand="DATA",
    )


def profile_command() -> Command:
    """Return the command `holdfast profile`."""
    from holdfast.cli import profile

    def run(asked: Asked) -> int:
        config, engine = asked.config(profile.ProfileConfig), asked.config(EngineConfig)
        if config.app is None:
            if "largest" in asked.given:
                raise UsageError("--largest is for the cells of an application; name one with --app")
            return run_in_loop(profile.run(config, engine))
        refuse_engine_flags(asked.given, "a language model; leave it out with --app", but=("device", "threads"))
        with value_errors_as_usage():
            apps = AppConfig(app=(config.app,), app_device=() if engine.device == "auto" else (engine.device,))
        return run_in_loop(profile.run_app(config, apps, engine.threads))

    return Command(
        run=run,
        description="Measure how long the steps of a model take on this device, and keep the result for "
        "`holdfast serve --tbt-target` and `holdfast bench --simulate`. With --app, measure an application's cells by "
        "batch size, which picks the batch sizes of `holdfast serve --app`.",
        groups={profile.ProfileConfig: "the profile", EngineConfig: "the engine"},
    )


def bench_command() -> Command:
    """Return the command `holdfast bench`. It runs its own event loop if it needs one."""
    from holdfast.cli import bench
    from holdfast.lab.workloads import WorkloadConfig

    def run(asked: Asked) -> int:
        measured = asked.config(bench.BenchConfig, client_key())
        if measured.url is not None:
            refuse_engine_flags(asked.flags, "a model that runs here; leave it out with --url", but=("seed",))
        if measured.simulate is not None:
            refuse_engine_flags(asked.flags, "a real engine; leave it out with --simulate", but=bench.SIMULATED_OPTIONS)
        load, engine = asked.config(WorkloadConfig), asked.config(EngineConfig)
        with value_errors_as_usage():
            return bench.run(measured, load, engine, asked.words)

    return Command(
        run=run,
        description="Put a model that runs here under load, or any server with OpenAI's API (--url), or a device that "
        "was measured (--simulate), where the engine's own scheduler runs over a virtual clock.",
        groups={
            WorkloadConfig: "the workload",
            bench.BenchConfig: "the measurement",
            EngineConfig: "the engine, when the model runs here or is simulated",
        },
    )


def plan_command() -> Command:
    """Return the command `holdfast plan`."""
    from holdfast.cli import plan
    from holdfast.lab.planning import SHARED_OPTIONS
    from holdfast.lab.simulator.shapes import MODELS
    from holdfast.lab.workloads import WorkloadConfig

    def run(asked: Asked) -> int:
        shared = [{name: had[name] for name in SHARED_OPTIONS if name in had} for had in (asked.flags, asked.file)]
        config, load = asked.config(plan.PlanConfig), asked.config(WorkloadConfig)
        with value_errors_as_usage():
            return plan.run(config, load, build(EngineConfig, *shared), asked.model, asked.words)

    return Command(
        run=run,
        description="Simulate schedulers, budgets, layouts over devices and host tiers under a workload. Show which of "
        "them sustains the highest rate within the limits, and the command that serves it. MODEL is a checkpoint's "
        "directory, a config.json, or the name of a known shape.",
        groups={
            WorkloadConfig: "the workload",
            plan.PlanConfig: "the plan",
            EngineConfig: "the engine, the same for all candidates",
        },
        engine_without=[field.name for field in fields(EngineConfig) if field.name not in SHARED_OPTIONS],
        model=f"a checkpoint's directory, a config.json, or one of {', '.join(sorted(MODELS))}",
    )


def keys_command() -> Command:
    """Return the command `holdfast keys`."""
    from holdfast.cli import keys

    def run(asked: Asked) -> int:
        with value_errors_as_usage():
            return keys.run(asked.config(keys.KeysConfig), asked.flags.get("action"), asked.flags.get("name"))

    return Command(
        run=run,
        description="Manage the API keys in a server's store. A running server follows within some seconds. `add` and "
        "`rotate` print the new key once. `limit` changes limits, and `none` removes one.",
        groups={keys.KeysConfig: "the key"},
        model=f"one of {', '.join(keys.ACTIONS)}",
        operand="ACTION",
        others=(("NAME", "the key, for all actions but list"),),
    )


def store_command() -> Command:
    """Return the command `holdfast store`."""
    from holdfast.cli import store

    def run(asked: Asked) -> int:
        with value_errors_as_usage():
            return store.run(asked.config(store.StoreConfig), asked.flags.get("action"), asked.flags.get("file"))

    return Command(
        run=run,
        description="Look after the store of conversations. `check` reads it whole and says whether it is damaged. "
        "`backup` copies it to FILE as it is at one moment. Servers may go on meanwhile.",
        groups={store.StoreConfig: "the store"},
        model=f"one of {', '.join(store.ACTIONS)}",
        operand="ACTION",
        others=(("FILE", "the new file of a backup"),),
    )


def ray_command() -> Command:
    """Return the command `holdfast ray`."""
    from holdfast.cli import ray_engines

    def run(asked: Asked) -> int:
        config, flags = asked.config(ray_engines.RayConfig), asked.flags
        with value_errors_as_usage():
            return run_in_loop(ray_engines.run(config, flags.get("action"), flags.get("name")))

    return Command(
        run=run,
        description="Look after the engines on a Ray cluster that outlive their servers (serve --ray-keep). `list` "
        "shows them with their nodes. `end` ends those of one NAME, whose servers must have ended before.",
        groups={ray_engines.RayConfig: "the cluster"},
        model=f"one of {', '.join(ray_engines.ACTIONS)}",
        operand="ACTION",
        others=(("NAME", "the engines to end, as named by --ray-keep; default: engine"),),
    )


def completion_command() -> Command:
    """Return the command `holdfast completion`."""

    def run(asked: Asked) -> int:
        shell = asked.flags.get("shell")
        if shell not in SHELLS:
            raise UsageError(f"SHELL is {shell or 'missing'}; it must be one of {', '.join(SHELLS)}")
        commands = {}
        for name, (help, load) in COMMANDS.items():
            parser = argparse.ArgumentParser()
            add_options(parser, load(), whole=True)
            commands[name] = help, options_of(parser)
        print(SCRIPTS[shell](commands), end="")
        return 0

    return Command(
        run=run,
        description="Print a script that completes commands and options in a shell. In bash: "
        "source <(holdfast completion bash); in zsh the same with zsh; in fish: holdfast completion fish | source.",
        groups={},
        model=f"one of {', '.join(SHELLS)}",
        operand="SHELL",
    )


COMMANDS: Mapping[str, tuple[str, Callable[[], Command]]] = {
    "serve": ("serve a model over HTTP, with OpenAI's API", serve_command),
    "engine": ("run an engine that servers attach to", engine_command),
    "chat": ("talk to a model in the terminal", chat_command),
    "batch": ("answer a file of requests, here or at a server", batch_command),
    "tune": ("tune a LoRA adapter, here or at a server", tune_command),
    "profile": ("measure a model's pace on this device, for --tbt-target and simulations", profile_command),
    "bench": ("measure a model or a server under load, or simulate one", bench_command),
    "plan": ("find out how to serve a model on which devices, by simulation", plan_command),
    "keys": ("add, list, rotate, limit and revoke a server's API keys", keys_command),
    "store": ("check or copy the store of conversations", store_command),
    "ray": ("list and end the engines on a Ray cluster that outlive servers", ray_command),
    "completion": ("print a completion script for bash, zsh or fish", completion_command),
}
"""For each command: its line in the help, and the function that imports it."""


OPERANDS = {
    "batch": "FILE", "tune": "DATA", "keys": "ACTION [NAME]", "store": "ACTION [FILE]", "ray": "ACTION [NAME]",
    "completion": "SHELL",
}  # fmt: skip
"""Positional arguments of the commands that do not take [MODEL], for their usage."""


def load_command(name: str) -> Command:
    """Import a command."""
    return COMMANDS[name][1]()


@contextmanager
def value_errors_as_usage() -> Iterator[None]:
    """Convert a ValueError to a UsageError within the context."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


def run_in_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run a command in an event loop. Returns its exit code."""
    import uvloop

    code: int = uvloop.run(work)
    return code


def refuse_engine_flags(flags: Mapping[str, object], why: str, but: Sequence[str]) -> None:
    """Raises UsageError for the first given option of the engine that would be ignored. Options in `but` are used."""
    for field in fields(EngineConfig):
        if field.name in flags and field.name not in but:
            name = "MODEL" if field.name == "model" else flag_of(field.name)
            raise UsageError(f"{name} is for {why}")


def environment_keys(variable: str = KEY_VARIABLE) -> list[str]:
    """Return the comma-separated keys of an environment variable."""
    return [key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()]


def client_key() -> dict[str, str]:
    """Return the key that a client sends, as an option: the first key in the environment."""
    keys = environment_keys()
    return {"api_key": keys[0]} if keys else {}
