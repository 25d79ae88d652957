"""The offline interface: prompts in, answers out, in the order of the prompts.

Owns the names of its requests; called by readers. It never decides what runs when. vLLM: `vllm/entrypoints/llm.py`.
"""

from __future__ import annotations

import common

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.engine_args import EngineArgs
from engine.front_end import Prompt, RequestOutput
from engine.llm_engine import LLMEngine
from engine.lora.config import LoRARequest
from engine.model import folders, llama
from engine.model.loader import find_dtype
from engine.model.tokenizer import Tokenizer, read_tokenizer
from engine.parallel.workers import start_workers
from engine.quantization.loader import load_model
from engine.quantization.methods import quantize_model
from engine.request import SamplingParams
from engine.sampling.defaults import SamplingDefaults


class LLM:
    """`LLM(model=…).generate(prompts, sampling_params)`."""

    def __init__(
        self,
        model: str | llama.Llama | None = None,
        *,
        tokenizer: Tokenizer | str | None = None,
        generation_config: str = "auto",
        override_generation_config: str | dict[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        """`model` is a folder, a hub id, None for the default model, or a loaded model together with its `tokenizer`,
        which may be another one's folder or hub id.

        `generation_config` and `override_generation_config`: see `SamplingDefaults.of`; the rest are arguments of
        `EngineArgs`. Raises InputError.
        """
        folder = None if isinstance(model, llama.Llama) else folders.model_folder(model)
        self.sampling_defaults = SamplingDefaults.of(folder, generation_config, override_generation_config)
        self.llm_engine = make_llm_engine(model, tokenizer, generation_config=generation_config, **engine_args)
        self.num_requests = 0

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Around an engine that is there already."""
        llm = cls.__new__(cls)
        llm.sampling_defaults, llm.llm_engine, llm.num_requests = SamplingDefaults(), engine, 0
        return llm

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take if they are given none."""
        return SamplingParams(**self.sampling_defaults.params)

    def generate(  # noqa: PLR0913  vLLM's arguments
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched as the scheduler sees fit; outputs come in the order of the prompts.

        SamplingParams, adapter and priority are one for all prompts, or one for each. Raises InputError before anything
        has run.
        """
        engine, prompts = self.llm_engine, as_list(prompts)
        sampling_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = for_each("sampling_params", sampling_params, prompts)
        priorities = for_each("priority", 0 if priority is None else priority, prompts)
        adapters = for_each("lora_request", lora_request, prompts)
        ids = [str(self.num_requests + i) for i in range(len(prompts))]
        self.num_requests += len(ids)
        ours, done = set(ids), {}
        try:
            for request_id, prompt, one, rank, adapter in zip(ids, prompts, params, priorities, adapters):
                engine.add_request(
                    request_id,
                    prompt,
                    one,
                    priority=rank,
                    tokenization_kwargs=tokenization_kwargs,
                    lora_request=adapter,
                )
            with progress_bar(len(ids), use_tqdm) as advance:
                while len(done) < len(ids):
                    for output in engine.step():
                        if output.request_id in ours:
                            done[output.request_id] = output
                            advance()
        finally:
            engine.abort_request(ids)  # after an error or Ctrl-C; otherwise there is nothing left to abort
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        **about: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, by the model's chat template.

        `about` goes to `generate`.
        """
        several = isinstance(messages, list | tuple) and not (messages and isinstance(messages[0], dict))
        tokenizer, prompts = self.llm_engine.tokenizer, []
        for conversation in messages if several else [messages]:
            text = tokenizer.render_chat(conversation)
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm, **about)


def make_llm_engine(
    model: str | llama.Llama | None = None,
    tokenizer: Tokenizer | str | None = None,
    **engine_args: Any,
) -> LLMEngine:
    """The engine behind an `LLM`: loads the model unless it is loaded, here or on workers. Raises InputError."""
    loaded = isinstance(model, llama.Llama)
    args = EngineArgs.of_llm(model=None if loaded else model, **engine_args)
    if isinstance(tokenizer, str):
        args.tokenizer = tokenizer
        tokenizer = read_tokenizer(tokenizer, None)
    if not loaded and args.has_workers:
        workers = start_workers(args, find_dtype(args.dtype))
        try:
            tokenizer = tokenizer or read_tokenizer(None, args.model)
            return LLMEngine(workers.model, tokenizer, args, config=args.vllm_config(workers))
        except Exception:
            workers.executor.shutdown()
            raise
    if loaded:
        if args.has_workers:
            raise common.InputError("model: workers load it themselves; give a folder or an id")
        if tokenizer is None:
            raise common.InputError("tokenizer: a loaded model needs one (loader.load returns both)")
        if args.quantization is not None:
            model = quantize_model(model, args.quantization, tokenizer)
    else:
        model, own = load_model(
            model, find_dtype(args.dtype), args.quantization, args.generation_config, args.load_format
        )
        tokenizer = tokenizer or own
        if args.tokenizer is not None:
            tokenizer.vocab_size = model.config.vocab_size
    return LLMEngine(model, tokenizer, args)


@contextlib.contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields what to call after each finished request; the bar goes to stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("Requests", total=total)
        yield lambda: progress.advance(task)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, text or token ids, or several of them, as a list. What is neither counts as one, and is refused."""
    given: Any = prompts
    token_ids = isinstance(given, list) and given and isinstance(given[0], int)
    several = isinstance(given, Iterable) and not (token_ids or isinstance(given, str | bytes | dict))
    found: list[Any] = list(given) if several else [given]
    return found


def for_each(name: str, given: Any, prompts: Sequence[Prompt]) -> list[Any]:
    """What was given once for all prompts, or once for each. Raises InputError if it is neither."""
    each = list(given) if isinstance(given, list | tuple) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise common.InputError(
            f"{name}: {len(each)} given for {len(prompts)} prompts; allowed: one, or as many as prompts"
        )
    return each
