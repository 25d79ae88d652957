"""What is typed behind `serve`: flags from a file, and JSON in pieces."""

from __future__ import annotations

import argparse
import json

import pytest

from engine import arguments
from engine.serving.cli import add_serve_command


def parsed(*words):
    parser = arguments.Parser(prog="p")
    add_serve_command(parser.add_subparsers())
    return parser.parse_args(["serve", *map(str, words)])


def refused(capsys, *words):
    with pytest.raises(SystemExit) as end:
        parsed(*words)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


WHOLE = """
model: org/from-file
port: 12323
max_model_len: 4k
served-model-name: [a, b]
enable-lora: true
enable-prefix-caching: false
lora-modules: [{name: one, path: /p}]
seed: null
speculative-config:
  method: ngram
  num_speculative_tokens: 3
override-generation-config: {}
api-key: [k1]
use-tqdm-on-load: false
"""


def test_a_file_of_flags(config):
    args = parsed("--config", config(WHOLE))
    assert (args.model, args.port, args.max_model_len, args.served_model_name) == (
        "org/from-file",
        12323,
        4000,
        ["a", "b"],
    )
    assert args.enable_lora is True and args.enable_prefix_caching is False and not hasattr(args, "seed")
    assert json.loads(args.speculative_config) == {"method": "ngram", "num_speculative_tokens": 3}
    assert json.loads(args.lora_modules[0]) == {"name": "one", "path": "/p"} and args.api_key == ["k1"]
    assert args.override_generation_config == "{}" and len(args.without_effect) == 1


def test_the_command_line_comes_before_the_file(config):
    path = config(WHOLE)
    words = ("--port", 1, "--served_model_name", "c", "--no-enable-lora", "--api-key", "k2", "k3", "-sc.method=suffix")
    args = parsed("m", "--seed", 5, f"--config={path}", *words)
    assert (args.model_tag, args.port, args.served_model_name, args.seed) == ("m", 1, ["c"], 5)
    assert args.enable_lora is False and args.api_key == ["k2", "k3"], "not joined to the file's"
    assert json.loads(args.speculative_config) == {"method": "suffix"} and args.max_model_len == 4000


def test_parts_of_a_flag_in_a_file(config):
    args = parsed("--config", config("spec-method: ngram\nspec_tokens: 2\n"))
    assert json.loads(args.speculative_config) == {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [("- 1", "must map flags"), ("a: [", "not YAML"), ("bogus: 1", "--bogus: no such flag"), ("", "must map flags"),
     ("max_num_seq: 1", "did you mean --max-num-seqs?"), ("config: x.yaml", "--config: not in a file"),
     ("enable-dbo: true", "--enable-dbo: in vLLM it overlaps two halves"), ("port: x", "'x' is not a whole number"),
     ("task: generate", "--task: vLLM has dropped it")],
)  # fmt: skip
def test_a_file_that_is_wrong(capsys, config, text, words):
    line = refused(capsys, "--config", path := config(text))
    named = not any(name in text for name in ("port", "dbo", "task"))  # these are the parser's own words
    assert words in line and (f"--config {path}" in line) == named


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--config"], "expected one file"), (["--config", "/no/such.yaml"], "/no/such.yaml: No such file"),
     (["--config", "/"], "Is a directory"), (["--config=a", "--config=b"], "expected one file"),
     (["--speculative-config.method"], "expected one argument"), (["--bogus.key", "1"], "--bogus: no such flag")],
)  # fmt: skip
def test_words_that_are_missing(capsys, words, told):
    assert told in refused(capsys, *words)


def test_a_file_that_is_no_text(capsys, tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(capsys, "--config", tmp_path / "x.yaml")


def test_json_in_pieces():
    args = parsed("--kv-transfer-config.kv_role", "kv_both", "--kv_transfer_config.a_b.c=1", "--port=1",
                  "--kv-transfer-config.a_b.d", "4k", "-sc.list+=x,1", "-sc.list+", "y", "--gpu-memory-utilization",
                  "0.5", "--spec-method=ngram")  # fmt: skip
    assert json.loads(args.kv_transfer_config) == {"kv_role": "kv_both", "a_b": {"c": 1, "d": 4000}}
    assert json.loads(args.speculative_config) == {"list": ["x", 1, "y"], "method": "ngram"} and args.port == 1


def test_short_names_of_accepted_flags():
    args = parsed("-O3", "-cc.mode=3", "--compilation-config", "{}", "--limit-mm-per-prompt.image", "2")
    assert [text.split(":")[0] for text in args.without_effect] == [
        "--optimization-level",
        "--compilation-config",
        "--compilation-config",
        "--limit-mm-per-prompt",
    ]
    assert isinstance(args, argparse.Namespace)
