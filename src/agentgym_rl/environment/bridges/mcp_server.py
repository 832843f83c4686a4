"""Our environments as an MCP server: an MCP client starts an episode, acts and reads observations, all by tools.

Episodes have ids of their own, because a request of the newest protocol belongs to no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.types import ASGIApp

from agentgym_rl import __version__
from agentgym_rl.environment import catalog, wire
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.bridges.server_guard import Guard
from agentgym_rl.environment.server import load_served
from agentgym_rl.environment.server_sessions import Sessions
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

MCP_PATH = "/mcp"


def mcp_server(sessions: Sessions) -> MCPServer:
    """Return an MCP server with the tools list_environments, start, act and stop."""
    server = MCPServer(
        "agentgym-rl",
        instructions="Text environments. Call start, then act until done is true, then stop.",
        version=__version__,
        log_level="WARNING",
    )
    classes = {name: catalog.class_of(factory) for name, factory in sessions.environments.items()}

    @server.tool()
    def list_environments() -> dict[str, Any]:
        """List the environments: their rules and the numbers of their items by split."""
        return {
            name: {
                "instruction": env_class.instruction,
                "splits": {split: [items.start, items.stop] for split, items in env_class.splits.items()},
            }
            for name, env_class in classes.items()
        }

    @server.tool()
    async def start(environment: str, item: int) -> dict[str, Any]:
        """Start an episode of an item. Returns the episode's id, the rules and the first observation."""
        if environment not in classes:
            raise ToolError(f"there is no environment {environment!r}: there are {', '.join(classes)}")
        with _answered():
            episode = await sessions.create(environment)
            try:
                with sessions.calling(episode):
                    step = await sessions.get(environment, episode).reset(item)
            except (EnvError, ConfigError):
                with contextlib.suppress(wire.NoSuchSession):  # after a timeout it is gone
                    await sessions.close(environment, episode)
                raise
        return {"episode": episode, "instruction": classes[environment].instruction, "observation": step.observation}

    @server.tool()
    async def act(episode: int, action: str) -> dict[str, Any]:
        """Play one action. Returns the observation, the reward and whether the episode is over."""
        with _answered():
            session = sessions.get(sessions.env_of(episode) or "open", episode)
            with sessions.calling(episode):
                step: Step = await session.step(action)
        return {
            "observation": step.observation,
            "reward": step.reward,
            "done": step.done,
            "info": step.info,
            "score": session.score,
        }

    @server.tool()
    async def stop(episode: int) -> str:
        """Close an episode."""
        with _answered():
            await sessions.close(sessions.env_of(episode) or "open", episode)
        return "closed"

    return server


@contextlib.contextmanager
def _answered() -> Any:
    """Turn the errors of an environment into errors of the tool, which the client can read."""
    try:
        yield
    except (EnvError, ConfigError) as error:
        raise ToolError(str(error)) from error


def mcp_app(
    environments: Mapping[str, Callable[[], TextEnv]],
    *,
    token: str | None = None,
    max_request_bytes: int = 1 << 20,
    **limits: Any,
) -> ASGIApp:
    """Return the MCP server as an ASGI app: streamable HTTP at /mcp. `limits` are those of Sessions."""
    sessions = Sessions(environments, **limits)
    # The guard checks the Host header, so the library need not know the address.
    app = mcp_server(sessions).streamable_http_app(
        streamable_http_path=MCP_PATH, host="0.0.0.0", max_request_body_size=max_request_bytes
    )
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(of: Any) -> AsyncIterator[Any]:
        async with sessions.served(), inner(of) as state:
            yield state

    app.router.lifespan_context = lifespan
    return Guard(app, sessions, token)


def run_stdio(names: list[str], kwargs: Mapping[str, Any] | None = None, **limits: Any) -> None:
    """Serve environments to one MCP client over stdin and stdout until it closes them."""
    environments = load_served(names, kwargs)

    async def main() -> None:
        sessions = Sessions(environments, **limits)
        async with sessions.served():
            await mcp_server(sessions).run_stdio_async()

    asyncio.run(main())
