"""What operators and trainers may do to a server, and nobody else: VLLM_SERVER_DEV_MODE=1.

Owns these routes; `app` attaches them in that mode alone, behind the keys. They never look into a request.
vLLM: `vllm/entrypoints/serve/dev/`.
"""

from __future__ import annotations

import common

import dataclasses
import json
import os
import platform
import sys
from typing import Annotated, Any, Literal

import fastapi
import torch

from engine.serving.openai.serving import OpenAIServing


class DevRoutes:
    """A method for each path."""

    def __init__(self, serving: OpenAIServing) -> None:
        self.serving, self.llm = serving, serving.llm

    async def sleep(
        self,
        level: Annotated[int, fastapi.Query(ge=0, le=2)] = 1,
        mode: Literal["abort", "wait", "keep"] = "abort",
    ) -> dict[str, Any]:
        """Weights and KV cache away."""
        await self.llm.sleep(level, mode)
        return {"status": "sleeping", "level": level}

    async def wake_up(self, tags: Annotated[list[str] | None, fastapi.Query()] = None) -> dict[str, Any]:
        """And back, or one of them: `tags=weights`, `tags=kv_cache`."""
        awake = await self.llm.wake_up(tags)
        return {"status": "awake" if awake else "sleeping", "tags": tags}

    async def is_sleeping(self) -> dict[str, bool]:
        """Whether requests wait for `/wake_up`."""
        return {"is_sleeping": await self.llm.call_utility("is_sleeping")}

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_external: bool = False
    ) -> dict[str, bool]:
        """Forget what is cached; false while a request has blocks, unless running ones may begin anew."""
        done = await self.llm.call_utility("reset_prefix_cache", reset_running_requests, reset_external)
        return {"success": done}

    async def server_info(self, config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
        """What it was started with, and where it runs; no key is in it."""
        args = self.serving.engine_args
        as_json = json.loads(json.dumps(dataclasses.asdict(args), default=str)) if args else {}
        env = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and "KEY" not in name}
        system = {"python": sys.version, "platform": platform.platform(), "torch": torch.__version__}
        return {
            "vllm_config": repr(args) if config_format == "text" else as_json,
            "vllm_env": env,
            "system_env": system | {name: str(value) for name, value in common.machine().items()},
        }


def attach(app: fastapi.FastAPI, serving: OpenAIServing) -> None:
    """All of them, beside the others; the page of the API does not show them."""
    routes = DevRoutes(serving)
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        app.post(path, include_in_schema=False)(getattr(routes, path[1:]))
    for path in ("/is_sleeping", "/server_info"):
        app.get(path, include_in_schema=False)(getattr(routes, path[1:]))
