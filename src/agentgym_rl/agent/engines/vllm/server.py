"""A `vllm serve` as an engine: token ids over `/v1/completions`, weights through a folder.

The server needs `--logprobs-mode processed_logprobs`. To load weights it also needs `VLLM_SERVER_DEV_MODE=1`,
`--worker-extension-cls` (docs/guides/vllm.md has the command) and a folder that both sides see.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import httpx

from agentgym_rl.agent.engines.vllm.probe import Probe
from agentgym_rl.agent.engines.vllm.requirements import EXTENSION, reply_limit, signed_64
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling

_TRANSIENT = {408, 429, 502, 503, 504}
RETRIES = 3
RAW_MODE_GAP = 1e-5
"""A log-probability at temperature 2 (a server's maximum) that differs less from the one at temperature 1 is raw."""


class VllmServer:
    """Client of a vLLM server. `await server.start()` asks the server for its model and context length.

    `api_key_variable` names the environment variable with the server's key, if it needs one.
    """

    def __init__(
        self,
        url: str,
        *,
        max_context: int = 8192,
        version: int = 0,
        api_key_variable: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"the address of a vLLM server must look like http://host:8000, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.max_context = max_context
        self.version = version
        self._model = ""
        self._adapter: str | None = None
        self._num_adapters = 0
        self._reports_processed: bool | None = None
        self._salt = os.urandom(8).hex()
        headers = {}
        if api_key_variable is not None:
            if not os.environ.get(api_key_variable):
                raise EngineError(f"the key of {self.url} must be in ${api_key_variable}, which is not set: export it")
            headers["Authorization"] = f"Bearer {os.environ[api_key_variable]}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits)
        self._ready = asyncio.Event()
        self._lock = asyncio.Lock()
        self._closed = f"The client of {self.url} was not started: await server.start() first."
        self._unknown_weights = ""
        """Why the server's weights are unknown, or an empty string. The next update resets it."""

    async def start(self) -> None:
        rows = (await self._send("GET", "/v1/models"))["data"]
        base = next((row for row in rows if not row.get("parent")), None)
        if base is None:
            raise EngineError(f"{self.url} serves no model: is it a vLLM server?")
        self._model = base["id"]
        self.max_context = min(self.max_context, base.get("max_model_len") or self.max_context)
        self._closed = ""
        self._ready.set()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        max_tokens = reply_limit(prompt_ids, sampling, self.max_context)
        await self._wait_until_open()
        if sampling.temperature not in (0.0, 1.0) or sampling.top_p < 1:
            await self._require_processed(prompt_ids)
        body = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "logprobs": 0,
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = signed_64(sampling.seed)
        while True:
            await self._wait_until_open()
            version = self.version
            choice = await self._complete(prompt_ids, body)
            if version == self.version:  # otherwise the server may have got the request after an update
                break
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise EngineError(f"{self.url} ended the reply of {session} as {finish!r}")
        token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not token_ids or not logprobs or len(token_ids) != len(logprobs):
            raise EngineError(
                f"{self.url} must return the reply's token ids and as many log-probabilities, got "
                f"{len(token_ids or [])} and {len(logprobs or [])}: it needs a vLLM that knows return_token_ids"
            )
        return Completion(token_ids, logprobs, finish, version)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability of every token but the first, at temperature 1."""
        await self._wait_until_open()
        return await self._score(token_ids)

    async def release(self, session: str) -> None:
        """Do nothing: the server finds cached blocks by content."""

    async def update_weights(
        self, source: str | Path | Mapping[str, Any], version: int, probe: Probe | None = None
    ) -> None:
        """Load weights or an adapter from a folder that the server sees under the same path."""
        if isinstance(source, Mapping):
            raise EngineError(
                f"{self.url} needs weights as a folder that both sides see, got a state dict: save it first"
            )
        folder = _absolute(source)
        async with self._lock:
            if self._closed:
                raise EngineError(self._closed)
            self._unknown_weights = ""
            self._ready.clear()
            try:
                if (Path(folder) / "adapter_config.json").is_file():
                    await self._load_adapter(folder, version)
                else:
                    await self._load_weights(folder)
                self.version = version
                if probe is not None:
                    await self.verify(probe)
            except BaseException:
                self._unknown_weights = f"{self.url} failed to load weights {version}: its weights are unknown."
                raise
            finally:
                self._ready.set()

    async def verify(self, probe: Probe) -> None:
        """Raise EngineError unless the server holds the weights that `probe` was made of."""
        if probe.checksums:
            call = {"method": "agentgym_checksums", "args": [probe.shapes]}
            probe.check_checksums((await self._call_dev_api("/collective_rpc", json=call))["results"], self.version)
        probe.check(await self._score(probe.token_ids), self.version)

    async def close(self) -> None:
        """Close the client. The server continues to run."""
        self._closed = "The engine was closed."
        self._ready.set()
        await self._http.aclose()

    async def _load_weights(self, folder: str) -> None:
        await self._call_dev_api("/pause", params={"mode": "wait", "clear_cache": "true"})
        await self._call_dev_api("/collective_rpc", json={"method": "agentgym_load_folder", "args": [folder]})
        answer = await self._call_dev_api("/reset_prefix_cache")
        if answer and answer.get("success") is False:
            raise EngineError(f"{self.url} did not drop the KV cache of the old weights")
        await self._call_dev_api("/resume")

    async def _load_adapter(self, folder: str, version: int) -> None:
        # A name of its own for every load of every client, because vLLM refuses a name twice.
        self._num_adapters += 1
        name = f"weights-{self._salt}-{version}-{self._num_adapters}"
        try:
            await self._change_adapters("load", name, lora_path=folder)
            if self._adapter is not None:
                await self._change_adapters("unload", self._adapter)
        except EngineError as error:
            raise EngineError(
                f"{error}; adapters need a server with --enable-lora, --max-lora-rank and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ) from error
        self._adapter = name

    async def _change_adapters(self, action: Literal["load", "unload"], name: str, **body: str) -> None:
        """Load or unload an adapter. A refused request has succeeded if an attempt whose answer was lost did so."""
        try:
            await self._send("POST", f"/v1/{action}_lora_adapter", json={"lora_name": name, **body})
        except EngineError:
            rows = (await self._send("GET", "/v1/models"))["data"]
            if (name in [row["id"] for row in rows]) != (action == "load"):
                raise

    async def _score(self, token_ids: list[int]) -> list[float]:
        choice = await self._complete(token_ids, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
        rows = (choice.get("prompt_logprobs") or [])[1:]
        if len(rows) != len(token_ids) - 1:
            raise EngineError(f"{self.url} returned {len(rows)} log-probabilities for {len(token_ids)} prompt tokens")
        return [row[str(token)]["logprob"] for row, token in zip(rows, token_ids[1:], strict=True)]

    async def _require_processed(self, prompt_ids: list[int]) -> None:
        """Raise EngineError if log-probabilities are from before temperature, which a request shows."""
        if self._reports_processed is None:
            prompt_ids = prompt_ids[: self.max_context - 2]
            body = {"max_tokens": 1, "temperature": 2.0, "logprobs": 0, "return_token_ids": True, "seed": 0}
            choice = await self._complete(prompt_ids, body)
            (token,), (at_two,) = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            at_one = (await self._score([*prompt_ids, token]))[-1]
            self._reports_processed = abs(at_two - at_one) > RAW_MODE_GAP
        if not self._reports_processed:
            raise EngineError(
                f"{self.url} reports log-probabilities from before temperature and top_p: start it with "
                "--logprobs-mode processed_logprobs, or sample with temperature = 1 and top_p = 1"
            )

    async def _complete(self, prompt_ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        common = {
            "model": self._adapter or self._model,
            "prompt": list(prompt_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "cache_salt": f"{self._salt}-{self.version}",
            # Explicit, because the server reads missing settings from the model's generation_config.json.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        answer = await self._send("POST", "/v1/completions", json=common | body)
        try:
            return answer["choices"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} did not answer with a completion: {str(answer)[:200]}") from error

    async def _call_dev_api(self, path: str, **request: Any) -> Any:
        try:
            return await self._send("POST", path, **request)
        except EngineError as error:
            raise EngineError(
                f"{error}; to load weights a server needs VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
            ) from error

    async def _send(self, method: str, path: str, **request: Any) -> Any:
        """Send a request, with retries. Return the answer's JSON, or None if it has no body."""
        for attempt in range(RETRIES + 1):
            try:
                response = await self._http.request(method, self.url + path, **request)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return (
                        response.json()
                        if response.headers.get("content-type", "").startswith("application/json")
                        else None
                    )
                reason = f"HTTP {response.status_code} {' '.join(response.text.split())[:300]}"
                if response.status_code not in _TRANSIENT:
                    raise EngineError(f"{self.url}{path} refused: {reason}")
            if attempt < RETRIES:
                await asyncio.sleep(0.5 * 2**attempt)
        raise EngineError(f"{self.url}{path} failed {RETRIES + 1} times, the last: {reason}")

    async def _wait_until_open(self) -> None:
        if not self._closed:
            await self._ready.wait()
        if self._closed or self._unknown_weights:
            raise EngineError(self._closed or self._unknown_weights)


def _absolute(folder: str | Path) -> str:
    """Return an absolute path, because the server has another working directory."""
    return str(Path(folder).resolve())
