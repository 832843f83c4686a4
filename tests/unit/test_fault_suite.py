"""The fault suite's count of sessions can fail: what leaked is seen, what a killed host left behind, too."""

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


def test_sessions_that_leak_are_seen_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "CALM_S", 0.2)
    monkeypatch.setattr(suite, "LEAVES_S", 0.1)
    host = subprocess.Popen(["sleep", "600"])
    try:
        with server_in_thread({"counting": Counting}, idle_timeout_s=suite.IDLE_S) as server, httpx.Client() as http:
            sessions = suite.Sessions(server.url)
            assert sessions.leaked(lambda: True) == 0
            opened = [http.post(f"{server.url}/create").json()["id"] for _ in range(3)]
            assert sessions.leaked(lambda: True) == 3
            assert sessions.leaked(lambda: True) == 0, "each is told once"
            opened.append(http.post(f"{server.url}/create").json()["id"])
            sessions.stop_with_some(host.pid)
            assert (sessions.held, sessions.known) == (1, 3)
            assert sessions.leaked(lambda: True) == 1, "what a killed host had must go, too"
            for session in opened:
                http.post(f"{server.url}/close", json={"id": session})
            assert sessions.leaked(lambda: True) == 0
            assert sessions.known == 0
    finally:
        host.kill()
        host.wait()
