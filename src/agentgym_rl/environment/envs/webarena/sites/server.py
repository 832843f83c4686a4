"""Web server of the embedded sites, in a thread of this process, on a free port of the loopback interface."""

from __future__ import annotations

import socket
import threading
import time
from functools import lru_cache

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Host, Router

from agentgym_rl.environment.envs.webarena.sites import admin, code, forum, maps, shop
from agentgym_rl.environment.envs.webarena.sites.store import Episodes
from agentgym_rl.environment.envs.webarena.sites.visit import http_notice
from agentgym_rl.errors import EnvError

HOSTS = {
    "SHOPPING": "shop.test",
    "SHOPPING_ADMIN": "admin.test",
    "REDDIT": "forum.test",
    "GITLAB": "code.test",
    "MAP": "map.test",
}
"""Host of each embedded site by WebArena's site name. The domain `.test` is reserved and never resolves."""
_ROUTES = {
    "shop.test": shop.ROUTES,
    "admin.test": admin.ROUTES,
    "forum.test": forum.ROUTES,
    "code.test": code.ROUTES,
    "map.test": maps.ROUTES,
}
START_TIMEOUT_S = 10.0


class SiteServer:
    """The running server."""

    def __init__(self) -> None:
        self.episodes = Episodes()
        app = Starlette(
            routes=[Host(host, Router(routes)) for host, routes in _ROUTES.items()],
            exception_handlers={404: http_notice, 405: http_notice},
        )
        app.state.episodes = self.episodes
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=60)
        self._server = uvicorn.Server(config)
        threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="webarena-sites", daemon=True
        ).start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > deadline:
                raise EnvError(f"the embedded sites did not start within {START_TIMEOUT_S:g} s")
            time.sleep(0.005)

    @property
    def resolver_flags(self) -> tuple[str, ...]:
        """Return browser flags that resolve the sites' names to this server and all other names to nothing."""
        rules = [f"MAP {host}:80 127.0.0.1:{self.port}" for host in HOSTS.values()]
        return ("--no-proxy-server", f"--host-resolver-rules={','.join([*rules, 'MAP * ~NOTFOUND'])}")


_lock = threading.Lock()


def site_server() -> SiteServer:
    """Return the process's server. Start it on the first call."""
    with _lock:
        return _start_server()


@lru_cache(maxsize=1)
def _start_server() -> SiteServer:
    return SiteServer()
