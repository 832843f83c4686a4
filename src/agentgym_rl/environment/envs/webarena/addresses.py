"""Addresses that an agent may open: those of the task's sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import SplitResult, urlsplit

from agentgym_rl.environment.envs.webarena.actions import Refused, quote


def address(text: str, allowed: Callable[[str], bool]) -> str:
    """Return the URL that `goto` opens; the scheme may be missing. Raise Refused if it is invalid or not allowed."""
    url = text if "://" in text else f"http://{text}"
    try:
        valid = urlsplit(url).scheme in ("http", "https") and url.isprintable()
    except ValueError:  # an unclosed bracket, or a character that normalises to a slash
        valid = False
    if not valid or not allowed(url):
        raise Refused(f"{quote(text)} is outside the sites of this task: it was not opened.")
    return url


def on_sites(url: str, sites: Iterable[str]) -> bool:
    """Return whether an address is on one of the sites or an empty tab."""
    if url == "about:blank":
        return True
    try:
        origin = _origin(urlsplit(url))
        return any(origin == _origin(site) for site in map(urlsplit, sites) if site.netloc)
    except ValueError:
        return False


def _origin(url: SplitResult) -> tuple[str, str, int | None]:
    """Return scheme, host (with the account before it) and port, filling in the default port."""
    port = url.port if url.port is not None else {"http": 80, "https": 443}.get(url.scheme)
    account, _, _ = url.netloc.rpartition("@")
    return url.scheme, f"{account}@{url.hostname}", port
