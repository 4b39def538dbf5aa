"""Runs clients and compliance suites that people use, each in its own environment, against `holdfast serve`.

    python benchmarks/clients/run.py                       # all that come from PyPI and npm
    python benchmarks/clients/run.py langchain litellm     # some of them
    python benchmarks/clients/run.py --source llama-stack=DIR --source openresponses=DIR --source openresponses-gw=DIR

Suites without a package run from a checkout of their repository: llamastack/llama-stack, openresponses/openresponses
and leseb/openresponses-gw. Environments stay in build/clients (guidellm's has 6 GB: it requires torch), so a second run
installs nothing. Writes results/clients.json next to this file, and docs/clients.md. Suites that do not run keep their
last result. Exit status 1 if a suite passes fewer cases than it must. Needs the internet to install packages, and npm:
it installs the newest Node and Bun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.lib.invocation import provenance

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "holdfast-tiny"
KEY = "suite"
TENANTS = {"ALICE_TOKEN": "alice", "BOB_TOKEN": "bob"}
"""More keys, whose clients must not see each other's responses."""
SECONDS = 900
"""Time limit of each suite, in seconds."""
Case = dict[str, str]
"""Keys: case, outcome (passed, failed, skipped), and reason if it did not pass."""


@dataclass(frozen=True)
class Where:
    """The environment in which a suite runs, and the server that it asks."""

    url: str
    directory: Path
    """The environment's directory: a venv, or a directory with node_modules."""
    source: Path | None
    """A checkout, for suites that need one."""

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    @property
    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        asked = {"SERVER_URL": self.url, "SERVER_MODEL": MODEL, "SERVER_KEY": KEY}
        asked["SERVER_TOKENIZER"] = str(ROOT / "holdfast" / "builtin" / MODEL)
        asked["PATH"] = os.pathsep.join((str(newer_node(self.directory)), kept["PATH"]))
        return kept | asked | TENANTS | {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def run(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Run a command and return its output. Its errors go to a file next to the environment."""
        with self.directory.with_suffix(".log").open("w") as log:
            done = subprocess.run(
                [str(word) for word in command],
                cwd=cwd or self.directory,
                env=self.variables | variables,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=SECONDS,
            )
        return done.stdout


@dataclass(frozen=True)
class Suite:
    """A client, or a suite of tests."""

    name: str
    about: str
    run: Callable[[Where], list[Case]]
    python: tuple[str, ...] = ()
    """Packages that pip installs."""
    node: tuple[str, ...] = ()
    """Packages that npm installs."""
    least: int = 0
    """Number of cases that must pass; 0: all."""
    named: tuple[str, ...] = field(default=())
    """Packages whose versions the page names; by default the first one installed."""
    needs_source: bool = False


def cases(script: str) -> Callable[[Where], list[Case]]:
    """Function that runs a script of this directory, which prints a line of JSON for each case."""

    def run(where: Where) -> list[Case]:
        if script.endswith(".py"):
            printed = where.run(where.python, HERE / script)
        else:  # modules are looked up next to the file that imports them
            for name in ("harness.mjs", script):
                shutil.copy(HERE / name, where.directory)
            printed = where.run("node", script)
        return [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]

    return run


def pytest_cases(report: Path) -> list[Case]:
    """The cases of a JUnit report."""
    found = []
    for element in ElementTree.parse(report).iter("testcase"):
        bad = next((child for child in element if child.tag in ("failure", "error", "skipped")), None)
        named = {"case": f"{element.get('classname', '').rpartition('.')[2]}::{element.get('name')}"}
        if bad is None:
            found.append(named | {"outcome": "passed"})
        else:
            outcome = "skipped" if bad.tag == "skipped" else "failed"
            lines = (bad.get("message") or bad.text or "").strip().splitlines()
            found.append(named | {"outcome": outcome, "reason": lines[0] if lines else ""})
    return found


def run_pytest(where: Where, cwd: Path, *arguments: str | Path, **variables: str) -> list[Case]:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        given = ("-q", "--timeout=60", "-p", "no:cacheprovider", f"--junitxml={report}")
        where.run(where.python, "-m", "pytest", *given, *arguments, cwd=cwd, **variables)
        return pytest_cases(report)


def llama_stack(where: Where) -> list[Case]:
    assert where.source is not None
    alone = ("-c", os.devnull, f"--rootdir={where.source}", "--noconftest", "-p", "llama_stack_plugin")
    tests = ("tests/integration/conversations", "tests/integration/responses")
    variables = {"STACK_SOURCE": str(where.source), "PYTHONPATH": str(HERE)}
    return run_pytest(where, where.source, *alone, "-o", "asyncio_mode=auto", *tests, **variables)


def openresponses_gateway(where: Where) -> list[Case]:
    assert where.source is not None
    tests = [f"test_{name}.py" for name in ("conversations", "responses", "sse_events", "streaming_persistence")]
    return run_pytest(
        where,
        where.source / "tests" / "integration",
        *tests,
        OPENRESPONSES_BASE_URL=f"{where.url}/v1",
        OPENRESPONSES_API_KEY=KEY,
        OPENRESPONSES_MODEL=MODEL,
        OPENRESPONSES_BACKEND_API="responses",
    )


def openresponses(where: Where) -> list[Case]:
    assert where.source is not None
    for name in ("bin", "src/lib", "src/generated"):  # modules are looked up next to the files that import them
        shutil.copytree(where.source / name, where.directory / name, dirs_exist_ok=True)
    given = ("--base-url", f"{where.url}/v1", "--api-key", KEY, "--model", MODEL, "--json")
    printed = where.run("node_modules/.bin/bun", "bin/compliance-test.ts", *given)
    return [
        {"case": result["id"], "outcome": result["status"]}
        | ({"reason": "; ".join(result["errors"])} if result.get("errors") else {})
        for result in json.loads(printed)["results"]
    ]


def guidellm(where: Where) -> list[Case]:
    """Twelve requests, one after another. A case passes if its request was answered."""
    report = where.directory / "guidellm.json"
    report.unlink(missing_ok=True)
    where.run(
        *(where.directory / "bin" / "guidellm", "run"),
        *("--backend", f"kind=openai_http,target={where.url},api_key={KEY}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=hf_auto,model={where.variables['SERVER_TOKENIZER']}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=12"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
    )
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    done, wrong = len(requests["successful"]), [*requests["errored"], *requests["incomplete"]]
    return [{"case": f"request {number + 1}", "outcome": "passed"} for number in range(done)] + [
        {"case": f"request {done + number + 1}", "outcome": "failed", "reason": str(request)[:200]}
        for number, request in enumerate(wrong)
    ]


PYTEST = ("pytest", "pytest-asyncio", "pytest-timeout")
SUITES = (
    Suite(
        "openresponses",
        "OpenResponses' compliance tests",
        openresponses,
        node=("bun", "zod@3"),
        least=15,
        named=("zod",),
        needs_source=True,
    ),
    Suite(
        "openresponses-gw",
        "its gateway's tests of conversations, responses, events and persistence",
        openresponses_gateway,
        python=("openai", "httpx", *PYTEST),
        least=30,
        needs_source=True,
    ),
    Suite(
        "llama-stack",
        "its tests of conversations and responses, through the openai package",
        llama_stack,
        python=(
            "openai",
            "langchain-openai",
            "langgraph",
            "mcp<2",
            "fastapi",
            "uvicorn",
            "pyyaml",
            "requests",
            *PYTEST,
        ),
        least=95,
        needs_source=True,
    ),
    Suite(
        "openai-python",
        "OpenAI's package for Python, resource by resource",
        cases("with_openai_python.py"),
        python=("openai",),
    ),
    Suite(
        "anthropic",
        "Anthropic's package: messages, the tool runner, documents, models, batches",
        cases("with_anthropic.py"),
        python=("anthropic",),
    ),
    Suite("ollama", "Ollama's package", cases("with_ollama.py"), python=("ollama",)),
    Suite(
        "llama-index",
        "LlamaIndex over OpenAI's and Ollama's protocols",
        cases("with_llama_index.py"),
        python=("llama-index-core", "llama-index-llms-openai-like", "llama-index-llms-ollama"),
    ),
    Suite("openai-node", "OpenAI's package for JavaScript", cases("with_openai.mjs"), node=("openai", "zod")),
    Suite(
        "ai-sdk",
        "the Vercel AI SDK, over chat completions and Responses",
        cases("with_ai_sdk.mjs"),
        node=("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
        named=("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"),
    ),
    Suite("langchain", "LangChain's ChatOpenAI", cases("with_langchain.py"), python=("langchain-openai",)),
    Suite(
        "openai-agents",
        "agents over chat completions and Responses, with tools",
        cases("with_openai_agents.py"),
        python=("openai-agents",),
    ),
    Suite(
        "pydantic-ai",
        "agents over chat completions and Responses, with tools",
        cases("with_pydantic_ai.py"),
        python=("pydantic-ai-slim[openai]",),
    ),
    Suite("litellm", "calls, and the errors made of a server's", cases("with_litellm.py"), python=("litellm", "mcp")),
    Suite("instructor", "typed answers", cases("with_instructor.py"), python=("instructor",)),
    Suite("llm", "the llm command's library, with a tool and a schema", cases("with_llm.py"), python=("llm",)),
    Suite("dspy", "DSPy's calls, and typed predictions", cases("with_dspy.py"), python=("dspy",)),
    Suite("haystack", "Haystack's OpenAI generators", cases("with_haystack.py"), python=("haystack-ai",)),
    Suite(
        "autogen",
        "AutoGen's client of models, and an agent",
        cases("with_autogen.py"),
        python=("autogen-ext[openai]", "autogen-agentchat"),
    ),
    Suite("smolagents", "smolagents' model, and an agent", cases("with_smolagents.py"), python=("smolagents[openai]",)),
    Suite(
        "lm_eval",
        "lm-evaluation-harness: generated and chosen answers",
        cases("with_lm_eval.py"),
        python=("lm_eval[api]", "transformers"),
    ),
    Suite("guidellm", "twelve requests of guidellm", guidellm, python=("guidellm",)),
)

NO_CALL = "the model does not call the tool that it may call, or calls it once where two calls are wanted"
NO_END = "the model does not end a text or a list that the schema leaves open"
REASONS = (
    (
        r"expected '(earth|saturn|paris)'|'paris' in|built\. got",
        "asks about the world, of which the model knows nothing",
    ),
    (r"input_image|does not see|^image-input", "needs a model that sees; refused by name"),
    (r"vector stores|file_search|assistants", "file search and its files are not supported; refused by name"),
    (
        r"error_when_header_provided",
        "expects that a key among an MCP server's headers is refused; OpenAI's API takes it",
    ),
    (r"connector", "names an MCP server by llama-stack's own settings"),
    (r"Prompts API", "makes prompts by a route that OpenAI's API does not have; here they are files of the operator"),
    (r"compact-missing-model", "expects that a request without a model is refused; here it means the served model"),
    (r"Use 'client\.|Conversation 'conv_0+' not found", "expects an error in llama-stack's own words"),
    (r"incomplete_details_length", "expects a long answer, and then a reason that OpenAI's types do not have"),
    (r"truncation_auto_error", "expects that truncation: auto is refused; OpenAI's API takes it"),
    (
        r"auto_creates|continue_conv|items_populated|conversation_preserved",
        "expects a conversation's id, for every response",
    ),
    (r"conversation_item_delete", "expects the item; OpenAI's types return the conversation"),
    (r"test_add_and_list_items", "expects a text; OpenAI's types have a list of parts"),
    (r"max_tool_calls_invalid", "expects Pydantic's words"),
    (r"failed_error_code_is_spec", "expects that truncation: auto fails; OpenAI's API takes it"),
    (r"invalid_tool_choice", "gives a function in the form of chat completions, which OpenAI's API refuses"),
    (r"max_infer_iters|guardrails", "a parameter of llama-stack's own"),
    (r"below_minimum", "expects that fewer than 16 tokens are refused, as by OpenAI; here they can be asked for"),
    (r"background_and_stream", "expects a refusal; OpenAI's API streams background responses"),
    (r"stream_options needs stream", "gives stream_options without a stream, which OpenAI's API refuses"),
    (r"web_search", "the model does not search, or has no query"),
    (r"mcp|get_time|assert 0 (?:==|>)|assert 1 == 2|Los Angeles", NO_CALL),
    (r"Expected tool call delta", NO_CALL),
    (r"== 'function_call'|\"function_call\" but", NO_CALL),
    (r"pineapple|context_loading", "the model does not say again what it was told"),
    (r"langchain_chain|langchain_multi|langgraph_multi", "asks about the world, which the model does not know"),
    (r"JSONDecodeError|length limit|timed? ?out|`response.incomplete`|got 1, not 2", NO_END),
    (r"hosted by remote::openai|return reasoning|live mode|reasoning_effort", "skipped for servers of this kind"),
)
"""Patterns of a case and its message, in any case, and the text that replaces the message."""


def reason_of(case: Case) -> str:
    """The reason why a case did not pass, in words."""
    text = f"{case['case'].rpartition('::')[2]} {case.get('reason', '')}"
    return next(
        (words for pattern, words in REASONS if re.search(pattern, text, re.IGNORECASE)),
        re.sub(r"(?:conv|resp|msg)_[0-9a-f]{32}", "…", case.get("reason", "")).replace("|", "\\|")[:160],
    )


class Pages(BaseHTTPRequestHandler):
    """A search engine that finds one page for any query, in SearXNG's JSON."""

    def do_GET(self) -> None:
        """Answer GET /search?q=…&format=json."""
        query = parse_qs(urlsplit(self.path).query)["q"][0]
        page = {"url": "https://pages.example/1", "title": query, "content": f"All about {query}."}
        body = json.dumps({"query": query, "results": [page]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: object) -> None:
        """Log nothing."""


@contextmanager
def search_engine() -> Iterator[str]:
    """A search engine. Yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{engine.server_port}"
        engine.shutdown()


@contextmanager
def server(log: Path) -> Iterator[str]:
    """`holdfast serve` with the built-in model. Yields its URL."""
    keys = [word for key in (KEY, *TENANTS.values()) for word in ("--api-key", key)]
    options = ("--port", "0", "--store", "memory", "--cache-gb", "0.5", "--max-model-len", "1024", *keys)
    remote = ("--mcp-allow", "localhost:*", "--mcp-allow", "127.0.0.1:*")
    command = [sys.executable, "-m", "holdfast.cli", "serve", MODEL, *options, *remote, "--web-search"]
    with (
        log.open("w") as errors,
        search_engine() as found,
        subprocess.Popen([*command, found], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as process,
    ):
        try:
            assert process.stdout is not None
            address = next((line for line in process.stdout if line.startswith("  address")), "")
            if not address:
                raise RuntimeError(f"the server did not start; see {log}")
            yield address.split()[1]
        finally:
            process.terminate()


def newer_node(directory: Path) -> Path:
    """The directory of the newest Node, which npm installs into an environment."""
    return directory / "node_modules" / "node" / "bin"


def prepare(suite: Suite, directory: Path) -> None:
    """Install what a suite needs, if it is not there yet. Raises CalledProcessError."""
    done = directory / ".ready"
    wanted = json.dumps([suite.python, suite.node])
    if done.exists() and done.read_text() == wanted:
        return
    directory.mkdir(parents=True, exist_ok=True)
    if suite.python:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([directory / "bin" / "pip", "install", "--quiet", "--upgrade", *suite.python], check=True)
    if suite.node:
        (directory / "package.json").write_text("{}")
        path = os.pathsep.join((str(newer_node(directory)), os.environ["PATH"]))
        for names in (("node",), suite.node):  # npm leaves out versions that the Node that runs it is too old for
            command = ["npm", "install", "--silent", *names]
            subprocess.run(command, cwd=directory, check=True, env=os.environ | {"PATH": path})
    done.write_text(wanted)


def versions(suite: Suite, directory: Path, source: Path | None) -> str:
    """The installed versions, in words."""
    names = suite.named or tuple(re.split(r"[\[<=@]", name)[0] for name in (*suite.python, *suite.node)[:1])
    if suite.python:
        code = f"from importlib.metadata import version\nfor name in {names}: print(name, version(name))"
        told = subprocess.run([directory / "bin" / "python", "-c", code], capture_output=True, text=True).stdout
        words = told.split("\n")
    else:
        read = {name: json.loads((directory / "node_modules" / name / "package.json").read_text()) for name in names}
        words = [f"{name} {package['version']}" for name, package in read.items()]
    if source is not None:
        shown = subprocess.run(
            ["git", "log", "-1", "--format=%h of %cs"], cwd=source, capture_output=True, text=True, check=True
        ).stdout
        words.insert(0, f"commit {shown.strip()}")
    return ", ".join(filter(None, words))


def measure(suite: Suite, directory: Path, source: Path | None) -> dict[str, Any]:
    """Run a suite against a fresh server."""
    prepare(suite, directory)
    began = time.monotonic()
    with server(directory.with_suffix(".server.log")) as url:
        found = suite.run(Where(url, directory.resolve(), source))
    counts = Counter(case["outcome"] for case in found)
    print(f"{suite.name}: {dict(counts)}, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "name": suite.name,
        "date": provenance()["date"],
        "versions": versions(suite, directory, source),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "least": suite.least or len(found),
        "cases": found,
    }


def page(results: Sequence[dict[str, Any]]) -> str:
    """The documentation page, in Markdown."""
    lines = [
        "# Clients",
        "",
        "Clients and compliance suites that people use, run against `holdfast serve` with the built-in model, each in",
        "an environment of its own. The model is tiny: it knows sums and what it is told, and nothing of the world.",
        "Written by",
        "",
        "```sh",
        "python benchmarks/clients/run.py     # its head says which checkouts some suites need",
        "```",
        "",
        "| suite | what runs | version | run on | passed | failed | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    known = {suite.name: suite for suite in SUITES}
    for result in results:
        passed = f"{result['passed']} of {result['passed'] + result['failed']}"
        row = (known[result["name"]].about, result["versions"], result["date"][:10], passed)
        lines.append(f"| {result['name']} | {' | '.join(row)} | {result['failed']} | {result['skipped']} |")
    lines += ["", "A skipped case was skipped by the suite itself.", ""]
    for result in results:
        grouped: dict[tuple[str, str], list[str]] = {}
        for case in result["cases"]:
            if case["outcome"] != "passed":
                grouped.setdefault((case["outcome"], reason_of(case)), []).append(case["case"])
        if grouped:
            lines += [f"## {result['name']}: what does not pass", ""]
            for (outcome, reason), names in sorted(grouped.items(), key=lambda item: (item[0][0], -len(item[1]))):
                shown = ", ".join(f"`{name.rpartition('::')[2]}`" for name in names)
                lines.append(f"- {outcome}, {len(names)}: {reason}: {shown}")
            lines.append("")
    return "\n".join(lines)


def write(results: Sequence[dict[str, Any]], file: Path, document: Path) -> None:
    """Write the results as JSON, and the page. Called after each suite, so that an interruption loses at most one."""
    about = provenance() | {"command": "python benchmarks/clients/run.py"}
    file.write_text(json.dumps(about | {"suites": results}, indent=1) + "\n")
    document.write_text(page(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(suite.name for suite in SUITES))
    parser.add_argument("--source", action="append", default=[], metavar="SUITE=DIR", help="a suite's checkout")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "clients", metavar="DIR")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "clients.json", metavar="FILE")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "clients.md", metavar="FILE")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - {suite.name for suite in SUITES}
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    sources = {name: Path(path).resolve() for name, _, path in (given.partition("=") for given in arguments.source)}
    before = json.loads(arguments.json.read_text())["suites"] if arguments.json.exists() else []
    results = {result["name"]: result for result in before}
    for suite in SUITES:
        if arguments.suites and suite.name not in arguments.suites:
            continue
        if suite.needs_source and suite.name not in sources:
            print(f"{suite.name}: needs --source {suite.name}=DIR")
            continue
        results[suite.name] = measure(suite, arguments.environments / suite.name, sources.get(suite.name))
        write([results[suite.name] for suite in SUITES if suite.name in results], arguments.json, arguments.page)
    ordered = [results[suite.name] for suite in SUITES if suite.name in results]
    return int(any(result["passed"] < result["least"] for result in ordered))


if __name__ == "__main__":
    sys.exit(main())
