"""Requests to prompts and parameters, outputs to answers: what chats and completions share, and where they differ.

Owns the names that a client may ask for, the model's and its adapters'; called by the routes in `app` and by
`responses`. All that can be wrong is found before the engine hears of a request, and it never outlives its client.
vLLM: `vllm/entrypoints/openai/chat_completion/serving.py`, `vllm/entrypoints/openai/completion/serving.py`.
"""

from __future__ import annotations

import common

import asyncio
import codecs
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engine.errors import EngineDeadError, QueueOverflowError
from engine.front_end import CompletionOutput, RequestOutput
from engine.kv_transfer.params import attach_params
from engine.llm import as_list
from engine.request import SamplingParams, prompt_length_error
from engine.sampling import token_rules
from engine.sampling.guided.guide_queue import GuideQueue
from engine.sampling.guided.structured_outputs import BROKEN, REASONING_END, start
from engine.sampling.guided.vocabulary import vocabulary_of
from engine.sampling.pooler import PoolerConfig
from engine.sampling.sampler import Logprob
from engine.sampling.token_rules import TokenizeParams, limit_logprobs
from engine.serving.async_llm import AsyncLLM
from engine.serving.collector import merge_outputs
from engine.serving.frontend_args import FrontendArgs
from engine.serving.openai import chat_template, reasoning, tools
from engine.serving.openai.errors import APIError, as_api_error
from engine.serving.openai.events import event, merged
from engine.serving.openai.job import Job, Usage
from engine.serving.openai.large_bodies import away
from engine.serving.openai.logprobs import by_text, finite, most_probable, scores
from engine.serving.openai.params import sampling_params
from engine.serving.openai.protocol import (
    ChatCompletionRequest,
    CommonRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoRAAdapterRequest,
    StreamOptions,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
    in_full,
)

VERSION = "0.1.0"


def own_salt(owner: str | None, salt: str) -> str:
    """A salt that only requests with the same key can name: what is cached under it tells nobody else of its prompt."""
    return hashlib.sha256(f"{owner} {salt}".encode()).hexdigest()


class OpenAIServing:
    """Requests to prompts and parameters, outputs to answers: what the two APIs share, and where they differ."""

    root: str | None = None  # the model's folder or hub id: clients load its tokenizer from there
    system_fingerprint: str | None = None  # another one says: the same seed may now bring another answer
    runtime_loras = False  # may clients load and unload adapters?
    has_kv_connector = False  # does anybody read kv_transfer_params? (lesson 08)
    tool_call_parser: str | None = None  # how the model writes a call of its own accord
    enable_auto_tool_choice = False
    reasoning_parser: str | None = None  # how it marks what it thinks before it answers
    response_role = "assistant"
    max_logprobs = 20  # that a request may ask for
    frontend = FrontendArgs()
    engine_args: Any = None  # for developers
    pooler_config = PoolerConfig()
    trained_dimensions: Sequence[int] | bool = False  # that vectors may be cut to

    def __init__(self, llm: AsyncLLM, names: Sequence[str], loras: dict[str, str] | None = None) -> None:
        self.llm, self.names, self.created = llm, names, int(time.time())
        # Adapters by name: their path, and what the engine calls them. A name that is loaded again gets a new one:
        # the prefix cache must not take what the old weights computed for the new.
        self.loras = {name: (path, name) for name, path in (loras or {}).items()}
        self.parents: dict[str, str] = {}  # of which model an adapter is one, where that was said
        self.lora_count, self.loading_loras = itertools.count(2), set()
        self.lora_owners: dict[str, str | None] = {}  # whose key has loaded it; the server's own ones are everybody's
        self.tokenizer, self.token_bytes = llm.front.tokenizer, llm.front.token_bytes
        self.max_model_len = llm.ready.max_model_len
        self.sampling_defaults = llm.sampling_defaults.within(self.max_model_len)
        vocabulary = self.tokenizer.backend.get_vocab()
        self.vocabulary = {token: text for text, token in vocabulary.items()}
        self.max_chars_per_token = max(map(len, vocabulary), default=1)

    @property
    def too_long(self) -> str:
        """By these words LiteLLM and others know what was wrong."""
        return f"this model's maximum context length is {self.max_model_len} tokens"

    # -- in --

    def check_model(self, name: str | None) -> str:
        known = [*self.names, *self.loras]
        if name and name not in known:  # as in vLLM, "" is no name
            raise APIError(404, f"The model `{name}` does not exist; this server has: {', '.join(known)}", "model")
        return name or self.names[0]

    def model_card(self, name: str) -> dict[str, Any]:
        """The model or an adapter, as `GET /v1/models` tells it."""
        root, parent = self.root or self.names[0], None
        if name in self.loras:
            root, parent = self.loras[name][0], self.parents.get(name, self.names[0])
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "vllm-from-first-principles",
            "root": root,
            "parent": parent,
            "max_model_len": self.max_model_len,
        }

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """`POST /tokenize`. Raises InputError."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise common.InputError("prompt: give either a prompt or messages")
        text, special = body.prompt or "", body.add_special_tokens is not False
        if body.messages is not None:
            text = await away(body.is_large, self.render_chat, body)
            special = bool(body.add_special_tokens)
        tokens = await self.encode(text, special)
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [self.vocabulary[t] for t in tokens]
        return found

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """`POST /detokenize`. Raises InputError."""
        self.check_model(body.model)
        self.llm.front._check_ids("tokens", body.tokens)
        return {"prompt": await asyncio.to_thread(self.tokenizer.decode, body.tokens, False)}

    def check_lora_owner(self, name: str, owner: str | None) -> None:
        """What answers under a name is for its owner to change. Raises InputError."""
        if self.lora_owners.get(name, owner) != owner:
            raise common.InputError(f"lora_name {name!r}: was loaded with another key, which alone may change it")

    async def load_lora(self, body: LoadLoRAAdapterRequest, owner: str | None = None) -> str:
        """Add an adapter, or replace one in place. Raises InputError, and nothing has changed."""
        name = body.lora_name
        if name in self.names:
            raise common.InputError(f"lora_name {name!r}: is the name of the model itself")
        if name in self.loading_loras:
            raise common.InputError(f"lora_name {name!r}: is being loaded")
        if name in self.loras and not body.load_inplace:
            raise common.InputError(f"lora_name {name!r}: is loaded already; load_inplace replaces it")
        self.check_lora_owner(name, owner)
        inner = f"{name} #{next(self.lora_count)}"
        self.loading_loras.add(name)
        try:
            await self.llm.call_utility("add_lora", inner, body.lora_path)
        except common.InputError:
            with contextlib.suppress(common.InputError):  # of several engines, some may have it
                await self.llm.call_utility("remove_lora", inner)
            raise
        finally:
            self.loading_loras.remove(name)
        old, self.loras[name] = self.loras.get(name), (body.lora_path, inner)
        self.lora_owners[name] = owner
        if old:
            await self.llm.call_utility("remove_lora", old[1])
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload_lora(self, body: UnloadLoRAAdapterRequest, owner: str | None = None) -> str:
        """Forget an adapter; answers that it is writing are finished."""
        if body.lora_name not in self.loras:
            raise APIError(404, f"The lora adapter '{body.lora_name}' cannot be found.", "lora_name")
        self.check_lora_owner(body.lora_name, owner)
        _, inner = self.loras.pop(body.lora_name)
        self.lora_owners.pop(body.lora_name, None)
        await self.llm.call_utility("remove_lora", inner)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    async def encode(
        self, text: str, add_special_tokens: bool, field: str = "prompt", params: TokenizeParams | None = None
    ) -> list[int]:
        """Tokenize on another thread: a long text takes longer than the event loop may be away.

        What cannot fit even if every token were the longest there is, is not tokenized at all.
        """
        limit = self.max_model_len * self.max_chars_per_token
        params = params or TokenizeParams(self.max_model_len)
        if len(text) > limit and params.max_length is None:
            raise common.InputError(
                f"{field}: {self.too_long}; {len(text):,} characters cannot fit into it, {limit:,} might"
            )
        return await asyncio.to_thread(params.encode, self.tokenizer, params.shorten(text, limit), add_special_tokens)

    def render_chat(self, body: ChatCompletionRequest | TokenizeRequest) -> str:
        """The text of a chat: the template decides whether tools and such wishes are in it. Raises InputError."""
        wishes = body.chat_template_kwargs or {}
        if {"self", "messages"} & wishes.keys():
            raise common.InputError("chat_template_kwargs: self and messages are no wishes")
        if (effort := getattr(body, "reasoning_effort", None)) is not None:
            wishes = {"reasoning_effort": effort, "enable_thinking": effort != "none", **wishes}
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
        messages = chat_template.messages_for_template(body.messages or ())
        ours = {"tools": tools, "add_generation_prompt": body.add_generation_prompt}
        if documents := getattr(body, "documents", None):
            ours["documents"] = documents
        render = functools.partial(self.tokenizer.render_chat, **{**wishes, **ours})
        return chat_template.left_open(render, messages) if body.continue_final_message else render(messages)

    def num_prompts(self, body: CompletionRequest | ChatCompletionRequest, n: int) -> int:
        """How many prompts a request has, `n` answers to each. Raises InputError if they can never be inside at once:
        before a hundred thousand of them are tokenized."""
        count = 1 if isinstance(body, ChatCompletionRequest) else len(as_list(body.prompt))
        if not count:
            raise common.InputError("prompt: must not be empty")
        bound = self.llm.admission.max_num_queued_reqs
        if bound is not None and count * n > bound:
            raise common.InputError(f"n: {count} prompts times {n} is more than this server ever holds ({bound})")
        return count

    async def prompts(self, body: CompletionRequest | ChatCompletionRequest) -> list[dict[str, Any]]:
        """Every prompt of a request as text and token ids. Raises InputError."""
        chat = isinstance(body, ChatCompletionRequest)
        given = [await away(body.is_large, self.render_chat, body)] if chat else as_list(body.prompt)
        # A chat template writes the special tokens itself; a plain prompt gets what the tokenizer puts around a text.
        special = not chat if body.add_special_tokens is None else body.add_special_tokens
        params = TokenizeParams(self.max_model_len, body.truncate_prompt_tokens, body.truncation_side)
        field, found = "messages" if chat else "prompt", []
        for prompt in given:
            if isinstance(prompt, str):
                text, ids = prompt, await self.encode(prompt, special, field, params)
            else:
                assert isinstance(prompt, list)
                text, ids = None, params.truncate(prompt)
            # Echoed is what was read, where vLLM repeats the whole text beside the offsets of a part.
            found.append({"prompt": None if len(ids) == params.max_length else text, "prompt_token_ids": ids})
        return found

    async def add(
        self, body: CompletionRequest | ChatCompletionRequest, name: str | None = None, owner: str | None = None
    ) -> Job:
        """Check everything, then hand it to the engine: all prompts of a request, or none of them.

        The answer's id ends with `name`, if the client has given it one. What is cached under a salt is `owner`'s.
        """
        model, llm = self.check_model(body.model), self.llm
        lora = self.loras.get(model)  # the adapter that this request means, whatever has its name later
        self.check_request(body)
        params = await away(body.is_large, self.check_params, body)
        if body.kv_transfer_params is not None:
            if not self.has_kv_connector:
                raise common.InputError("kv_transfer_params: this server was started without --kv-transfer-config")
            attach_params(params, body.kv_transfer_params)
        wanted = self.num_prompts(body, params.n) * params.n
        try:
            params, prompts, grammars, thinks = await self.prepare(body, params, wanted)
            if self.loras.get(model) != lora:
                raise APIError(404, f"The model `{model}` was unloaded or replaced while the request was read", "model")
            llm.admission.check(llm.num_unfinished, wanted)  # from here to the engine without an await
        except QueueOverflowError:
            if llm.stat_logger:
                llm.stat_logger.record_rejection(wanted)
            raise
        kind = "chatcmpl-" if isinstance(body, ChatCompletionRequest) else "cmpl-"
        request_id = kind + uuid.uuid4().hex  # what the engine calls it: two clients may think of the same name
        name = kind + (name or body.request_id or "") if name or body.request_id else request_id
        parsers = self.tool_call_parser or "hermes", self.reasoning_parser if thinks else None
        job = Job(name, model, body, params, [], grammars=grammars, parsers=parsers)
        about = {
            "priority": body.priority,
            "cache_salt": own_salt(owner, body.cache_salt) if body.cache_salt else None,
            "lora_name": lora and lora[1],
        }
        try:
            for i, prompt in enumerate(prompts):
                collector = llm.add_request(f"{request_id}-{i}", prompt, params, stream=bool(body.stream), **about)
                job.collectors.append(collector)
        except BaseException:
            self.forget(job)
            raise
        return job

    def check_request(self, body: CompletionRequest | ChatCompletionRequest) -> None:
        """What can be said at once against a request. Raises InputError or EngineDeadError."""
        if self.llm.dead:
            raise EngineDeadError(str(self.llm.dead))
        if body.stream_options is not None and not body.stream:
            raise common.InputError("stream_options: only allowed when stream is true")
        if body.stream and self.frontend.enable_force_include_usage:
            options = body.stream_options or StreamOptions()
            body.stream_options = options.model_copy(update={"include_usage": True})
        tools.check_tools(body, self.tool_call_parser, self.enable_auto_tool_choice)
        if body.priority != 0 and self.llm.ready.policy != "priority":
            raise common.InputError("priority: this server was started with --scheduling-policy fcfs; allowed: 0")
        if not -(2**63) <= body.priority < 2**63:
            raise common.InputError("priority: must fit in 64 bits")

    async def prepare(
        self, body: CompletionRequest | ChatCompletionRequest, params: SamplingParams, wanted: int
    ) -> tuple[SamplingParams, list[dict[str, Any]], Any, bool]:
        """What takes time: the guide of a constraint, and token ids. Parameters, prompts, a guide for each answer, and
        whether an answer begins with thinking. Raises InputError, QueueOverflowError.
        """
        with contextlib.ExitStack() as places:
            guide = None
            if found := await away(body.is_large, tools.structured_outputs, body):
                field, params.structured_outputs = found
                guide = await self.check_constraint(field, found[1], body, places, wanted)
            if params.bad_words:
                params = await asyncio.to_thread(token_rules.update_from_tokenizer, params, self.tokenizer)
            prompts = await self.check_prompts(body, params)
        thinks = self.thinks(body, prompts[0]["prompt"])
        if guide is None:
            return params, prompts, None, thinks
        begin = guide.start
        if thinks:  # the grammar is about the answer alone
            params.structured_outputs = (params.structured_outputs or {}) | {REASONING_END: reasoning.CLOSE}
            begin = functools.partial(start, params.structured_outputs, guide, await self.guide_queue.vocabulary())
        return params, prompts, collections.defaultdict(begin), thinks

    def thinks(self, body: CompletionRequest | ChatCompletionRequest, prompt: str | None) -> bool:
        """Whether an answer begins with thinking, as far as one can know: what the template has written behind the last
        message says it, or else the client's wish."""
        if self.reasoning_parser is None or not isinstance(body, ChatCompletionRequest):
            return False
        (last,) = chat_template.messages_for_template(body.messages[-1:])
        behind = (prompt or "").rpartition(last["content"] or "\0")[2] if body.add_generation_prompt else prompt or ""
        wishes = {"enable_thinking": body.reasoning_effort != "none"} | (body.chat_template_kwargs or {})
        said = reasoning.is_open(behind)
        return wishes["enable_thinking"] is not False if said is None else said

    async def check_prompts(
        self, body: CompletionRequest | ChatCompletionRequest, params: SamplingParams
    ) -> list[dict[str, Any]]:
        """Every prompt of a request, if there is room for an answer behind it. Raises InputError."""
        prompts = await self.prompts(body)
        for prompt in prompts:
            length = len(prompt["prompt_token_ids"])
            if error := prompt_length_error(length, self.max_model_len):
                error = f"{self.too_long}. {error}" if length else error
                raise common.InputError(f"{'messages' if hasattr(body, 'messages') else 'prompt'}: {error}")
            if params.max_tokens is not None and params.max_tokens > self.max_model_len:  # less ends with the context
                raise common.InputError(
                    f"max_tokens {params.max_tokens}: more than the {self.max_model_len} tokens of the whole context"
                )
        return prompts

    def check_params(self, body: CompletionRequest | ChatCompletionRequest) -> SamplingParams:
        """The part of a request that differs between the two APIs."""
        if isinstance(body, ChatCompletionRequest):
            if body.top_logprobs and not body.logprobs:
                raise common.InputError("top_logprobs: needs logprobs to be true")
            least, most = (-1, math.inf) if self.max_logprobs == -1 else (0, self.max_logprobs)
            if body.top_logprobs is not None and not least <= body.top_logprobs <= most:
                raise common.InputError(f"top_logprobs {body.top_logprobs}: must be from {least} to {most}")
            limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            params = limit_logprobs(sampling_params(body, limit, logprobs, self.sampling_defaults), self.max_logprobs)
            if tools.tool_choice(body) == "auto":  # to many models <tool_call> is a special token: it must be seen
                params.skip_special_tokens = False
            return params
        if body.suffix:
            raise common.InputError("suffix: not supported; this model cannot fill in the middle")
        if body.best_of not in (None, 1, body.n):
            raise common.InputError(f"best_of {body.best_of}: not supported (nor by vLLM's V1); allowed: 1, or n")
        limit = body.max_tokens
        if limit is None:  # a chat's null is all that is left; here it is 16
            limit = self.sampling_defaults.params.get("max_tokens", 16)
        limit = 1 if body.echo and limit == 0 else limit  # a token that nobody sees
        return limit_logprobs(sampling_params(body, limit, body.logprobs, self.sampling_defaults), self.max_logprobs)

    @functools.cached_property
    def guide_queue(self) -> Any:
        """Where guides are compiled, within 06b's limits and on other threads: no engine ever waits for a bad one."""
        config = self.llm.front.model_config
        about = self.tokenizer, config.vocab_size, tuple(config.eos_token_ids)
        return GuideQueue(functools.partial(vocabulary_of, *about))

    async def check_constraint(
        self, field: str, constraint: dict[str, Any], body: CommonRequest, places: contextlib.ExitStack, wanted: int
    ) -> Any:
        """Its guide. While it is compiled, the `wanted` sequences have their `places` inside. Raises InputError,
        QueueOverflowError."""
        try:
            key, guide = await self.guide_queue.look(constraint)
            if guide is None:
                places.enter_context(self.llm.admission.hold(self.llm.num_unfinished, wanted))
                guide = await self.guide_queue.compile(key)
            return guide
        except common.InputError as error:
            raise common.InputError(tools.constraint_error(field, str(error), body)) from None

    def forget(self, job: Job) -> None:
        """The end of a request, however it came."""
        self.llm.abort(collector.request_id for collector in job.collectors)

    # -- out --

    def check_answer(self, job: Job, index: int, answer: CompletionOutput) -> None:
        """Raises APIError: an answer, or this piece of it, has failed, or its grammar refuses it (06b, BROKEN)."""
        if answer.finish_reason == "error":
            what, _, why = str(answer.stop_reason).partition(": ")
            if what.startswith("lora_name"):  # its adapter is unloaded, or not what it was; this name is the engine's
                raise APIError(404, f"The model `{job.model}`: {why}", "model")
            raise APIError(500, str(answer.stop_reason))
        if job.grammars is not None and not all(map(job.grammars[index].accept_token, answer.token_ids)):
            raise APIError(500, BROKEN)

    def logprobs(self, job: Job, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        """Log probabilities in the shape of the API that was asked."""
        if job.params.logprobs is None or answer.logprobs is None:
            return None
        best, found = functools.partial(most_probable, job.params.logprobs), [*zip(answer.token_ids, answer.logprobs)]
        if by_id := job.body.return_tokens_as_token_ids:  # texts can be alike (half a character), ids cannot
            found = [
                (t, e and {i: dataclasses.replace(x, decoded_token=f"token_id:{i}") for i, x in e.items()})
                for t, e in found
            ]
        if isinstance(job.body, ChatCompletionRequest):
            return {
                "content": [
                    self.scored(t, entry[t]) | {"top_logprobs": [self.scored(*x) for x in best(entry)]}
                    for t, entry in found
                ]
            }
        # The first token of an echoed prompt has no entry: nothing predicts it. A character of several tokens stands
        # with the last of them, whatever is scored: only so do offsets count the text's characters.
        read = job.utf8.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace")).decode
        tokens = [read(self.token_bytes[t]) for t, _ in found]
        offsets = [*itertools.accumulate(map(len, tokens), initial=job.text_offsets.get(index, 0))]
        job.text_offsets[index], tokens = offsets.pop(), [f"token_id:{t}" for t, _ in found] if by_id else tokens
        return {
            "tokens": tokens,
            "token_logprobs": [entry and finite(entry[t]) for t, entry in found],
            "top_logprobs": [
                entry and by_text([*best(entry), (t, entry[t])], t, text) for (t, entry), text in zip(found, tokens)
            ],
            "text_offset": offsets,
        }

    def scored(self, token: int, x: Logprob) -> dict[str, Any]:
        """One token of a chat's log probabilities: its text as vLLM tells it, and its own bytes as OpenAI does."""
        return {"token": x.decoded_token, "logprob": finite(x), "bytes": list(self.token_bytes[token])}

    def choice(
        self, job: Job, index: int, answer: CompletionOutput, first: RequestOutput | None = None
    ) -> dict[str, Any]:
        """One answer, or one piece of it if the request streams; `first` is given with what begins an answer."""
        self.check_answer(job, index, answer)
        shown = self.echoed(job, first, answer) if first and getattr(job.body, "echo", False) else answer
        chat, by_id = isinstance(job.body, ChatCompletionRequest), job.body.return_token_ids
        content = {"logprobs": self.logprobs(job, index, shown), "finish_reason": answer.finish_reason}
        if answer.finish_reason is not None or not (chat and job.body.stream):
            content["stop_reason"] = answer.stop_reason
        content["token_ids"] = answer.token_ids if by_id else None
        if not chat:
            content["prompt_token_ids"] = first.prompt_token_ids if first and by_id else None
            if first and job.params.prompt_logprobs is not None and not job.body.stream:  # echo asks for them, too
                content["prompt_logprobs"] = scores(first)
            return {"index": index, "text": shown.text} | content
        reader = job.readers[index]
        message, calls = reader.read(answer.text, answer.finish_reason is not None), reader.calls
        if first:  # who says nothing beside a call or a thought has no content, else an empty one
            nothing = None if not job.body.stream and (calls.count or reader.reasoning) else ""
            message = {"role": self.role_of(job.body), "content": nothing} | message
        if calls.count and calls.choice in ("auto", "required") and answer.finish_reason == "stop":
            content["finish_reason"] = "tool_calls"  # for a named function OpenAI says "stop"
        if not job.body.stream:
            for call in message.get("tool_calls", ()):
                del call["index"]  # which call a piece belongs to: only streams say it
        return {"index": index, "delta" if job.body.stream else "message": message} | content

    def usage_of(self, job: Job) -> Usage:
        """Nothing yet; thoughts are counted in chats, where there is a parser of them."""
        counts = self.reasoning_parser and isinstance(job.body, ChatCompletionRequest)
        return Usage(reasoning=0 if counts else None)

    def role_of(self, body: CompletionRequest | ChatCompletionRequest) -> str:
        """Who answers: --response-role, or whoever's message goes on."""
        if isinstance(body, ChatCompletionRequest) and not body.add_generation_prompt:
            return body.messages[-1].role
        return self.response_role

    def envelope(
        self, job: Job, choices: list[dict], usage: dict | None = None, first: RequestOutput | None = None
    ) -> dict[str, Any]:
        """`first` is given with what begins a chat's answer, or is all of it."""
        kind = "text_completion"
        if isinstance(job.body, ChatCompletionRequest):
            kind = "chat.completion" + ".chunk" * bool(job.body.stream)
        found = {"id": job.request_id, "object": kind, "created": job.created, "model": job.model, "choices": choices}
        if not (job.body.stream and choices and choices[0]["finish_reason"] is None):  # in a stream: with its end
            found["system_fingerprint"] = self.system_fingerprint
        if first and isinstance(job.body, ChatCompletionRequest):
            found["prompt_token_ids"] = first.prompt_token_ids if job.body.return_token_ids else None
            found["prompt_text"] = first.prompt if job.body.return_prompt_text else None
        return found | {"usage": usage} if usage or job.wants_usage else found

    def told(self, usage: Usage) -> dict[str, Any]:
        """A `usage`, with what was cached unless the server says it does not tell."""
        found = usage.as_dict()
        if not self.frontend.enable_prompt_tokens_details:
            found["prompt_tokens_details"] = None
        return found

    def echoed(self, job: Job, output: RequestOutput, answer: CompletionOutput) -> CompletionOutput:
        """The answer behind its prompt, for a client that wants to read it again. If it wants no token, only that."""
        text = output.prompt if output.prompt is not None else self.tokenizer.decode(output.prompt_token_ids)
        token_ids, logprobs = output.prompt_token_ids, output.prompt_logprobs
        if job.body.max_tokens != 0:
            text, token_ids = text + answer.text, token_ids + answer.token_ids
            logprobs = answer.logprobs and [*(logprobs or ()), *answer.logprobs]
        return dataclasses.replace(answer, text=text, token_ids=token_ids, logprobs=logprobs)

    async def answer(self, job: Job) -> dict[str, Any]:
        """The whole answer at once. Aborts what is left if it is cancelled."""
        try:
            outputs = [await collector.get() for collector in job.collectors]
        finally:
            self.forget(job)
        usage, choices = self.usage_of(job), []
        for i, output in enumerate(outputs):
            usage.add_prompt(output)
            for answer in output.outputs:
                reader = job.readers[i * job.params.n + answer.index]
                usage.add_answer(reader, [self.token_bytes[t] for t in answer.token_ids])
                choices.append(self.choice(job, i * job.params.n + answer.index, answer, output))
        first = outputs[0] if isinstance(job.body, ChatCompletionRequest) else None
        found = self.envelope(job, choices, self.told(usage), first)
        if first and job.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = scores(outputs[0])
        return in_full(found | {"kv_transfer_params": outputs[0].kv_transfer_params or None})

    async def stream(self, job: Job) -> AsyncIterator[str]:
        """The answer as server-sent events: `data: {JSON}`, a blank line, and in the end `data: [DONE]`."""
        usage, seen, prompts, held = self.usage_of(job), set(), set(), {}
        chat = isinstance(job.body, ChatCompletionRequest)
        options = job.body.stream_options or StreamOptions()
        counted = options.include_usage and options.continuous_usage_stats
        interval = max(job.body.stream_interval or 1, self.frontend.stream_interval)
        try:
            async for i, output in merged(job.collectors):
                if i in held:
                    merge_outputs(held[i], output)
                    output = held.pop(i)
                if i not in prompts:
                    prompts.add(i)
                    usage.add_prompt(output)
                for piece in output.outputs:
                    index = i * job.params.n + piece.index
                    fewest = 0 if index not in seen or piece.finish_reason else interval
                    if len(piece.token_ids) < fewest:  # the client wants fewer and larger pieces
                        held.setdefault(i, dataclasses.replace(output, outputs=[])).outputs.append(piece)
                        continue
                    first = None if index in seen else output
                    seen.add(index)
                    if first and chat:  # OpenAI's streams begin with the role and no text
                        opening = CompletionOutput(piece.index, "", [])
                        now = self.told(usage) if counted else None
                        yield event(self.envelope(job, [self.choice(job, index, opening, first)], now, first))
                        first = None
                    usage.add_answer(job.readers[index], [self.token_bytes[t] for t in piece.token_ids])
                    choice = self.choice(job, index, piece, first)
                    says = choice.get("text") or any(choice.get("delta", {}).values())
                    if not (says or piece.finish_reason or piece.logprobs or job.body.return_token_ids):
                        continue  # half a character, or what may become a stop string or a call: nothing to say yet
                    yield event(self.envelope(job, [choice], self.told(usage) if counted else None))
            if options.include_usage:
                yield event(self.envelope(job, [], self.told(usage)))
        except Exception as error:  # the status line is long gone: the stream itself has to say it
            yield event(as_api_error(error).body())
        yield "data: [DONE]\n\n"
