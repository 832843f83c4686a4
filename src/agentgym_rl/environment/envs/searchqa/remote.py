"""Client of the `/retrieve` service of the deep-search ecosystem.

POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\nText"}, "score": 12.3}, ...], ...]}
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
import orjson

from agentgym_rl.environment.envs.searchqa.passages import Passage, passage_from
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable

MAX_ANSWER_BYTES = 16 * 1024 * 1024
CONNECT_ATTEMPTS = 3
RETRY_DELAY_S = 0.1


class RemoteRetriever:
    """Client of a retrieval server. All sessions share its connections; every call has a deadline."""

    cheap = False

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"a retrieval service needs an address like http://127.0.0.1:8000, got {url!r}")
        base = url.rstrip("/")
        self.url = base if base.endswith("/retrieve") else f"{base}/retrieve"
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.Client(timeout=timeout_s, limits=limits, trust_env=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if not queries:
            return []
        body = orjson.dumps({"queries": list(queries), "topk": k, "return_scores": True})
        return _read_answer(self._post(body), len(queries), k, self.url)

    def close(self) -> None:
        self._client.close()

    def _post(self, body: bytes) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            try:
                return self._post_once(body, deadline)
            except httpx.TimeoutException as error:
                raise EnvTimeout(self._timeout_message()) from error
            except httpx.ConnectError as error:  # nothing was sent, so a retry is safe
                if attempt == CONNECT_ATTEMPTS:
                    raise EnvUnavailable(f"no retrieval service answers at {self.url}: start it ({error})") from error
                time.sleep(RETRY_DELAY_S * attempt)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                raise EnvUnavailable(f"the retrieval service at {self.url} cut its answer short ({reason})") from error
        raise AssertionError("the loop returns or raises")

    def _post_once(self, body: bytes, deadline: float) -> bytes:
        headers = {"content-type": "application/json"}
        with self._client.stream("POST", self.url, content=body, headers=headers) as response:
            answer = bytearray()
            for chunk in response.iter_bytes():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise EnvError(f"the retrieval service at {self.url} answered more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline:  # httpx only limits the wait for each chunk
                    raise EnvTimeout(self._timeout_message())
            if response.status_code != 200:
                message = bytes(answer[:200]).decode(errors="replace")
                raise EnvError(f"the retrieval service at {self.url} answered {response.status_code}: {message}")
            return bytes(answer)

    def _timeout_message(self) -> str:
        return f"the retrieval service at {self.url} did not answer within {self._timeout_s:g} s"


def _read_answer(answer: bytes, num_queries: int, k: int, url: str) -> list[list[Passage]]:
    try:
        result: Any = orjson.loads(answer)["result"]
        if len(result) != num_queries:
            raise ValueError(f"{num_queries} queries, {len(result)} results")
        return [[_passage(row, rank) for rank, row in enumerate(rows[:k])] for rows in result]
    except (KeyError, TypeError, ValueError) as error:
        raise EnvError(
            f'the retrieval service at {url} must answer {{"result": [[{{"document": {{"contents": ...}}, "score": '
            f"...}}, ...]]}}, one list a query; got {answer[:80]!r} ({type(error).__name__}: {error})"
        ) from error


def _passage(row: Any, rank: int) -> Passage:
    """Return the passage of a document, with or without a score. Without an id, the contents are the id."""
    document = row.get("document", row) if isinstance(row, dict) else row
    if isinstance(document, str):
        document = {"contents": document}
    passage = passage_from(document, rank)
    return passage if "id" in document else Passage(passage.contents, passage.title, passage.text)
