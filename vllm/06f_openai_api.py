"""06f · The OpenAI API: JSON in, events out, and nothing in between that anybody can break.

The question: thousands of programs speak one HTTP dialect. What must a server understand so that they work unchanged,
and what must it answer to all that is wrong, too large, too much, or suddenly no longer wanted?

The mechanism:
  1. A gate in front: the key, and the size of the body. Nothing behind it sees more than 4 MiB.
  2. Fields are types: `max_tokens: "5"` is an error that names the field. So is a field that nobody knows.
  3. Then meaning: ranges, one constraint and not two, a prompt that can fit. All of it before the engine hears a word.
  4. Then room: as many sequences as the bound allows, else 503 and Retry-After.
  5. A prompt becomes a request to 06e's `AsyncLLM`, and a mailbox. Several prompts are several mailboxes.
  6. A streamed answer is server-sent events: `data: {…}`, a blank line, `data: [DONE]`. Half a character sends nothing.
  7. A client that hangs up, streaming or not, cancels a task; a task's end, however it came, aborts the request.
  8. Every error has one shape. After the status line is sent, the stream itself carries it.

Numbers to remember: a token of five letters travels in 250 bytes; eight kinds of refusal cost the engine nothing.

How to run:
  uv run python vllm/06f_openai_api.py                        the whole story, against an app in this process
  uv run python vllm/06f_openai_api.py --max-num-queued-reqs 1    break it: the second client is turned away
  uv run python vllm/06f_openai_api.py --no-abort             break it: nobody tells the engine that the client left
  uv run python vllm/06f_openai_api.py --bench                what validation and events cost, measured longer

Read for this: OpenAI's API reference; vLLM 0.32 `entrypoints/openai/` and `entrypoints/serve/exception_handling/`; the
HTML standard on server-sent events; RFC 9110 on status codes; the ASGI specification.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import codecs
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import secrets
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama

KEY = "06f_openai_api"

from engine.serving.openai import protocol  # requests, tools and errors
from engine.serving.openai import responses as responses_api  # chats in OpenAI's newer form

async_engine = common.lesson("06e_async_engine")
offline = common.lesson("04b_offline_engine")
scheduling = common.lesson("04_continuous_batching")
AsyncLLM, EngineDeadError = async_engine.AsyncLLM, async_engine.EngineDeadError
QueueOverflowError, RequestOutputCollector = async_engine.QueueOverflowError, async_engine.RequestOutputCollector
RequestOutput, SamplingParams = offline.RequestOutput, offline.SamplingParams
SamplingDefaults = offline.SamplingDefaults
TokenizeParams = offline.token_rules.TokenizeParams
APIError, ErrorResponse, StreamOptions = protocol.APIError, protocol.ErrorResponse, protocol.StreamOptions
CommonRequest, CompletionRequest = protocol.CommonRequest, protocol.CompletionRequest
ChatCompletionRequest, ToolCallReader = protocol.ChatCompletionRequest, protocol.ToolCallReader
away = protocol.away
TokenizeRequest, DetokenizeRequest = protocol.TokenizeRequest, protocol.DetokenizeRequest
ResponsesRequest = responses_api.ResponsesRequest
LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest = protocol.LoadLoRAAdapterRequest, protocol.UnloadLoRAAdapterRequest

VERSION = "0.1.0"
MAX_BODY_BYTES = 4 << 20  # a request of the longest context is a few hundred kilobytes
MAX_STOP_STRINGS, MAX_N = protocol.MAX_STOP_STRINGS, 128
READ_IN_THEIR_OWN_WAY = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs"}


# --- What we want, without cleverness ---------------------------------------------------------------------------------


def read_events(body: str) -> list[Any]:
    """A whole stream, read when it is over: what a client must have understood in the end."""
    blocks = [block.removeprefix("data: ") for block in body.split("\n\n") if block]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


def text_of(events: Sequence[Any], index: int = 0) -> str:
    """The text of one answer in a stream."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    pieces = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices if c["index"] == index]
    return "".join(pieces)


def as_api_error(error: Exception, body: Any = None) -> APIError:
    """What a client is told about an exception; `body` is its request."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, common.InputError):
        text = re.sub("^prompt_token_ids", "prompt", str(error))  # the engine's name for it
        if getattr(body, "max_completion_tokens", None) is not None:
            text = re.sub("^max_tokens", "max_completion_tokens", text)
        first = text.split(":")[0].split(" ")[0]
        kinds = (CompletionRequest, ChatCompletionRequest, ResponsesRequest, DetokenizeRequest, LoadLoRAAdapterRequest)
        return APIError(400, text, first if any(first in kind.model_fields for kind in kinds) else None)
    if isinstance(error, QueueOverflowError):
        return APIError(503, str(error), headers={"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        return APIError(500, f"EngineCore is dead: {error}")
    traceback.print_exception(error)
    return APIError(500, "internal error; the server's log has the details")


# --- 1. From a request's fields to the engine's -----------------------------------------------------------------------


def sampling_params(body: CommonRequest, max_tokens: int | None, logprobs: int | None,
                    defaults: SamplingDefaults) -> SamplingParams:  # fmt: skip
    """Lesson 04's parameters from a request's, or by default. Raises InputError."""
    names = {field.name for field in dataclasses.fields(SamplingParams)} - READ_IN_THEIR_OWN_WAY
    more = defaults.params | {name: value for name in names if (value := getattr(body, name, None)) is not None}
    more["max_tokens"] = defaults.params.get("max_tokens") if max_tokens is None else max_tokens
    if defaults.max_tokens_limit is not None:
        more["max_tokens"] = min(more["max_tokens"], defaults.max_tokens_limit)
    if body.n is not None and not 1 <= body.n <= MAX_N:
        raise common.InputError(f"n {body.n}: must be a whole number from 1 to {MAX_N}")
    if sum(map(len, [body.stop] if isinstance(body.stop, str) else body.stop or ())) > protocol.MAX_STOP_CHARS:
        raise common.InputError(f"stop: more than {protocol.MAX_STOP_CHARS:,} characters in all")
    listed = sum(len(x) for x in (body.stop_token_ids, body.allowed_token_ids, body.logit_bias) if x)
    if listed * (body.n or 1) > protocol.MAX_IDS:  # each answer's request carries its own
        raise common.InputError(f"n {body.n}: times {listed:,} token ids is more than {protocol.MAX_IDS:,}")
    if body.logit_bias:
        try:
            more["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        except ValueError:
            raise common.InputError("logit_bias: its keys must be token ids, as strings") from None
    if body.prompt_logprobs and body.stream:
        raise common.InputError("prompt_logprobs: only when stream is false; echo with logprobs streams them")
    scored = body.logprobs if body.prompt_logprobs is None and getattr(body, "echo", False) else body.prompt_logprobs
    return SamplingParams(logprobs=logprobs, prompt_logprobs=scored, **more)


def companion(name: str, flag: str) -> Any:
    """A companion lesson that a flag or field asks for. Raises InputError if its file is not there."""
    if not (common.HERE / f"{name}.py").is_file():
        raise common.InputError(f"{flag}: needs vllm/{name}.py, which is not there")
    return common.lesson(name)


def own_salt(owner: str | None, salt: str) -> str:
    """A salt that only requests with the same key can name: what is cached under it tells nobody else of its prompt."""
    return hashlib.sha256(f"{owner} {salt}".encode()).hexdigest()


class OpenAIServing:
    """Requests to prompts and parameters, outputs to answers: what the two APIs share, and where they differ."""

    root: str | None = None  # the model's folder or hub id: clients load its tokenizer from there
    system_fingerprint: str | None = None  # another one says: the same seed may now bring another answer
    runtime_loras = False  # may clients load and unload adapters?
    has_kv_connector = False  # does anybody read kv_transfer_params? (lesson 08)
    tool_call_parser: str | None = None  # "hermes": how the model writes a call of its own accord
    enable_auto_tool_choice = False

    def __init__(self, llm: AsyncLLM, names: Sequence[str], loras: dict[str, str] | None = None) -> None:
        self.llm, self.names, self.created = llm, names, int(time.time())
        # Adapters by name: their path, and what the engine calls them. A name that is loaded again gets a new one:
        # the prefix cache must not take what the old weights computed for the new.
        self.loras = {name: (path, name) for name, path in (loras or {}).items()}
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
        if name is not None and name not in known:
            raise APIError(404, f"The model `{name}` does not exist; this server has: {', '.join(known)}", "model")
        return name or self.names[0]

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

    async def encode(self, text: str, add_special_tokens: bool, field: str = "prompt",
                     params: TokenizeParams | None = None) -> list[int]:  # fmt: skip
        """Tokenize on another thread: a long text takes longer than the event loop may be away.

        What cannot fit even if every token were the longest there is, is not tokenized at all.
        """
        limit = self.max_model_len * self.max_chars_per_token
        params = params or TokenizeParams(self.max_model_len)
        if len(text) > limit and params.max_length is None:
            raise common.InputError(f"{field}: {self.too_long}; {len(text):,} characters cannot fit into it, {limit:,} "
                                    "might")  # fmt: skip
        return await asyncio.to_thread(params.encode, self.tokenizer, params.shorten(text, limit), add_special_tokens)

    def render_chat(self, body: ChatCompletionRequest | TokenizeRequest) -> str:
        """The text of a chat: the template decides whether tools and such wishes are in it. Raises InputError."""
        wishes = body.chat_template_kwargs or {}
        if {"self", "messages"} & wishes.keys():
            raise common.InputError("chat_template_kwargs: self and messages are no wishes")
        if (effort := getattr(body, "reasoning_effort", None)) is not None:
            wishes = {"reasoning_effort": effort, "enable_thinking": effort != "none", **wishes}
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
        messages = protocol.messages_for_template(body.messages)
        ours = {"tools": tools, "add_generation_prompt": body.add_generation_prompt}
        if documents := getattr(body, "documents", None):
            ours["documents"] = documents
        render = functools.partial(self.tokenizer.render_chat, **{**wishes, **ours})
        return protocol.left_open(render, messages) if body.continue_final_message else render(messages)

    def num_prompts(self, body: CompletionRequest | ChatCompletionRequest, n: int) -> int:
        """How many prompts a request has, `n` answers to each. Raises InputError if they can never be inside at once:
        before a hundred thousand of them are tokenized."""
        count = 1 if isinstance(body, ChatCompletionRequest) else len(offline.as_list(body.prompt))
        if not count:
            raise common.InputError("prompt: must not be empty")
        bound = self.llm.admission.max_num_queued_reqs
        if bound is not None and count * n > bound:
            raise common.InputError(f"n: {count} prompts times {n} is more than this server ever holds ({bound})")
        return count

    async def prompts(self, body: CompletionRequest | ChatCompletionRequest) -> list[dict[str, Any]]:
        """Every prompt of a request as text and token ids. Raises InputError."""
        chat = isinstance(body, ChatCompletionRequest)
        given = [await away(body.is_large, self.render_chat, body)] if chat else offline.as_list(body.prompt)
        # A chat template writes the special tokens itself; a plain prompt gets what the tokenizer puts around a text.
        special = not chat if body.add_special_tokens is None else body.add_special_tokens
        params = TokenizeParams(self.max_model_len, body.truncate_prompt_tokens, body.truncation_side)
        field, found = "messages" if chat else "prompt", []
        for prompt in given:
            text = prompt if isinstance(prompt, str) else None
            ids = params.truncate(prompt) if text is None else await self.encode(text, special, field, params)
            # Echoed is what was read, where vLLM repeats the whole text beside the offsets of a part.
            found.append({"prompt": None if len(ids) == params.max_length else text, "prompt_token_ids": ids})
        return found

    async def add(self, body: CompletionRequest | ChatCompletionRequest, name: str | None = None,
                  owner: str | None = None) -> Job:  # fmt: skip
        """Check everything, then hand it to the engine: all prompts of a request, or none of them.

        The answer's id ends with `name`, if the client has given it one. What is cached under a salt is `owner`'s.
        """
        model, llm = self.check_model(body.model), self.llm
        lora = self.loras.get(model)  # the adapter that this request means, whatever has its name later
        if llm.dead:
            raise EngineDeadError(str(llm.dead))
        if body.stream_options is not None and not body.stream:
            raise common.InputError("stream_options: only allowed when stream is true")
        protocol.check_tools(body, self.tool_call_parser, self.enable_auto_tool_choice)
        if body.priority != 0 and llm.ready.policy != "priority":
            raise common.InputError("priority: this server was started with --scheduling-policy fcfs; allowed: 0")
        if not -(2**63) <= body.priority < 2**63:
            raise common.InputError("priority: must fit in 64 bits")
        params = await away(body.is_large, self.check_params, body)
        if body.kv_transfer_params is not None:
            if not self.has_kv_connector:
                raise common.InputError("kv_transfer_params: this server was started without --kv-transfer-config")
            from engine.kv_transfer import connectors

            connectors.attach_params(params, body.kv_transfer_params)
        wanted = self.num_prompts(body, params.n) * params.n
        try:
            with contextlib.ExitStack() as places:
                grammars = None
                if found := await away(body.is_large, protocol.structured_outputs, body):
                    params.structured_outputs = found[1]
                    guide = await self.check_constraint(*found, body, places, wanted)
                    grammars = guide and collections.defaultdict(guide.start)
                if params.bad_words:
                    params = await asyncio.to_thread(offline.token_rules.update_from_tokenizer, params, self.tokenizer)
                prompts = await self.check_prompts(body, params)
            if self.loras.get(model) != lora:
                raise APIError(404, f"The model `{model}` was unloaded or replaced while the request was read", "model")
            llm.admission.check(llm.num_unfinished, wanted)  # from here to the engine without an await
        except QueueOverflowError:
            if llm.stat_logger:
                llm.stat_logger.record_rejection(wanted)
            raise
        kind = "chatcmpl-" if isinstance(body, ChatCompletionRequest) else "cmpl-"
        request_id = kind + uuid.uuid4().hex  # what the engine calls it: two clients may think of the same name
        name = kind + (name or body.request_id) if name or body.request_id else request_id
        job = Job(name, model, body, params, [], grammars=grammars)
        salt = body.cache_salt and own_salt(owner, body.cache_salt)
        try:
            for i, prompt in enumerate(prompts):
                collector = llm.add_request(f"{request_id}-{i}", prompt, params, stream=bool(body.stream),
                                            priority=body.priority, cache_salt=salt,
                                            lora_name=lora and lora[1])  # fmt: skip
                job.collectors.append(collector)
        except BaseException:
            self.forget(job)
            raise
        return job

    async def check_prompts(self, body: CompletionRequest | ChatCompletionRequest,
                            params: SamplingParams) -> list[dict[str, Any]]:  # fmt: skip
        """Every prompt of a request, if there is room for an answer behind it. Raises InputError."""
        prompts = await self.prompts(body)
        for prompt in prompts:
            length = len(prompt["prompt_token_ids"])
            if error := scheduling.prompt_length_error(length, self.max_model_len):
                error = f"{self.too_long}. {error}" if length else error
                raise common.InputError(f"{'messages' if hasattr(body, 'messages') else 'prompt'}: {error}")
            if params.max_tokens is not None and params.max_tokens > self.max_model_len:  # less ends with the context
                raise common.InputError(f"max_tokens {params.max_tokens}: more than the {self.max_model_len} tokens of "
                                        "the whole context")  # fmt: skip
        return prompts

    def check_params(self, body: CompletionRequest | ChatCompletionRequest) -> SamplingParams:
        """The part of a request that differs between the two APIs."""
        if isinstance(body, ChatCompletionRequest):
            if body.top_logprobs and not body.logprobs:
                raise common.InputError("top_logprobs: needs logprobs to be true")
            if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
                raise common.InputError(f"top_logprobs {body.top_logprobs}: must be from 0 to 20")
            limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            params = sampling_params(body, limit, logprobs, self.sampling_defaults)
            if protocol.tool_choice(body) == "auto":  # to many models <tool_call> is a special token: it must be seen
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
        return sampling_params(body, limit, body.logprobs, self.sampling_defaults)

    @functools.cached_property
    def guide_queue(self) -> Any:
        """Where guides are compiled, within 06b's limits and on other threads: no engine ever waits for a bad one."""
        guided, config = companion("06b_guided_decoding", "structured_outputs"), self.llm.front.model.config
        about = self.tokenizer, config.vocab_size, tuple(config.eos_token_ids)
        from engine.sampling.guided import guide_queue as queue

        return queue.GuideQueue(functools.partial(guided.vocabulary_of, *about))

    async def check_constraint(self, field: str, constraint: dict[str, Any], body: CommonRequest,
                               places: contextlib.ExitStack, wanted: int) -> Any:  # fmt: skip
        """Its guide. While it is compiled, the `wanted` sequences have their `places` inside. Raises InputError,
        QueueOverflowError."""
        try:
            key, guide = await self.guide_queue.look(constraint)
            if guide is None:
                places.enter_context(self.llm.admission.hold(self.llm.num_unfinished, wanted))
                guide = await self.guide_queue.compile(key)
            return guide
        except common.InputError as error:
            raise common.InputError(protocol.constraint_error(field, str(error), body)) from None

    def forget(self, job: Job) -> None:
        """The end of a request, however it came."""
        self.llm.abort(collector.request_id for collector in job.collectors)

    # -- out --

    def check_answer(self, job: Job, index: int, answer: offline.CompletionOutput) -> None:
        """Raises APIError: an answer, or this piece of it, has failed, or its grammar refuses it (06b, BROKEN)."""
        if answer.finish_reason == "error":
            what, _, why = str(answer.stop_reason).partition(": ")
            if what.startswith("lora_name"):  # its adapter is unloaded, or not what it was; this name is the engine's
                raise APIError(404, f"The model `{job.model}`: {why}", "model")
            raise APIError(500, str(answer.stop_reason))
        if job.grammars is not None and not all(map(job.grammars[index].accept_token, answer.token_ids)):
            raise APIError(500, companion("06b_guided_decoding", "structured_outputs").BROKEN)

    def logprobs(self, job: Job, index: int, answer: offline.CompletionOutput) -> dict[str, Any] | None:
        """Log probabilities in the shape of the API that was asked."""
        if job.params.logprobs is None or answer.logprobs is None:
            return None
        best, found = functools.partial(most_probable, job.params.logprobs), [*zip(answer.token_ids, answer.logprobs)]
        if by_id := job.body.return_tokens_as_token_ids:  # texts can be alike (half a character), ids cannot
            found = [(t, e and {i: dataclasses.replace(x, decoded_token=f"token_id:{i}") for i, x in e.items()})
                     for t, e in found]  # fmt: skip
        if isinstance(job.body, ChatCompletionRequest):
            return {"content": [self.scored(t, entry[t]) | {"top_logprobs": [self.scored(*x) for x in best(entry)]}
                                for t, entry in found]}  # fmt: skip
        # The first token of an echoed prompt has no entry: nothing predicts it. A character of several tokens stands
        # with the last of them, whatever is scored: only so do offsets count the text's characters.
        read = job.utf8.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace")).decode
        tokens = [read(self.token_bytes[t]) for t, _ in found]
        offsets = [*itertools.accumulate(map(len, tokens), initial=job.text_offsets.get(index, 0))]
        job.text_offsets[index], tokens = offsets.pop(), [f"token_id:{t}" for t, _ in found] if by_id else tokens
        return {
            "tokens": tokens, "token_logprobs": [entry and finite(entry[t]) for t, entry in found],
            "top_logprobs": [entry and by_text([*best(entry), (t, entry[t])], t, text)
                             for (t, entry), text in zip(found, tokens)],
            "text_offset": offsets,
        }  # fmt: skip

    def scored(self, token: int, x: offline.Logprob) -> dict[str, Any]:
        """One token of a chat's log probabilities: its text as vLLM tells it, and its own bytes as OpenAI does."""
        return {"token": x.decoded_token, "logprob": finite(x), "bytes": list(self.token_bytes[token])}

    def choice(self, job: Job, index: int, answer: offline.CompletionOutput,
               first: RequestOutput | None = None) -> dict[str, Any]:  # fmt: skip
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
            if first and job.body.prompt_logprobs is not None and not job.body.stream:
                content["prompt_logprobs"] = scores(first)
            return {"index": index, "text": shown.text} | content
        reader = job.readers[index]
        message = reader.read(answer.text, answer.finish_reason is not None)
        if first:  # as in vLLM: who says nothing beside a call of their own has no content, else an empty one
            nothing = None if reader.choice == "auto" and reader.count else ""
            message = {"role": "assistant", "content": nothing} | message
        if reader.count and reader.choice in ("auto", "required") and answer.finish_reason == "stop":
            content["finish_reason"] = "tool_calls"  # for a named function OpenAI says "stop"
        if not job.body.stream:
            for call in message.get("tool_calls", ()):
                del call["index"]  # which call a piece belongs to: only streams say it
        return {"index": index, "delta" if job.body.stream else "message": message} | content

    def envelope(self, job: Job, choices: list[dict], usage: dict | None = None,
                 first: RequestOutput | None = None) -> dict[str, Any]:  # fmt: skip
        """`first` is given with what begins a chat's answer, or is all of it."""
        chat = isinstance(job.body, ChatCompletionRequest)
        kind = "chat.completion" + ".chunk" * bool(job.body.stream) if chat else "text_completion"
        found = {"id": job.request_id, "object": kind, "created": job.created, "model": job.model, "choices": choices}
        if not (job.body.stream and choices and choices[0]["finish_reason"] is None):  # in a stream: with its end
            found["system_fingerprint"] = self.system_fingerprint
        if first:
            found["prompt_token_ids"] = first.prompt_token_ids if job.body.return_token_ids else None
            found["prompt_text"] = first.prompt if job.body.return_prompt_text else None
        return found | {"usage": usage} if usage or job.wants_usage else found

    def echoed(self, job: Job, output: RequestOutput, answer: offline.CompletionOutput) -> offline.CompletionOutput:
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
        usage, choices = Usage(), []
        for i, output in enumerate(outputs):
            usage.add_prompt(output)
            for answer in output.outputs:
                usage.completion += len(answer.token_ids)
                choices.append(self.choice(job, i * job.params.n + answer.index, answer, output))
        first = outputs[0] if isinstance(job.body, ChatCompletionRequest) else None
        found = self.envelope(job, choices, usage.as_dict(), first)
        if first and job.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = scores(outputs[0])
        return protocol.in_full(found | {"kv_transfer_params": outputs[0].kv_transfer_params or None})

    async def stream(self, job: Job) -> AsyncIterator[str]:
        """The answer as server-sent events: `data: {JSON}`, a blank line, and in the end `data: [DONE]`."""
        usage, seen, prompts, held = Usage(), set(), set(), {}
        chat = isinstance(job.body, ChatCompletionRequest)
        options = job.body.stream_options or StreamOptions()
        counted = options.include_usage and options.continuous_usage_stats
        try:
            async for i, output in merged(job.collectors):
                if i in held:
                    async_engine.merge_outputs(held[i], output)
                    output = held.pop(i)
                if i not in prompts:
                    prompts.add(i)
                    usage.add_prompt(output)
                for piece in output.outputs:
                    index = i * job.params.n + piece.index
                    fewest = 0 if index not in seen or piece.finish_reason else job.body.stream_interval or 0
                    if len(piece.token_ids) < fewest:  # the client wants fewer and larger pieces
                        held.setdefault(i, dataclasses.replace(output, outputs=[])).outputs.append(piece)
                        continue
                    first = None if index in seen else output
                    seen.add(index)
                    if first and chat:  # OpenAI's streams begin with the role and no text
                        opening = offline.CompletionOutput(piece.index, "", [])
                        now = usage.as_dict() if counted else None
                        yield event(self.envelope(job, [self.choice(job, index, opening, first)], now, first))
                        first = None
                    usage.completion += len(piece.token_ids)
                    choice = self.choice(job, index, piece, first)
                    says = choice.get("text") or any(choice.get("delta", {}).values())
                    if not (says or piece.finish_reason or piece.logprobs or job.body.return_token_ids):
                        continue  # half a character, or what may become a stop string or a call: nothing to say yet
                    yield event(self.envelope(job, [choice], usage.as_dict() if counted else None))
            if options.include_usage:
                yield event(self.envelope(job, [], usage.as_dict()))
        except Exception as error:  # the status line is long gone: the stream itself has to say it
            yield event(as_api_error(error).body())
        yield "data: [DONE]\n\n"


@dataclass
class Job:
    """One HTTP request inside the engine: a prompt is a collector, and n answers to it come to the same one."""

    request_id: str
    model: str
    body: CompletionRequest | ChatCompletionRequest
    params: SamplingParams
    collectors: list[RequestOutputCollector]
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    text_offsets: dict[int, int] = dataclasses.field(default_factory=dict)  # where an answer's next token begins
    grammars: dict[int, Any] | None = None  # what each answer must match, as far as it has come (companion 06b)
    utf8: dict[int, Any] = dataclasses.field(default_factory=dict)  # decoders: what of a character is there already

    def __post_init__(self) -> None:  # what has been understood of each answer so far
        self.readers = collections.defaultdict(functools.partial(ToolCallReader, self.body))

    @property
    def wants_usage(self) -> bool:
        """OpenAI's streams carry `usage: null` in every chunk but the last, if usage was asked for."""
        return bool(self.body.stream and self.body.stream_options and self.body.stream_options.include_usage)


@dataclass
class Usage:
    """Tokens of one HTTP request, whatever its number of prompts and answers."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add_prompt(self, output: RequestOutput) -> None:
        self.prompt += len(output.prompt_token_ids)
        self.cached += output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion,
                "total_tokens": self.prompt + self.completion,
                "prompt_tokens_details": {"cached_tokens": self.cached}}  # fmt: skip


def finite(x: offline.Logprob) -> float:
    """JSON has no infinity."""
    return max(x.logprob, -9999.0)


def most_probable(k: int, entry: dict[int, offline.Logprob]) -> list[tuple[int, offline.Logprob]]:
    """The k best of what was reported for one position, best first; what was sampled may be none of them."""
    return sorted(((t, x) for t, x in entry.items() if x.rank <= k), key=lambda item: item[1].rank)


def by_text(entries: Sequence[tuple[int, offline.Logprob]], chosen: int, its_text: str) -> dict[str, float]:
    """Log probabilities as completions have them, by text: of several tokens with one text, the most probable counts.

    (In vLLM 0.32 it is the one that comes last.) `entries` are given best first; `its_text` is what `chosen` has added
    to the answer.
    """
    found: dict[str, float] = {}
    for token, x in entries:
        found.setdefault(its_text if token == chosen else x.decoded_token, finite(x))
    return found


def scores(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
    """Log probabilities of a prompt's tokens in vLLM's form: by token id, and null for the first one."""
    return [entry and {str(t): {"logprob": finite(x), "rank": x.rank, "decoded_token": x.decoded_token}
                       for t, x in entry.items()}
            for entry in output.prompt_logprobs or ()]  # fmt: skip


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def merged(collectors: Sequence[RequestOutputCollector]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """News of several prompts as they come, each with its prompt's index."""
    waiting = {asyncio.create_task(collector.get()): i for i, collector in enumerate(collectors)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i, output = waiting.pop(task), task.result()
                if not output.finished:
                    waiting[asyncio.create_task(collectors[i].get())] = i
                yield i, output
    finally:
        for task in waiting:
            task.cancel()


# --- 2. HTTP ----------------------------------------------------------------------------------------------------------


class Gate:
    """What happens before FastAPI sees a request: the key, and the size of the body (ASGI middleware)."""

    PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/debug/")

    def __init__(self, app: Any, api_keys: Sequence[str]) -> None:
        self.app, self.api_keys = app, [key.encode() for key in api_keys]
        self.owners = [hashlib.sha256(key).hexdigest() for key in self.api_keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if not scope["path"].startswith("/"):  # through some proxies a target comes as a whole URL (RFC 9112, 3.2.2)
            scope = {**scope, "path": "/" + scope["path"].partition("://")[2].partition("/")[2]}
        if self.api_keys and scope["method"] != "OPTIONS" and scope["path"].startswith(self.PROTECTED):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # Comparing takes the same time however many characters are right, so it tells nobody how close they are.
            right = [owner for key, owner in zip(self.api_keys, self.owners) if secrets.compare_digest(given, key)]
            if scheme.lower() != b"bearer" or not right:
                error = APIError(401, "Unauthorized: send the header Authorization: Bearer <api key>",
                                 headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
                return await refuse(send, error)
            scope = {**scope, "owner": right[0]}
        if {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys():  # a proxy may read the other
            error = APIError(400, "Content-Length and Transfer-Encoding: one of them", headers={"Connection": "close"})
            return await refuse(send, error)
        body, total, more = bytearray(), 0, True
        while more and total <= 16 * MAX_BODY_BYTES:  # an over-long body is read to its end, and dropped: then the
            message = await receive()  # client is ready to hear why
            if message["type"] == "http.disconnect":
                return None
            more, total = message.get("more_body", False), total + len(message.get("body", b""))
            if total <= MAX_BODY_BYTES:
                body += message.get("body", b"")
        if total > MAX_BODY_BYTES:
            return await refuse(send, APIError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes"))
        held = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Any:
            return held.pop() if held else await receive()

        return await self.app(scope, replay, send)


async def refuse(send: Any, error: APIError) -> None:
    """Answer an ASGI request with the error, before any route has seen it."""
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def build_app(serving: OpenAIServing, api_keys: Sequence[str] = (), debug: bool = False) -> Any:
    """The routes. FastAPI is loaded here and not before, so that everybody else may import this file cheaply."""
    global HTTPRequest, Response  # FastAPI looks annotations up among a module's names
    import fastapi
    from fastapi import Request as HTTPRequest
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException

    from engine.serving.openai import request_bodies as bodies

    llm = serving.llm
    failures = {status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 500, 503)}
    app = fastapi.FastAPI(title="vLLM, from first principles", version=VERSION, docs_url=None, redoc_url=None)
    app.router.route_class = bodies.BodyRoute
    post = functools.partial(app.post, responses={**failures, 422: {"description": "never: such errors are 400"}})
    get = functools.partial(app.get, responses={status: failures[status] for status in (400, 401, 404, 500, 503)})

    def error_response(error: APIError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HTTPRequest, error: RequestValidationError) -> Response:
        first = max(error.errors(), key=lambda x: len(x["loc"]))  # of several kinds, the one that was meant most likely
        if first["type"] == "json_invalid":
            problem = first["ctx"]["error"].removesuffix(" at")  # "Unterminated string starting at"
            return error_response(APIError(400, f"the body is not JSON: {problem} at {first['loc'][-1]}"))
        where = [str(part) for part in first["loc"][1:2]]
        where += [str(x) for x in first["loc"][2:] if not re.match(r"[A-Z]|str$|[\w-]+\[", str(x))]  # types: no fields
        text = first["msg"].removeprefix("Value error, ")
        if where:
            text = f"{'.'.join(where)}: {text}"
        elif first["type"] != "string_unicode":  # which is about a field's name
            is_json = bodies.says_json(request)
            text = "the body must be one JSON object" if is_json else "Content-Type: must be application/json"
        return error_response(APIError(400, f"invalid request: {text}", where[0] if where else None))

    @app.exception_handler(HTTPException)
    async def http_error(request: HTTPRequest, error: HTTPException) -> Response:
        text = f"{error.detail}: {request.method} {request.url.path}"
        if error.status_code == 400:  # FastAPI could not read the body, and does not say why
            text = ("the body is not JSON that can be read: it must be UTF-8, not nested too deeply, without numbers "
                    "of thousands of digits")  # fmt: skip
        return error_response(APIError(error.status_code, text, None, error.headers))

    for kind in (APIError, common.InputError, QueueOverflowError, EngineDeadError, Exception):

        @app.exception_handler(kind)
        async def other(request: HTTPRequest, error: Exception) -> Response:
            return error_response(as_api_error(error))

    class EventStream(StreamingResponse):
        """A streamed answer that aborts its request when it is over, even if it never began."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self.forget()

    def owner_of(request: HTTPRequest) -> str | None:
        """Whose key it came with: what is kept between requests is found again with the same one."""
        return request.scope.get("owner")

    async def respond(body: Any, request: HTTPRequest, api: Any = serving) -> Response:
        name = request.headers.get("x-request-id")
        if name and len(name) > protocol.MAX_NAME:
            raise common.InputError(f"X-Request-Id: more than {protocol.MAX_NAME} characters")
        gone = asyncio.ensure_future(disconnected(request))
        try:
            job = await unless(gone, api.add(body, name, owner_of(request)), api.forget)
            if job is not None and body.stream:
                response = EventStream(api.stream(job), media_type="text/event-stream")
                response.forget = functools.partial(api.forget, job)
                return response
            found = job and await unless(gone, api.answer(job), lambda answer: None)
        except Exception as error:
            return error_response(as_api_error(error, body))
        finally:
            gone.cancel()
        if found is None:
            return Response(status_code=499)  # nobody will read it
        return await away(body.is_large, JSONResponse, found)  # a response repeats what was asked

    @post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: HTTPRequest) -> Response:
        return await respond(body, request)

    @post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: HTTPRequest) -> Response:
        return await respond(body, request)

    responses = responses_api.ResponsesAPI(serving, as_api_error, max(1, len(api_keys)))

    @post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: HTTPRequest) -> Response:
        return await respond(body, request, responses)

    @get("/v1/responses/{response_id}")
    async def retrieve_response(response_id: str, request: HTTPRequest, stream: bool = False) -> Response:
        found = responses.retrieve(response_id, owner_of(request), stream)
        return await away(found.size > protocol.LARGE_BYTES, JSONResponse, found.response)

    @post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, request: HTTPRequest) -> None:
        responses.cancel(response_id, owner_of(request))

    @app.delete("/v1/responses/{response_id}", responses={status: failures[status] for status in (401, 404)})
    async def delete_response(response_id: str, request: HTTPRequest) -> dict[str, Any]:
        return responses.delete(response_id, owner_of(request))

    @get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)  # here no redirect: the next route would take it for no name
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(name) for name in [*serving.names, *serving.loras]]}

    @get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        return model_card(serving.check_model(name))

    def model_card(name: str) -> dict[str, Any]:
        root, parent = serving.root or serving.names[0], None
        if name in serving.loras:
            root, parent = serving.loras[name][0], serving.names[0]
        return {"id": name, "object": "model", "created": serving.created, "owned_by": "vllm-from-first-principles",
                "root": root, "parent": parent, "max_model_len": serving.max_model_len}  # fmt: skip

    if serving.runtime_loras:  # VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: a client names a path, and the server reads it

        @post("/v1/load_lora_adapter")
        async def load_lora_adapter(body: LoadLoRAAdapterRequest, request: HTTPRequest) -> Response:
            return Response(await serving.load_lora(body, owner_of(request)))

        @post("/v1/unload_lora_adapter")
        async def unload_lora_adapter(body: UnloadLoRAAdapterRequest, request: HTTPRequest) -> Response:
            return Response(await serving.unload_lora(body, owner_of(request)))

    @post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        serving.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise common.InputError("prompt: give either a prompt or messages")
        text, special = body.prompt, body.add_special_tokens is not False
        if body.messages is not None:
            text = await away(body.is_large, serving.render_chat, body)
            special = bool(body.add_special_tokens)
        tokens = await serving.encode(text, special)
        found = {"count": len(tokens), "max_model_len": serving.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [serving.vocabulary[t] for t in tokens]
        return found

    @post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        serving.check_model(body.model)
        llm.front._check_ids("tokens", body.tokens)
        return {"prompt": await asyncio.to_thread(serving.tokenizer.decode, body.tokens, False)}

    @get("/health")
    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def health() -> Response:
        """Empty, and 200 as long as the engine lives; a load balancer asks nothing else."""
        return Response(status_code=503 if llm.dead else 200)

    @get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    if llm.stat_logger:

        @get("/metrics")
        async def metrics() -> Response:
            return Response(llm.stat_logger.expose(), media_type="text/plain; version=0.0.4; charset=utf-8")

    if debug:  # VLLM_SERVER_DEV_MODE=1, as vLLM's own endpoints for developers

        @app.get("/debug/engine", include_in_schema=False)
        async def engine_state() -> dict[str, Any]:
            return {**await llm.call_utility("check_idle"), "callers": len(llm.front.callers), "pid": llm.ready.pid,
                    "sequences": len(llm.front.sequences), "collectors": len(llm.collectors),
                    "times": len(llm.stat_logger.times) if llm.stat_logger else 0}  # fmt: skip

    # A page in a browser may ask from anywhere: the key protects, not the origin. (vLLM 0.32 lets none ask unless
    # --allowed-origins names it.) Outside the gate, so that a page can read a 401 or 413, too.
    return CORSMiddleware(Gate(app, api_keys), allow_origins=["*"], allow_methods=["*"], allow_headers=["*"],
                          expose_headers=["Retry-After"])  # fmt: skip


async def disconnected(request: Any) -> None:
    """Returns when the client hangs up. Its body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless(gone: asyncio.Future, work: Any, undo: Callable[[Any], None]) -> Any:
    """The result of `work`, or None if the client hangs up first; then the work is cancelled.

    If we are cancelled ourselves in the moment in which the work is done, nobody takes its result: `undo` it.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    except asyncio.CancelledError:
        if task.done() and not task.cancelled() and task.exception() is None:
            undo(task.result())
        raise
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


# --- 3. A client without a network, and a server without an engine ----------------------------------------------------


@dataclass
class Heard:
    """What came back from an app: status, headers, and the pieces of the body as they were sent."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    body_read: bool = False  # has the app asked for any of the request's body?

    @property
    def text(self) -> str:
        return b"".join(self.pieces).decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


async def call(app: Any, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST",
               hang_up_after: int | None = None) -> Heard:  # fmt: skip
    """One request to an ASGI app. `body` is JSON, bytes, or a list of bytes that arrive one after the other.

    With `hang_up_after=k` the client is gone once it has had k pieces of the answer.
    """
    parts = body if isinstance(body, list) and all(isinstance(x, bytes) for x in body) else [
        body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()]  # fmt: skip
    mail = [{"type": "http.request", "body": x, "more_body": i < len(parts) - 1} for i, x in enumerate(parts)]
    heard, gone = Heard(), asyncio.Event()
    if hang_up_after == 0:
        gone.set()
    sent = [(k.encode(), v.encode()) for k, v in {"content-type": "application/json", **(headers or {})}.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": sent, "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
             "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": ""}  # fmt: skip

    async def receive() -> dict[str, Any]:
        heard.body_read = True
        if mail:
            return mail.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            heard.status = message["status"]
            heard.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message.get("body"):
            heard.pieces.append(message["body"])
            if len(heard.pieces) == hang_up_after:
                gone.set()

    await app(scope, receive, send)
    return heard


class ScriptedTokenizer:
    """One token per character. For the widget and for tests: the checks in front of the engine need no model."""

    chat_template = "{{ messages }}"
    backend = argparse.Namespace(get_vocab=lambda: {chr(i): i for i in range(128)})

    def encode(self, text: str, add_special_tokens: bool = True, max_length: int | None = None) -> list[int]:
        return [min(ord(char), 127) for char in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True,
                    **variables: Any) -> str:  # fmt: skip
        return "".join(message["content"] for message in messages)


class ScriptedLLM:
    """Stands where `AsyncLLM` does, with 06e's real admission control, and answers at once with the same few words."""

    ANSWER = ("Par", "is", ".")
    sampling_defaults = SamplingDefaults()

    def __init__(self, max_model_len: int = 64, max_num_queued_reqs: int | None = 4, num_unfinished: int = 0) -> None:
        tokenizer = ScriptedTokenizer()
        self.front = argparse.Namespace(tokenizer=tokenizer, token_bytes={i: bytes([i]) for i in range(128)})
        self.ready = argparse.Namespace(max_model_len=max_model_len, policy="fcfs", pid=0)
        self.admission = async_engine.AdmissionControl(max_num_queued_reqs)
        self.num_unfinished, self.dead, self.stat_logger = num_unfinished, None, None
        self.added: list[tuple[str, dict, SamplingParams]] = []
        self.aborted: list[str] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams, *, stream: bool = False,
                    **about: Any) -> RequestOutputCollector:  # fmt: skip
        """Notes that it was asked, and has the whole answer ready at once."""
        self.added.append((request_id, prompt, params))
        collector = RequestOutputCollector(request_id)
        for i, text in enumerate(self.ANSWER):
            done = i == len(self.ANSWER) - 1
            answer = offline.CompletionOutput(0, text, [i], finish_reason="stop" if done else None)
            collector.put(RequestOutput(request_id, prompt["prompt"], prompt["prompt_token_ids"], [answer], done))
        return collector

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


# --- The simulation behind the widget ---------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "nothing unusual": {}, "temperature 9": {"temperature": 9}, "n 0": {"n": 0}, 'max_tokens "5"': {"max_tokens": "5"},
    "max_tokens 65": {"max_tokens": 65}, "an unknown field": {"temprature": 1}, "model gpt-9": {"model": "gpt-9"},
    "a suffix": {"suffix": "x"}, "json_object and a regex": {"response_format": {"type": "json_object"},
                                                             "structured_outputs": {"regex": "a"}},
    "half a body": {},
}  # fmt: skip
PROMPTS = {"5 characters": "Hello", "empty": "", "64 characters": "x" * 64, "5 MB": "x" * 5_000_000}
CHOICES = {"key": ["right", "wrong"], "field": list(FIELDS), "prompt": list(PROMPTS), "inside": [0, 3, 4]}
CORRECT = {"key": "right", "field": "nothing unusual", "prompt": "5 characters", "inside": 0}
WIDGET_DEFAULT = {"key": "right", "field": "temperature 9", "prompt": "64 characters", "inside": 4}


def simulate(params: dict) -> dict:
    """One request to the real app (context 64, at most 4 inside), then again, mistake by mistake. Raises InputError."""
    return asyncio.run(_correct(common.checked(params, CHOICES)))


async def _correct(case: dict) -> dict:
    server = ScriptedServer()
    first = last = await server.ask(case)
    first["then"] = []
    for _ in CORRECT:
        if last["status"] != 200:
            blamed = "prompt" if last["param"] == "prompt" else "field"
            blamed = {401: "key", 413: "prompt", 503: "inside"}.get(last["status"], blamed)
            case = case | {blamed: CORRECT[blamed]}
            last = {"corrected": blamed, **await server.ask(case)}
            first["then"].append(last)
    return first


async def _ask(cases: Sequence[dict]) -> list[dict]:
    server = ScriptedServer()
    return [await server.ask(case) for case in cases]


class ScriptedServer:
    """The real app before a scripted engine; each station signs when it gets to look at a request."""

    def __init__(self) -> None:
        self.llm, self.signed = ScriptedLLM(), []
        serving = OpenAIServing(self.llm, ["smol"])
        self.app = build_app(serving, ["right"])
        doors = ((self.app.app, "app", "JSON"), (serving, "add", "model"), (serving, "check_params", "values"),
                 (serving, "prompts", "length"), (self.llm.admission, "check", "room"),
                 (self.llm, "add_request", "engine"))  # fmt: skip
        for owner, name, station in doors:
            setattr(owner, name, self.signing(getattr(owner, name), station))

    def signing(self, function: Callable[..., Any], station: str) -> Callable[..., Any]:
        """`function`, which notes its station when a request gets so far."""

        def signed(*args: Any, **kwargs: Any) -> Any:
            self.signed.append(station)
            return function(*args, **kwargs)

        return signed

    async def ask(self, case: dict) -> dict:
        """One request through the app itself; what was answered, and who looked at it on the way."""
        llm = self.llm
        llm.num_unfinished, llm.added, llm.aborted = case["inside"], [], []
        self.signed.clear()
        body = json.dumps({"prompt": PROMPTS[case["prompt"]]} | FIELDS[case["field"]]).encode()
        if case["field"] == "half a body":
            body = body[: len(body) // 2]
        heard = await call(self.app, "/v1/completions", body, {"authorization": f"Bearer {case['key']}"})
        error = heard.json.get("error", {})
        message = error.get("message")
        if "JSON" in self.signed and "not JSON" not in (message or ""):  # the app says which of the two it was
            self.signed.insert(1, "fields")
        return {
            "status": heard.status, "type": error.get("type"), "param": error.get("param"),
            "message": message, "retry_after": heard.headers.get("retry-after"),
            "answer": None if error else heard.json["choices"][0]["text"], "sent_bytes": len(body),
            "engine_heard": len(llm.added), "looked": ["key", *["size"] * heard.body_read, *self.signed],
            "key": case["key"], "body": re.sub("x{8,}", "xx…xx", body.decode()), "inside": case["inside"],
        }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    first = f"HTTP {trace['status']} {trace['type'] or 'OK'}" + (f", param {trace['param']}" if trace["param"] else "")
    lines = [f"{trace['sent_bytes']:,} bytes sent", first]
    lines += [f"Retry-After: {trace['retry_after']}"] if trace["retry_after"] else []
    lines += [trace["message"] or f"answer: {trace['answer']}",
              f"requests that the engine heard of: {trace['engine_heard']}"]  # fmt: skip
    for again in trace["then"]:
        about = f", param {again['param']}" if again["param"] else ""
        lines.append(f"{again['corrected']} corrected: HTTP {again['status']} {again['type'] or 'OK'}{about}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    cases = [{"key": key, "field": field, "prompt": prompt, "inside": inside} for key in CHOICES["key"]
             for field in FIELDS for prompt in CHOICES["prompt"][:3] for inside in CHOICES["inside"]]  # fmt: skip
    traces = asyncio.run(_ask(cases))
    by_status = {
        str(status): sum(trace["status"] == status for trace in traces) for status in (200, 400, 401, 404, 503)
    }
    job = Job("chatcmpl-" + 32 * "0", "SmolLM2-135M-Instruct", ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], stream=True), SamplingParams(), [], 1_700_000_000)  # fmt: skip
    serving = OpenAIServing(ScriptedLLM(), ["smol"])
    chunk = event(serving.envelope(job, [serving.choice(job, 0, offline.CompletionOutput(0, " word", [1]))]))
    return {
        "states": len(cases), "by_status": by_status, "heard": sum(trace["engine_heard"] for trace in traces),
        "refused": sum(trace["status"] != 200 for trace in traces),
        "chunk_bytes": len(chunk), "word_bytes": 5, "overhead": len(chunk) / 5, "mb_per_s": len(chunk) * 2500 / 1e6,
        "max_body_mb": MAX_BODY_BYTES / 2**20, "max_stop": MAX_STOP_STRINGS, "max_n": MAX_N,
        "fields": {"completions": len(CompletionRequest.model_fields), "chat": len(ChatCompletionRequest.model_fields)},
    }  # fmt: skip


# --- Figure -----------------------------------------------------------------------------------------------------------

GATES = [("key", 401, "Bearer …"), ("size", 413, "at most\n4 MiB"), ("JSON", 400, "one\nobject"),
         ("fields", 400, "types,\nnames"), ("model", 404, "is\nserved"), ("values", 400, "ranges,\none constraint"),
         ("length", 400, "fits the\ncontext"), ("room", 503, "else\nRetry-After")]  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The stations between a socket and the engine, each with its way out."""
    figure, ax = common.new_figure(8.0, 3.1)
    colors, way_out = common.COLORS, functools.partial(dict, arrowstyle="-|>", linewidth=1.3)
    for x, (name, status, what) in enumerate(GATES):
        ax.add_patch(_box(ax, x, colors["grey" if x < 2 else "blue"]))
        ax.text(x, 0.12, name, ha="center", va="center", color="white", weight="bold", fontsize=9.5)
        ax.annotate("", (x, -1.02), (x, -0.36), arrowprops=way_out(color=colors["red"]))
        ax.text(x, -1.12, str(status), ha="center", va="top", color=colors["red"], weight="bold")
        ax.text(x, -1.5, what, ha="center", va="top", fontsize=7.5, color=colors["grey"])
    through = {"arrowstyle": "-|>", "color": colors["ink"], "linewidth": 1.2}
    ax.annotate("", (7.95, 0.12), (-0.75, 0.12), arrowprops=through, zorder=0)
    ax.add_patch(_box(ax, 8.4, colors["green"]))
    ax.text(8.4, 0.12, "engine", ha="center", va="center", color="white", weight="bold", fontsize=9.5)
    ax.text(8.4, -1.12, "200", ha="center", va="top", color=colors["green"], weight="bold")
    ax.annotate("", (8.4, -1.02), (8.4, -0.36), arrowprops=way_out(color=colors["green"]))
    ax.text(0.5, 0.85, "before FastAPI", ha="center", fontsize=9, color=colors["grey"])
    ax.text(4.5, 0.85, "in the API process, without the engine", ha="center", fontsize=9, color=colors["blue"])
    ax.set(xlim=(-0.8, 8.9), ylim=(-2.2, 1.15), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return [common.save_figure(figure, folder, "06f_gates")]


def _box(ax: Any, x: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x - 0.4, -0.2), 0.8, 0.64, boxstyle="round,pad=0.02", facecolor=color, edgecolor="white")


# --- The story --------------------------------------------------------------------------------------------------------

WRONG = {
    "half a body": b'{"prompt": "Hel', "temperature 9": {"prompt": "Hello", "temperature": 9},
    'max_tokens "5"': {"prompt": "Hello", "max_tokens": "5"}, "temprature 1": {"prompt": "Hello", "temprature": 1},
    "model gpt-9": {"prompt": "Hello", "model": "gpt-9"}, "an empty prompt": {"prompt": ""},
    "100,000 words": {"prompt": "word " * 100_000}, "a token that is none": {"prompt": [7, 10**9]},
}  # fmt: skip


class ForgetfulServing(OpenAIServing):
    """The mistake of every first server: nobody tells the engine that the client left."""

    def forget(self, job: Job) -> None: ...


async def incremental_text(pieces: Iterable[bytes]) -> str:
    """What a client reads from a stream that the network has cut anywhere: bytes, then characters, then events."""
    utf8, buffer, text = codecs.getincrementaldecoder("utf-8")(), "", ""
    for piece in pieces:
        buffer += utf8.decode(piece)
        while "\n\n" in buffer:
            block, buffer = buffer.split("\n\n", 1)
            text += text_of(read_events(block + "\n\n"))
    return text


async def tell_story(args: argparse.Namespace, bench: dict[str, Any]) -> None:
    """Steps 1 to 3, on an engine in a thread; adds its measurements to `bench`."""
    llm = await AsyncLLM.start(
        ("06e_async_engine", "make_small_engine"), {"model": args.model, "seed": args.seed},
        llama.model_folder(args.model), "thread", max_num_queued_reqs=args.max_num_queued_reqs,
    )  # fmt: skip
    try:
        kind = ForgetfulServing if args.no_abort else OpenAIServing
        await _tell_story(args, build_app(kind(llm, ["smol"])), llm, bench)
    finally:
        await llm.shutdown()


async def _tell_story(args: argparse.Namespace, app: Any, llm: AsyncLLM, bench: dict[str, Any]) -> None:
    common.heading("1. What is refused before the engine hears of it")
    rows, repeat, bench["refusal_us"] = [], 30 if args.bench else 3, {}
    for name, body in WRONG.items():
        start = time.perf_counter()
        for _ in range(repeat):
            heard = await call(app, "/v1/completions", body)
        bench["refusal_us"][name] = (time.perf_counter() - start) / repeat * 1e6
        if name == "an empty prompt" and heard.status == 200:
            rows.append([name, 200, "", "an answer: this tokenizer begins every text with a token"])
            continue
        error, message = heard.json["error"], heard.json["error"]["message"]
        rows.append([name, heard.status, error["param"] or "", message[:57] + "…" * (len(message) > 57)])
    common.table(["request", "status", "param", "message"], rows)
    common.check_equal("the engine has heard of nothing", llm.num_unfinished, 0)

    common.heading("2. An answer on the wire")
    ask = {"prompt": "The weather in Zürich is", "max_tokens": 8, "temperature": 0}
    whole = (await call(app, "/v1/completions", ask)).json["choices"][0]["text"]
    streamed = await call(app, "/v1/completions", ask | {"stream": True})
    for piece in streamed.pieces[:2]:
        common.say(f"data: {{… [{piece.decode().partition('[')[2][:84]} …")
    common.say(f"… {len(streamed.pieces)} pieces, {sum(map(len, streamed.pieces)):,} bytes for {len(whole)} characters")
    common.check_equal("the stream's text is the whole answer's", text_of(read_events(streamed.text)), whole)
    raw = streamed.text.encode()
    for size in (1, 7, 1000):
        cut = [raw[i : i + size] for i in range(0, len(raw), size)]
        if await incremental_text(cut) != whole:
            raise common.CheckFailed(f"cut into pieces of {size} bytes, the stream reads differently")
    common.say("✓ cut by the network into pieces of 1, 7 or 1,000 bytes, it reads the same")

    common.heading("3. A client that leaves, and one that comes too late")
    long = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True,
            "skip_special_tokens": False}  # fmt: skip
    start = time.perf_counter()
    await call(app, "/v1/completions", long, hang_up_after=2)
    common.check_equal(f"hung up after 2 of 400 tokens ({(time.perf_counter() - start) * 1e3:.0f} ms): nobody inside",
                       llm.num_unfinished, 0)  # fmt: skip
    running = asyncio.create_task(call(app, "/v1/completions", long | {"max_tokens": 16}))
    while not (llm.num_unfinished or running.done()):
        await asyncio.sleep(0.001)
    second = await call(app, "/v1/completions", ask | {"n": args.max_num_queued_reqs, "temperature": 1})
    common.say(f"{llm.num_unfinished} inside, bound {args.max_num_queued_reqs}; {args.max_num_queued_reqs} more: "
               f"{second.status}, Retry-After {second.headers.get('retry-after')}")  # fmt: skip
    common.check_equal("the one inside is served to its end", (await running).text.endswith("data: [DONE]\n\n"), True)
    idle = await llm.call_utility("check_idle")
    common.check_equal("no KV block is owned, no request is left", (idle["owned_blocks"], idle["unfinished"]), (0, 0))


CHAT = {"model": "smol",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
        "stream": True, "temperature": 0.7, "max_completion_tokens": 64}  # fmt: skip
CHAT_BYTES, WORD = json.dumps(CHAT).encode(), offline.CompletionOutput(0, " word", [1])


def measure_costs(seconds: float) -> dict[str, float]:
    """Microseconds of what the event loop does for a request and for a token."""
    serving = OpenAIServing(ScriptedLLM(), ["smol"])
    job = Job("chatcmpl-" + 32 * "0", "smol", ChatCompletionRequest(**CHAT), SamplingParams(), [])
    read = ChatCompletionRequest.model_validate
    validate = lambda: serving.check_params(read(json.loads(CHAT_BYTES)))  # noqa: E731
    write = lambda: event(serving.envelope(job, [serving.choice(job, 0, WORD)]))  # noqa: E731
    return {"validate_us": common.measure(validate, seconds).median * 1e6,
            "event_us": common.measure(write, seconds).median * 1e6}  # fmt: skip


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--max-num-queued-reqs", type=common.number(int, 1, MAX_N), default=2, metavar="N",
                   help="the queue bound of step 3 (default %(default)s)")  # fmt: skip
    p.add_argument("--no-abort", action="store_true", help="the bug: a client that leaves is not forgotten")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, bench = common.start(args), {}
    llama.check_context(args.model, 512)  # the small engine's
    asyncio.run(tell_story(args, bench))
    common.heading("4. One request, station by station: simulate()")
    common.say(describe(simulate(WIDGET_DEFAULT)))
    common.heading("5. What it costs")
    bench |= measure_costs(1.0 if args.bench else 0.1)
    common.say(f"{bench['validate_us']:.0f} µs to validate a chat request of {len(CHAT_BYTES)} bytes, "
               f"{bench['event_us']:.1f} µs to write an event")  # fmt: skip
    draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": facts(), "bench": bench})


if __name__ == "__main__":
    common.run(main)
