"""Seeds that are the same in every process, unlike `hash`.

The two functions differ in their hash. Both stay, because a change would change the episodes of every recorded run.
"""

from __future__ import annotations

import hashlib


def stable_seed(*parts: object) -> int:
    """Return the seed in [0, 2**63) of an episode or a reply, from the text of `parts`."""
    return _first_63_bits(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest())


def derive_seed(*parts: object) -> int:
    """Return the seed in [0, 2**63) of a part of a run, such as a step's rollouts, from the text of `parts`."""
    return _first_63_bits(hashlib.sha256("/".join(map(str, parts)).encode()).digest())


def _first_63_bits(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
