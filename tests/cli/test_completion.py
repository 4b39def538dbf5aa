"""Completion scripts: shells take them, and they know the commands, options and words."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from holdfast.cli.command import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected", "others"),
    [
        (["holdfast", "pro"], {"profile"}, set()),
        (["holdfast", ""], {"serve", "chat", "completion"}, {"--port"}),
        (["holdfast", "serve", "--po"], {"--port"}, {"--url"}),
        (["holdfast", "serve", "--dtype", "bf"], {"bfloat16"}, set()),
        (["holdfast", "chat", "--no-pre"], {"--no-prefix-sharing"}, set()),
        (["holdfast", "chat", "-"], {"-p", "--prompt", "--url", "--help-all"}, {"--port"}),
    ],
)
def test_bash_completes_commands_options_and_words(
    line: list[str], expected: set[str], others: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"'{word}'" for word in line)
    program = f"{script('bash', capsys)}\nCOMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _holdfast\n"
    program += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert not done.stderr
    found = set(done.stdout.split())
    assert expected <= found and not others & found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_is_whole_and_its_shell_reads_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "serve" in text and "max-model-len" in text and "Traceback" not in text
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=200)


def test_fish_has_the_help_texts_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("fish", capsys)
    line = next(line for line in text.splitlines() if "from serve" in line and "-l executor" in line)
    assert "-x -a 'auto paged padded'" in line
    assert "Transformers\\'" in line
