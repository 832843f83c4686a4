"""Which addresses an agent may open. Whatever it writes is an address of the sites or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import SplitResult, urlsplit

from agentgym_rl.environment.envs.webarena.actions import Refused, quote


def address(text: str, allowed: Callable[[str], bool]) -> str:
    """What `goto` opens: `shop.test/a` without its scheme too; Refused when it is no address or not allowed."""
    url = text if "://" in text else f"http://{text}"
    try:
        readable = urlsplit(url).scheme in ("http", "https") and url.isprintable()
    except ValueError:  # a bracket that is never closed, a letter that stands for a slash
        readable = False
    if not readable or not allowed(url):
        raise Refused(f"{quote(text)} is outside the sites of this task: it was not opened.")
    return url


def on_sites(url: str, sites: Iterable[str]) -> bool:
    """Whether an address is on one of the sites (or an empty tab)."""
    if url == "about:blank":
        return True
    try:
        origin = _origin(urlsplit(url))
        return any(origin == _origin(site) for site in map(urlsplit, sites) if site.netloc)
    except ValueError:
        return False


def _origin(place: SplitResult) -> tuple[str, str, int | None]:
    """Scheme, host (with whatever account stands before it) and port, also where it is the one that goes unsaid."""
    port = place.port if place.port is not None else {"http": 80, "https": 443}.get(place.scheme)
    account, _, _ = place.netloc.rpartition("@")
    return place.scheme, f"{account}@{place.hostname}", port
