"""Which engine a session goes to: its own, that of its group, or the least busy one."""

from __future__ import annotations

import asyncio

from scripted_engine_for_tests import ScriptedEngine

from agentgym_rl.agent.engines.replicas import Replicas
from agentgym_rl.agent.engines.routing import SessionRouter
from agentgym_rl.types import Completion, Sampling


def test_hosts_with_few_episodes_each_leave_no_engine_idle() -> None:
    hosts = [SessionRouter(4, first) for first in (0, 2)]
    assert sorted(host.engine_of(session, [1]) for host in hosts for session in ("a", "b")) == [0, 1, 2, 3]
    assert hosts[0].engine_of("a", [1], {0}) == 0, "an assigned session remains"
    assert hosts[0].engine_of("c", [1], {2}) == 3


def test_the_episodes_of_a_group_go_to_one_engine_and_groups_spread() -> None:
    router = SessionRouter(3, first=1, max_sessions=8)
    engines = {group: {router.engine_of(f"{group}-{n}", [group, 7]) for n in range(4)} for group in range(6)}
    assert engines == {0: {1}, 1: {2}, 2: {0}, 3: {1}, 4: {2}, 5: {0}}
    assert router.engine_of("0-0", [0, 7, 8, 9]) == 1, "a later turn has another prompt"
    assert [router.remove(f"0-{n}") for n in range(4)] == [1] * 4
    assert router.engine_of("again", [3, 7]) == 1, "the rest of group 3 is there"


def test_a_group_leaves_an_engine_that_is_full_or_down() -> None:
    router = SessionRouter(2, max_sessions=3)
    assert [router.engine_of(f"a{n}", [1]) for n in range(5)] == [0, 0, 0, 1, 1]
    assert [router.engine_of(f"b{n}", [2], down={1}) for n in range(2)] == [0, 0], "no other engine is up"
    assert router.engine_of("a5", [1], down={0}) == 1
    assert router.remove("a5") == 1
    assert router.remove("never seen") is None


class Serving(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__([])
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        self.prompts.append(prompt_ids)
        return Completion([1], [0.0], "stop", self.version)


async def test_replicas_keep_the_episodes_of_a_group_together() -> None:
    engines = [Serving(), Serving()]
    replicas = Replicas(engines, max_sessions=8)
    groups = [(group, member) for member in range(4) for group in range(4)]
    await asyncio.gather(*(replicas.generate([group, 5], Sampling(1), f"{group}-{m}") for group, m in groups))
    served = [{prompt[0] for prompt in engine.prompts} for engine in engines]
    assert served[0].isdisjoint(served[1])
    assert [len(engine.prompts) for engine in engines] == [8, 8]
