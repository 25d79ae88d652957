"""04 · Continuous batching: which requests run in the next step?

The question: requests want 10 tokens, or 500. A batch that runs until its longest member is done leaves seats empty;
how does an engine keep them filled, what is that worth, and when is it worth nothing?

The mechanism:
  1. One forward pass yields one token for every sequence in it, whichever these are: so choose them anew every time.
  2. A `Request` is its tokens, and how many of them have their keys and values in the cache. It is behind by the rest.
  3. `Scheduler.schedule()`: running requests go on; then the head of the waiting queue is admitted while there is a
     seat (max_num_seqs), budget for its prompt (max_num_batched_tokens) and room in the pool of blocks.
  4. The model runs all of it as one flat list of tokens: prompts of new requests beside single tokens of the others.
  5. `Scheduler.update_from_output()` appends what was sampled, ends requests and frees their blocks, for the next step.
  6. This first scheduler is careful: it admits a request only if all that run, and it, can go on to their last token.
     So it never has to take blocks back. Lesson 10 lets it cut prompts; lesson 11 admits on less, and preempts.

Numbers to remember: with lengths drawn token by token, static batching uses 1/(1 + 1/2 + … + 1/slots) of its slots:
48 % of 4, 25 % of 32. Equal lengths, or sorted ones: continuous batching buys nothing.

How to run:
  uv run python vllm/04_continuous_batching.py                    the whole story
  uv run python vllm/04_continuous_batching.py --max-num-seqs 1   one at a time: same tokens, several times the steps
  uv run python vllm/04_continuous_batching.py --num-blocks 34    break it: blocks for 22 of 32 requests at a time
  uv run python vllm/04_continuous_batching.py --bench            minutes: throughput beside Transformers and the floor

Read for this: Yu et al. 2022 (Orca: iteration-level scheduling), Kwon et al. 2023 (PagedAttention), Graham 1966 (list
scheduling), vLLM 0.32 `v1/core/sched/scheduler.py`, `v1/engine/core.py`, `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine import arguments
from engine.config import SchedulerConfig, VllmConfig
from engine.core.block_pool import BlockPool
from engine.core.queues import FCFSRequestQueue, PriorityRequestQueue
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.output import EngineCoreOutput, SchedulerOutput
from engine.request import Request, RequestStatus, SamplingParams, check_stop, prompt_length_error
from engine.worker.assemble import make_runner
from lab import cli

KEY = "04_continuous_batching"


# --- What we want, without cleverness ---------------------------------------------------------------------------------


def recompute(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention without a cache: the keys and values of this forward pass are all there is.

    Shapes: q [T, Hq, D]; k, v [T, Hkv, D]; returns [T, Hq, D].
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, T, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def generate_alone(model: llama.Llama, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy decoding of one sequence: no cache, no batch, the whole sequence through the model for every token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.device)  # [T]
        hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), recompute)  # [T, hidden]
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def static_steps(slots: int, outputs: Sequence[int]) -> int:
    """Decode steps of static batching: every batch lasts as long as its longest. Σ over batches of max n."""
    return sum(max(outputs[i : i + slots]) for i in range(0, len(outputs), slots))


def continuous_steps(slots: int, outputs: Sequence[int]) -> int:
    """Decode steps if each request, in order, takes the slot that is free first (list scheduling, Graham 1966)."""
    free_at = [0] * slots
    for n in outputs:
        heapq.heapreplace(free_at, free_at[0] + n)
    return max(free_at)


# --- Blocks for requests ----------------------------------------------------------------------------------------------


class KVCacheManager:
    """Keeps each block table long enough for the tokens that are about to be computed. Tables only grow.

    Entry i of a request's table is the physical block that holds its tokens [i·block_size, (i+1)·block_size). Which
    blocks are free is the pool's business (lesson 02).
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """`num_blocks` counts block 0, which the pool keeps for padding and never hands out.

        Raises InputError for a pool that cannot hold one sequence of `max_model_len`: it would wait for ever.
        """
        if (capacity := (num_blocks - 1) * block_size) < max_model_len:
            raise common.InputError(
                f"num_blocks {num_blocks}: they hold {capacity} tokens, and must hold at least max_model_len "
                f"({max_model_len})"
            )
        self.block_pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.req_to_blocks: dict[str, list[int]] = {}

    def get_num_blocks_to_allocate(self, request: Request, num_tokens: int) -> int:
        """Blocks missing until the table holds `num_tokens`: ⌈num_tokens / block_size⌉ − blocks it has."""
        return -(-num_tokens // self.block_size) - len(self.req_to_blocks.get(request.request_id, ()))

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Make room for `num_new_tokens` behind those computed.

        Returns the new blocks, or None, and nothing has changed, if the pool has too few.
        """
        missing = self.get_num_blocks_to_allocate(request, request.num_computed_tokens + num_new_tokens)
        if missing > self.block_pool.num_free_blocks:
            return None
        new_blocks = self.block_pool.allocate(missing)
        self.req_to_blocks.setdefault(request.request_id, []).extend(new_blocks)
        return new_blocks

    def get_block_ids(self, request_id: str) -> list[int]:
        """The block table of a running request."""
        return self.req_to_blocks[request_id]

    def free(self, request: Request) -> None:
        """Give all its blocks back; the pool decides where in the free queue they go."""
        self.block_pool.free(self.req_to_blocks.pop(request.request_id, []))


# --- The scheduler ----------------------------------------------------------------------------------------------------


class Scheduler:
    """Iteration-level scheduling: the batch is chosen anew for every forward pass (Orca, OSDI 2022).

    There is no prefill phase and no decode phase. A request is behind by num_tokens − num_computed_tokens: a new one by
    its whole prompt, one that decodes by exactly 1, the token that was sampled last. Whoever is in a step catches up.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, static: bool = False) -> None:
        """`config` has the seats (max_num_seqs), the budget of a step in tokens (max_num_batched_tokens), the longest
        sequence (max_model_len) and the order of the queue (policy). With enable_chunked_prefill=False it refuses a
        budget that is too small for the longest prompt or for a token in every seat.

        `static`: request-level batching, which was there before Orca. It is treated kindly here: it starts with those
        that are there, without waiting for a full batch, and a seat whose request is done costs nothing (a padded batch
        would go on computing it).
        """
        self.config, self.kv_cache_manager, self.static = config, kv_cache_manager, static
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []  # in order of admission
        self.waiting = PriorityRequestQueue() if config.policy == "priority" else FCFSRequestQueue()
        self.finished_req_ids: list[str] = []  # since the last step: the model runner has still to forget them

    def add_request(self, request: Request) -> None:
        """It waits. Raises InputError for a prompt that can never be served."""
        if error := prompt_length_error(request.num_prompt_tokens, self.config.max_model_len):
            raise common.InputError(error)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Choose who is in the next step, and allocate the blocks that it will write."""
        manager, token_budget = self.kv_cache_manager, self.config.max_num_batched_tokens
        output = SchedulerOutput(finished_req_ids=self.finished_req_ids, block_tables=manager.req_to_blocks)
        self.finished_req_ids = []

        # 1. Whoever runs goes on: by one token, so the budget covers all of them, and with blocks that admission has
        #    seen to. (In lesson 11 there may be none left, and then somebody has to give up its own.)
        for request in self.running:
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            manager.allocate_slots(request, num_new_tokens)
            output.scheduled_running_reqs.append(request)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens

        # 2. Then the queue, from its head, while there are seats, budget and blocks. Nobody overtakes the head: if
        #    small requests could, a large one might wait for ever. (In lesson 10 a prompt takes what budget is left.)
        seats = self.config.max_num_seqs - len(self.running)
        if self.static and self.running:
            seats = 0  # static batching looks at the queue again when its batch is done: that is all the difference
        while self.waiting and seats > 0 and token_budget > 0:
            request = self.waiting.peek_request()
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            if num_new_tokens > token_budget or not self._fits(request):
                break
            manager.allocate_slots(request, num_new_tokens)
            self.running.append(self.waiting.pop_request())
            request.status = RequestStatus.RUNNING
            output.scheduled_new_reqs.append(request)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens
            seats -= 1

        # 3. The model is about to run: what was granted counts as computed from now on.
        for request_id, num_new_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_new_tokens
        return output

    def num_slots(self, request: Request) -> int:
        """KV slots that a request fills in its life. Its last token is sampled and never computed, hence − 1."""
        return int(min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)) - 1

    def _fits(self, request: Request) -> bool:
        """Are there blocks for the rest of all these lives, if everybody goes on to its last token?"""
        manager = self.kv_cache_manager
        missing = sum(manager.get_num_blocks_to_allocate(r, self.num_slots(r)) for r in (*self.running, request))
        return missing <= manager.block_pool.num_free_blocks

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Append what was sampled, in scheduling order. Whoever is done leaves: its seat and its blocks are free now.

        `sampled_token_ids` has the one new token of each request of the step.
        """
        outputs = []
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the model ran
            request.append_output_token_id(sampled_token_ids[request_id][0])
            if check_stop(request, self.config.max_model_len):
                self._free_request(request)
            reason = request.get_finished_reason()  # None: it goes on
            outputs.append(EngineCoreOutput(request_id, request.output_token_ids[-1:], reason, request.stop_reason))
        self.running = [request for request in self.running if not request.is_finished()]
        return outputs

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside, such as those of a client that hung up. Returns those ended; unknown and finished
        ids are passed over."""
        ended = []
        for request in filter(None, map(self.requests.get, request_ids)):
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove_request(request)
            request.status = status
            self._free_request(request)
            ended.append(request)
        return ended

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        self.finished_req_ids.append(request.request_id)
        del self.requests[request.request_id]


# --- The engine -------------------------------------------------------------------------------------------------------

# What runs the model on a step: {request id: [its next token]} for all that are in it.
ExecuteModel = Callable[[SchedulerOutput], dict[str, list[int]]]


@dataclass
class Run:
    """What the loop did, step by step."""

    batches: list[list[str]] = field(default_factory=list)  # the ids of those that were in the step
    seconds: list[float] = field(default_factory=list)


def engine_loop(scheduler: Scheduler, execute_model: ExecuteModel, requests: Iterable[Request]) -> Run:
    """Schedule, run, update, until all is done. A request comes before the step that its `arrival_time` names, at the
    earliest; they are in order of arrival. Their tokens are in `output_token_ids` at the end."""
    coming, run = deque(requests), Run()
    while coming or scheduler.has_unfinished_requests():
        while coming and coming[0].arrival_time <= len(run.batches):
            scheduler.add_request(coming.popleft())
        start = time.perf_counter()
        output = scheduler.schedule()
        assert output.num_scheduled_tokens or coming, "nobody runs, so whoever waits will wait for ever"
        sampled_token_ids = execute_model(output)
        scheduler.update_from_output(output, sampled_token_ids)
        run.seconds.append(time.perf_counter() - start)
        run.batches.append(list(output.num_scheduled_tokens))
    return run


def no_model(output: SchedulerOutput) -> dict[str, list[int]]:
    """In place of a model: every next token is 0. Queue, budget and blocks do not notice."""
    return {request_id: [0] for request_id in output.num_scheduled_tokens}


def make_requests(
    prompts: Sequence[Sequence[int]], outputs: Sequence[int], arrivals: Sequence[int] | None = None
) -> list[Request]:
    """Greedy requests "0", "1", …, each of which ends after exactly as many tokens as `outputs` says."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
    rows = zip(prompts, params, arrivals or [0] * len(outputs))
    return [Request(str(i), list(prompt), how, arrival_time=at) for i, (prompt, how, at) in enumerate(rows)]


# --- The surprise -----------------------------------------------------------------------------------------------------


def lanes(batches: Sequence[Sequence[str]], seats: int) -> list[list[str | None]]:
    """Who sits where in each step, [steps][seats]: whoever comes takes the first seat that is free."""
    found = []
    row: list[str | None] = [None] * seats
    for batch in batches:
        row = [request_id if request_id in batch else None for request_id in row]
        for request_id in batch:
            if request_id not in row:
                row[row.index(None)] = request_id
        found.append(row)
    return found


def dry_run(outputs: Sequence[int], seats: int, static: bool) -> Run:
    """Requests of these lengths, all there at the start, with prompts of one token and a pool that is never short."""
    longest = 1 + max(outputs)
    config = SchedulerConfig(longest, seats, max(longest, seats), enable_chunked_prefill=False)
    manager = KVCacheManager(2 + seats * -(-longest // 16), 16, longest)
    return engine_loop(Scheduler(config, manager, static), no_model, make_requests([[0]] * len(outputs), outputs))


# --- The story --------------------------------------------------------------------------------------------------------

PROMPTS = [
    "The capital of France is", "Once upon a time, in a small village by the sea,", "To make bread you need flour,",
    "The three laws of motion say that", "Water boils at", "Dear Sir or Madam, I am writing to you because",
    "In Python, a list is", "The best thing about winter is",
]  # fmt: skip
PROMPTS *= 4  # 32 requests
OUTPUTS = [4, 6, 5, 24] * 8  # tokens wanted: one in four is long
BET = [8, 8, 8, 64] * 4
BLOCK_SIZE = 16


def check_counts(seed: int) -> None:
    """Step counts of the scheduler against those that the naive functions add up."""
    rng = random.Random(seed)
    queues = [(rng.randint(1, 6), rng.choices(range(1, 20), k=rng.randint(1, 24))) for _ in range(100)]
    for name, static, naive in (("static", True, static_steps), ("continuous", False, continuous_steps)):
        counted = [len(dry_run(outputs, seats, static).batches) for seats, outputs in queues]
        wanted = [naive(seats, outputs) for seats, outputs in queues]
        common.check_equal(f"{len(queues)} random queues, {name}: as many steps as the naive count", counted, wanted)


def show_lives(scheduler: Scheduler, execute_model: ExecuteModel, prompts: Sequence[list[int]]) -> None:
    """Three requests, the third of which comes at step 2: what each computes in a step, and its blocks."""
    requests, rows = make_requests(prompts, [2, 6, 3], arrivals=[0, 0, 2]), []

    def watched(output: SchedulerOutput) -> dict[str, list[int]]:
        granted = output.num_scheduled_tokens
        cells = [f"{granted[r]}  {output.block_tables[r]}" if r in granted else "" for r in ("0", "1", "2")]
        rows.append([len(rows), *cells, sum(granted.values())])
        return execute_model(output)

    engine_loop(scheduler, watched, requests)
    common.table(["step", "request A", "request B", "request C", "tokens"], rows, title="tokens to compute, and blocks")


def show_batch(
    scheduler: Scheduler, execute_model: ExecuteModel, tokenizer: Tokenizer, prompts: Sequence[list[int]]
) -> list[Request]:
    """All requests at once; what two of them get, and how fast."""
    together = make_requests(prompts, OUTPUTS)
    run = engine_loop(scheduler, execute_model, together)
    for i in (3, 7):
        common.say(f"#{i} {PROMPTS[i]}…{tokenizer.decode(together[i].output_token_ids)!r}"[:108])
    most, rate = max(map(len, run.batches)), sum(OUTPUTS) / sum(run.seconds)
    common.say(f"{len(run.batches)} steps, at most {most} requests in one, {sum(OUTPUTS)} tokens: {rate:.0f} tokens/s")
    return together


def check_alone(
    scheduler: Scheduler, execute_model: ExecuteModel, model: llama.Llama, together: Sequence[Request]
) -> None:
    """Four of the requests one after another, and the first without any cache: the same tokens, more slowly."""
    prompts = [request.prompt_token_ids for request in together[:4]]
    alone, seconds = make_requests(prompts, OUTPUTS[:4]), 0.0
    for request in alone:
        seconds += sum(engine_loop(scheduler, execute_model, [request]).seconds)
    common.say(f"4 of them, one after another: {sum(OUTPUTS[:4]) / seconds:.0f} tokens/s")
    batched, serial = ([request.output_token_ids for request in some[:4]] for some in (together, alone))
    common.check_equal("they get the same tokens in the batch and one after another", batched, serial)
    wanted = generate_alone(model, prompts[0], OUTPUTS[0])
    common.check_equal("the first gets the tokens that a loop without any cache writes", serial[0], wanted)


def show_model(scheduler: Scheduler, model: llama.Llama, tokenizer: Tokenizer, prompts: Sequence[list[int]]) -> None:
    """Serve the real model: three lives step by step, then all requests at once, then some of them one by one."""
    pool = scheduler.kv_cache_manager.block_pool
    about = VllmConfig(attention_backend="paged", enforce_eager=True)  # lesson 02's attention, no CUDA graphs
    runner = make_runner(model, scheduler.config, pool.num_blocks, BLOCK_SIZE, about)

    def execute_model(output: SchedulerOutput) -> dict[str, list[int]]:
        return runner.execute_model(output).sampled_token_ids

    show_lives(scheduler, execute_model, prompts[:3])
    together = show_batch(scheduler, execute_model, tokenizer, prompts)
    check_alone(scheduler, execute_model, model, together)
    common.check_equal(f"all {pool.num_blocks - 1} blocks are free again", pool.num_free_blocks, pool.num_blocks - 1)


def show_timeline(name: str, outputs: Sequence[int], static: bool, seats: int = 4, scale: int = 4) -> None:
    """A Gantt chart: a row for each seat, a column for `scale` steps, a letter for each request."""
    batches = dry_run(outputs, seats, static).batches
    used = sum(map(len, batches)) / (seats * len(batches))
    common.say(f"{name}: {len(batches)} steps, {used:.0%} of the seats used")
    for lane in zip(*lanes(batches, seats)[::scale]):
        common.say("".join("·" if request_id is None else chr(ord("A") + int(request_id)) for request_id in lane))


def make_scheduler(max_num_seqs: int, num_blocks: int, static: bool = False) -> Scheduler:
    """With room for sequences of 512 tokens. Raises InputError for fewer blocks than one of them takes."""
    config = SchedulerConfig(512, max_num_seqs, max_num_batched_tokens=4096, enable_chunked_prefill=False)
    return Scheduler(config, KVCacheManager(num_blocks, BLOCK_SIZE, config.max_model_len), static)


def show_limits(prompts: Sequence[list[int]]) -> None:
    """Steps and seats used if there are fewer seats, or blocks for fewer lives."""
    rows = []
    for seats, num_blocks in ((32, 1024), (8, 1024), (1, 1024), (32, 34)):
        requests = make_requests(prompts, OUTPUTS)
        batches = engine_loop(make_scheduler(seats, num_blocks), no_model, requests).batches
        rows.append([f"--max-num-seqs {seats} --num-blocks {num_blocks}", max(map(len, batches)), len(batches)])
    common.table(["", "most in a step", "steps"], rows)
    common.say("Too few blocks leave seats empty, just as a lower limit on seats would.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--policy", choices=("static", "continuous"), default="continuous", help="batching of part 2")
    seats, blocks = arguments.number(int, 1, 256), arguments.number(int, 2, 1 << 14)
    help_seats = "sequences in one step (default %(default)s; 1 serves them one by one)"
    help_blocks = f"KV blocks of {BLOCK_SIZE} tokens (default %(default)s; 34 hold few, below 33 is refused)"
    p.add_argument("--max-num-seqs", type=seats, default=32, metavar="N", help=help_seats)
    p.add_argument("--num-blocks", type=blocks, default=1024, metavar="N", help=help_blocks)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    scheduler = make_scheduler(args.max_num_seqs, args.num_blocks, static=args.policy == "static")
    loader.check_context(args.model, scheduler.config.max_model_len)

    common.heading("1. The scheduler, without a model")
    check_counts(args.seed)
    n = len(OUTPUTS)
    common.heading(f"2. The real model: {n} requests, {args.policy}, at most {args.max_num_seqs} at a time")
    model, tokenizer = loader.load(args.model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    show_model(scheduler, model, tokenizer, prompts)
    common.heading("3. The surprise: sixteen requests on four seats, and the same sorted by length")
    for name, outputs in (("as they come", BET), ("sorted", sorted(BET))):
        show_timeline(f"static, {name}", outputs, static=True)
        show_timeline(f"continuous, {name}", outputs, static=False)
    common.say("A letter is a request, a column is 4 steps. Sorted, continuous batching has nothing to gain.")
    common.heading("4. What breaks it: the requests of part 2 under other limits, counted without the model")
    show_limits(prompts)
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
