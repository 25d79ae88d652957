"""Tour 04b: its widget, its words, and its bug of decoding token by token."""

from __future__ import annotations

import common

import itertools

import pytest

from engine import registry
from engine.llm import LLM
from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams
from engine.sampling.sampler import draw_tokens
from lab import cli
from lab.naive_sampler import reference_distribution

lesson, page = registry.lesson("04b_offline_engine"), cli.numbers("04b_offline_engine")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_state_of_the_widget(every):
    for values in list(itertools.product(*page.WIDGET_CHOICES.values()))[::every]:
        params = dict(zip(page.WIDGET_CHOICES, values))
        if params["seed"]:
            continue
        trace = page.simulate(params)
        assert [s["stage"] for s in trace["stages"]] == ["penalties", "temperature", "min_p", "top_k", "top_p"]
        for stage in trace["stages"]:
            assert sum(stage["probs"]) == pytest.approx(1)
            assert stage["kept"] == [i for i, p in enumerate(stage["probs"]) if p > 0]
        for before, after in zip(trace["stages"][1:], trace["stages"][2:]):
            assert set(after["kept"]) <= set(before["kept"])
        penalty = page.PENALTIES[params.pop("penalty")]
        chosen = SamplingParams(**params, **penalty)
        want = reference_distribution(lesson.LOGITS, chosen, page.PROMPT, page.OUTPUT)
        assert trace["stages"][-1]["probs"] == pytest.approx(want, abs=1e-6)
        assert all(want[i] > 0 for i in trace["draws"]) and len(trace["draws"]) == page.NUM_DRAWS


def test_the_words_of_the_story_are_those_of_the_simulation():
    for temperature, suffix in ((0.5, "_cold"), (1, ""), (2, "_hot")):
        for name, cut in (("top_p_75", {"top_p": 0.75}), ("min_p_20", {"min_p": 0.2})):
            probs = lesson.shaped(temperature, **cut)
            assert probs == page.last_stage(temperature=temperature, **cut)["probs"]
            assert sum(p > 0 for p in probs) == page.facts()["kept"][name + suffix]


def test_a_broken_sampler_breaks_the_simulation(monkeypatch):
    right = page.simulate(page.WIDGET_DEFAULT)
    original = draw_tokens
    monkeypatch.setattr(page, "draw_tokens", lambda probs, u: original(probs, 1 - u))
    assert page.simulate(page.WIDGET_DEFAULT)["draws"] != right["draws"]


def test_the_bug_of_decoding_token_by_token_is_caught(real_model, capsys):
    with pytest.raises(common.CheckFailed, match="pieces"):
        lesson.main(["--decode-tokens", "--figure", "unused"])


def test_greedy_samples_of_the_script_are_one(real_model, monkeypatch):
    """Two would be the same and are refused, but its --temperature may be 0."""
    asked = []

    def generate(self, prompts, params):
        asked.append([one.n for one in params])
        raise InterruptedError

    monkeypatch.setattr(lesson.loader, "load", lambda *_: real_model)
    monkeypatch.setattr(LLM, "generate", generate)
    with pytest.raises(InterruptedError):
        lesson.main(["--temperature", "0"])
    assert asked == [[1, 1, 1, 1]]


def test_a_model_without_some_characters_and_without_a_template_is_no_fault(tiny_model, tmp_path, monkeypatch, capsys):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    printable = [*map(chr, range(33, 127)), "Ġ"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(printable)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(lesson.TEXT)) == "Zo paid 5  for ;  said: bon"
    monkeypatch.setattr(lesson.loader, "load", lambda *_: (tiny_model, tokenizer))
    monkeypatch.setattr(page, "draw", lambda *_: None)
    lesson.main(["--figure", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "✓ the pieces make up the text" in shown and "SKIPPED chat: this model has no chat template" in shown
