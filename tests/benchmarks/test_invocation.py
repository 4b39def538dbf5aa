"""`--set NAME=VALUE` of benchmarks."""

import argparse

import pytest

from benchmarks.lib.invocation import add_engine_options


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_engine_options(parser, "--beside")
    return parser.parse_args(arguments)


def test_option_values_parse_as_words_numbers_or_booleans() -> None:
    given = parsed("--set", "kv_cache_dtype=fp8", "--set", "block_size=8", "--beside", "prefix_sharing=false")
    assert dict(given.set) == {"kv_cache_dtype": "fp8", "block_size": 8}
    assert dict(given.beside) == {"prefix_sharing": False}
    assert dict(parsed("--set", "speculation=off").set) == {"speculation": "off"}
    assert dict(parsed().set) == {}


@pytest.mark.parametrize("wrong", ["block_size", "=8", "block size=8", "block_size=[8"])
def test_a_malformed_option_is_named_in_the_error(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--set", wrong)
    assert repr(wrong) in capsys.readouterr().err
