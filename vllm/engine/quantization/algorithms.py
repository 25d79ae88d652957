"""Which codes to choose: round to nearest, GPTQ, AWQ, AutoRound; and SmoothQuant, which moves the difficulty.

Owns the search for the codes of one matrix; called by `methods` for each layer. It never runs a model: it is given a
matrix [N, K] and, where it wants them, inputs [tokens, K]. vLLM loads what `llm-compressor` made with these:
vLLM: `vllm/model_executor/layers/quantization/`.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from engine.quantization.formats import Format, Quantized, choose_scales, decode, encode

# A layer computes Y = X Wᵀ. Rounding W to Ŵ changes Y by X (Ŵ − W)ᵀ, whose squared size is
#
#     E = tr((Ŵ − W) H (Ŵ − W)ᵀ),   H = XᵀX over calibration tokens     [K, K]
#
# RTN behaves as if H were the identity. The others know that some inputs are large and that inputs are correlated.


def rtn(W: torch.Tensor, format: Format) -> Quantized:
    """Every weight to its nearest grid point."""
    return _with_codes(choose_scales(W, format), W)


def per_tensor(W: torch.Tensor, format: Format) -> Quantized:
    """The same with the largest of the scales for all rows, as vLLM's fp8_per_tensor has it."""
    found = choose_scales(W, format)
    found.scale = found.scale.amax().expand_as(found.scale).contiguous()
    return _with_codes(found, W)


def _with_codes(found: Quantized, W: torch.Tensor, nudge: torch.Tensor | float = 0.0) -> Quantized:
    groups = found.scale.shape[1]
    zero = None if found.zero is None else found.zero[..., None]
    if isinstance(nudge, torch.Tensor):
        nudge = nudge.unflatten(1, (groups, -1))
    codes = encode(W.float().unflatten(1, (groups, -1)), found.scale_values[..., None], zero, found.format, nudge)
    return dataclasses.replace(found, codes=codes.flatten(1))


def gptq(W: torch.Tensor, X: torch.Tensor, format: Format, damp: float = 0.01, block: int = 128) -> Quantized:
    """Round one input column after the other; each time let the columns to come make up for the error.

    The best compensation for an error d in column j is w −= d / U[j, j] · U[j, :], where U is the upper Cholesky
    factor of H⁻¹: its row j is what the remaining problem's inverse Hessian has to say about column j.
    Columns with large inputs go first ("act-order"), while there is most room to compensate; the scales are chosen
    before, so groups stay where they are ("static groups"). W [N, K], X [tokens, K]. Frantar et al. 2022.
    """
    found = choose_scales(W, format)
    K, repeat = W.shape[1], W.shape[1] // found.scale.shape[1]
    H = X.double().T @ X.double()
    H.diagonal().add_(damp * H.diagonal().mean())
    order = H.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H[order][:, order]))
    U = torch.linalg.cholesky(inverse, upper=True).float()
    rows = W.float().T[order].contiguous()  # [K, N]: a column of W is contiguous now
    scale = found.scale_values.repeat_interleave(repeat, 1).T[order].contiguous()
    zero = None if found.zero is None else found.zero.repeat_interleave(repeat, 1).T[order].contiguous()
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    for start in range(0, K, block):  # errors inside a block at once, to all columns behind it at its end
        end = min(start + block, K)
        errors = torch.empty(end - start, rows.shape[1])
        for j in range(start, end):
            z = None if zero is None else zero[j]
            codes[j] = encode(rows[j], scale[j], z, format)
            errors[j - start] = (rows[j] - decode(codes[j], scale[j], z, format)) / U[j, j]
            rows[j + 1 : end].addr_(U[j, j + 1 : end], errors[j - start], alpha=-1)
        rows[end:] -= U[start:end, end:].T @ errors
    return dataclasses.replace(found, codes=codes[order.argsort()].T.contiguous())


def awq(W: torch.Tensor, X: torch.Tensor, format: Format, steps: int = 10) -> tuple[Quantized, torch.Tensor]:
    """Enlarge the columns that meet large inputs before rounding, shrink the inputs: (quantized W·s, 1/s).

    A column that is s times larger suffers 1/s of the rounding error, as long as its group's maximum does not grow.
    s = (mean |x|)^α; α is searched from 0 (plain RTN) to 1. Lin et al. 2023, scales only. X [tokens, K].
    """
    magnitude = X.abs().mean(0).clamp(min=1e-8)  # [K]
    best: tuple[float, Quantized, torch.Tensor] | None = None
    for step in range(steps + 1):
        s = magnitude ** (step / steps)
        s = s / (s.max() * s.min()).sqrt()
        candidate = rtn(W * s, format)
        error = output_error(candidate.dequantize() / s, W, X)
        if best is None or error < best[0]:
            best = error, candidate, 1 / s
    assert best is not None, "α has at least one value"
    return best[1], best[2]


def autoround(W: torch.Tensor, X: torch.Tensor, format: Format, steps: int = 100, batch: int = 16) -> Quantized:
    """Learn for each weight whether to round up or down: round(w / s + v), with v in [−½, ½] by signed gradients.

    ∂E/∂Ŵ = 2 (Ŵ − W) XᵀX, on `batch` random tokens per step; rounding counts as the identity ("straight-through"), and
    only the gradient's sign is used, with a step that shrinks to 0. Few tokens are not a saving but the point: a sign
    has no size, and only noise lets large gradients win more often. The best v met, on all tokens, gives the codes.
    Integer formats; X [tokens, K]. Cheng et al. 2023, where whole blocks are compared and scales are learned as well.
    """
    found, generator = choose_scales(W, format), torch.Generator().manual_seed(0)
    repeat = W.shape[1] // found.scale.shape[1]
    s = found.scale_values.repeat_interleave(repeat, 1)
    zero = None if found.zero is None else found.zero.float().repeat_interleave(repeat, 1)
    if zero is not None and format.zero == "min":
        x = (W - zero) / s
    else:
        x = W / s + (format.center if zero is None else zero)
    v, best, least = torch.zeros_like(x), torch.zeros_like(x), math.inf
    for step in range(steps):
        excess = ((x + v).round_().clamp_(0, (1 << format.bits) - 1) - x).mul_(s)  # Ŵ − W
        if step % 10 == 0 and (error := (excess @ X.T).square().sum().item()) < least:
            best, least = v.clone(), error
        some = X[torch.randint(len(X), (batch,), generator=generator)]
        v.sub_(((excess @ some.T) @ some).sign_(), alpha=(1 - step / steps) / steps).clamp_(-0.5, 0.5)
    return _with_codes(found, W, best)


def smoothquant(W: torch.Tensor, X: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """Factors s [K] so that X / s and W · s share the difficulty: s = max|x|^α / max|w|^(1 − α). Xiao et al. 2022."""
    return X.abs().amax(0).clamp(min=1e-5) ** alpha / W.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)


def output_error(quantized: torch.Tensor, W: torch.Tensor, X: torch.Tensor) -> float:
    """‖X (Ŵ − W)ᵀ‖ / ‖X Wᵀ‖: the relative error of the layer's output."""
    return ((X @ (quantized - W).T).norm() / (X @ W.T).norm()).item()
