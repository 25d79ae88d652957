"""What a request gets that does not say."""

from __future__ import annotations

import common

import json

import pytest

from engine.sampling.defaults import SamplingDefaults

WISHES = {"temperature": 0.25, "top_k": 7, "do_sample": False, "max_new_tokens": 5, "min_p": None, "eos_token_id": 2}


@pytest.mark.parametrize(("source", "override", "params", "limit"), [
    ("auto", None, {"temperature": 0.25, "top_k": 7, "max_tokens": 5}, None),
    ("auto", {"temperature": 1.5, "top_p": 0.5}, {"temperature": 1.5, "top_p": 0.5, "top_k": 7, "max_tokens": 5}, None),
    ("auto", '{"max_new_tokens": 3}', {"temperature": 0.25, "top_k": 7, "max_tokens": 3}, 3),
    ("auto", {"temperature": None}, {"top_k": 7, "max_tokens": 5}, None),
    ("auto", {"nonsense": 1}, {"temperature": 0.25, "top_k": 7, "max_tokens": 5}, None),  # vLLM passes over it, too
    ("vllm", None, {}, None),
    ("vllm", {"top_k": 3, "max_new_tokens": 4}, {"top_k": 3, "max_tokens": 4}, 4),
    ("FOLDER", None, {"repetition_penalty": 1.25, "max_tokens": 9}, 9),
    ("FOLDER", {"max_new_tokens": 4}, {"repetition_penalty": 1.25, "max_tokens": 4}, 4),
])  # fmt: skip
def test_sampling_defaults_are_those_of_vllm(tmp_path, source, override, params, limit):
    """`ModelConfig.get_diff_sampling_param`, and the servers' `override_max_tokens`."""
    (tmp_path / "other").mkdir()
    (tmp_path / "generation_config.json").write_text(json.dumps(WISHES))
    (tmp_path / "other" / "generation_config.json").write_text('{"repetition_penalty": 1.25, "max_new_tokens": 9}')
    source = str(tmp_path / "other") if source == "FOLDER" else source
    found = SamplingDefaults.of(tmp_path, source, override)
    assert (found.params, found.max_tokens_limit) == (params, limit)


def test_sampling_defaults_that_cannot_be(tmp_path):
    for override in ("[1]", "{", 5, ["x"]):
        with pytest.raises(common.InputError, match=r"override_generation_config .*: must be a JSON object"):
            SamplingDefaults.of(tmp_path, "auto", override)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(common.InputError, match="generation_config: temperature 'hot'"):
        SamplingDefaults.of(tmp_path, "auto", None)
    assert SamplingDefaults.of(tmp_path, "auto", {"temperature": 1}).params == {"temperature": 1}
    with pytest.raises(common.InputError, match=r"generation_config\.json: no such file"):
        SamplingDefaults.of(tmp_path, str(tmp_path / "nowhere"), None)
