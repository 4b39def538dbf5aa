"""`holdfast serve owner/name` from a hub on this machine: a model without a tokenizer, under names of its own."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from fake_hub import fake_hub
from served import CONFIG, make_checkpoint, serve

from holdfast import LLM, SamplingParams
from holdfast.lm.limits import RequestRefused


def test_a_model_of_the_hub_without_a_tokenizer_is_served_by_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    names = ("--served-model-name", "mine", "--served-model-name", "too")
    with fake_hub(bare=directory) as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with serve(Path("made/bare"), *names) as serving, serving.client() as client:
            assert [model.id for model in client.models.list()] == ["mine", "too"]
            asked = dict(prompt=[1, 2, 3], max_tokens=5, temperature=0, extra_body={"ignore_eos": True})
            whole = client.completions.create(model="too", **asked)  # type: ignore[call-overload]
            ids = [int(word) for word in whole.choices[0].text.split(" ")[1:]]
            assert len(ids) == 5 and all(id < CONFIG["vocab_size"] for id in ids)  # type: ignore[operator]
            stream = client.completions.create(model="mine", stream=True, **asked)  # type: ignore[call-overload]
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
            with pytest.raises(openai.BadRequestError, match="this model has no tokenizer; give the prompt as token"):
                client.completions.create(model="mine", prompt="words")
            with pytest.raises(openai.BadRequestError, match="this model has no tokenizer; use completions"):
                client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "words"}])
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="made/bare", prompt=[1])
    with LLM(str(directory), load_format="random", device="cpu", cache_gb=0.02, threads=1) as llm:
        (given,) = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), progress=False)
        assert list(given.token_ids) == ids
        with pytest.raises(RequestRefused, match="this model has no tokenizer"):
            llm.generate("words", progress=False)
