"""Sampling that a checkpoint's generation_config.json recommends."""

import json

import pytest

from holdfast.core.types import SamplingParams
from holdfast.engine.generation import GenerationDefaults, find_generation

GIVEN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "eos_token_id": [1, 2],
    "transformers_version": "5.0",
}
FOUND = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_new_tokens=2048)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(GIVEN))
    return tmp_path


def test_the_fields_of_sampling_are_read_and_others_passed_over(directory):
    assert find_generation(directory) == FOUND
    assert find_generation(directory).params() == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_tokens=2048
    )


def test_none_reads_nothing_and_a_checkpoint_without_the_file_recommends_nothing(directory):
    nothing = GenerationDefaults()
    assert find_generation(directory, "none") == find_generation(directory / "absent") == nothing
    assert nothing.params() == SamplingParams() and nothing.sampling == {}


def test_another_file_or_directory_may_be_read_in_its_place(directory, tmp_path):
    for source in (str(directory), str(directory / "generation_config.json")):
        assert find_generation(tmp_path / "absent", source) == FOUND
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        find_generation(directory, "nowhere")


def test_overrides_replace_fields_of_the_file(directory):
    found = find_generation(directory, overrides='{"temperature": 0.1, "top_k": -1, "max_new_tokens": null}')
    assert (found.temperature, found.top_p, found.top_k, found.max_new_tokens) == (0.1, 0.95, 0, None)
    assert find_generation(directory, "none", '{"min_p": 0.1}').sampling == {"min_p": 0.1}


def test_a_file_that_says_not_to_sample_means_greedy(directory):
    (directory / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    assert find_generation(directory).temperature == 0.0


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"temprature": 1}', "has temprature; it may have temperature,"),
        ('{"top_p": "high"}', "top_p is 'high'; it must be a number"),
        ('{"top_k": 1.5}', "top_k is 1.5; it must be a number"),
        ('{"top_p": 1.5}', "top_p is 1.5; it must lie above 0"),
        ('{"max_new_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_name(directory, overrides, reason):
    with pytest.raises(ValueError, match=reason):
        find_generation(directory, overrides=overrides)
