"""Every script tells its story as a reader starts it: in time, in a readable length, without Triton too."""

from __future__ import annotations

import common

import argparse
import inspect
import json
import re
import shutil
import sys

import pytest
import tokenizers
from safetensors.torch import load_file, save_file

import on_gpu
from engine import registry
from engine.model import folders, loader
from lab import cli, figures
from lab.make_model import make_model
from support import modules, scripts
from support.cases import named
from support.documents import LESSONS, TOLD
from support.processes import alone, together
from support.scripts import YARDSTICK_SECONDS, Done, execute, get, output_of, run, script_job, within

FLAGS = ("--bench", "--json", "--figure", "--model", "--device", "--seed")
HEAVY = ("06_serving", "08_disagg")  # of those that load most, even for `--help`
HIDE_TRITON = "import sys; sys.modules['triton'] = None"

by_lesson = pytest.mark.parametrize("lesson", [path.stem for path in LESSONS])
by_story = pytest.mark.parametrize(
    "lesson", [pytest.param(p.stem, marks=[] if p in TOLD else pytest.mark.slow) for p in LESSONS]
)


@by_story
def test_default_run_takes_at_most_twenty_seconds(lesson, monkeypatch):
    """What does on one core, beside another test, does alone on two. What does not is told once more, alone."""
    if common.HAS_GPU:
        pytest.skip("the limit is for two CPU cores; a GPU's first run compiles kernels")
    if run(lesson).seconds <= 20:
        return
    # With threads that sleep while they wait, then as a reader starts it, with threads that spin: these are faster on
    # two free cores, but take twice as long as the others while something else keeps one of them busy.
    with alone():
        for policy in ("PASSIVE", None):
            monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
            if policy:
                monkeypatch.setenv("OMP_WAIT_POLICY", policy)
            seconds = scripts.run_now(script_job(lesson)).seconds
            if within(seconds, 20):
                return
    pytest.fail(f"took {seconds:.0f} s")


@pytest.mark.parametrize("slower", [0.8, 1, 2])
def test_a_slower_machine_gets_more_time_in_proportion(slower, monkeypatch):
    def measured(command):
        return Done(0, "", "", slower * YARDSTICK_SECONDS, {}, {})

    monkeypatch.setattr(scripts, "execute", measured)
    assert within(20, 20) and within(19.9 * slower, 20) and not within(20.1 * max(1, slower), 20)


@by_story
def test_default_run(lesson):
    output = output_of(lesson)
    lines = output.splitlines()
    assert lines[0].startswith("Machine: ")
    assert "✓" in output, "a script checks something against its reference"
    assert len(lines) <= 75 and max(map(len, lines)) <= common.PAGE
    done = run(lesson)
    assert done.results["other"] == 1, "--json merges"
    mine = done.results[lesson]
    assert mine["machine"]["torch"] and mine["facts"]
    committed = figures.FIGURES.glob(f"{lesson.split('_')[0]}_*.svg")
    assert done.figures == {path.name: path.read_bytes() for path in committed}, "a figure is out of date"


# A piece of the heading under which the real model runs, and of the one under which something is timed (None: that
# takes --bench), and what the story sets of the simulation's parameters that is not the widget's default (None: the
# story has a small simulation of its own, and the second heading is the surprise's).
PARTS: dict[str, tuple[str, str | None, dict | None]] = {
    "01_kv_cache": ("The real model", "What reserving", None),
    "02_paged_attention": ("The real model", "how many fit at once", None),
    "03_flash_attention": ("The real model", "Every float that crosses HBM", None),
    "04_continuous_batching": ("The real model", "The surprise", None),
    "04b_offline_engine": ("The offline engine", "Eight words", None),
    "04c_speed": ("From naive to final", "Waiting requests cost nothing", None),
    "05_optimizations": ("The real model", "on a clock", None),
    "05b_quantization": ("Live: block", "One group and its outlier", None),
    "05c_tensor_parallel": ("The real model", "Where it stops paying", None),
    "05d_kv_cache_quantization": ("The real model", "One query among eight keys", None),
    "05e_experts": ("The real model", "One expert overloads", None),
    "06_serving": ("The real model", "What load does", None),
    "06b_guided_decoding": ("One batch", "Masks change the distribution", None),
    "06c_scaling_out": ("One scheduler", "Pipelines: 4 stages", None),
    "06d_load_generator": ("The real engine", "An engine under load", None),
    "06e_async_engine": ("Where the engine runs", "A reader that is slower", None),
    "06f_openai_api": ("An answer on the wire", "What it costs", None),
    "07_spec_decode": ("The real model", "When it pays", None),
    "07b_trained_drafters": ("In the engine", "A tree of guesses", None),
    "08_disagg": ("Two processes", "When is it worth it", None),
    "09_gqa": ("The head map", "On several GPUs", None),
    "10_chunked_prefill": ("The real model", "on a clock", None),
    "11_preemption": ("The real model", "Sixteen requests", None),
    "11b_prediction": ("The real model", "What load does", None),
    "12_multi_lora": ("Four models in one batch", "one adapter too many", None),
}


@by_story
def test_a_story_has_its_parts_in_order(lesson):
    """DESIGN's: the machine, a check against the reference, the real model, the simulation, what was measured."""
    real, measured, params = PARTS[lesson]
    if params is None:
        told = ""
    else:
        module = cli.numbers(lesson)
        told = module.describe(module.simulate(module.WIDGET_DEFAULT | params))
    assert wrong_parts(output_of(lesson), told, real, measured) is None


def wrong_parts(output: str, told: str, real: str, measured: str | None) -> str | None:
    """What is missing in a script's output, or comes too early; None if all is well."""
    lines = [line.rstrip() for line in output.splitlines()]
    headings = [i for i, line in enumerate(lines) if re.match(r"\d+( ·|\.) ", line) and not lines[i - 1]]
    sections = [*zip(headings, [*headings[1:], len(lines)])]
    model = next(((i, end) for i, end in sections if real in lines[i]), None)
    wanted = ["  " + line.rstrip() for line in told.splitlines()]
    simulation = next((i for i in range(len(lines)) if lines[i : i + len(wanted)] == wanted), None)
    if not told and model:
        simulation = next((i for i in headings if measured and measured in lines[i]), None)
        measured = None
    if model is None or simulation is None:
        return f"no part {real!r}" if model is None else f"the simulation does not say {told!r}"
    if next((i for i, line in enumerate(lines) if "✓" in line), simulation) >= min(simulation, model[1]):
        return "nothing is checked before"
    if simulation < model[0]:
        return "the real model comes after the simulation"
    if measured and not any(measured in lines[i] for i in headings if i > simulation):
        return f"no part {measured!r} after the simulation"
    return None


def test_a_story_out_of_order_is_found():
    parts = ["Machine: x", "", "1. Kernels", "  ✓ same", "", "2. The real model", "  ✓ same", "", "3. The widget",
             "  a", "    b", "", "4. Measured", "  1 ms"]  # fmt: skip
    found = lambda *parts: wrong_parts("\n".join(parts), "a\n  b", "The real model", "Measured")  # noqa: E731
    assert found(*parts) is None
    assert "does not say" in found(*parts[:10], *parts[11:])
    assert "no part" in found(*parts[:4], *parts[7:])
    assert "checked" in found(*(line for line in parts if "✓" not in line))
    assert "after the simulation" in found(*parts[:4], *parts[7:11], *parts[4:7], *parts[11:])
    assert "no part 'Measured'" in found(*parts[:4], *parts[11:], *parts[4:11])
    own = lambda *parts: wrong_parts("\n".join(parts), "", "The real model", "The widget")  # noqa: E731
    assert own(*parts) is None and "does not say" in own(*parts[:7])
    assert "after the simulation" in own(*parts[:4], *parts[7:11], *parts[4:7])


def test_every_script_has_its_parts_named():
    assert [path.stem for path in LESSONS] == list(PARTS)


def test_who_looks_at_what_a_script_prints_is_in_one_process():
    default, quoted = "tests/lessons/test_scripts.py::test_default_run[", "tests/site/test_docs.py::test_quoted_output["
    assert together(f"{default}01_kv_cache]") == together(f"{quoted}01_kv_cache.md]") == "01_kv_cache's story"
    assert together(f"{default}05_optimizations]") != together(f"{quoted}05b_quantization.md]")
    timed = "tests/lessons/test_scripts.py::test_default_run_takes_at_most_twenty_seconds["
    assert together(f"{timed}01_kv_cache]") == together(f"{default}01_kv_cache]")
    file = "tests/lessons/test_12_multi_lora.py"
    assert together(f"{file}::test_two[5-3]") == together(f"{file}::test_three") == file


@by_lesson
def test_the_figures_are_saved_last(lesson):
    """And then the numbers, where they are asked for."""
    main = inspect.getsource(registry.lesson(lesson).main)
    if "cli.hand_over(" in main:
        assert main.rstrip().endswith("cli.hand_over(KEY, args)")
        return
    rest = main.partition("draw(args.figure)")[2]
    assert "args.json" in rest and not re.search(r"common\.(heading|say|table|check)", rest)


@by_lesson
def test_help(lesson):
    text = registry.lesson(lesson).build_parser().format_help()
    assert all(flag in text for flag in FLAGS)


@pytest.mark.parametrize(
    "lesson", [pytest.param(p.stem, marks=[] if p.stem in HEAVY else pytest.mark.slow) for p in LESSONS]
)
def test_help_of_a_process(lesson):
    done = run(lesson, "--help")
    assert done.returncode == 0, done.stderr
    assert all(flag in done.stdout for flag in FLAGS)


@by_lesson
def test_wrong_flags_are_one_line(lesson, capsys):
    parser = registry.lesson(lesson).build_parser()
    for argv in (["--nonsense"], ["--seed", "x"], ["--device", "tpu"], ["stray"]):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(argv)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and len(error.splitlines()) == 1 and argv[0] in error


@by_lesson
def test_simulation_refuses_wrong_parameters(lesson):
    module = cli.numbers(lesson)
    for name, value in module.WIDGET_DEFAULT.items():
        for wrong in (None, [], {"a": 1}, "no such\nvalue", -(10**9)):
            if wrong == value:
                continue
            with pytest.raises(common.InputError, match=name):
                module.simulate({**module.WIDGET_DEFAULT, name: wrong})
    with pytest.raises(common.InputError, match="no_such_parameter"):
        module.simulate({**module.WIDGET_DEFAULT, "no_such_parameter": 1})


@pytest.mark.parametrize(
    ("lesson", "argv"),
    [
        ("01_kv_cache", ["--slots", "50"]),
        ("01_kv_cache", ["--prompt", "a " * 9000]),
        ("04_continuous_batching", ["--num-blocks", "32"]),
        ("05b_quantization", ["--layer", "30"]),
        ("05c_tensor_parallel", ["-tp", "5"]),
        ("12_multi_lora", ["--max-lora-rank", "7"]),
    ],
)
def test_values_that_cannot_be_are_refused_before_a_model_is_loaded(real_model, lesson, argv, monkeypatch, tmp_path):
    def load(*args, **kwargs):
        pytest.fail("it loads a model first")

    monkeypatch.setattr(loader, "load", load)
    with pytest.raises(common.InputError) as refused:
        registry.lesson(lesson).main([*argv, "--figure", str(tmp_path)])
    assert len(str(refused.value).splitlines()) == 1


# --- Without Triton -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare_model(another_model, tmp_path_factory):
    """The small one, and its tokenizer has no chat template."""
    folder = shutil.copytree(another_model, tmp_path_factory.mktemp("bare") / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def bare_arguments(lesson, folder):
    return () if lesson in SHIPPED else ("--model", folder, "--seed", "3", *SIZES.get(lesson, ()))


def test_without_triton_the_first_lesson_runs(bare_model):
    """Nor with a chat template, which models that only complete texts lack."""
    lesson = LESSONS[0].stem
    told_without_triton(lesson, run(lesson, *bare_arguments(lesson, bare_model), prelude=HIDE_TRITON))


@pytest.mark.slow
def test_without_triton_every_lesson_runs(bare_model):
    wanted = {path.stem: bare_arguments(path.stem, bare_model) for path in LESSONS}
    for lesson, done in one_after_another(wanted, HIDE_TRITON):
        with named(lesson):
            told_without_triton(lesson, done)


def told_without_triton(lesson, done):
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert "no Triton wheel" in done.stdout.splitlines()[0] and "✓" in done.stdout
    if "@common.kernel" in modules.paths()[lesson].read_text():
        assert "SKIPPED" in done.stdout, "kernels that cannot run are reported"


IN_ONE_PROCESS = f"""
import contextlib, io, json, runpy, traceback
sys.path.insert(0, {str(common.HERE)!r})
for lesson, *sys.argv[:] in json.loads(sys.argv[1]):
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            code = 1
            traceback.print_exc()
    print(json.dumps([lesson, code, out.getvalue(), err.getvalue()]))
"""


def one_after_another(wanted, prelude="import sys"):
    """The stories of several lessons, told in one process: most of a small story's time is the import of torch."""
    files = ["--figure", "FIGURES", "--json", "FILE.json"]
    words = [[lesson, modules.paths()[lesson], *files, *arguments] for lesson, arguments in wanted.items()]
    code = f"{prelude}\n{IN_ONE_PROCESS}"
    done = execute([sys.executable, "-c", code, json.dumps(words, default=str)], scripts.ONE_CORE)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert [lesson for lesson, *_ in told] == [*wanted]
    for lesson, code, out, err in told:
        yield lesson, Done(code, out, err, 0.0, {}, {})


LOADS = f"""{HIDE_TRITON}
sys.path.insert(0, {str(common.HERE)!r})
import common
from engine import registry
from lab import cli
assert not common.HAS_TRITON
for name in {[path.stem for path in LESSONS]!r}:
    registry.lesson(name).main
    cli.numbers(name).simulate
"""
LOADS_JOB = (("every lesson, without Triton",), [sys.executable, "-c", LOADS])


def test_without_triton_every_lesson_loads():
    done = get(LOADS_JOB)
    assert done.returncode == 0, done.stderr


# --- Elsewhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(str(common.HERE), "config.json"), pytest.param("no/such-model", "--model", marks=pytest.mark.slow)],
)
def test_a_wrong_model_is_one_line(wrong, word):
    done = run(LESSONS[0].stem, "--model", wrong)
    assert done.returncode == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1


def small_folder(path):
    return on_gpu.random_folder(
        path, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=[2, 7],
    )  # fmt: skip


@pytest.fixture(scope="module")
def another_model(tmp_path_factory):
    """Nothing in it is as in SmolLM2: heads and groups, widths, layers, context, an output matrix of its own. Every
    text begins with a token of its own, as in most Llamas."""
    folder = small_folder(tmp_path_factory.mktemp("another") / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = "<|endoftext|>"
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


SIZES = {"05b_quantization": ["--layer", "1"], "05c_tensor_parallel": ["--tensor-parallel-size", "2"],
         "06c_scaling_out": ["--tensor-parallel-size", "2"]}  # fmt: skip
SHIPPED = {"07b_trained_drafters": "made for another target", "12_multi_lora": "adapters/pirate"}  # for SmolLM2 only


def another_arguments(lesson, folder):
    return "--model", folder, "--seed", "3", *SIZES.get(lesson, ())


# Whose stories launch no kernel do with Triton what they do without it, above, on a model of the same sizes.
LAUNCH = [p.stem for p in LESSONS if re.search(r"@common\.kernel|use_kernels", p.read_text()) and p.stem not in SHIPPED]
OTHERS = [path.stem for path in LESSONS if path.stem not in LAUNCH]


@pytest.mark.slow
def test_another_model(another_model):
    wanted = {lesson: another_arguments(lesson, another_model) for lesson in LAUNCH}
    for lesson, done in one_after_another(wanted):
        with named(lesson):
            assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("lesson", OTHERS)
def test_another_model_with_triton(lesson, another_model):
    done = run(lesson, *another_arguments(lesson, another_model))
    if lesson in SHIPPED:
        assert done.returncode == 2 and SHIPPED[lesson] in done.stderr and len(done.stderr.splitlines()) == 1
    else:
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


MULTIPLES = r"--model .*: layers of \(%s\) inputs; allowed: multiples of %d"


@pytest.mark.parametrize(("lesson", "shape", "flags", "why"), [
    ("03_flash_attention", {"head_dim": 24}, [], r"--model .*: head_dim 24; the kernel takes multiples of 16 to 256"),
    ("03_flash_attention", {"head_dim": 272}, [], r"--model .*: head_dim 272; the kernel takes multiples of 16 to 256"),
    ("05b_quantization", {"hidden_size": 48}, [], r"--group 64: must divide the model's hidden size, 48"),
    ("05b_quantization", {"hidden_size": 32}, ["--group", "32", "--bench"], MULTIPLES % ("32, 64, 64", 64)),
    ("05b_quantization", {"intermediate_size": 80}, [], MULTIPLES % ("64, 80, 64", 32)),
    ("05b_quantization", {"intermediate_size": 96}, ["--bench"], MULTIPLES % ("64, 96, 64", 64)),
    ("05b_quantization", {"head_dim": 48}, ["--bench"], MULTIPLES % ("64, 64, 96", 64)),
    ("05d_kv_cache_quantization", {"head_dim": 12}, [], r"--model .*: head_dim 12; every format takes multiples of 8"),
    ("05d_kv_cache_quantization", {}, ["--bench"], r"--model: a context of 1024 .* too short; this story takes 2048"),
])  # fmt: skip
def test_a_model_that_a_story_cannot_use_is_one_line(lesson, shape, flags, why, tmp_path, capsys):
    """Before the story begins."""
    usable = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "max_position_embeddings": 1024}
    folder = on_gpu.random_folder(
        tmp_path / "model", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **usable | shape
    )
    with pytest.raises(common.InputError) as refused:
        registry.lesson(lesson).main(["--model", str(folder), "--figure", str(tmp_path), *flags])
    assert re.fullmatch(why, str(refused.value))
    assert not re.search(r"^ *1\b", capsys.readouterr().out, re.M)


def test_a_story_about_an_mlp_takes_no_experts(tmp_path):
    make_model("mixtral", tmp_path / "model", vocab_size=99)
    with pytest.raises(common.InputError, match=r"--model: this story takes the MLP .* and this model has experts"):
        registry.lesson("05b_quantization").main(["--model", str(tmp_path / "model")])


@pytest.fixture(scope="module")
def short_model(tmp_path_factory):
    return on_gpu.random_folder(
        tmp_path_factory.mktemp("short") / "model", hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=32,
    )  # fmt: skip


@by_lesson
def test_a_context_that_is_too_short_is_one_line(lesson, short_model, tmp_path, monkeypatch):
    """And it names nothing that nobody gave. The kernels of lesson 03 take any context, and its prompts are short."""
    module = registry.lesson(lesson)
    if lesson == "03_flash_attention":
        return module.show_model(str(short_model))
    for name in ("check_kernel", "check_kernels"):  # they know no model
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *args: None)
    with pytest.raises(common.InputError) as refused:
        module.main(["--model", str(short_model), "--figure", str(tmp_path)])
    assert re.fullmatch(r"--model: a context of 32 tokens is too short; this story takes \d+", str(refused.value))


@pytest.mark.parametrize("lesson", SHIPPED)
def test_weights_that_were_trained_for_another_model_say_so(lesson, bare_model, tmp_path, capsys):
    with pytest.raises(common.InputError) as refused:
        registry.lesson(lesson).main(["--model", str(bare_model), "--figure", str(tmp_path)])
    words = (f"--model: this story takes {folders.DEFAULT_MODEL}", SHIPPED[lesson])
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)
    assert len(capsys.readouterr().out.splitlines()) == 1, "the machine: nothing was told yet"


@pytest.fixture(scope="module")
def sure_model(tmp_path_factory):
    """It says one token, which ends the answer, and is as sure of it as a float can be."""
    folder = on_gpu.random_folder(
        tmp_path_factory.mktemp("sure") / "model", hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 50
    weights["lm_head.weight"][2] = 0
    weights["lm_head.weight"][2, 0] = 1000
    save_file(weights, folder / "model.safetensors")
    return loader.load(str(folder))


def test_what_an_answer_that_ends_at_once_leaves_to_be_told(sure_model, capsys):
    """No rate of nothing, and no perplexity that a float cannot hold."""
    drafting = registry.lesson("07_spec_decode")
    drafting.tell_model(argparse.Namespace(k=4), *sure_model)
    drafting.tell_end(argparse.Namespace(k=4), *sure_model)
    told = capsys.readouterr().out
    assert "ends at its first token, at '<|im_end|>'" in told and "0/0" not in told and "0.00  " not in told
    found = cli.numbers("09_gqa").measure_perplexity(*sure_model, 512)
    told = capsys.readouterr().out
    assert found["trained"] == 1e9 and "over a billion as trained" in told and "inf" not in told


@pytest.mark.parametrize("name", ["03_flash_attention", "04c_speed"])
def test_numbers_of_the_model_that_is_there(sure_model, monkeypatch, capsys, name):
    module = registry.lesson(name)
    monkeypatch.setattr(loader, "load", lambda path: sure_model)
    if name == "03_flash_attention":
        module.show_model("sure")
        assert "is →<|im_end|>" in capsys.readouterr().out
        return
    monkeypatch.setattr(module, "print_profiles", lambda *args: None)
    monkeypatch.setattr(module, "matmul_seconds", lambda *args: 1e-6)
    monkeypatch.setattr(loader, "check_context", lambda *args: None)
    monkeypatch.setattr(module, "scheduler_seconds", lambda *args, **options: 1e-3)
    module.main(["--sequences", "2"])
    weights = sum(layer.weight.numel() for layer in sure_model[0].linear.values())
    assert f"{2 * 2 * weights / 1e-6 / 1e9:.0f} GFLOP/s" in capsys.readouterr().out


def test_a_script_runs_as_a_module():
    done = execute([sys.executable, "-m", f"vllm.{LESSONS[0].stem}", "--slots", "5"])
    assert done.returncode == 2 and "--slots 5: too few" in done.stderr and len(done.stderr.splitlines()) == 1
