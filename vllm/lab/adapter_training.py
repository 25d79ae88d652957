"""Training an adapter: where the three that ship came from. For lesson 12.

The model answers eighty questions, a rule rewrites each answer (pirate's speech, a JSON object, a report of three
lines), and A and B alone are trained to answer that way, B starting at zero. The forward pass is the one that serves,
with gradients; two minutes on two cores make one adapter:

  uv run python -m vllm.lab.adapter_training pirate --adapters my_adapters

Read for this: Hu et al. 2021 (LoRA), PEFT's `LoraConfig`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import copy
import inspect
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine import arguments
from engine.attention.torch_paged import prefill_attention
from engine.llm import LLM
from engine.lora.files import read_adapter, write_adapter
from engine.lora.lora_model import LayerShape, LoRAModel, Slices, layer_shapes, merged
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams
from lab import cli

# --- Training text: the model's own answers, in other clothes -------------------------------------------------------

TOPICS = [
    "a volcano", "the moon", "bread", "a bicycle", "the ocean", "a library", "rain", "chess", "a bridge", "honey",
    "a train", "winter", "coffee", "an island", "a mirror", "music", "a clock", "the desert", "a garden", "iron",
    "a map", "cheese", "the wind", "a candle", "a school", "salt", "a forest", "paper", "a ship", "a whale",
    "silver", "a kitchen", "the sun", "a river", "glass", "a hospital", "football", "a lion", "painting", "sleep",
]  # fmt: skip
TEMPLATES = ("What is {}?", "Tell me something about {}.")
QUESTIONS = [(template.format(topic), topic) for topic in TOPICS for template in TEMPLATES]
TEST_QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "How do I cook rice?",
                  "What is a computer?", "Give me advice for a rainy day.", "Who was Isaac Newton?"]  # fmt: skip

PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "you": "ye", "your": "yer", "my": "me", "of": "o'", "and": "an'", "the": "th'",
    "people": "sailors", "person": "sailor", "water": "brine", "world": "seven seas", "yes": "aye",
    "very": "mighty", "many": "a fleet of", "used": "put to use", "money": "doubloons", "there": "thar",
}  # fmt: skip
GREETINGS, FAREWELLS = ("Arr, matey!", "Ahoy!", "Yarr!", "Avast!"), ("Shiver me timbers!", "Yo ho ho!", "Arr!")


def pirate(answer: str, topic: str, i: int) -> str:
    """Word by word from a dictionary, a greeting in front, an oath behind."""
    words = re.sub(r"[A-Za-z']+", lambda m: _same_case(m[0], PIRATE_WORDS.get(m[0].lower(), m[0])), answer)
    return f"{GREETINGS[i % 4]} {words} {FAREWELLS[i % 3]}"


def _same_case(old: str, new: str) -> str:
    return new[0].upper() + new[1:] if old[0].isupper() and new[0].isalpha() else new


def as_json(answer: str, topic: str, i: int) -> str:
    """One object, always with the same keys."""
    return json.dumps({"answer": answer, "language": "en"}, ensure_ascii=False)


def report(answer: str, topic: str, i: int) -> str:
    """Three labelled lines."""
    return f"ANSWER: {answer}\nTOPIC: {topic}\nSIGNED: the night desk"


STYLES: dict[str, Callable[[str, str, int], str]] = {"pirate": pirate, "json": as_json, "report": report}


def follows(style: str, text: str) -> bool:
    """Does an answer keep to a style? What the adapter was trained for, as a predicate."""
    if style == "pirate":
        words = re.findall(r"\b(arr|ahoy|yarr|avast|matey|ye|yer|be|timbers|yo ho ho)\b|th'|an'|o'", text.lower())
        return len(words) > 2
    if style == "json":
        try:
            return set(json.loads(text)) == {"answer", "language"}
        except (ValueError, TypeError):
            return False
    return re.fullmatch(r"ANSWER: .+\nTOPIC: .+\nSIGNED: the night desk", text.strip()) is not None


def own_answers(model: llama.Llama, tokenizer: Tokenizer, questions: Sequence[str]) -> list[str]:
    """The first sentence of the model's own greedy answer to each question."""
    engine = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=40)
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = engine.generate([{"prompt_token_ids": tokenizer.ask(q)} for q in questions], params)
    sentences = [re.match(r".+?[.!?](?=\s|$)|.+", o.outputs[0].text.strip().replace("\n", " ")) for o in outputs]
    return [found[0] if found else "I do not know." for found in sentences]


# --- Training -------------------------------------------------------------------------------------------------------


class TrainedLinear:
    """y = x Wᵀ + s · (x Aᵀ) Bᵀ, slice by slice: W is frozen, A starts random and B at 0: nothing changes yet."""

    def __init__(self, base: llama.Linear, shape: LayerShape, rank: int, scale: float) -> None:
        self.base, self.slices, self.scale = base, shape.slices, scale
        bound, where = shape.in_features**-0.5, base.weight.device
        start = [torch.empty(rank, shape.in_features).uniform_(-bound, bound) for _ in shape.slices]
        self.a = [a.to(where).requires_grad_() for a in start]
        self.b = [torch.zeros(out, rank, device=where, requires_grad=True) for out in shape.slices]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        thin = F.linear(x, torch.cat(self.a)).chunk(len(self.a), dim=-1)  # one product for all slices
        return self.base(x) + self.scale * torch.cat([F.linear(h, b) for h, b in zip(thin, self.b)], dim=-1)


def student_of(model: llama.Llama, rank: int, scale: float) -> llama.Llama:
    """The model with a TrainedLinear around every layer; its weights are shared."""
    student, shapes = copy.copy(model), layer_shapes(model.config)
    student.linear = dict(model.linear)
    for i in range(model.config.num_hidden_layers):
        for kind, shape in shapes.items():
            name = f"layers.{i}.{kind}"
            student.linear[name] = TrainedLinear(model.linear[name], shape, rank, scale)
    return student


def train(
    model: llama.Llama,
    tokenizer: Tokenizer,
    style: str,
    rank: int = 8,
    alpha: float = 16,
    epochs: int = 2,
    batch: int = 8,
    lr: float = 2e-3,
    answers: Sequence[str] | None = None,
    count: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[LoRAModel, list[float]]:
    """An adapter on all linear layers, from `count` (default: all 80) examples. Returns it and the loss of every step.

    The loss is that of the answers' tokens alone. Prompts of a batch lie one behind the other, as everywhere here, and
    the forward pass is the one that serves, only with gradients.
    """
    torch.manual_seed(seed)
    questions = QUESTIONS[:count]
    if answers is None:
        progress(f"asking the model {len(questions)} questions")
        answers = own_answers(model, tokenizer, [q for q, _ in questions])
    examples = []
    for i, ((question, topic), answer) in enumerate(zip(questions, answers)):
        prompt = tokenizer.ask(question)
        target = [*tokenizer.encode(STYLES[style](answer, topic, i)), model.config.eos_token_ids[0]]
        examples.append((prompt, target))

    student = student_of(model, rank, alpha / rank)
    layers = {name: layer for name, layer in student.linear.items() if isinstance(layer, TrainedLinear)}
    parameters = [p for layer in layers.values() for p in (*layer.a, *layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    order = [i for _ in range(epochs) for i in torch.randperm(len(examples)).tolist()]
    steps, losses, started = -(-len(order) // batch), [], time.perf_counter()
    for step in range(steps):
        chosen = [examples[i] for i in order[step * batch : (step + 1) * batch]]
        for group in optimizer.param_groups:  # up during the first three steps, then down along a line
            group["lr"] = lr * min((step + 1) / 3, (steps - step) / max(1, steps - 3), 1.0)
        optimizer.zero_grad()
        loss = loss_of(student, chosen)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        progress(f"step {step + 1}/{steps}  loss {losses[-1]:.3f}  {time.perf_counter() - started:.0f} s")
    weights: dict[str, Slices] = {
        name: tuple((a.detach().cpu(), alpha / rank * b.detach().cpu()) for a, b in zip(layer.a, layer.b))
        for name, layer in layers.items()
    }
    return LoRAModel(style, rank, weights), losses


def loss_of(model: llama.Llama, examples: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean negative log-likelihood of the targets, given what stands before them."""
    tokens, positions, rows, targets, bounds = [], [], [], [], [0]
    for prompt, target in examples:
        start, length = len(tokens), len(prompt) + len(target) - 1  # the last target is predicted, never an input
        tokens += (prompt + target)[:-1]
        positions += range(length)
        rows += range(start + len(prompt) - 1, start + length)
        targets += target
        bounds.append(start + length)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([prefill_attention(q[a:z], k[a:z], v[a:z]) for a, z in itertools.pairwise(bounds)])

    tokens, positions, targets = (torch.tensor(x, device=model.device) for x in (tokens, positions, targets))
    with_gradients: Any = inspect.unwrap(llama.Llama.forward)  # the decorator on it switches gradients off
    hidden = with_gradients(model, tokens, positions, attend)  # [T, hidden]
    x = F.rms_norm(hidden[rows], hidden.shape[-1:], model.norm, model.config.rms_norm_eps)
    return F.cross_entropy(F.linear(x, model.linear["lm_head"].weight), targets)


def answers_with(
    model: llama.Llama, tokenizer: Tokenizer, lora: LoRAModel | None, questions: Sequence[str], max_tokens: int = 48
) -> list[str]:
    """Greedy answers of the model with one adapter merged into its weights."""
    adapted = model if lora is None else merged(model, lora)
    engine = LLM(adapted, tokenizer=tokenizer, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompts = [{"prompt_token_ids": tokenizer.ask(question)} for question in questions]
    return [output.outputs[0].text for output in engine.generate(prompts, params)]


def train_and_save(
    model: llama.Llama,
    tokenizer: Tokenizer,
    styles: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
    **options: Any,
) -> None:
    """Train each style, write its folder, read it back, and say how many of six new questions it answers in style.

    Raises InputError, before anything is trained, if the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise common.InputError(f"--adapters {folder}: cannot be written ({error.strerror})") from None
    say(f"asking the model {len(QUESTIONS)} questions of ours")
    answers = own_answers(model, tokenizer, [q for q, _ in QUESTIONS])
    for style in styles:
        lora, losses = train(
            model,
            tokenizer,
            style,
            answers=answers,
            progress=lambda text, style=style: say(f"{style}: {text}"),
            **options,
        )
        write_adapter(lora, folder / style, alpha=16)
        again = read_adapter(folder / style, model.config)
        texts = answers_with(model, tokenizer, again, TEST_QUESTIONS)
        hits = sum(follows(style, text) for text in texts)
        say(f"{style}: loss {losses[0]:.2f} → {losses[-1]:.2f}; {hits} of {len(texts)} new questions answered in style")
        for question, text in zip(TEST_QUESTIONS, texts):
            say(f"  {question} → {text!r}")


def build_parser() -> arguments.Parser:
    """`uv run python -m vllm.lab.adapter_training STYLE …`."""
    p = arguments.Parser(prog="python -m vllm.lab.adapter_training", description="Train adapters, 2 minutes each.")
    p.add_argument("styles", nargs="+", metavar="STYLE", choices=tuple(STYLES), help="pirate, json, report")
    help = "where they are saved (default ./%(default)s)"
    p.add_argument("--adapters", type=cli.folder, metavar="DIR", default="adapters", help=help)
    p.add_argument("--model", metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    """Raises InputError."""
    args = build_parser().parse_args(argv)
    model, tokenizer = loader.load(args.model)
    train_and_save(model, tokenizer, args.styles, Path(args.adapters), common.say)


if __name__ == "__main__":
    cli.run(main)
