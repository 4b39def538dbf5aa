"""Flags and YAML keys from dataclasses, and the errors for invalid ones."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch

import holdfast.cli
from holdfast.cli.chat import ChatConfig
from holdfast.cli.command import main, make_parser
from holdfast.cli.flags import UsageError, build, check_url, flag_of, read_file
from holdfast.core.config import AppConfig
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig


def engine(*arguments: str, file: str | None = None) -> EngineConfig:
    """The engine's options from a command line, and from a file with lower precedence."""
    options = make_parser("serve").parse_args(["serve", *arguments])
    return build(EngineConfig, vars(options), read_file(file, (EngineConfig, ServerConfig)) if file else {})


def test_without_flags_the_defaults_stand() -> None:
    assert engine() == EngineConfig()


def test_flags_set_fields_of_every_type() -> None:
    made = engine(
        "/a/model", "--max-model-len", "128", "--no-prefix-sharing", "--dtype", "bfloat16", "--cache-gb", "0.5"
    )
    assert made == EngineConfig(
        model="/a/model", max_model_len=128, prefix_sharing=False, dtype="bfloat16", cache_gb=0.5
    )


def test_a_flag_may_take_a_number_or_a_word(tmp_path: Path) -> None:
    assert engine("--token-budget", "auto", "--tbt-target", "50ms").token_budget == "auto"
    assert engine("--token-budget", "64").token_budget == 64
    assert engine("--host-cache-gb", "4").host_cache_gb == 4.0
    assert engine("--host-cache-gb", "auto") == EngineConfig()
    path = tmp_path / "holdfast.yaml"
    for value, meant in (("auto", "auto"), ("4", 4.0), ("0.5", 0.5)):
        path.write_text(f"host_cache_gb: {value}\n")
        assert engine(file=str(path)).host_cache_gb == meant
    for value, meant in (("auto", "auto"), ("64", 64)):
        path.write_text(f"token_budget: {value}\ntbt_target: {'50ms' if meant == 'auto' else 'null'}\n")
        assert engine(file=str(path)).token_budget == meant


@pytest.mark.parametrize("given", ["50", "50ms", "0.05s"])
def test_a_time_may_name_its_unit(given: str, tmp_path: Path) -> None:
    assert engine("--tbt-target", given).tbt_target == 50
    path = tmp_path / "holdfast.yaml"
    path.write_text(f"tbt_target: {given}\n")
    assert engine(file=str(path)).tbt_target == 50


@pytest.mark.parametrize("given", ["2000", "2000ms", "2s"])
def test_the_target_for_the_first_token_may_name_its_unit(given: str, tmp_path: Path) -> None:
    assert engine("--order", "deadline", "--ttft-target", given).ttft_target == 2000
    path = tmp_path / "holdfast.yaml"
    path.write_text(f"order: deadline\nttft_target: {given}\n")
    assert engine(file=str(path)).ttft_target == 2000


def test_an_option_that_is_off_when_it_is_empty_may_be_given_so() -> None:
    assert engine("--chunk-host", "", "--draft-model", "") == EngineConfig()


def test_an_empty_value_in_a_file_is_refused_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.yaml"
    path.write_text("revision: ''\n")
    with pytest.raises(UsageError, match="revision is empty; give it a value, or leave it out"):
        engine(file=str(path))
    assert engine("--revision", "main", file=str(path)).revision == "main"


def test_repeating_api_key_gives_several_keys() -> None:
    options = make_parser("serve").parse_args(["serve", "--api-key", "a", "--api-key", "b"])
    assert build(ServerConfig, vars(options)).api_key == ("a", "b")


def test_flags_win_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.yaml"
    path.write_text("model: /from/file\nmax-model-len: 64\nblock_size: 8\nprefix_sharing: false\nport: 9000\n")
    assert engine("--block-size", "4", file=str(path)) == EngineConfig(
        model="/from/file", max_model_len=64, block_size=4, prefix_sharing=False
    )
    assert build(ServerConfig, read_file(str(path), (EngineConfig, ServerConfig))).port == 9000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_modl_len: 3", "unknown option max_modl_len; the nearest is max_model_len"),
        ("tensor_parallel_size: 2", "unknown option tensor_parallel_size; here it is tp"),
        ("kv_cache_dtype: fp4", "kv_cache_dtype: Invalid enum value 'fp4'; choose from auto, fp8"),
        ("block_size: many", "block_size: Expected `int`, got `str`"),
        ("- a\n- b", "must hold one option a line"),
        ("a: [", "is not YAML"),
        ("tbt_target: soon", "tbt_target: 'soon' is not a time"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as printed:
        engine(file=str(path))
    assert message in str(printed.value)
    assert "\n" not in str(printed.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-modl-len", "3"], "unknown option --max-modl-len; did you mean --max-model-len?"),
        (
            ["plan", "mistral-7b", "--attention-backend", "torch"],
            "--attention-backend; it is an option of holdfast serve; holdfast plan --help",
        ),
        (["serve", "--model", "x"], "--model; name the model without an option: holdfast serve MODEL"),
        (["serve", "--tensor-parallel-size", "2"], "unknown option --tensor-parallel-size; here it is --tp"),
        (["serve", "-ngl=99"], "a model is on one device as a whole: --device cuda, or --device cpu"),
        (["bench", "--no-enable-prefix-caching"], "here it is --no-prefix-sharing"),
        (["plan", "--gpu-memory-utilization", "0.9"], "here it is --memory-fraction"),
        (["plan", "--modle", "x"], "name the model without an option: holdfast plan MODEL"),
        (["keys", "--tenent", "x"], "unknown option --tenent; did you mean --tenant?"),
        (["keys", "--model", "x"], "--model; it is an option of holdfast batch; holdfast keys --help"),
        (["serve", "one", "two"], "serve takes one MODEL, and there is two besides"),
        (["serve", "--port", "high"], "argument --port: invalid int value: 'high'"),
        (["serve", "--port", "70000"], "port is 70000; it must lie between 0 and 65535"),
        (["serve", "--host-cache-gb", "lots"], "argument --host-cache-gb: invalid float or auto value: 'lots'"),
        (["serve", "--host-cache-gb", "-1"], "host_cache_gb is -1.0; it must be auto, or at least 0"),
        (["serve", "--tbt-target", "-3ms"], "tbt_target is -3.0; it must be above 0 and finite"),
        (["serve", "--tbt-target", "-.5s"], "tbt_target is -500.0; it must be above 0 and finite"),
        (["serve", "--cache-gb", "-inf"], "cache_gb is -inf; it must be above 0 and finite"),
        (["serve", "--max-sequences", "-2", "--port", "1"], "max_sequences is -2; it must lie between 1 and 4096"),
        (["serve", "--swap-threshold", "-5%"], "argument --swap-threshold: invalid float value: '-5%'"),
        (["serve", "--tbt-target", "--port", "1"], "argument --tbt-target: expected one argument"),
        (["serve", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["serve", "--scheduler", "fifo"], "--scheduler: invalid choice: 'fifo' (choose from"),
        (["serve", "--scheduler", "a/b:C"], "scheduler is 'a/b:C'; it must be one of stall-free, request-level"),
        (["serve", "--kv-cache-dtype", "fp4"], "--kv-cache-dtype: invalid choice: 'fp4' (choose from"),
        (["chat", "--kv-cache-dtype", "e5m2"], "--kv-cache-dtype: invalid choice: 'e5m2' (choose from"),
        (["serve", "--seed", "-1"], "seed is -1; it must lie between 0 and 9223372036854775807"),
        (["serve", "--chunk-size", "16777217"], "chunk_size is 16777217; it must lie between 1 and 16777216"),
        (["serve", "--block-size", "0"], "block_size is 0; it must lie between 1 and 1024"),
        (["serve", "--config", "/no/such/file"], "cannot read /no/such/file"),
        (["serve", "--app", "a b"], "app is 'a b'; it must be a name, or look like module:object"),
        (["serve", "--app", "x", "--app-device", "tpu"], "app_device is 'tpu'; it must be cpu, cuda, or cuda:N"),
        (["serve", "--app", "x", "--app-capacity", "1"], "app_capacity is 1; it must lie between 2 and 16777216"),
        (["serve", "--app", "x", "--app-max-tasks", "0"], "app_max_tasks is 0; it must lie between 1 and 1024"),
        (["serve", "--app-device", "cpu"], "--app-device is for applications; name one with --app"),
        (["serve", "--app", "x", "--cache-gb", "1"], "--cache-gb is for a language model; name MODEL to serve one"),
        (
            ["serve", "--app", "x", "--app", "y", "--app-profile", "p.json"],
            "there are 2 applications; a file is for one",
        ),
        (["serve", "--app", "x", "--app-profile", ""], "app_profile is empty; give it a value, or leave it out"),
        (["serve", "--host", ""], "host is empty; give it a value, or leave it out"),
        (["serve", "--store", " "], "store is empty; give it a value"),
        (["serve", "--allowed-host", "a.example", "--allowed-host", ""], "allowed_host is empty; give it a value"),
        (["keys", "list", "--store", ""], "store is empty; give it a value"),
        (["bench", "--json", ""], "json is empty; give it a value"),
        (["chat", "-p", "\n"], "prompt is empty; give it a value"),
        (["plan", "mistral-7b", "--device", ""], "device is empty; give it a value"),
        (["bench", "--requests", "10000001"], "requests is 10000001; it must be at most 10,000,000"),
        (["serve", "--app-profile", "off"], "--app-profile is for applications; name one with --app"),
        (["serve", "--app", "x", "--grpc-port", "65536"], "grpc_port is 65536; it must lie between 0 and 65535"),
        (["profile", "--app", "a b"], "app is 'a b'; it must be a name, or look like module:object"),
        (["profile", "--app", "x", "--largest", "1"], "largest is 1; it must lie between 2 and 16384"),
        (["profile", "--app", "x", "--largest", "16385"], "largest is 16385; it must lie between 2 and 16384"),
        (["profile", "--largest", "64"], "--largest is for the cells of an application; name one with --app"),
        (["profile", "--app", "x", "--cache-gb", "1"], "--cache-gb is for a language model; leave it out with --app"),
        (["profile", "--app", "x", "/model"], "MODEL is for a language model; leave it out with --app"),
        (["profile", "--out", "/"], "/ cannot be written: it is a directory"),
        (["profile", "--out", "/no/such/place/p.json"], "/no/such/place is not a directory"),
        (["sing"], "there is no command sing; holdfast --help lists what there is"),
        (["chatt", "holdfast-tiny"], "there is no command chatt; did you mean chat?"),
        (["tune", "--data", "x.jsonl"], "name the examples without an option: holdfast tune DATA"),
        (["serve", "--enable-deterministic-inference"], "here it is --deterministic"),
        (["run", "llama3"], "there is no command run: holdfast chat MODEL talks to a model"),
        (["pull", "llama3"], "there is no command pull: holdfast serve OWNER/NAME fetches"),
        (["list"], "there is no command list: a server has one model"),
        (["completion"], "SHELL is missing; it must be one of bash, zsh, fish"),
        (["completion", "tcsh"], "SHELL is tcsh; it must be one of bash, zsh, fish"),
        (["completion", "bash", "--port", "1"], "unknown option --port"),
        (["chat", "--url", "nowhere"], "url is nowhere; it must look like http://127.0.0.1:8000"),
        (["chat", "--url", "http://x", "--block-size", "1"], "--block-size is for a model that runs here"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize(
    ("apps", "message"),
    [
        (["nobody"], "nobody"),
        (["no_such_module:thing"], "no_such_module"),
        (["tiny_apps:adding", "tiny_apps:adding"], "two applications are named adding; serve one of them"),
    ],
)
def test_an_application_that_cannot_be_served_is_one_line_and_exit_code_2(
    apps: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    words = [word for app in apps for word in ("--app", app)]
    assert main(["serve", "--port", "0", "--app-device", "cpu", "--threads", "1", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("nobody", "application 'nobody' is not built in"),
        ("no_such_module:thing", "there is no module no_such_module"),
        ("tiny_apps:unrunnable", "cell unrunnable-cell gives"),
    ],
)
def test_cells_that_cannot_be_measured_are_one_line_and_exit_code_2(
    app: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(["profile", "--app", app, "--device", "cpu", "--threads", "1", "--largest", "2"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cells_cannot_be_measured_on_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--app", "listops", "--device", "cuda", "--largest", "2"]) == 2
    err = capsys.readouterr().err
    assert "device is cuda:0; this machine has 0 CUDA devices" in err and err.count("\n") == 1


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("holdfast", "attention_backend is holdfast, which takes a GPU, and the device is cpu; choose auto"),
        ("vllm-flash-attn", "attention_backend is vllm-flash-attn, which takes a GPU, and the device is cpu"),
    ],
)
def test_an_unavailable_attention_backend_is_one_line_and_exit_code_2(
    backend: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--device", "cpu", "--attention-backend", backend]) == 2
    assert message in capsys.readouterr().err


def test_the_whole_help_has_every_option_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for config in (EngineConfig, ServerConfig, AppConfig):
        for field in dataclasses.fields(config):
            assert field.name == "model" or f"{flag_of(field.name)}" in shown
    assert "--max-model-len N longest sequence in tokens" in shown
    assert "tokens in one block of the KV cache (default: 16)" in shown
    assert "--no-prefix-sharing" in shown
    assert "--host-cache-gb X|auto" in shown


def test_the_help_has_the_common_options_and_says_where_the_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--port N" in shown and "--max-model-len" in shown and "--block-size" not in shown
    assert "more options: holdfast serve --help-all" in shown
    assert len(shown.splitlines()) < 70
    assert engine("--block-size", "8").block_size == 8, "hidden options are taken"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8123", "http://localhost:8123"),
        ("localhost", "http://localhost"),
        (":8123", "http://127.0.0.1:8123"),
        ("127.0.0.1:8123/v1", "http://127.0.0.1:8123/v1"),
        ("[::1]:8123", "http://[::1]:8123"),
        ("gpu.lan", "http://gpu.lan"),
        ("box:80", "http://box:80"),
        ("https://gpu.lan", "https://gpu.lan"),
    ],
)
def test_a_url_may_lack_its_scheme(given: str, url: str) -> None:
    assert build(ChatConfig, {"url": given}).url == url
    check_url(url)


@pytest.mark.parametrize("given", ["nowhere", "ftp://x", "a b:1"])
def test_text_that_is_not_a_url_is_unchanged_and_refused(given: str) -> None:
    with pytest.raises(UsageError, match="it must look like http"):
        build(ChatConfig, {"url": given})


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "holdfast serve" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_help_imports_neither_the_server_nor_the_engine(asked: str) -> None:
    program = f"""
import sys
from holdfast.cli import main
try:
    main([{asked!r}])
except SystemExit as ended:
    assert ended.code == 0
heavy = {{"fastapi", "uvicorn", "sqlalchemy", "httpx", "openai", "rich", "prompt_toolkit", "tokenizers", "torch"}}
own = {{"holdfast.server", "holdfast.engine", "holdfast.lab"}}
assert not (heavy | own) & set(sys.modules), (heavy | own) & set(sys.modules)
of_models = {{name.removeprefix("holdfast.lm.") for name in sys.modules if name.startswith("holdfast.lm.")}}
packages = {{"parts"}} | {{f"parts.{{name.split('.')[1]}}" for name in of_models if name.startswith("parts.")}}
assert of_models <= packages | {{"config"}} | {{f"{{name}}.options" for name in packages}}, of_models
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("holdfast 0.")


def test_ctrl_c_during_the_import_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "holdfast.cli.command":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "holdfast.cli.command")
    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    assert holdfast.cli.main(["--version"]) == 130


def test_help_begins_with_one_usage_line_and_explains_model(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for command in ("serve", "plan"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        shown[command] = capsys.readouterr().out
        assert shown[command].startswith(f"usage: holdfast {command} [MODEL] [OPTION ...]\n\n")
    assert "holdfast-tiny, which is built in" in shown["serve"] and "mistral-7b" in shown["plan"]


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["serve", "--app", "x"], "tuning: true", "--tuning is for a language model; name MODEL"),
        (["serve"], "app: [x]\ntbt-target: 50", "--tbt-target is for a language model; name MODEL"),
        (["serve"], "app_max_tasks: 5", "--app-max-tasks is for applications; name one with --app"),
        (["serve", "--engines", "/a.sock"], "cache_gb: 1", "--cache-gb is for an engine that is started here"),
        (["profile", "--app", "x"], "cache_gb: 1", "--cache-gb is for a language model; leave it out"),
        (["profile"], "largest: 64", "--largest is for the cells of an application"),
    ],
)
def test_an_option_in_the_file_that_would_be_ignored_is_refused_as_on_the_command_line(
    arguments: list[str], text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.yml"
    path.write_text(text)
    assert main([*arguments, "--config", str(path)]) == 2
    assert message in capsys.readouterr().err
