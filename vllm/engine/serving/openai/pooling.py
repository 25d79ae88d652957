"""Texts to vectors, and vectors to scores: embeddings, score and rerank.

Owns what such a request is answered with; called by the routes as `OpenAIServing` is, whose names, adapters and
tokenizer it goes by. The vectors are the engine's, out of the steps in which others write; it never runs a model.
vLLM: `vllm/entrypoints/pooling/embed/serving.py`, `vllm/entrypoints/pooling/scoring/serving.py`.
"""

from __future__ import annotations

import common

import base64
import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.errors import EngineDeadError
from engine.llm import as_list
from engine.request import PoolingParams, prompt_length_error
from engine.sampling.pooler import PoolerConfig
from engine.sampling.token_rules import TokenizeParams
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai.errors import APIError
from engine.serving.openai.large_bodies import away
from engine.serving.openai.pooling_protocol import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from engine.serving.openai.serving import OpenAIServing, own_salt

AT_ONCE = 256  # texts of one request that are inside: a batch of thousands leaves room for others
PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
KINDS = {EmbeddingRequest: "embd", ScoreRequest: "score", RerankRequest: "rerank"}


@dataclass
class PoolingJob:
    """One request: all of its prompts, and what is inside of them now."""

    request_id: str
    model: str
    body: Any
    params: PoolingParams
    prompts: list[dict[str, Any]]
    about: dict[str, Any]
    num_queries: int = 0  # of the prompts, those in front: a score is one of these against one of the others
    created: int = field(default_factory=lambda: int(time.time()))
    collectors: list[RequestOutputCollector] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt["prompt_token_ids"]) for prompt in self.prompts)


class PoolingServing:
    """Has `add`, `answer` and `forget`, as the routes call what answers."""

    def __init__(self, serving: OpenAIServing, config: PoolerConfig, dimensions: Sequence[int] | bool) -> None:
        """`dimensions`: which shorter vectors the model was trained for; True: any, False: none."""
        self.serving, self.llm, self.config, self.dimensions = serving, serving.llm, config, dimensions

    async def add(self, body: Any, name: str | None = None, owner: str | None = None) -> PoolingJob:
        """Check and tokenize everything; the engine hears of it in `answer`. Raises InputError, APIError."""
        serving, kind = self.serving, KINDS[type(body)]
        if self.llm.dead:
            raise EngineDeadError(str(self.llm.dead))
        model = serving.check_model(body.model)
        if body.priority != 0 and self.llm.ready.policy != "priority":
            raise common.InputError("priority: this server was started with --scheduling-policy fcfs; allowed: 0")
        lora = serving.loras.get(model)
        params = self.pooling_params(body)
        texts, num_queries = self.texts(body)
        salt = own_salt(owner, body.cache_salt) if body.cache_salt else None
        about = {"priority": body.priority, "cache_salt": salt, "lora_name": lora and lora[1]}
        name = f"{kind}-{name or body.request_id or uuid.uuid4().hex}"
        return PoolingJob(name, model, body, params, await self.prompts(body, texts), about, num_queries)

    def pooling_params(self, body: PoolingRequest) -> PoolingParams:
        """How its prompts are pooled. Raises InputError."""
        wanted, known = getattr(body, "dimensions", None), self.dimensions
        if wanted is not None:
            size = self.llm.front.model_config.hidden_size
            if known is False:
                raise common.InputError(
                    f"dimensions {wanted}: this model's vectors cannot be cut (it does not support Matryoshka "
                    f"representation); leave it out"
                )
            if wanted > size or (known is not True and wanted not in known):
                allowed = f"from 1 to {size}" if known is True else f"one of {', '.join(map(str, known))}"
                raise common.InputError(f"dimensions {wanted}: must be {allowed}")
        unit = self.config.use_activation if body.use_activation is None else body.use_activation
        if not isinstance(body, EmbeddingRequest):
            unit = True  # a cosine does not ask for lengths
        return PoolingParams(self.config.pooling_type, unit, wanted)

    def texts(self, body: Any) -> tuple[list[Any], int]:
        """Its prompts, and how many in front of them are queries. Raises InputError."""
        if isinstance(body, RerankRequest):
            return self.two_sides([body.query], several(body.documents))
        if isinstance(body, EmbeddingRequest):
            if (body.input is None) == (body.messages is None):
                raise common.InputError("input: give either an input or messages")
            texts = several(body.input) if body.messages is None else [None]
            if not texts:
                raise common.InputError("input: must not be empty")
            return texts, 0
        given = {name for side in PAIRS for name in side if getattr(body, name) is not None}
        found = [pair for pair in PAIRS if set(pair) == given]
        if not found:
            allowed = ", or ".join(" and ".join(pair) for pair in PAIRS)
            raise common.InputError(f"queries: give {allowed}")
        return self.two_sides(*(several(getattr(body, name)) for name in found[0]))

    @staticmethod
    def two_sides(queries: list[str], documents: list[str]) -> tuple[list[str], int]:
        """Raises InputError."""
        if not queries or not documents:
            raise common.InputError("documents: at least one text on each side")
        if len(queries) not in (1, len(documents)):
            raise common.InputError("queries: input lengths must be either 1:1, 1:N or N:N")
        return [*queries, *documents], len(queries)

    async def prompts(self, body: Any, texts: Sequence[Any]) -> list[dict[str, Any]]:
        """All of them as token ids. Raises InputError."""
        serving, chat = self.serving, getattr(body, "messages", None) is not None
        field_name = "messages" if chat else "input" if isinstance(body, EmbeddingRequest) else "documents"
        asked = getattr(body, "add_special_tokens", None)
        special = not chat if asked is None else bool(asked)
        params = TokenizeParams(serving.max_model_len, body.truncate_prompt_tokens, body.truncation_side)
        found = []
        for text in texts:
            text = await away(body.is_large, serving.render_chat, body) if chat else text
            if isinstance(text, str):
                ids = await serving.encode(text, special, field_name, params)
            else:
                ids = params.truncate(text)
            if error := prompt_length_error(len(ids), serving.max_model_len):
                raise common.InputError(f"{field_name}: {f'{serving.too_long}. {error}' if ids else error}")
            found.append({"prompt_token_ids": ids})
        return found

    def forget(self, job: PoolingJob) -> None:
        """The end of a request, however it came."""
        self.llm.abort(collector.request_id for collector in job.collectors)

    async def answer(self, job: PoolingJob) -> dict[str, Any]:
        """Have all prompts pooled, some hundred at a time, and say what was asked."""
        vectors: list[np.ndarray] = []
        bound = self.llm.admission.max_num_queued_reqs
        for start in range(0, len(job.prompts), size := min(AT_ONCE, bound or AT_ONCE)):
            vectors += await self.pooled(job, start, job.prompts[start : start + size])
        return await away(job.body.is_large, self.written, job, vectors)

    async def pooled(self, job: PoolingJob, start: int, prompts: list[dict[str, Any]]) -> list[np.ndarray]:
        """Vectors of some prompts, [hidden] each. Raises APIError, QueueOverflowError."""
        own = uuid.uuid4().hex  # two clients may think of the same name
        try:
            self.llm.admission.check(self.llm.num_unfinished, len(prompts))
            for i, prompt in enumerate(prompts, start):
                name = f"pool-{own}-{i}"
                job.collectors.append(self.llm.add_request(name, prompt, job.params, **job.about))
            outputs = [await collector.get() for collector in job.collectors]
        finally:
            self.forget(job)
            job.collectors = []
        found = []
        for output in outputs:
            if output.pooling_output is None:
                answer = output.outputs[0]
                raise APIError(500, f"no vector: {answer.stop_reason or answer.finish_reason}")
            found.append(np.frombuffer(output.pooling_output, "<f4"))
            if not np.isfinite(found[-1]).all():
                raise APIError(500, "no vector: the model's hidden states are NaN or infinite")
        return found

    def written(self, job: PoolingJob, vectors: list[np.ndarray]) -> dict[str, Any]:
        """The answer."""
        usage = {"prompt_tokens": job.num_tokens, "total_tokens": job.num_tokens}
        head = {"id": job.request_id, "object": "list", "created": job.created, "model": job.model}
        more = {"completion_tokens": 0, "prompt_tokens_details": None}
        if isinstance(job.body, EmbeddingRequest):
            told = encoded if job.body.encoding_format == "base64" else np.ndarray.tolist
            data = [{"index": i, "object": "embedding", "embedding": told(x)} for i, x in enumerate(vectors)]
            return head | {"data": data, "usage": usage | more}
        scores = cosines(vectors[: job.num_queries], vectors[job.num_queries :])
        if isinstance(job.body, ScoreRequest):
            data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
            return head | {"data": data, "usage": usage | more}
        documents = several(job.body.documents)
        results = [
            {"index": i, "document": {"text": documents[i], "multi_modal": None}, "relevance_score": scores[i]}
            for i in sorted(range(len(scores)), key=lambda i: -scores[i])
        ]
        results = results[: job.body.top_n or None]
        return {"id": job.request_id, "model": job.model, "usage": usage, "results": results}


def several(given: Any) -> list[Any]:
    """One text, or a list of token ids, or several of either, as a list."""
    found: list[Any] = as_list(given)
    return found


def encoded(vector: np.ndarray) -> str:
    """Little-endian fp32 in base64, as OpenAI's library asks for it: a third of the digits' length."""
    return base64.b64encode(vector.tobytes()).decode()


def cosines(queries: list[np.ndarray], documents: list[np.ndarray]) -> list[float]:
    """Of one query with every document, or of each with its own; vectors of length 1."""
    pairs = zip(itertools.cycle(queries), documents)
    return [float(np.dot(query, document)) for query, document in pairs]


def trained_dimensions(config: dict[str, Any]) -> Sequence[int] | bool:
    """What a model's config.json says of shorter vectors (vLLM: `ModelConfig.is_matryoshka`)."""
    return config.get("matryoshka_dimensions") or bool(config.get("is_matryoshka"))
