"""Lesson 07's steps: going back, the rule that keeps the target's distribution, its kernels, and the loop around them.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from engine.request import SamplingParams
from learn import pictures
from learn.step import Case, Context, Step

LESSON = "07_spec_decode"


# --- One sequence -----------------------------------------------------------------------------------------------------


def back_to_what_stood(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """What the next token sees: as if the rejected ones had never been written."""
    rng = context.rng
    some = [(n := rng.randint(1, 9), rng.randint(0, n)) for _ in range(3)]
    for written, rejected in [(4, 2), (3, 0), (5, 5), *some]:
        config = SimpleNamespace(num_hidden_layers=1, head_dim=4)
        model = SimpleNamespace(config=config, num_kv_heads=1, dtype=torch.float32, device=context.device)
        q, k, v = (context.randn(written + 1, 1, 4) for _ in range(3))
        stood = written - rejected

        def attended(module: ModuleType, first: int, back: Any) -> list:
            cache = module.KVCache(model)
            if first:
                cache.attend(0, q[:first], k[:first], v[:first])
            cache.length += first
            back(cache)
            return [cache.length, cache.attend(0, q[-1:], k[-1:], v[-1:])]

        yield Case(
            f"{written} tokens were written, the last {rejected} are rejected: the cache's length, and what a token "
            "behind them sees",
            lambda: attended(mine, written, lambda cache: mine.roll_back(cache, rejected)),
            attended(given, stood, lambda cache: None),
        )


def ends(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(rng.choices(range(6), k=rng.randint(1, 6)), rng.sample(range(6), 2)) for _ in range(6)]
    for tokens, stops in [([5, 6, 7], [6]), ([5, 6, 7], [9]), ([6, 5, 6], [6]), ([5], [5]), ([1, 2, 3], [3, 2]), *some]:
        places = [i for i, token in enumerate(tokens) if token in stops]
        yield Case(
            f"a pass writes {tokens}; the answer ends at {' or '.join(map(str, stops))}",
            lambda: mine.until_end(tokens, set(stops)),
            tokens[: places[0] + 1] if places else tokens,
        )


def looked_up(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(rng.choices(range(3), k=rng.randint(2, 14)), rng.randint(0, 5), rng.randint(1, 4)) for _ in range(12)]
    for tokens, k, longest in [
        ([1, 2, 3, 4, 1, 2], 2, 4),
        ([1, 2, 3, 4, 5, 6], 2, 4),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, 4),
        ([3, 1, 2, 7, 5, 1, 2, 8, 5, 1, 2], 2, 3),
        ([1, 2, 1, 2], 5, 4),
        ([1, 1, 1], 3, 4),
        ([4, 5, 6, 4, 5, 6], 0, 4),
        ([5], 2, 4),
        *some,
    ]:
        yield Case(
            f"tokens {tokens}: at most {k} guesses, by the last {longest} to 2 tokens",
            lambda: mine.look_up(tokens, k, longest),
            found(tokens, k, longest),
        )


def found(tokens: list[int], k: int, longest: int) -> list[int]:
    """By brute force: of all earlier places, the best."""
    best: tuple[int, int] = (0, 0)  # (length of the match, −its first place)
    for end in range(1, len(tokens)):
        n = 0
        while n < min(end, longest) and tokens[end - n - 1] == tokens[len(tokens) - n - 1]:
            n += 1
        best = max(best, (n, -end)) if n >= 2 else best
    return tokens[-best[1] :][:k] if best[0] else []


# --- The rule ---------------------------------------------------------------------------------------------------------


def rests(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    p, q = (
        torch.tensor([[9.0, 5, 2], [4, 4, 8], [0, 16, 0]]) / 16,
        torch.tensor([[4.0, 4, 8], [4, 4, 8], [8, 4, 4]]) / 16,
    )
    some = context.randn(2, 4, 9).softmax(-1)
    for what, target, draft in [
        ("p = [9 5 2]/16, q = [4 4 8]/16", p[:1], q[:1]),
        ("p = q = [4 4 8]/16", p[1:2], q[1:2]),
        ("three rows, the second with p = q", p, q),
        ("four rows of nine, random", some[0], some[1]),
    ]:
        rows = []
        for a, b in zip(target.tolist(), draft.tolist()):
            rest = [max(x - y, 0.0) for x, y in zip(a, b)]
            rows.append(rest if sum(rest) > 0 else a)
        yield Case(what, lambda: mine.residual(target, draft), torch.tensor(rows))


@dataclasses.dataclass
class Batch:
    """The arguments of `rejection_sample`, in its order."""

    scores: torch.Tensor
    draft_token_ids: torch.Tensor
    cu_num_sampled_tokens: torch.Tensor
    is_greedy: torch.Tensor
    draw_u: torch.Tensor
    accept_u: torch.Tensor
    draft_probs: torch.Tensor | None
    draft_rows: torch.Tensor | None

    def all(self) -> tuple:
        return tuple(vars(self).values())

    def of_rows(self) -> tuple:
        """The arguments of `sample_rows`."""
        return self.scores, self.draft_token_ids, *self.all()[3:]


def batch(context: Context, drafts: list[int], kinds: str, vocab: int, repeats: int = 3, loud: float = 3) -> Batch:
    """Request b has drafts[b] drafts and is kinds[b]: g greedy, p without q, q with q; the drafts' own rows are in no
    order. `repeats` random numbers for each, so that many are asked in one case."""
    rng, device = context.rng, context.device
    drafts, kinds = drafts * repeats, kinds * repeats
    counts = [n + 1 for n in drafts]
    R = sum(counts)
    p = (loud * context.randn(R, vocab)).softmax(-1)
    guesses, greedy, q_rows = [], [], []
    q = ((2 * context.randn(R + 2, vocab)) + 0.0).softmax(-1)
    free = rng.sample(range(R + 2), R + 2)
    for n, kind in zip(drafts, kinds):
        for j in range(n + 1):
            row = len(guesses)
            with_q = kind == "q" and j < n
            q_rows.append(free.pop() if with_q else -1)
            of = q[q_rows[-1]] if with_q else p[row]
            likely = int(of.argmax()) if rng.random() < 0.6 else rng.randrange(vocab)
            guesses.append(likely if j < n else -1)
            greedy.append(kind == "g")

    def uniform() -> torch.Tensor:
        return torch.tensor([rng.random() for _ in range(R)], dtype=torch.float64, device=device)

    return Batch(
        context.fence(p),
        context.ints(guesses, torch.int64),
        context.ints([0, *torch.tensor(counts).cumsum(0).tolist()], torch.int64),
        context.ints(greedy, torch.bool),
        uniform(),
        uniform(),
        context.fence(q) if "q" in kinds else None,
        context.ints(q_rows, torch.int64) if "q" in kinds else None,
    )


def one_draft(context: Context, d: int, accept_u: float, draw_u: float) -> Batch:
    """A draft and a bonus row, over three tokens: small enough for a head."""
    p, q = torch.tensor([[9.0, 5, 2], [4, 4, 8]]) / 16, torch.tensor([[4.0, 4, 8]]) / 16
    u = torch.tensor([[draw_u] * 2, [accept_u] * 2], dtype=torch.float64, device=context.device)
    ints = context.ints([d, -1], torch.int64), context.ints([0, 2], torch.int64)
    greedy, rows = context.ints([0, 0], torch.bool), context.ints([0, -1], torch.int64)
    return Batch(context.fence(p), *ints, greedy, u[0], u[1], context.fence(q), rows)


def counts(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for what, answers, drafts, start, right in count_questions(context):
        yield Case(
            what,
            lambda: mine.count_sampled(
                context.ints(answers, torch.int64), context.ints(drafts, torch.int64), context.ints(start, torch.int64)
            ),
            torch.tensor(right),
        )


def count_questions(context: Context) -> Iterator[tuple[str, list[int], list[int], list[int], list[int]]]:
    """(in words, answers, drafts, where requests begin, how many tokens each is given)."""
    rng = context.rng
    some = []
    for _ in range(4):
        guesses = [[rng.randrange(2) for _ in range(rng.randint(0, 4))] for _ in range(rng.randint(1, 5))]
        some.append(([[*(rng.randrange(2) for _ in g), rng.choice([-1, 1])] for g in guesses], guesses))
    for answers, guesses in [
        ([[5, 6, 7]], [[5, 6]]),
        ([[5, 9, 7]], [[5, 6]]),
        ([[9, 6, 7]], [[5, 6]]),
        ([[3], [5, 6], [8, 6, 7]], [[], [5], [5, 6]]),
        ([[5, 6, -1], [1, 1]], [[5, 6], [1]]),  # the bonus row leaves no token to write, and says −1 as its draft does
        ([[5, -1, 7], [-1]], [[5, 6], []]),
        *some,
    ]:
        start, right = [0], []
        for answer, guess in zip(answers, guesses):
            start.append(start[-1] + len(answer))
            right.append(1 + next((i for i, d in enumerate(guess) if answer[i] != d), len(guess)))
        yield (
            f"drafts {guesses}, what the target writes in each row {answers}",
            [token for answer in answers for token in answer],
            [token for guess in guesses for token in [*guess, -1]],
            start,
            right,
        )


def the_rule(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for d, accept_u, draw_u in [(0, 0.9, 0.5), (2, 0.1, 0.5), (2, 0.3, 0.5), (2, 0.3, 0.9), (1, 0.99, 0.1)]:
        small = one_draft(context, d, accept_u, draw_u)
        p, q = small.scores.tolist(), [[4 / 16, 4 / 16, 8 / 16]]
        first, *more = given.naive_round(p, q, [d], [accept_u], [draw_u, draw_u])
        bonus = more or [given.naive_draw(p[1], draw_u)]
        yield Case(
            f"p = [9 5 2]/16, bonus row [4 4 8]/16, q = [4 4 8]/16; draft {d}, accept_u {accept_u}, draw_u {draw_u}",
            lambda: mine.sample_rows(*small.of_rows()),
            torch.tensor([first, *bonus]),
        )
    for drafts, kinds, vocab in [([2, 0], "gg", 5), ([2, 1], "pp", 5), ([2, 3], "qq", 5), ([2, 1, 3, 0], "gqpq", 40)]:
        asked = batch(context, drafts, kinds, vocab, 6)
        if vocab == 40:
            asked.scores[2, 3], asked.scores[8, 1], asked.scores[9, 0] = math.nan, math.nan, math.nan
        yield Case(
            f"{say(drafts, kinds)}, {vocab} tokens, six times: the token of each row"
            + ", NaN in three of them" * (vocab == 40),
            lambda: mine.sample_rows(*asked.of_rows()),
            given.sample_rows(*asked.of_rows()),
        )


def say(drafts: list[int], kinds: str) -> str:
    names = {"g": "greedy", "p": "random without q", "q": "random with q"}
    return "requests with " + ", ".join(f"{n} drafts ({names[kind]})" for n, kind in zip(drafts, kinds))


# --- The kernels ------------------------------------------------------------------------------------------------------


def count_kernel(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for what, answers, drafts, start, right in count_questions(context):
        counts = torch.full((len(right) + 2,), -5, device=context.device)

        def launch() -> torch.Tensor:
            ints = [context.ints(x, torch.int64) for x in (answers, drafts, start)]
            mine.count_sampled_kernel[(len(right),)](*ints, counts, num_warps=1)
            return counts

        yield Case(f"{what}; two places too many in num_sampled", launch, torch.tensor([*right, -5, -5]))


def tile_sums(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for drafts, kinds, vocab in [([1], "p", 16), ([2], "g", 20), ([2, 1], "gq", 37), ([1, 2, 1], "pqg", 61)]:
        asked, has_q = batch(context, drafts, kinds, vocab, 1), "q" in kinds
        if "g" in kinds:
            asked.scores[asked.is_greedy.nonzero()[0], 17] = math.nan
        R, tiles = len(asked.scores), -(-vocab // 16)
        sums = context.fence(torch.zeros(2 if has_q else 1, R, tiles, dtype=torch.float64))
        right = torch.zeros(sums.shape, dtype=torch.float64)
        q_rows = [-1] * R if asked.draft_rows is None else asked.draft_rows.tolist()
        for row in range(R):
            p = asked.scores[row].double().cpu()
            q = torch.zeros(vocab) if asked.draft_probs is None or q_rows[row] < 0 else asked.draft_probs[q_rows[row]]
            for n in range(tiles):
                w, rest = p[16 * n : 16 * n + 16], (p - q.double().cpu())[16 * n : 16 * n + 16].clamp(min=0)
                if asked.is_greedy[row]:
                    right[0, row, n] = w.nan_to_num(math.inf).max()
                    continue
                right[0, row, n] = rest.sum()
                if has_q:
                    right[1, row, n] = w.sum()

        def launch() -> torch.Tensor:
            q = (asked.draft_probs, asked.draft_rows) if has_q else (asked.scores, asked.draft_token_ids)
            assert q[0] is not None
            mine.sum_tiles_kernel[(R, tiles)](
                asked.scores, asked.is_greedy, *q, sums, vocab, vocab, q[0].stride(0), HAS_DRAFT_PROBS=has_q, BLOCK=16
            )
            return sums.float()

        yield Case(
            f"{say(drafts, kinds)}, {vocab} tokens in tiles of 16{', NaN in a greedy row' * ('g' in kinds)}: the sums",
            launch,
            right.float(),
            lambda got, right: pictures.grid(got, right, "Σ max(p − q, 0), Σ p", "rows"),
        )


def rows_kernel(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for drafts, kinds, vocab, loud in [([1, 0], "gg", 300, 3), ([2, 1], "pp", 300, 0.5), ([2, 2], "qq", 530, 0.5)]:
        yield rows_case(mine, given, batch(context, drafts, kinds, vocab, 2, loud), say(drafts, kinds))
    for loud in (0.2, 3):
        mixed = batch(context, [2, 1, 3, 0], "gqpq", 613, 2, loud)
        mixed.scores[1, 300] = math.nan  # greedy
        mixed.scores[3, 300], mixed.scores[5, 600] = math.nan, math.nan
        yield rows_case(mine, given, mixed, say([2, 1, 3, 0], "gqpq") + ", NaN in three rows")
    for d, accept_u, draw_u in [(2, 0.3, 0.9), (2, 0.1, 0.9)]:
        small = one_draft(context, d, accept_u, draw_u)
        yield rows_case(
            mine, given, small, f"draft {d}, accept_u {accept_u}, draw_u {draw_u}, p [9 5 2]/16, q [4 4 8]/16"
        )


def rows_case(mine: ModuleType, given: ModuleType, asked: Batch, what: str) -> Case:
    right = given.sample_rows(*asked.of_rows())
    right[asked.scores.isnan().any(1)] = -1  # even where the draft's own p and q would let it stand
    return Case(
        f"{what}; {asked.scores.shape[1]} tokens in tiles of 256: the token of each row",
        lambda: mine.rejection_sample(*asked.all())[0],
        right,
    )


# --- The loop ---------------------------------------------------------------------------------------------------------


class Toy:
    """A model without layers: it counts on, 0 1 2 … 7 0 1, unless all that its one attention sees says otherwise. So
    drafts stand often, and any key too many, too few or out of place changes the answer."""

    def __init__(self, context: Context) -> None:
        self.config = SimpleNamespace(num_hidden_layers=1, head_dim=16, eos_token_ids=[])
        self.num_kv_heads, self.dtype, self.device = 1, torch.float32, context.device
        self.values, self.head = context.randn(8, 16), context.randn(16, 8)
        self.computed: list[int] = []  # tokens of each pass

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        self.computed.append(len(token_ids))
        v = (self.values[token_ids] * (1 + positions % 3)[:, None])[:, None]  # [T, 1, 16]
        seen = attend(0, torch.zeros_like(v), v, v)[:, 0] * (positions + 1).sqrt()[:, None]  # all count alike
        following = ((token_ids + 1) % 8)[:, None] == torch.arange(8, device=token_ids.device)
        return torch.cat((seen, following.to(seen.dtype)), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :16] @ self.head + 20 * hidden[:, 16:]


def loops(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    counting = [i % 8 for i in range(12)]
    for prompt, K, temperature, max_tokens in [
        ([1, 2, 3], 0, 0, 4),
        (counting, 3, 0, 8),
        (counting, 4, 0, 1),
        (counting[: rng.randint(9, 12)], rng.randint(2, 5), 0, 20),
        (counting[: rng.randint(9, 12)], rng.randint(2, 5), 2.0, 20),
        (counting, 4, 0, 30),
    ]:
        model, params = Toy(context), SamplingParams(temperature=temperature, seed=5, max_tokens=max_tokens)
        stops = [None]
        if max_tokens == 30:
            stop = in_a_draft(*given.generate(model, prompt, params, K))
            while stop is None:
                model = Toy(context)
                stop = in_a_draft(*given.generate(model, prompt, params, K))
            stops += [stop, prompt[-1]]
        for stop in stops:
            params = dataclasses.replace(params, stop_token_ids=[] if stop is None else [stop])
            yield Case(
                f"prompt {prompt}, at most {K} drafts, {max_tokens} tokens, temperature {temperature}"
                + (f", ends at {stop}" if stop is not None else "")
                + ": the answer, (drafts, written) of each pass, and the tokens that the model computed in it",
                lambda: generated(mine, model, prompt, params, K),
                generated(given, model, prompt, params, K),
            )


def in_a_draft(answer: list[int], passes: list[tuple[int, int]]) -> int | None:
    """A token that occurs first as one that stood, with others of its pass behind it."""
    start = 0
    for _, written in passes:
        for i in range(start, start + written - 1):
            if answer[i] not in answer[:i]:
                return answer[i]
        start += written
    return None


def generated(module: ModuleType, model: Toy, prompt: list[int], params: SamplingParams, K: int) -> list:
    model.computed = []
    return [*module.generate(model, prompt, params, K), model.computed]


STEPS = (
    Step(
        "07.1",
        LESSON,
        "Back to what stood",
        "roll_back",
        "forget the last num_rejected tokens of the cache.",
        "Only the first `length` rows are valid. What lies behind them is overwritten before anybody reads it.",
        back_to_what_stood,
    ),
    Step(
        "07.2",
        LESSON,
        "An end inside a draft",
        "until_end",
        "return the tokens up to the first that ends the answer, with it; all of them if none does.",
        "`in ends` asks for one token. Nothing behind the first hit is kept, though it was accepted.",
        ends,
    ),
    Step(
        "07.3",
        LESSON,
        "What is left of p",
        "residual",
        "return max(p − q, 0) row by row, and p itself in a row where nothing is left.",
        "Rows without a rest are those whose sum is 0. torch.where takes one of two rows if the condition is [N, 1].",
        rests,
    ),
    Step(
        "07.4",
        LESSON,
        "Guesses out of the prompt",
        "look_up",
        "return at most k tokens that followed the last n the first time; the longest n wins, and [] if none occurred.",
        "From `longest` down to `shortest`, and for each n over the ends of earlier places, from the left. A place "
        "may overlap the last n tokens, and is not those themselves.",
        looked_up,
    ),
    Step(
        "07.5",
        LESSON,
        "How many stand",
        "count_sampled",
        "return for each request 1 + the number of leading rows where the answer is the draft, [B].",
        "A request's last row always ends the run, even where answer and draft are both −1. Without a loop: where "
        "rows differ, ascending, searchsorted finds the first from a request's start on.",
        counts,
    ),
    Step(
        "07.6",
        LESSON,
        "The rule",
        "sample_rows",
        "return the token that the target writes in each row: argmax, the draft if it stands, or a draw.",
        "Three kinds of rows, and the table above says each. Rows have their q at draft_rows, −1 for none: with q = 0 "
        "the residual is p. `draw_tokens(p, u.cpu().numpy())` draws, `most_probable` is the argmax.",
        the_rule,
        forbidden=("naive_round",),
        plugs=(("rejection", "rejection_sample"), ("sampler", "sample_rows")),
    ),
    Step(
        "07.7",
        LESSON,
        "How many stand, on a GPU",
        "count_sampled_kernel",
        "a program per request: store 1 + the number of its leading rows where the answer is the draft.",
        "Triton has no break. Keep a number that is 1 as long as all rows were equal, and add it up; the last row "
        "counts whatever is in it.",
        count_kernel,
        launches=("count_sampled_kernel",),
        forbidden=("count_sampled",),
    ),
    Step(
        "07.8",
        LESSON,
        "A row in tiles",
        "sum_tiles_kernel",
        "a program per (row, tile): its Σ max(p − q, 0), or of a greedy row its largest score; with q, its Σ p, too.",
        "sums [1 or 2, R, tiles] is contiguous: program_id and num_programs say where. Sum in fp64. A row without q "
        "has draft_rows −1, and nothing may be read for it. NaN counts as +∞ in a greedy row.",
        tile_sums,
        launches=("sum_tiles_kernel",),
    ),
    Step(
        "07.9",
        LESSON,
        "From the sums to a token",
        "sample_rows_kernel",
        "a program per row: the best of a greedy row; else the draft if it stands, else what draw_u falls on.",
        "`draw_index` over the tiles' sums finds the tile, and over that tile's weights, with the sums before it, the "
        "token. The target is draw_u times the sum of all. A row without q, or with nothing left, draws from p. "
        "Where p has no finite mass, the token is −1.",
        rows_kernel,
        launches=("sample_rows_kernel",),
        forbidden=("sample_rows", "naive_round"),
    ),
    Step(
        "07.10",
        LESSON,
        "Guess, verify, roll back",
        "generate",
        "the loop: until the limit or an end, a pass over all tokens not yet computed and the drafts behind them.",
        "The prompt's own pass has no drafts. The last 1 + drafts rows of `hidden` make the logits for `verify`. "
        "A pass writes one token more than stand, so leave room for it. The newest token is not computed yet.",
        loops,
        first="while len(tokens)",
    ),
)
