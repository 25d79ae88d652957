"""Names from which one is chosen, where the command line and those who check must agree.

Owns names; read by `EngineArgs`, by configurations and by the command line, before torch is there. It never says what a
name means. vLLM: `vllm/config/`, each `Literal`.
"""

from __future__ import annotations

POLICIES = ("fcfs", "priority")  # --scheduling-policy
PLACES = ("process", "thread", "event-loop")  # --engine-place
BACKENDS = ("uni", "mp", "ray")  # --distributed-executor-backend
ROUTING = ("load", "prefix")  # --data-parallel-routing
LOAD_FORMATS = ("auto", "safetensors", "dummy")  # --load-format
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")  # --uvicorn-log-level
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "pythonic")  # --tool-call-parser
REASONING_PARSERS = ("deepseek_r1", "qwen3")  # --reasoning-parser
# --attention-backend, under vLLM's names: its Triton kernel is lesson 10's, and on a CPU that takes torch's path.
ATTENTION = {"auto": "unified", "triton_attn": "unified", "cpu_attn": "unified"}
