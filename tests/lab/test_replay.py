"""`python -m vllm replay`: what it draws and prints, and what it refuses. Its decisions: `test_conformance.py`."""

from __future__ import annotations

import common

import json
import re
import shlex

import pytest

from lab import figures, replay, workload_files


def test_owners_of_a_trace():
    prompt = list(range(16))
    request = {"arrival_step": 0, "prompt_token_ids": prompt, "max_tokens": 40, "forced_output_token_ids": [7] * 40}
    config = {"num_blocks": 9, "block_size": 8, "max_model_len": 64, "enable_prefix_caching": True}
    trace = replay.replay({"name": "x", "config": config, "requests": [{"id": i, **request} for i in "ab"]})
    owners = dict(workload_files.owners_of(trace))
    assert owners[0] == {"a": 2, "b": 1}  # b shares a's first block
    assert any(step.get("preempted") for step in trace["steps"])
    assert all(sum(held.values()) + step["free_blocks"][0] == 8
               for step, held in zip(trace["steps"], owners.values()) if "free_blocks" in step)  # fmt: skip


def test_owners_are_drawn_with_the_most_preempted_in_blue(tmp_path):
    owners = [(0, {"a": 2}), (1, {"a": 2, "b": 1}), (2, {"a": 3}), (3, {"a": 3, "b": 0}), (4, {"b": 4})]
    drawn = workload_files.draw_owners(tmp_path, "owners", owners, [2], 4, "Two requests")
    fills = re.findall(r"fill: (#[0-9a-f]{6})", drawn.read_text())
    blue, purple = (fills.index(figures.COLORS[color]) for color in ("blue", "purple"))
    assert purple < blue  # a is drawn first, and b, which came back, is the blue one


def test_without_the_check_at_the_door_it_waits_for_ever():
    """vLLM's scheduler admits a prompt that fits, lets it outgrow the pool, and then never gives up on it."""
    config = {"num_blocks": 13, "block_size": 16, "max_model_len": 256}
    request = {"id": "a", "arrival_step": 0, "prompt_token_ids": [0] * 64, "max_tokens": 192}
    trace = replay.replay({"name": "x", "config": config,
                           "requests": [request | {"forced_output_token_ids": [1] * 192}]})  # fmt: skip
    assert trace["end"] == "stalled" and trace["steps"][-2]["preempted"] == ["a"]


@pytest.mark.parametrize(
    ("where", "field", "value", "text"),
    [("", "name", "\ud83d", "name: must be a string of printable"), ("", "name", "a\nb", "name: must be"),
     ("requests", "id", "\ud83d", "requests[0].id: must be"), ("requests", "id", "a\nb", "requests[0].id: must be"),
     ("requests", "id", "\x1b[31m", "requests[0].id: must be"),
     ("requests", "cache_salt", "\ud83d", "requests[0].cache_salt: must be a string without half"),
     ("requests", "a\n\x1b[31m", 1, 'requests[0]."a\\n\\u001b[31m": unknown field'),
     ("config", "\ud83d", 1, 'config."\\ud83d": unknown field'),
     ("config", "num_blocks", 10**6 + 1, "config.num_blocks: must be a whole number from 2 to 1000000"),
     ("config", "num_blocks", 10**8, "config.num_blocks: must be")],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path, where, field, value, text):
    """And before anything runs: a pool of 10⁸ blocks alone would take gigabytes."""
    request = {"id": "a", "arrival_step": 0, "max_tokens": 1, "prompt_token_ids": [1], "forced_output_token_ids": [1]}
    workload = {"name": "w", "config": {}, "requests": [request]}
    {"": workload, "requests": request, "config": workload["config"]}[where][field] = value
    (tmp_path / "w.json").write_text(json.dumps(workload))
    with pytest.raises(common.InputError) as error:
        replay.main([str(tmp_path / "w.json"), "--table"])
    assert text in str(error.value) and str(error.value).isprintable()


def test_texts_that_can_be_shown_are_taken(capsys, tmp_path):
    """A salt only has to be hashed."""
    request = {"id": "寿 é", "arrival_step": 0, "max_tokens": 1, "prompt_token_ids": [1], "cache_salt": "a\n",
               "forced_output_token_ids": [1]}  # fmt: skip
    workload = {"name": "👩", "config": {"num_blocks": 3}, "requests": [request]}
    (tmp_path / "w.json").write_text(json.dumps(workload, ensure_ascii=False), encoding="utf-8")
    replay.main([str(tmp_path / "w.json"), "--table"])
    assert "寿 é" in capsys.readouterr().out


def test_replay_draws(tmp_path, capsys):
    workload = tmp_path / "w.json"
    workload.write_text('{"name": "w", "config": {}, "requests": [{"id": "a", "arrival_step": 0, "max_tokens": 3,'
                        ' "prompt_token_ids": [1, 2], "forced_output_token_ids": [1, 2, 3]}]}')  # fmt: skip
    replay.main([str(workload), "--table", "--figure", str(tmp_path / "figures")])
    assert (tmp_path / "figures" / "replay_w.svg").read_text().startswith("<?xml")
    assert "finished" in capsys.readouterr().out
    workload.write_text('{"name": "w", "config": {}, "requests": []}')
    with pytest.raises(common.InputError, match=r"--out .*file"):
        (tmp_path / "file").write_text("")
        replay.main([str(workload), "--out", str(tmp_path / "file" / "deep")])
    replay.main([str(workload), "--out", str(tmp_path / "new" / "deep"), "--figure", str(tmp_path / "none")])
    assert (tmp_path / "new" / "deep" / "w.json").exists() and not (tmp_path / "none").exists(), "nothing to draw"


def test_the_table_names_who_was_refused(tmp_path, capsys):
    request = {"id": "long", "arrival_step": 0, "max_tokens": 1, "prompt_token_ids": [1] * 600,
               "forced_output_token_ids": [1]}  # fmt: skip
    short = request | {"id": "short", "prompt_token_ids": [1]}
    (tmp_path / "w.json").write_text(json.dumps({"name": "w", "config": {}, "requests": [request, short]}))
    replay.main([str(tmp_path / "w.json"), "--table"])
    assert "long refused: " in capsys.readouterr().out


@pytest.mark.parametrize("path", ["README.md", "lessons/11_preemption.md"])
def test_a_page_that_names_the_command_names_it_rightly(path):
    (command,) = re.findall(r"uv run python -m vllm replay ([^`\n]+)", (common.ROOT / path).read_text())
    args = replay.build_parser().parse_args(shlex.split(command))
    assert len(args.workloads) == 1
