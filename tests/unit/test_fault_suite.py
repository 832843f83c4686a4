"""The fault suite's count of sessions can fail: what leaked is seen, what a killed host held is told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from envs_for_tests import Counting
from servers_for_tests import server_in_thread

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
import suite


def test_sessions_that_leak_are_told_from_those_of_a_killed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "CALM_S", 0.2)
    host = subprocess.Popen(["sleep", "600"])
    try:
        with server_in_thread({"counting": Counting}, idle_timeout_s=suite.IDLE_S) as server, httpx.Client() as http:
            sessions = suite.Sessions(server.url)
            assert sessions.leaked(lambda: True) == 0
            opened = [http.post(f"{server.url}/create").json()["id"] for _ in range(3)]
            assert sessions.leaked(lambda: True) == 3
            assert sessions.leaked(lambda: True) == 0, "each is told once"
            http.post(f"{server.url}/create")
            sessions.stop_with_some(host.pid)
            assert (sessions.held, sessions.known) == (1, 4)
            assert sessions.leaked(lambda: True) == 0
            http.post(f"{server.url}/close", json={"id": opened[0]})
            with pytest.raises(AssertionError, match="3 sessions are open, but 1 were of hosts that are dead"):
                sessions.leaked(lambda: True)
    finally:
        host.kill()
        host.wait()
