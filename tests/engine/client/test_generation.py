"""Sampling that a checkpoint's generation_config.json recommends."""

import json

import pytest

from holdfast.core.types import SamplingParams
from holdfast.engine.client.generation import GenerationDefaults, find_generation

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


def test_an_override_may_replace_a_value_of_the_file_that_is_out_of_range(directory):
    (directory / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p is 1.5; .* --generation-config none"):
        find_generation(directory, overrides='{"temperature": 0.5}')
    assert find_generation(directory, overrides='{"top_p": 0.5}').top_p == 0.5


def test_a_file_that_says_not_to_sample_means_greedy(directory):
    (directory / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    assert find_generation(directory).temperature == 0.0


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"temprature": 1}', "has temprature; it may have temperature,"),
        ('{"top_p": "high"}', "top_p is 'high'; it must be a number"),
        ('{"top_k": 1.5}', "top_k is 1.5; it must be a number"),
        ('{"top_p": 1.5}', "^override_generation_config: top_p is 1.5; it must lie above 0 .*; correct it$"),
        ('{"temperature": 9}', "^override_generation_config: temperature is 9; it must be at most 2, as in requests"),
        ('{"temperature": NaN}', "^override_generation_config: temperature is nan"),
        ('{"top_k": 16777217}', "top_k is 16777217; it must be at most 16777216"),
        ('{"max_new_tokens": 0}', "^override_generation_config: max_tokens is 0"),
    ],
)
def test_an_invalid_field_is_refused_by_its_name(directory, overrides, reason):
    with pytest.raises(ValueError, match=reason):
        find_generation(directory, overrides=overrides)


EFFECTIVE = {
    "suppress_tokens": [7],
    "token_healing": True,
    "begin_suppress_tokens": [7, 8],
    "bad_words_ids": [[3, 4]],
    "sequence_bias": [[[5], -1.0]],
    "min_new_tokens": 10,
    "min_length": 5,
    "no_repeat_ngram_size": 2,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": [2],
    "num_beams": 4,
    "typical_p": 0.9,
    "penalty_alpha": 0.6,
    "epsilon_cutoff": 1e-4,
    "guidance_scale": 1.5,
    "encoder_repetition_penalty": 1.2,
    "exponential_decay_length_penalty": [5, 1.1],
    "stop_strings": ["stop"],
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_a_field_that_changes_tokens_and_is_not_applied_is_named_with_its_value(directory, caplog, name):
    (directory / "generation_config.json").write_text(json.dumps({**GIVEN, name: EFFECTIVE[name]}))
    assert find_generation(directory) == FOUND
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"{directory}/generation_config.json sets {name} = {EFFECTIVE[name]!r}, which are not applied" in said


def test_fields_without_effect_are_passed_over_in_silence(directory, caplog):
    plain = {"num_beams": 1, "typical_p": 1.0, "min_new_tokens": 0, "suppress_tokens": [], "bad_words_ids": None}
    plain |= {
        "penalty_alpha": None,
        "guidance_scale": 1.0,
        "sequence_bias": {},
        "epsilon_cutoff": 0.0,
        "pad_token_id": 3,
    }
    (directory / "generation_config.json").write_text(json.dumps({**GIVEN, **plain}))
    assert find_generation(directory) == FOUND and not caplog.records


def test_the_forced_first_token_of_an_encoder_decoder_is_applied_and_not_named(directory, caplog):
    (directory / "generation_config.json").write_text('{"forced_bos_token_id": 5, "num_beams": 4}')
    (directory / "config.json").write_text('{"is_encoder_decoder": true}')
    find_generation(directory)
    (said,) = [record.message for record in caplog.records]
    assert "num_beams = 4" in said and "forced_bos" not in said


def test_a_long_value_is_cut_and_an_ignored_file_gives_no_warning(directory, caplog):
    (directory / "generation_config.json").write_text(json.dumps({"suppress_tokens": [*range(1000)]}))
    find_generation(directory, "none")
    assert not caplog.records
    find_generation(directory)
    assert "suppress_tokens = [0, 1, 2" in caplog.text and "..., which" in caplog.text and len(caplog.text) < 500
