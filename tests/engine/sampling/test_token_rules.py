"""Which tokens go in and which may come out: against loops that look at every token, and in every kind of engine."""

from __future__ import annotations

import common

import asyncio
import functools
import json
import math
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.config import VllmConfig
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.model import folders
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from engine.sampling import token_rules as lesson
from engine.sampling.sampler import SamplingState
from engine.serving.async_llm import AsyncLLM
from engine.serving.openai.app import build_app
from engine.spec_decode.drafters import Draft, SpeculativeConfig
from engine.spec_decode.verifier import DraftedState
from lab import naive
from support import tokenizing

speculation = registry.lesson("07_spec_decode")
async_engine, openai_api = registry.lesson("06e_async_engine"), registry.lesson("06f_openai_api")
guided, serving = registry.lesson("06b_guided_decoding"), registry.lesson("06_serving")
TokenizeParams = lesson.TokenizeParams
INF, VOCAB = math.inf, 128
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def state_of(params, output=(), eos=()):
    request = Request("r", [1], params)
    for token in output:
        request.append_output_token_id(token)
    return SamplingState(request, 0, eos)


def banning(*words, **wishes):
    """Parameters whose bad words are known by their tokens."""
    return SamplingParams(bad_words=["x"], _bad_words_token_ids=[list(word) for word in words], **wishes)


# --- Out: one row ----------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, 5)
WISHES = st.fixed_dictionaries({
    "allowed_token_ids": st.none() | st.lists(TOKENS, min_size=1, max_size=6),
    "_bad_words_token_ids": st.none() | st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=5),
    "min_tokens": st.integers(0, 3), "stop_token_ids": st.lists(TOKENS, max_size=2),
})  # fmt: skip


@given(st.lists(st.tuples(WISHES, st.lists(TOKENS, max_size=4), st.lists(st.booleans(), min_size=6, max_size=6)),
                min_size=1, max_size=4))  # fmt: skip
def test_what_is_ruled_out_is_what_the_loop_rules_out(rows):
    """A whole batch; some tokens are −∞ already, as a grammar leaves them, and sometimes a rule would leave nothing."""
    states, want, logits = [], [], []
    for wishes, output, allowed in rows:
        stop = wishes["stop_token_ids"] if not all(wishes["stop_token_ids"].count(t) for t in range(6)) else []
        grammar = {"regex": "a"} if not all(allowed) else None
        params = SamplingParams(structured_outputs=grammar, **(wishes | {"stop_token_ids": stop}))
        row = [float(t) if allowed[t] or t == 2 else -INF for t in range(6)]
        states.append(state_of(params, output))
        want.append(lesson.reference_allowed(row, params, output, stop))
        logits.append(row)
    z = torch.tensor(logits)
    lesson.rule_out(z, states)
    assert z.tolist() == want
    assert (z.amax(1) > -INF).all(), "every row has a token left"


@given(WISHES, st.lists(TOKENS, max_size=3), st.lists(TOKENS, max_size=3))
def test_behind_accepted_drafts_the_rules_are_those_behind_as_many_tokens(wishes, output, drafts):
    params = SamplingParams(**wishes)
    drafted = DraftedState(state_of(params, output), drafts)
    rows = [torch.zeros(1, 6), torch.zeros(1, 6)]
    for z, state in zip(rows, (drafted, state_of(params, [*output, *drafts]))):
        lesson.rule_out(z, [state])
    assert torch.equal(*rows)


def test_rules_by_hand():
    def left(params, output=(), eos=()):
        z = torch.zeros(1, 8)
        lesson.rule_out(z, [state_of(params, output, eos)])
        return {token for token, x in enumerate(z[0]) if x == 0}

    every = set(range(8))
    assert left(SamplingParams(allowed_token_ids=[2, 2, 7])) == {2, 7}
    words = banning([3], [1, 2], [1, 1, 4], [200], [6, 300])
    assert left(words) == every - {3}, "one that is longer than what is written cannot be completed"
    assert left(words, [1]) == every - {3, 2} and left(words, [1, 1]) == every - {3, 2, 4}
    assert left(words, [1, 0]) == every - {3} == left(words, [6]), "nor by a token that the model does not have"
    assert left(SamplingParams(allowed_token_ids=[5, 6], min_tokens=1), eos=[5]) == {6}
    assert left(SamplingParams(allowed_token_ids=[5], min_tokens=1), eos=[5]) == {5}, "the set is stronger"
    assert left(banning([6], allowed_token_ids=[5, 6], min_tokens=1), eos=[5]) == {5}, "what comes last goes first"
    assert left(banning([5], allowed_token_ids=[5, 6])) == {6} and left(banning([5], allowed_token_ids=[5])) == {5}


def test_an_impossible_wish_is_not_heard_where_a_grammar_is():
    z = torch.full((1, 8), -INF)
    z[0, [1, 2]] = 1.0
    for params, left in ((SamplingParams(allowed_token_ids=[5]), [1, 2]), (banning([1], [2]), [1, 2]),
                         (SamplingParams(allowed_token_ids=[2, 5]), [2]), (banning([1]), [2])):  # fmt: skip
        row = z.clone()
        lesson.rule_out(row, [state_of(params)])
        assert (row[0] > -INF).nonzero().flatten().tolist() == left


# --- Bad words as tokens ---------------------------------------------------------------------------------------------


def test_both_forms_of_a_word(real_model):
    """Against SmolLM2's tokenizer: with a space it may be another token, or only one more."""

    def tokens(*words):
        return lesson.update_from_tokenizer(SamplingParams(bad_words=[*words]), real_model[1])._bad_words_token_ids

    encode = real_model[1].encode
    assert tokens("a") == [encode("a"), encode(" a")] == [[81], [253]]
    assert tokens(" word", "word") == [encode("word"), encode(" word")] * 2
    assert len(encode(" 12")) == 3 and tokens("12") == [encode("12")], "a space, then the same"
    assert len(encode(" unbelievable")) != len(encode("unbelievable"))
    assert tokens("unbelievable") == [encode("unbelievable")]
    assert tokens("a", "a") == tokens("a")
    same = SimpleNamespace(encode=lambda text, add_special_tokens: [7, *map(ord, text.strip())])
    assert lesson.update_from_tokenizer(SamplingParams(bad_words=["a"]), same)._bad_words_token_ids == [[7, 97]]
    plain = SamplingParams()
    assert lesson.update_from_tokenizer(plain, real_model[1]) is plain
    known = banning([1])
    assert lesson.update_from_tokenizer(known, real_model[1]) is known
    for words, said in ((["\n"], "bad_words: '\\n' has no tokens"), ([f"{i:03}" for i in range(129)], "at most 128")):
        with pytest.raises(common.InputError, match="bad_words") as error:
            tokens(*words)
        assert said in str(error.value)
    assert len(tokens(*(f"{i:03}" for i in range(128)))) == 128


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": 5}, "allowed_token_ids"),
     ({"allowed_token_ids": ["5"]}, "allowed_token_ids"), ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
     ({"allowed_token_ids": [True]}, "allowed_token_ids"), ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
     ({"bad_words": "word"}, "bad_words"), ({"bad_words": [""]}, "bad_words"), ({"bad_words": [5]}, "bad_words"),
     ({"bad_words": [" "]}, "bad_words")],
)  # fmt: skip
def test_wrong_wishes_name_the_field(llm, wrong, field):
    with pytest.raises(common.InputError, match=f"^{field}") as error:
        llm.generate([PROMPT], SamplingParams(**wrong))
    assert len(str(error.value).splitlines()) == 1 and not llm.llm_engine.callers


# --- In the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_model, real_model):
    return LLM(tiny_model, tokenizer=real_model[1], max_model_len=64, max_num_seqs=8, num_gpu_blocks_override=65)


def token_ids(llm, prompt, params, **about):
    (output,) = llm.generate([prompt], params, **about)
    return [answer.token_ids for answer in output.outputs]


def masked_argmax(model, prompt, steps, allowed=range(VOCAB), bad_words=()):
    """Greedy decoding by hand: no cache, and the best of the tokens that are not ruled out."""
    tokens, bad_words = [], [list(word) for word in bad_words]
    for _ in range(steps):
        ids = torch.tensor([*prompt, *tokens])
        hidden = model.forward(ids, torch.arange(len(ids)), naive.recompute)
        z = model.logits(hidden[-1:])[0].tolist()
        left = [t for t in allowed if not any([*tokens, t][-len(word) :] == word for word in bad_words)]
        tokens.append(max(left, key=lambda t: z[t]))
    return tokens


@functools.cache
def wishes():
    """Names of rules, each with (allowed, bad words) that change what the tiny model writes."""
    rng = random.Random(0)
    some = rng.sample(range(1, VOCAB), 9)
    twice = [[t, t] for t in range(VOCAB)]
    return {"allowed": (some, []), "no token twice": (range(VOCAB), twice), "both": (some, twice),
            "words": (range(VOCAB), [[t] for t in range(0, VOCAB, 2)] + [[5, 7], [1, 9, 11]])}  # fmt: skip


def params_of(name, **more):
    allowed, words = wishes()[name]
    more = {"ignore_eos": True, "temperature": 0, "max_tokens": 12} | more
    wanted = SamplingParams(**more) if not words else banning(*words, **more)
    wanted.allowed_token_ids = None if isinstance(allowed, range) else allowed
    return wanted


@pytest.mark.parametrize("name", ["allowed", "no token twice", "both", "words"])
def test_greedy_is_the_best_of_what_is_left(llm, tiny_model, name):
    (tokens,) = token_ids(llm, PROMPT, params_of(name))
    assert tokens == masked_argmax(tiny_model, PROMPT, 12, *wishes()[name])
    assert tokens != token_ids(llm, PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]


def follows(tokens, name):
    allowed, words = wishes()[name]
    pieces = {tuple(tokens[i:j]) for i in range(len(tokens)) for j in range(i + 1, i + 4)}
    return set(tokens) <= set(allowed) and pieces.isdisjoint(map(tuple, words))


@pytest.mark.parametrize("temperature", [0.5, 2])
def test_nothing_that_is_drawn_breaks_a_rule(llm, temperature):
    """Several answers, neighbours with other wishes, top_p and penalties on top."""
    names = ["allowed", "no token twice", "both", "words"]
    wanted = [params_of(name, temperature=temperature, n=3, seed=i, top_p=0.9, frequency_penalty=1, max_tokens=20)
              for i, name in enumerate(names)]  # fmt: skip
    outputs = llm.generate([PROMPT] * 5, [*wanted, SamplingParams(temperature=temperature, seed=1, max_tokens=60)])
    for name, output in zip(names, outputs):
        assert len(output.outputs) == 3 and all(len(a.token_ids) == 20 for a in output.outputs)
        assert all(follows(answer.token_ids, name) for answer in output.outputs)
    assert not any(follows(outputs[4].outputs[0].token_ids, name) for name in names), "the rules do not bite"


def test_bad_words_by_their_text(llm, tiny_model):
    """What the tiny model likes best is forbidden by its text: "7" and "12" are tokens 39, and 33 and 34."""
    bias = {33: 50.0, 34: 50.0, 39: 90.0}
    free = SamplingParams(temperature=0, max_tokens=8, logit_bias=bias, ignore_eos=True)
    assert set(token_ids(llm, PROMPT, free)[0]) == {39}
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias=bias, ignore_eos=True, bad_words=["7", " 12", "21"])
    (output,) = llm.generate([PROMPT], params)
    assert output.outputs[0].text in ("1" * 8, "2" * 8) and params._bad_words_token_ids is None, "the caller's own"


@pytest.mark.parametrize("name", ["allowed", "words"])
def test_log_probabilities_are_the_models(llm, tiny_model, name):
    (output,) = llm.generate([PROMPT], params_of(name, logprobs=5, max_tokens=4))
    tokens, answer = list(PROMPT), output.outputs[0]
    for token, entry in zip(answer.token_ids, answer.logprobs):
        ids = torch.tensor(tokens)
        hidden = tiny_model.forward(ids, torch.arange(len(ids)), naive.recompute)
        raw = tiny_model.logits(hidden[-1:])[0].log_softmax(0)
        assert raw.topk(5).indices.tolist() == [t for t, x in sorted(entry.items(), key=lambda x: x[1].rank)][:5]
        assert entry[token].logprob == pytest.approx(raw[token].item(), abs=1e-4)
        tokens.append(token)
    ruled_out = [t for entry in answer.logprobs for t in entry if t not in (wishes()[name][0])]
    assert ruled_out or name != "allowed", "alternatives are the model's, whether they may be written or not"


def test_what_leaves_nothing_does_not_end_anybodys_engine(llm):
    """The rule that came last is passed over."""
    for temperature in (0, 1):
        banned = banning([5], allowed_token_ids=[5], temperature=temperature, max_tokens=3)
        early = SamplingParams(temperature=temperature, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3)
        assert token_ids(llm, PROMPT, banned) == [[5, 5, 5]] and token_ids(llm, PROMPT, early) == [[5]]


SERVED = [(name, [i, *PROMPT, i]) for i, name in enumerate([*wishes()] * 2)]


@pytest.fixture(scope="module")
def wanted(tiny_model):
    """What each of SERVED is to answer."""
    return [masked_argmax(tiny_model, prompt, 12, *wishes()[name]) for name, prompt in SERVED]


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 8}, {"num_gpu_blocks_override": 17}],
                         ids=["roomy", "chunks", "cramped"])  # fmt: skip
@pytest.mark.parametrize("ahead", [False, True])
def test_on_the_servers_scheduler(tiny_model, real_model, wanted, limits, ahead):
    """Prefix cache, chunked prefill, preemption; with drafts of which some stand; planned in step."""
    options = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 80} | limits
    about, preempted = VllmConfig(), []
    if ahead:  # drafts: what the answer will be, and every third of them wrong
        truth = {tuple(p): tokens for (_, p), tokens in zip(SERVED, wanted)}
        config = SpeculativeConfig("ngram", 3, prompt_lookup_min=2, prompt_lookup_max=4)
        about = VllmConfig(speculative_config=config, plug={"drafter": lambda config, model: Guesses(truth)})
    engine = LLMEngine(tiny_model, real_model[1], config=about, **options)
    preempt = engine.core.scheduler._preempt_request
    engine.core.scheduler._preempt_request = lambda *a: (preempted.append(a), preempt(*a))
    for i, (name, p) in enumerate(SERVED):
        engine.add_request(str(i), p, params_of(name))
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert [found[str(i)] for i in range(len(SERVED))] == wanted
    assert bool(preempted) == ("num_gpu_blocks_override" in limits)
    if ahead:
        stats = engine.core.scheduler.spec_decoding_stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


class Guesses:
    """A drafter that knows the answers, and is wrong about every third token of them."""

    needs_hidden = False

    def __init__(self, truth):
        self.truth = truth

    def propose(self, contexts):
        found = []
        for c in contexts:
            whole = next([*p, *out] for p, out in self.truth.items() if tuple(c.token_ids[: len(p)]) == p)
            at = len(c.token_ids)
            found.append(Draft([t if (at + i) % 3 else (t + 1) % VOCAB
                                            for i, t in enumerate(whole[at : at + c.max_tokens])]))  # fmt: skip
        return found

    def forget(self, request_id):
        pass


@pytest.fixture(scope="module")
def guided_llm(real_model):
    return LLM(real_model[0], tokenizer=real_model[1], max_model_len=64, num_gpu_blocks_override=5)


@pytest.mark.parametrize(("wishes", "text"), [({"allowed_token_ids": [81, 82, 2]}, "ab"), ({"bad_words": ["a"]}, "b"),
                                              ({"allowed_token_ids": [83]}, "abc")])  # fmt: skip
def test_together_with_a_grammar(guided_llm, wishes, text):
    """Both hold; where they contradict each other, the answer still matches."""
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"regex": "[abc]{3}"}, **wishes)
    (output,) = guided_llm.generate(["Letters:"], params)
    said = output.outputs[0].text
    assert len(said) == 3 and set(said) <= set("abc")
    if "allowed_token_ids" in wishes and 81 in wishes["allowed_token_ids"]:
        assert set(said) <= set(text) and set(output.outputs[0].token_ids) <= {81, 82, 2}
    if "bad_words" in wishes:
        assert 81 not in output.outputs[0].token_ids


# --- In: how much of a prompt is read --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(-1, 6), st.sampled_from([None, "left", "right"]))
def test_a_cut_by_hand(ids, n, side):
    n_kept = 5 if n == -1 else n
    kept = ids[:n_kept] if side == "right" else ids[::-1][:n_kept][::-1]
    assert TokenizeParams(6, n, side).truncate(ids) == kept
    assert TokenizeParams(6, None, side).truncate(ids) == ids


@pytest.fixture(scope="module")
def with_bos(real_model):
    """SmolLM2's tokenizer with a token in front of every text and one behind it, here and in Transformers."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(folders.model_folder(None))
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return tokenizer, lambda side: PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend).from_str(tokenizer.backend.to_str()), truncation_side=side
    )


def test_special_tokens_stay_as_in_transformers(with_bos):
    """vLLM hands the cut to Transformers' tokenizer, whose default side it has set to "left"."""
    ours, theirs = with_bos
    text = "<|im_start|>How far is it from 3 to 14?"
    whole, left = ours.encode(text), theirs("left")
    assert whole[:2] == [1, 1] and whole[-1] == 2, "one was written, one was added"
    for n in range(3, len(whole) + 3):
        found = TokenizeParams(512, n).encode(ours, text)
        assert found == left(text, truncation=True, max_length=n).input_ids and len(found) == min(n, len(whole))
        assert TokenizeParams(512, n, "right").encode(ours, text) == whole[:n]
        assert TokenizeParams(512, n, "left").encode(ours, text) == whole[-n:]
        assert TokenizeParams(512, n).encode(ours, text, False) == ours.encode(text, False)[-n:]
    assert [TokenizeParams(512, n).encode(ours, text) for n in range(3)] == [[], [2], [1, 2]]
    assert TokenizeParams(512).encode(ours, text) == whole


@pytest.mark.parametrize("given", [-2, 65, 1.0, "5", True])
def test_wrong_cuts(given):
    with pytest.raises(common.InputError, match=r"^truncate_prompt_tokens .* from -1 to 64"):
        TokenizeParams(64, given)


def test_a_cut_prompt_is_the_prompt(llm, tiny_model):
    """Tokens, scores, length and limits are those of what is left."""
    long = [random.Random(1).randrange(VOCAB) for _ in range(200)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
    for kwargs, kept in (({"truncate_prompt_tokens": 7}, long[-7:]), ({"truncate_prompt_tokens": -1}, long[-63:]),
                         ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, long[:7])):  # fmt: skip
        (cut,) = llm.generate([long], params, tokenization_kwargs=kwargs)
        (whole,) = llm.generate([kept], params)
        assert cut.prompt_token_ids == kept == whole.prompt_token_ids and len(cut.prompt_logprobs) == len(kept)
        assert cut.outputs[0].token_ids == whole.outputs[0].token_ids
        assert len(cut.outputs[0].token_ids) == min(5, 64 - len(kept))
    (text,) = llm.generate("1234567", params, tokenization_kwargs={"truncate_prompt_tokens": 3})
    assert text.prompt_token_ids == [37, 38, 39] and text.prompt == "1234567"
    for kwargs, said in (({"truncate_prompt_tokens": 64}, "plus the number of requested output tokens"),
                         ({"truncate_prompt_tokens": 0}, "cannot be empty"), ({"truncate_prompt_tokens": 65}, "to 64"),
                         ({}, "longer than"), ({"truncation_side": "left"}, "longer than"), ({"max": 5}, "allowed: "),
                         ({"truncation_side": "top", "truncate_prompt_tokens": 3}, "truncation_side"),
                         ("x", "tokenization_kwargs")):  # fmt: skip
        with pytest.raises(common.InputError, match=said):
            llm.generate([long], params, tokenization_kwargs=kwargs)


def test_what_is_left_is_found_in_the_prefix_cache(tiny_model, real_model):
    llm = LLM(tiny_model, tokenizer=real_model[1], max_model_len=64, block_size=4, num_gpu_blocks_override=40)
    params, kept = SamplingParams(temperature=0, max_tokens=2), list(range(20, 40))
    llm.generate([kept], params)
    (output,) = llm.generate([[*range(90), *kept]], params, tokenization_kwargs={"truncate_prompt_tokens": 20})
    assert output.num_cached_tokens == 16 and output.prompt_token_ids == kept


# --- From another process, and over HTTP -----------------------------------------------------------------------------


def test_the_rules_travel(real_model):
    """To the core's process and to workers: what the tokenizer made of the words goes along, and copies keep it."""
    params = lesson.update_from_tokenizer(SamplingParams(bad_words=["a"], allowed_token_ids=[5, 81]), real_model[1])
    for copy in (pickle.loads(pickle.dumps(params)), lesson.replace(params, n=1)):
        state = state_of(copy)
        assert state.bad_words == [[81], [253]] and state.allowed.tolist() == [5, 81] and not state.plain


@pytest.fixture
def tiny_server(monkeypatch, tiny_model, real_model):
    """`with_app(use)` runs `use(app)` beside an engine on a thread of its own; letters between them are pickles."""

    def make(args=None, report=None):
        return LLMEngine(
            tiny_model, real_model[1], max_model_len=64, max_num_seqs=8, block_size=4, num_gpu_blocks_override=80
        )

    monkeypatch.setattr(async_engine, "make_small_engine", make)
    tokenizing.building(monkeypatch, lambda folder: real_model[1])

    async def with_app(use):
        llm = await AsyncLLM.start(async_engine.make_small_engine, None, folders.model_folder(None), "thread")
        llm.front.model_config = tiny_model.config  # and not the folder's
        try:
            return await use(build_app(openai_api.OpenAIServing(llm, ["tiny"])), llm)
        finally:
            await llm.shutdown()

    return lambda use: asyncio.run(with_app(use))


def test_over_http_it_is_the_same(tiny_server, llm, tiny_model):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bias = {"33": 50, "34": 50, "39": 90}
    want = masked_argmax(tiny_model, PROMPT, 12, wishes()["allowed"][0])

    async def use(app, engine):
        def ask(**more):
            return openai_api.call(app, "/v1/completions", body | more)

        found = (await ask(allowed_token_ids=wishes()["allowed"][0])).json["choices"][0]
        assert found["token_ids"] == want
        streamed = await ask(allowed_token_ids=wishes()["allowed"][0], stream=True)
        events = [e for e in openai_api.read_events(streamed.text) if e != "[DONE]"]
        assert [t for e in events for t in e["choices"][0]["token_ids"]] == want
        found = (await ask(logit_bias=bias, bad_words=["7", "12", "21"])).json["choices"][0]
        assert found["text"] in ("1" * 12, "2" * 12)
        drawn = (await ask(allowed_token_ids=[5, 6, 7], n=4, temperature=2)).json["choices"]
        assert len(drawn) == 4 and all(set(c["token_ids"]) <= {5, 6, 7} for c in drawn)
        for wrong, field in (({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"), ({"bad_words": [" "]}, "bad_words"),
                             ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens")):  # fmt: skip
            refused = await ask(**wrong)
            assert refused.status == 400 and refused.json["error"]["param"] == field, refused.text
        few = await ask(prompt=["1234567", "89"], truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=1,
                        allowed_token_ids=[50])  # fmt: skip
        assert few.json["usage"]["prompt_tokens"] == 5
        for choice, text in zip(few.json["choices"], ("567", "89")):
            scored = choice["logprobs"]
            assert choice["text"].startswith(text) and scored["text_offset"][: len(text)] == [*range(len(text))]
            assert "".join(scored["tokens"]) == choice["text"]
        whole = (await ask(prompt=[*range(100)], truncate_prompt_tokens=-1, max_tokens=5)).json
        assert whole["usage"]["prompt_tokens"] == 63 and whole["usage"]["completion_tokens"] == 1
        assert whole["choices"][0]["prompt_token_ids"] == [*range(37, 100)]
        async for output in engine.generate("x", [*range(100)], SamplingParams(temperature=0, max_tokens=2),
                                            tokenization_kwargs={"truncate_prompt_tokens": 4}):  # fmt: skip
            assert output.prompt_token_ids == [96, 97, 98, 99]
        assert not engine.front.callers

    tiny_server(use)


P, M = {"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("body", "kept"),
    [(P | {"truncate_prompt_tokens": 3}, ["llo"]), (P | {"truncate_prompt_tokens": 5}, ["Hello"]),
     (P | {"truncate_prompt_tokens": 9}, ["Hello"]), (P | {"truncation_side": "right"}, ["Hello"]),
     (P | {"truncate_prompt_tokens": 3, "truncation_side": "right"}, ["Hel"]),
     ({"prompt": ["Hello", "you"], "truncate_prompt_tokens": 4}, ["ello", "you"]),
     ({"prompt": [[1, 2, 3], [4]], "truncate_prompt_tokens": 2}, ["\2\3", "\4"]),
     ({"prompt": "x" * 99 + "end", "truncate_prompt_tokens": -1}, ["x" * 60 + "end"]),
     ({"prompt": "x" * 9999 + "end", "truncate_prompt_tokens": 4}, ["xend"]),
     ({"prompt": "beg" + "x" * 9999, "truncate_prompt_tokens": 4, "truncation_side": "right"}, ["begx"]),
     (M | {"truncate_prompt_tokens": 3}, ["llo"]), (M | {"truncate_prompt_tokens": -1}, ["Hello"]),
     (M | {"truncate_prompt_tokens": 2, "truncation_side": "right"}, ["He"])],
)  # fmt: skip
def test_cuts_of_every_kind_of_prompt(body, kept):
    """On 06f's script, whose tokens are characters and whose context has 64 of them."""
    llm = openai_api.ScriptedLLM(max_model_len=64)
    app = build_app(openai_api.OpenAIServing(llm, ["smol"]))
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    longest, encode = [0], llm.front.tokenizer.encode
    llm.front.tokenizer.encode = lambda text, *about: longest.append(len(text)) or encode(text, *about)
    heard = asyncio.run(openai_api.call(app, path, body))
    assert heard.status == 200, heard.text
    assert ["".join(map(chr, prompt["prompt_token_ids"])) for _, prompt, _ in llm.added] == kept
    assert heard.json["usage"]["prompt_tokens"] == sum(map(len, kept))
    assert max(longest) <= 64, "no more of a text is tokenized than can be read"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"truncate_prompt_tokens": n}, None if n == 0 else "truncate_prompt_tokens") for n in (-2, 65, "3", 1.5, 0)]
    + [({"truncation_side": "top"}, "truncation_side"), ({"truncate_prompt_tokens": 2**63}, "truncate_prompt_tokens"),
       ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
       ({"allowed_token_ids": [-1]}, "allowed_token_ids"), ({"bad_words": [""]}, "bad_words"),
       ({"bad_words": "word"}, "bad_words"), ({"bad_words": ["a", 5]}, "bad_words"),
       ({"bad_words": [" "]}, "bad_words"),
       ({"prompt": "x" * 64, "truncate_prompt_tokens": 64}, "prompt")],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(fields, param):
    llm = openai_api.ScriptedLLM(max_model_len=64)
    app = build_app(openai_api.OpenAIServing(llm, ["smol"]))
    for path, body in (("/v1/completions", P), ("/v1/chat/completions", M)):
        if "prompt" in fields and "messages" in body:
            continue
        heard = asyncio.run(openai_api.call(app, path, body | fields))
        assert heard.status == 400, heard.text
        assert heard.json["error"]["param"] == (param or ("messages" if "messages" in body else "prompt"))
    assert not llm.added


def test_a_client_that_writes_out_all_fields_asks_for_nothing():
    llm = openai_api.ScriptedLLM(max_model_len=64)
    app = build_app(openai_api.OpenAIServing(llm, ["smol"]))
    nothing = {"bad_words": [], "allowed_token_ids": None, "truncate_prompt_tokens": None, "truncation_side": None}
    for fields in (nothing, nothing | {"bad_words": None}):
        assert asyncio.run(openai_api.call(app, "/v1/completions", json.loads(json.dumps(P | fields)))).status == 200
    assert [params for _, _, params in llm.added] == [SamplingParams()] * 2
    assert not SamplingState(Request("r", [1], llm.added[0][2]), 0).restricted


def test_nobody_names_another_context_than_the_engines():
    assert TokenizeParams.of(9, {"truncate_prompt_tokens": 3}) == TokenizeParams(9, 3)
    with pytest.raises(common.InputError, match=r"allowed: truncate_prompt_tokens, truncation_side$"):
        TokenizeParams.of(9, {"max_total_tokens": 3})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_how_many_log_probabilities_a_request_may_ask_for(name):
    """-1 asks for all; the API's side does not know how many those are."""

    def limited(wanted, most, **about):
        return getattr(lesson.limit_logprobs(SamplingParams(**{name: wanted}), most, **about), name)

    assert [limited(n, 20, vocab_size=128) for n in (None, 0, 20)] == [None, 0, 20]
    assert limited(-1, -1, vocab_size=128) == 128 == limited(-1, 200, vocab_size=128) and limited(-1, -1) == -1
    assert limited(500, -1, vocab_size=128) == 500, "there are fewer: the sampler has what there is"
    for wanted, most, about in ((21, 20, {}), (-1, 20, {"vocab_size": 128}), (-1, 20, {}), (1, 0, {})):
        with pytest.raises(common.InputError, match=f"^{name} {wanted}: must be a whole number from 0 to {most} "):
            limited(wanted, most, **about)
