"""How a letter from the engine reaches those who wait."""

from __future__ import annotations

import common  # noqa: F401  it must come before torch

import asyncio
from types import SimpleNamespace

from engine.serving.async_llm import AsyncLLM
from engine.serving.letters import EngineCoreOutputs


def test_others_have_a_turn_between_two_pieces_of_a_letter():
    happened: list = []

    async def other() -> None:
        happened.append("another task")

    async def run() -> None:
        front = SimpleNamespace(process_outputs=lambda letter, outputs: happened.append(len(outputs)) or [])
        llm = SimpleNamespace(CHUNK=2, front=front, stat_logger=None, collectors={})
        task = asyncio.create_task(other())
        await AsyncLLM._deliver(llm, EngineCoreOutputs(outputs=[None] * 5))
        await task

    asyncio.run(run())
    assert happened == [2, "another task", 2, 1]
