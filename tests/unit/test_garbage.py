"""Garbage collections while episodes are played."""

from __future__ import annotations

import gc

from agentgym_rl.common.garbage import ALLOCATIONS_BETWEEN, rare_collections


def test_collections_are_rare_in_the_body_and_as_before_after_it() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] == ALLOCATIONS_BETWEEN
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_or_rarer_stays_so() -> None:
    before = gc.get_threshold()
    try:
        for threshold in (0, 2 * ALLOCATIONS_BETWEEN):
            gc.set_threshold(threshold)
            with rare_collections():
                assert gc.get_threshold()[0] == threshold
    finally:
        gc.set_threshold(*before)
