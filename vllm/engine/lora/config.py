"""What a caller says about adapters: how many and how large, and which one a request means.

Owns the limits and refuses those that contradict each other; read by everybody, changed by nobody. It never looks at a
file. vLLM: `vllm/config/lora.py`, `vllm/lora/request.py`.
"""

from __future__ import annotations

import common

from dataclasses import dataclass


@dataclass
class LoRAConfig:
    """vLLM's limits (`vllm/config/lora.py`), and two choices of ours. Raises InputError."""

    max_loras: int = 1  # adapters in one step, and slots for them
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None  # adapters kept in CPU memory; None: max_loras
    memory: str = "slots"  # or "unified": pages of the KV cache (S-LoRA)
    fair: bool = False  # choose the next request by tokens served per adapter (VTC), not by arrival

    def __post_init__(self) -> None:
        for name, high in (("max_loras", 4096), ("max_lora_rank", 512)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= high:
                raise common.InputError(f"{name} {value!r}: must be a whole number from 1 to {high}")
        if self.max_cpu_loras is None:
            self.max_cpu_loras = self.max_loras
        if type(self.max_cpu_loras) is not int or self.max_cpu_loras < self.max_loras:
            raise common.InputError(
                f"max_cpu_loras {self.max_cpu_loras!r}: must be at least max_loras {self.max_loras}"
            )
        if self.memory not in ("slots", "unified"):
            raise common.InputError(f"memory {self.memory!r}: must be one of slots, unified")


@dataclass(frozen=True)
class LoRARequest:
    """What a caller names an adapter by (`vllm/lora/request.py`). A name has the same weights until it is removed."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
