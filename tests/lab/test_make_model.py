"""The command that writes a small random model: the same folder for the same seed, whole or not at all."""

from __future__ import annotations

import common

import pytest
from safetensors.torch import load_file

from engine.model.config import FAMILIES, LlamaConfig
from lab import make_model


def test_a_seed_is_a_model(tmp_path, capsys):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model.main(["qwen2", str(tmp_path / name), "--seed", str(seed)])
        said = capsys.readouterr()
        assert "a qwen2 of" in said.out and said.err == ""
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(a[name].equal(b[name]) for name in a) and not all(a[name].equal(c[name]) for name in a)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"], "nothing is left over"


@pytest.mark.parametrize("family", [*sorted(set(FAMILIES.values()))])
def test_the_engine_reads_what_it_writes(tmp_path, family):
    make_model.make_model(family, tmp_path / "model", vocab_size=99)
    config = LlamaConfig.from_folder(tmp_path / "model")
    assert (config.moe is not None) == (family not in ("llama", "mistral", "qwen2", "qwen3"))
    assert (config.mla is not None) == family.startswith("deepseek")


def test_a_folder_that_is_there_and_a_family_that_is_not_are_refused(tmp_path):
    with pytest.raises(common.InputError, match="is there already"):
        make_model.main(["llama", str(tmp_path)])
    with pytest.raises(
        common.InputError,
        match="family 'gpt2': must be one of deepseek_v2, deepseek_v3, gpt_oss, llama, mistral, mixtral, qwen2",
    ):
        make_model.main(["gpt2", str(tmp_path / "new")])
    (tmp_path / "file").touch()
    with pytest.raises(common.InputError, match=r"file.*Not a directory|file.*File exists"):
        make_model.main(["llama", str(tmp_path / "file" / "below")])


def test_a_window_is_for_families_that_have_one(tmp_path, capsys):
    make_model.main(["mistral", str(tmp_path / "m"), "--window", "9"])
    assert LlamaConfig.from_folder(tmp_path / "m").sliding_windows == (9, 9, 9) and capsys.readouterr().out
    with pytest.raises(common.InputError, match="window: not for family 'llama', whose layers see everything"):
        make_model.main(["llama", str(tmp_path / "l"), "--window", "9"])
