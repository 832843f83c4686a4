"""Starts a vLLM engine, says so, and waits to be killed: `python owner_for_tests.py FOLDER`."""

from __future__ import annotations

import asyncio
import sys

from vllm_for_tests import SMALL

from agentgym_rl.agent.engines.vllm import VllmEngine


async def main() -> None:
    await VllmEngine(sys.argv[1], **SMALL).start()
    print("started", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
