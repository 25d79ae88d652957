"""06b · Guided decoding: a model that cannot answer outside the format.

The question: a program reads the answer, and wants a date, one of three words, or JSON of a given shape. How does an
engine make that work every time, at what cost, and what does it do to what the model would have said?

The mechanism:
  1. A token may come next if what is written, with it, can still become a match. Trying each token is obviously right.
  2. A regular expression becomes an automaton over *bytes*, since tokens are bytes: é is two of them, and may be cut.
  3. Subset construction makes it deterministic: all that matters of what is written is one integer, the state.
  4. The vocabulary is a trie. One walk over it, a level at a time, finds all tokens that a state allows: a mask of one
     bit per token, computed when a request first comes to the state, and kept.
  5. The end-of-sequence token is allowed where the automaton accepts, and nowhere else.
  6. Before sampling, a kernel sets the logits of forbidden tokens to −∞, in the rows of the requests that asked for it.
  7. JSON schemas and grammars may nest without end: llguidance keeps a parser, and yields masks of the same form.
  8. Patterns come from strangers: our automata may not exceed a fixed size, and the library reads a schema or grammar
     first in a process of its own, where it may hang or crash.
The engine's files for all that are in `engine/sampling/guided/`; here are the reference and the story.

Numbers to remember: a mask of 49,152 tokens is 6,144 bytes. (a|b)*a(a|b){n} has 2^(n+1) states. A model under masks
is not the model given that its answer matches: an answer of 2 % may become one of 60 %.

How to run:
  uv run python -m vllm.tours.06b_guided_decoding                     the whole story
  uv run python -m vllm.tours.06b_guided_decoding --regex '[a-f]{4}'  what the model says if it must match your pattern
  uv run python -m vllm.tours.06b_guided_decoding --text-masks        break it: look at tokens as text, not as bytes
  uv run python -m vllm.tours.06b_guided_decoding --eos always        break it: forget the rule about the end
  uv run python -m vllm.tours.06b_guided_decoding --bench             a minute: more questions, longer measurements

Read for this: Thompson 1968 and Rabin & Scott 1959 (automata), Brzozowski 1964 (derivatives), Willard & Louf 2023
(masks from automata), Park et al. 2024 (what masks do to the distribution), vLLM 0.32 `v1/structured_output/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import ast
import contextlib
import functools
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from engine import arguments
from engine.llm import LLM
from engine.model import loader
from engine.request import SamplingParams
from engine.sampling.guided.automaton import determinize
from engine.sampling.guided.bitmask import apply_token_bitmask_inplace
from engine.sampling.guided.characters import literal
from engine.sampling.guided.expressions import EMPTY, NOTHING, Alt, Bytes, Concat, Node, Repeat, alt, concat, repeat
from engine.sampling.guided.reader_process import read_apart
from engine.sampling.guided.regex import parse_regex
from engine.sampling.guided.regex_guide import RegexGuide
from engine.sampling.guided.structured_outputs import compile_guide
from engine.sampling.guided.token_trie import TokenTrie
from engine.sampling.guided.vocabulary import Vocabulary, vocabulary_of
from lab import cli, timing

KEY = "06b_guided_decoding"


# --- What we want, without cleverness: try every token ----------------------------------------------------------------


def nullable(node: Node) -> bool:
    """Does the empty string match?"""
    match node:
        case Bytes():
            return False
        case Concat(parts):
            return all(map(nullable, parts))
        case Alt(parts):
            return any(map(nullable, parts))
        case Repeat(inner, low, _):
            return low == 0 or nullable(inner)


def derivative(node: Node, byte: int) -> Node:
    """What must follow `byte`: the expression of all w such that byte·w matches (Brzozowski 1964)."""
    match node:
        case Bytes(mask):
            return EMPTY if mask >> byte & 1 else NOTHING
        case Alt(parts):
            return alt(derivative(part, byte) for part in parts)
        case Repeat(inner, low, high):
            rest = repeat(inner, max(0, low - 1), None if high is None else high - 1)
            return concat([derivative(inner, byte), rest])
        case Concat(()):
            return NOTHING
        case Concat(parts):
            first, *rest = parts
            found = concat([derivative(first, byte), *rest])
            return alt([found, derivative(concat(rest), byte)]) if nullable(first) else found


def tokens_by_trying(node: Node, written: bytes, vocabulary: Sequence[bytes]) -> set[int]:
    """Ids of the tokens with which `written` can still become a match. Tokens without bytes are never among them."""
    rest = functools.reduce(derivative, written, node)
    return {i for i, token in enumerate(vocabulary) if token and functools.reduce(derivative, token, rest) != NOTHING}


# --- A vocabulary of 23 tokens, and two bugs --------------------------------------------------------------------------

EOS = b""  # in the small vocabularies: no bytes, so never text
TOKENS = [b"0", b"1", b"2", b"5", b"12", b"25", b".", b"-", b"a", b"c", b"t", b"s", b"ca", b"cat", b"at",
          b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xc3", b"\xa9", "é".encode(), EOS]  # fmt: skip
PATTERNS = {
    "a price": r"\d{1,2}€", "a decimal": r"\d+\.\d\d", "cats": r"cats?|at|2 ?cats", "é or €": "(é|€){1,2}",
    "any two characters": ".{2}", "no end": r"\d+(-\d+)*-",
}  # fmt: skip


def token_name(token: bytes) -> str:
    """A token as one writes it down: its text, its bytes where it is a part of a character, or EOS."""
    try:
        return token.decode() or "EOS"
    except UnicodeDecodeError:
        return f"<{token.hex(' ').upper()}>"


def toy_vocabulary(masks: str = "bytes") -> Vocabulary:
    """23 tokens. With "text", the bug: the trie holds what a decoder shows, U+FFFD for half a character."""
    vocabulary = Vocabulary(TOKENS, [TOKENS.index(EOS)])
    if masks == "text":
        vocabulary.trie = TokenTrie([token.decode("utf-8", "replace").encode() for token in TOKENS])
    return vocabulary


def allowed_tokens(guide: RegexGuide, state: int, eos: str) -> list[int]:
    """What the guide's mask allows; with `eos` "always" or "never", the other bug: an end that ignores the state."""
    found = guide.vocabulary.unpack(guide.mask(state))
    if eos != "accepting":
        found[guide.vocabulary.eos_token_ids] = eos == "always"
    return found.nonzero()[0].tolist()


# --- What masks do to a distribution ----------------------------------------------------------------------------------

# What a model thinks the best fruit is: it wants to say apple, and must choose between two others.
FRUIT = [b"ap", b"ple", b"ricot", b"ch", b"erry", *(bytes([b]) for b in b"aceghiloprty"), EOS]
FRUIT_MODEL = {b"": {b"ap": 0.6, b"ch": 0.4}, b"ap": {b"ple": 0.99, b"ricot": 0.01}, b"ch": {b"erry": 0.9, b"ple": 0.1}}
FRUIT_CHOICE = ["apricot", "cherry"]


def distortion() -> dict[str, dict[str, float]]:
    """Every answer of the model, by enumeration: free, given that it is one of the two, and under masks."""
    guide = RegexGuide(alt(map(literal, FRUIT_CHOICE)), Vocabulary(FRUIT, [FRUIT.index(EOS)]))

    def draws(written: bytes, masked: bool) -> Iterable[tuple[bytes, float]]:
        allowed = allowed_tokens(guide, guide.dfa.step(0, written), "accepting") if masked else range(len(FRUIT))
        kept = {FRUIT[i]: FRUIT_MODEL[written][FRUIT[i]] for i in allowed if FRUIT[i] in FRUIT_MODEL[written]}
        return [(token, p / sum(kept.values())) for token, p in kept.items()]

    free, masked = (
        {(a + b).decode(): p * q for a, p in draws(b"", how) for b, q in draws(a, how)} for how in (False, True)
    )
    total = sum(free[text] for text in FRUIT_CHOICE)
    return {"free": free, "given": {text: free[text] / total for text in FRUIT_CHOICE}, "masked": masked}


SHOWN = {  # patterns whose automata the text talks about
    "date": r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "ip": r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
    "phone": r"\+\d{1,3} \(\d{3}\) \d{3}-\d{4}", "character": ".", "kanji": "[一-鿿]{1,20}", "text": ".{1,200}",
}  # fmt: skip


# --- The story --------------------------------------------------------------------------------------------------------

SUM = 'start: sum " = " N\nsum: term (" + " term)? (" + " term)?\nterm: N | "(" sum ")"\nN: /[1-9][0-9]{0,3}/\n'


def closed(**properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, AGE = {"type": "string", "minLength": 1, "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 120}
PERSON = closed(name=TEXT, age=AGE, city={"enum": ["London", "Paris", "Rome"]},
                hobbies={"type": "array", "items": TEXT, "maxItems": 2})  # fmt: skip
CALL = closed(name={"enum": ["get_weather"]}, arguments=closed(city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}))

TASKS = {  # what the answer must be, how to ask for it, and examples
    "date": ({"regex": SHOWN["date"]}, "When {}? Answer with a date like 2024-12-31 and nothing else.",
             ["did people first walk on the Moon", "did the Berlin Wall fall", "was the iPhone introduced"]),
    "ip": ({"regex": SHOWN["ip"]}, "Give me {}. Answer with one IP address and nothing else.",
           ["the address of this computer itself", "an address in a private network", "the address of a DNS server"]),
    "phone": ({"regex": SHOWN["phone"]}, "Invent a phone number in {}, written like +1 (555) 555-5555, nothing else.",
              ["New York", "London", "Tokyo"]),
    "choice": ({"choice": ["positive", "negative", "neutral"]}, "Is it positive, negative or neutral? '{}' One word.",
               ["What a waste of money!", "I loved every minute of it.", "It arrived on Tuesday."]),
    "person": ({"json": PERSON}, "Write JSON with name, age, city and hobbies: {}.",
               ["Anna, 31, lives in Rome, likes chess", "Bob from Paris is 45 and cooks", "Chloë, 28, London, paints"]),
    "tool call": ({"json": CALL}, "Call get_weather with a city and a unit, as JSON with name and arguments: {}?",
                  ["how warm is it in Oslo, in celsius", "is it hot in Dallas, in fahrenheit", "how cold is 札幌"]),
    "sum": ({"grammar": SUM}, "Write {} and its result, like (1 + 2) + 3 = 6, and nothing else.",
            ["a sum of two numbers", "a sum of three numbers", "a sum with parentheses"]),
}  # fmt: skip

EXPLOSIVE = {  # what anybody may send; the tests have more of it
    "2^21 states": {"regex": "(a|b)*a(a|b){20}"}, "many repeats": {"regex": "((a{1,99}){1,99}){1,99}"},
    "ambiguous": {"regex": "(a?){9999}"}, "only itself": {"json": {"$ref": "#"}},
    "product": {"json": {"allOf": [{"anyOf": [closed(**{f"{i}{j}": TEXT}) for j in range(6)]} for i in range(9)]}},
    "long chain": {"grammar": "start: r0\n" + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(3000)) + 'r3000: "x"'},
}  # fmt: skip


def parses(text: str, wanted: dict[str, Any]) -> bool:
    """Is it what was asked for, in Python's opinion? (Of JSON, only whether it has the right keys.)"""
    ((kind, spec),) = wanted.items()
    try:
        if kind == "json":
            value = json.loads(text)
            return isinstance(value, dict) and sorted(value) == sorted(spec["required"])
        if kind == "grammar":
            return bool(ast.parse(text.replace(" = ", " == "), mode="eval")) and text.count(" = ") == 1
        return text in spec if kind == "choice" else re.fullmatch(spec, text, re.ASCII) is not None
    except (ValueError, SyntaxError):
        return False


def check_masks(vocabulary: Vocabulary, eos: str) -> int:
    """Each state of each preset against derivatives, its end against `re`. The number of masks. Raises CheckFailed."""
    checked, (end,) = 0, vocabulary.eos_token_ids
    for pattern in PATTERNS.values():
        guide = RegexGuide(parse_regex(pattern), vocabulary)
        for state, text in enumerate(guide.dfa.examples):
            expected = tokens_by_trying(parse_regex(pattern), text, vocabulary.tokens)
            with contextlib.suppress(UnicodeDecodeError):  # half a character matches nothing
                expected |= {end} if re.fullmatch(pattern, text.decode(), re.ASCII) else set()
            if wrong := expected ^ {*allowed_tokens(guide, state, eos)}:
                names = ", ".join(token_name(TOKENS[token]) for token in sorted(wrong))
                raise common.CheckFailed(f"{pattern} after {text.decode('utf-8', 'replace')!r}: wrong about {names}")
            checked += 1
    return checked


def check_real_masks(vocabulary: Vocabulary) -> None:
    """One mask against trying all tokens, then the kernel that applies it (or, without Triton, the torch path)."""
    start, written = time.perf_counter(), b"1969-0"
    expected = tokens_by_trying(parse_regex(SHOWN["date"]), written, vocabulary.tokens)
    seconds = time.perf_counter() - start
    guide = RegexGuide(parse_regex(SHOWN["date"]), vocabulary)
    mask = guide.mask(guide.dfa.step(0, written))
    allowed = vocabulary.unpack(mask)
    what = f"after {written.decode()} a date may go on with {len(expected)} tokens; trying all took {seconds:.1f} s"
    common.check_equal(what, {*allowed.nonzero()[0].tolist()}, expected)
    device = common.device()
    logits = torch.randn(3, len(allowed), device=device)
    want = logits.clone()
    want[2, torch.from_numpy(~allowed).to(device)] = -math.inf
    with common.use_kernels() if common.HAS_TRITON else contextlib.nullcontext():
        apply_token_bitmask_inplace(logits, torch.from_numpy(mask[None]).to(device), torch.tensor([2], device=device))
    common.check("the last of three rows, masked in place", logits, want)
    if not common.HAS_TRITON:
        common.skipped("the kernel", f"{common.kernel_mode()}; the torch path was checked")


def time_guides(vocabulary: Vocabulary) -> dict[str, dict[str, float]]:
    """What compiling, a first mask and a kept mask cost, for patterns and for a schema (which keeps none)."""
    costs, row = {}, np.empty(vocabulary.num_words, np.int32)
    read_apart("json", json.dumps(PERSON))
    for name, pattern in (SHOWN | {"schema": ""}).items():
        key = ("regex", pattern) if pattern else ("json", json.dumps(PERSON))
        compiles = functools.partial(vocabulary.compile, *key)
        guide = compiles()
        again = functools.partial(guide.start().fill_bitmask, row)
        first = functools.partial(lambda g: vocabulary.pack(g.allowed(0)), guide) if pattern else again
        found = [timing.measure(part, 0.02).median * 1e3 for part in (compiles, first, again)]
        costs[name] = dict(zip(("compile_ms", "mask_ms", "again_ms"), found))
    return costs


def ask_everything(llm: LLM, count: int, regex: str | None) -> dict[str, dict[str, float]]:
    """`count` questions of each task, free and guided, in one batch. The shares that parse. Raises CheckFailed."""
    tasks = ({} if regex is None else {"yours": ({"regex": regex}, "Say {}.", ["something"])}) | TASKS
    asked = [(name, template.format(x)) for name, (_, template, examples) in tasks.items() for x in examples[:count]]
    prompts = [{"prompt_token_ids": llm.llm_engine.tokenizer.ask(text)} for _, text in asked]
    wanted = [*[None] * len(asked), *(tasks[name][0] for name, _ in asked)]
    params = [SamplingParams(temperature=0, max_tokens=120 if x else 64, structured_outputs=x) for x in wanted]
    answers = [output.outputs[0] for output in llm.generate(prompts * 2, params)]
    rows: dict[str, list[str]] = {}
    parsed: dict[str, dict[str, list[bool]]] = {name: {"free": [], "guided": []} for name in ("all", *tasks)}
    for i, (name, _) in enumerate(asked):
        for kind, answer in (("free", answers[i]), ("guided", answers[i + len(asked)])):
            good, brief = parses(answer.text, tasks[name][0]), " ".join(answer.text.split())
            for group in (name, "all"):
                parsed[group][kind].append(good)
            if kind == "guided" and not good and answer.finish_reason == "stop":  # not cut by max_tokens
                raise common.CheckFailed(f"{name}: {answer.text!r} is not what was asked for")
            if len(parsed[name][kind]) == 1:
                rows.setdefault(name, [name]).append(f"{brief[:43]}{'…' * (len(brief) > 43)} {'✓' if good else '✗'}")
    common.table(["task", "free", "guided"], list(rows.values()))
    rates = {name: {kind: sum(found) / len(found) for kind, found in both.items()} for name, both in parsed.items()}
    common.say("of {} answers parse: {free:.0%} free, {guided:.0%} guided".format(len(asked), **rates["all"]))
    return rates


def refuse(vocabulary: Vocabulary) -> dict[str, float]:
    """Every one of EXPLOSIVE must be refused. Milliseconds until it is. Raises CheckFailed."""
    found = {}
    for name, wanted in EXPLOSIVE.items():
        start = time.perf_counter()
        with contextlib.suppress(common.InputError):
            compile_guide(wanted, vocabulary)
            raise common.CheckFailed(f"{name}: was not refused")
        found[name] = (time.perf_counter() - start) * 1e3
    return found


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--regex", metavar="PATTERN", help="one more answer of the real model, which must match this")
    p.add_argument("--text-masks", action="store_true", help="the bug: ask what tokens look like as text")
    p.add_argument(
        "--eos",
        choices=("accepting", "always", "never"),
        default="accepting",
        help="where it may end (default %(default)s)",
    )
    return p


def time_masking(vocabulary: Vocabulary, device: torch.device) -> float:
    """Milliseconds of applying masks to 32 rows."""
    logits, rows = torch.randn(32, len(vocabulary.tokens)).to(device), torch.arange(32).to(device)
    masks = torch.from_numpy(np.tile(vocabulary.only_eos, (32, 1))).to(device)
    return timing.measure(lambda: apply_token_bitmask_inplace(logits, masks, rows), 0.2).median * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, 256)
    model, tokenizer = loader.load(args.model)
    vocabulary = vocabulary_of(tokenizer, model.config.vocab_size, model.config.eos_token_ids)
    if args.regex is not None:
        compile_guide({"regex": args.regex}, vocabulary)

    common.heading("1. Masks from an automaton and a trie, against trying every token")
    checked = check_masks(toy_vocabulary("text" if args.text_masks else "bytes"), args.eos)
    common.say(f"✓ {checked} masks over {len(TOKENS)} tokens: every state of {len(PATTERNS)} patterns, ends included")

    common.heading(f"2. A real vocabulary: {len(vocabulary.tokens):,} tokens, {len(vocabulary.trie.byte):,} trie nodes")
    check_real_masks(vocabulary)
    states = {name: len(determinize(parse_regex(pattern)).accepting) for name, pattern in SHOWN.items()}
    common.table(
        ["what", "states", "compile ms", "mask ms", "again ms"],
        [
            [name, states.get(name, "–"), *(f"{ms:.3f}" for ms in cost.values())]
            for name, cost in time_guides(vocabulary).items()
        ],
    )
    common.say(f"applying masks to 32 rows: {time_masking(vocabulary, model.device):.1f} ms")

    common.heading("3. One batch: every question twice, free and guided")
    llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=64)
    ask_everything(llm, 1, args.regex)

    common.heading("4. What strangers send, and must be refused")
    common.say("\n".join(f"{name}: refused in {ms:.0f} ms" for name, ms in refuse(vocabulary).items()))

    common.heading("5. Masks change the distribution: a model that wants to say apple")
    kinds, found = {"free": "free", "given": "given that it matches", "masked": "under masks"}, distortion()
    common.table(
        ["answer", *kinds.values()],
        [[text, *(f"{100 * found[kind].get(text, 0):.1f} %" for kind in kinds)] for text in ("apple", *FRUIT_CHOICE)],
    )
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
