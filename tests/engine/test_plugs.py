"""A part of one's own in a seam: from a file, in this process and in others; what does not fit is one line."""

from __future__ import annotations

import common

import textwrap

import pytest

from engine import plugs, seams
from engine.core.block_pool import BlockPool
from engine.core.scheduler import Scheduler
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.lora import files, lora_model
from engine.lora.config import LoRARequest
from engine.parallel import executors
from engine.registry import fill
from engine.request import SamplingParams
from engine.sampling.sampler import Sampler
from engine.spec_decode.drafters import NgramDrafter
from engine.worker.assemble import find_attention

OWN = {
    "attention": fill("attention.unified"),
    "scheduler": Scheduler,
    "block_pool": BlockPool,
    "sampler": Sampler,
    "rejection": fill("rejection"),
    "drafter": lambda config, model: NgramDrafter(2, 4),
    "lora": fill("lora"),
}

MINE = """
import common
from engine import registry
from engine.core.block_pool import BlockPool
from engine.core.scheduler import Scheduler
from engine.sampling.sampler import Sampler
from engine.spec_decode.drafters import Draft

called = []


class Attention(registry.fill("attention.unified")):
    def plan(self, meta, cache):
        called.append("attention")
        return super().plan(meta, cache)


class OneAtATime(Scheduler):
    def __init__(self, config, kv_cache_manager):
        super().__init__(config, kv_cache_manager)
        self.max_num_running_reqs = 1

    def schedule(self):
        called.append("scheduler")
        return super().schedule()


class FromTheEnd(BlockPool):
    def allocate(self, n):
        called.append("block_pool")
        for _ in range(n):
            self.free_queue.move_to_end(next(reversed(self.free_queue)), last=False)
        return super().allocate(n)


class Watched(Sampler):
    def __call__(self, logits, states):
        called.append("sampler")
        return super().__call__(logits, states)


def rejection(*rows):
    called.append("rejection")
    return registry.fill("rejection")(*rows)


def lora(*rows):
    called.append("lora")
    return registry.fill("lora")(*rows)


class Sevens:
    needs_hidden = False

    def __init__(self, config, model):
        pass

    def propose(self, contexts):
        called.append("drafter")
        return [Draft([7] * context.max_tokens) for context in contexts]

    def forget(self, request_id):
        pass
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture(scope="module")
def tokenizer(real_model):
    return real_model[1]


def answers(tiny_model, tokenizer, adapter=None, **arguments):
    about = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 20}
    llm = LLM(tiny_model, tokenizer=tokenizer, **about, **arguments)
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7], [7, 7, 7, 7]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = llm.generate(prompts, params, lora_request=[adapter, None, None] if adapter else None)
    return [output.outputs[0].token_ids for output in found], llm


@pytest.fixture
def adapter(tiny_model, tmp_path):
    """A random one, as a caller names it."""
    files.write_adapter(lora_model.random_adapter(tiny_model.config, 4, seed=1), tmp_path / "own", 4)
    return LoRARequest("own", 1, str(tmp_path / "own"))


PARTS = {
    "attention": "Attention",
    "scheduler": "OneAtATime",
    "block_pool": "FromTheEnd",
    "sampler": "Watched",
    "rejection": "rejection",
    "drafter": "Sevens",
    "lora": "lora",
}


def test_every_seam_is_tried():
    assert [*PARTS] == [*plugs.SEAMS] == [*OWN]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_from_a_file_is_used_and_writes_the_same(name, mine, tiny_model, tokenizer, adapter):
    more = {"adapter": adapter, "enable_lora": True} if name == "lora" else {}
    if name in ("rejection", "drafter"):
        more = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    plain, _ = answers(tiny_model, tokenizer, **more)
    plug = {name: f"{mine}:{PARTS[name]}"}
    found, llm = answers(tiny_model, tokenizer, plug=plug, **more)
    assert found == plain and plugs.module_of(mine).called.count(name) >= 1
    if name == "block_pool":
        assert llm.llm_engine.core.scheduler.kv_cache_manager.block_pool.num_free_blocks > 0
        assert max(llm.llm_engine.core.scheduler.kv_cache_manager.block_pool.free_queue) > 4


def test_what_is_made_already_is_taken_as_it_is(mine, tiny_model, tokenizer):
    module = plugs.module_of(mine)
    plug = {"attention": module.Attention(), "sampler": module.Watched()}
    _, llm = answers(tiny_model, tokenizer, plug=plug)
    runner = llm.llm_engine.core.runner
    assert (runner.attention, runner.sampler) == (plug["attention"], plug["sampler"])


def test_objects_and_files_are_the_same(mine, tiny_model, tokenizer):
    module = plugs.module_of(mine)
    found, _ = answers(tiny_model, tokenizer, plug={"scheduler": module.OneAtATime})
    assert found == answers(tiny_model, tokenizer)[0]


def test_the_engines_own_parts_fit_their_seams():
    assert plugs.read(OWN) == OWN
    drafts = {"method": "ngram"}
    for name, own in OWN.items():
        assert plugs.difference(own, plugs.SEAMS[name]) is None
    assert plugs.read(EngineArgs(plug=OWN, speculative_config=drafts, enable_lora=True).plug) == OWN, "read twice"
    assert plugs.read(None) == {}


WRONG = {
    "scheduler=mine.py": "plug scheduler=: must be FILE.py:OBJECT",
    "scheduler=nobody.py:X": "nobody.py:X: must be FILE.py:OBJECT, and the file must be there",
    "scheduler=mine.py:X": "plug scheduler: mine.py has no 'X'",
    "schedule=mine.py:OneAtATime": "plug 'schedule': no such seam; allowed: attention, scheduler, block_pool",
    "scheduler=mine.py:called": "plug scheduler: list has no method add_request(request)",
    "rejection=mine.py:called": "plug rejection: [] is not a function",
    "sampler=broken.py:X": "plug sampler: broken.py does not load: ZeroDivisionError: division by zero",
    "sampler=wrong.py:NoCall": "plug sampler: NoCall has no method __call__(logits, states)",
    "sampler=wrong.py:Needs": "plug sampler: Needs(temperature): the seam calls it with ()",
    "attention=wrong.py:Attention":
        "plug attention: Attention.plan(cache, meta): the seam calls it with (meta, cache)",
    "scheduler=wrong.py:More":
        "plug scheduler: More.schedule(budget): the seam calls it with ()",
    "rejection=wrong.py:rule": "plug rejection: rule(scores, drafts): the seam calls it with (scores, draft_token_ids",
    "drafter=wrong.py:Drafter": "plug drafter: Drafter has no method forget(request_id)",
    "lora=wrong.py:add": "plug lora: add(y, x): the seam calls it with (y, x, memory, layer, kind, meta)",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_one_line(text, mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "wrong.py").write_text(
        textwrap.dedent("""
        from engine import registry
        from engine.core.scheduler import Scheduler

        class NoCall: pass

        class Needs:
            def __init__(self, temperature): pass

        class Attention(registry.fill("attention.unified")):
            def plan(self, cache, meta): pass

        class More(Scheduler):
            def schedule(self, budget): pass

        def rule(scores, drafts): pass

        def add(y, x): pass

        class Drafter:
            def __init__(self, config, model): pass
            def propose(self, contexts): pass
        """)
    )
    with pytest.raises(common.InputError) as refused:
        EngineArgs(plug=[text])
    said = str(refused.value).replace(f"{tmp_path}/", "")
    if text == "scheduler=mine.py":
        assert said.startswith("plug scheduler=") and "must be FILE.py:OBJECT" in said
    else:
        assert WRONG[text] in said
    assert len(said.splitlines()) == 1
    plugs.module_of.cache_clear()


def test_what_shows_only_when_it_is_made_is_one_line_too(mine, tiny_model, tokenizer):
    class Bare:
        def __init__(self, num_blocks):
            self.num_blocks = num_blocks

    def make(num_blocks):
        return Bare(num_blocks)

    with pytest.raises(common.InputError, match="plug block_pool: make has no 'allocate'"):
        answers(tiny_model, tokenizer, plug={"block_pool": make})
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    one = f"{mine}:OneAtATime"
    with pytest.raises(common.InputError, match=r"scheduler: OneAtATime cannot be made as the flags ask: .*drafts"):
        answers(tiny_model, tokenizer, plug={"scheduler": one}, **drafts)


@pytest.mark.parametrize(
    "seam", [seams.AttentionBackend, seams.Scheduler, seams.BlockPool, seams.Sampler, seams.Drafter]
)
def test_every_method_of_a_seam_is_looked_for(seam):
    """A class without one of them is refused, whichever it is."""
    (name,) = [name for name, one in plugs.SEAMS.items() if one.asks is seam]
    asked = plugs.methods(seam)
    assert asked
    maker = lambda self, *made_with: None  # noqa: E731
    for missing in asked:
        part = type("Part", (), {"__init__": maker} | {method: f for method, f in asked.items() if method != missing})
        assert f"Part has no method {missing}(" in plugs.difference(part, plugs.SEAMS[name])
    assert plugs.difference(type("Part", (), {"__init__": maker} | asked), plugs.SEAMS[name]) is None


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("attention", {"kv_cache_dtype": "fp8"}, "not together with --kv-cache-dtype"),
        ("drafter", {}, "needs --speculative-config"),
        ("rejection", {}, "needs --speculative-config"),
        ("lora", {}, "needs --enable-lora"),
    ],
)
def test_a_part_that_nobody_would_ask_is_refused(name, more, why):
    with pytest.raises(common.InputError, match=f"plug {name}: {why}"):
        EngineArgs(plug={name: OWN[name]}, **more)


def test_a_plugged_backend_is_what_the_runner_gets(mine):
    found = find_attention(EngineArgs(plug=[f"attention={mine}:Attention"]).vllm_config())
    assert type(found).__name__ == "Attention"


@pytest.mark.slow
def test_parts_travel_to_workers(mine, real_model):
    """A worker is another process: the file is read there."""
    counting = mine.with_name("counting.py")
    counting.write_text(
        MINE + "import os, pathlib\npathlib.Path(__file__).with_suffix(f'.{os.getpid()}').write_text('loaded')\n"
    )
    plug = {"sampler": f"{counting}:Watched", "attention": f"{counting}:Attention"}
    params, found = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), []
    for more in ({}, {"plug": plug, "distributed_executor_backend": "mp"}):
        llm = LLM(max_model_len=64, max_num_seqs=2, num_gpu_blocks_override=10, **more)
        found.append([output.outputs[0].token_ids for output in llm.generate([[1, 2, 3]], params)])
    executors.shutdown_all()
    assert found[0] == found[1]
    assert len(list(counting.parent.glob("counting.[0-9]*"))) == 2, "here, to look at it, and in the worker"
