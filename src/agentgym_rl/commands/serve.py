"""The command `serve`: environments over AgentGym's protocol, OpenEnv's or MCP."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from agentgym_rl.environment import server
from agentgym_rl.errors import ConfigError


def serve(names: list[str], host: str, port: int, *, openenv: bool, mcp: bool, stdio: bool, **options: Any) -> None:
    """Serve until interrupted. `options` are those of `server.serve`."""
    if openenv and mcp:
        raise ConfigError("--openenv and --mcp are two protocols: start a server for each")
    if stdio and not mcp:
        raise ConfigError("--stdio is a way to serve MCP: add --mcp")
    if openenv:
        _require("websockets", "openenv")
        from agentgym_rl.environment.bridges.openenv_server import openenv_app

        server.serve(names, host, port, create=openenv_app, **options)
    elif stdio:
        _require("mcp", "mcp")
        from agentgym_rl.environment.bridges.mcp_server import run_stdio

        limits = {name: options[name] for name in ("max_sessions", "idle_timeout_s", "step_timeout_s")}
        run_stdio(names, options["kwargs"], **limits)
    elif mcp:
        _require("mcp", "mcp")
        from agentgym_rl.environment.bridges.mcp_server import MCP_PATH, mcp_app

        server.serve(names, host, port, create=mcp_app, path=MCP_PATH, **options)
    else:
        server.serve(names, host, port, **options)


def _require(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"this needs the package {package!r}: pip install 'agentgym-rl[{extra}]'")
