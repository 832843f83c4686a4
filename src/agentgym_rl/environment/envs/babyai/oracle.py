"""A planner that solves every level with knowledge of the whole grid.

In a simulation it plans the moves to the first open part of the mission: walking, opening doors, fetching keys (from
boxes too) and clearing objects out of the way. The moves are then expressed as actions of the game, each as long as
possible. While the agent follows the advice the plan is kept; otherwise the next call makes a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentgym_rl.environment.envs.babyai.field_of_view import Move
from agentgym_rl.environment.envs.babyai.simulation import Simulation
from agentgym_rl.errors import EnvError

_MAX_MOVES = 3000
_MAX_DEPTH = 12
_LOCKED_COST = 40
_BLOCKER_COST = 12


class NoWayError(Exception):
    """The planner finds no way to its goal."""


def next_goal(instruction: Any) -> Any:
    """Return the first part of the mission that is still open."""
    kind = type(instruction).__name__
    if kind == "BeforeInstr":
        return next_goal(instruction.instr_b if instruction.a_done == "success" else instruction.instr_a)
    if kind == "AfterInstr":
        return next_goal(instruction.instr_a if instruction.b_done == "success" else instruction.instr_b)
    if kind == "AndInstr":
        return next_goal(instruction.instr_b if instruction.a_done == "success" else instruction.instr_a)
    return instruction


class Planner:
    """Plans the moves for one goal. With more `care`, objects are put away further from where they could block."""

    def __init__(self, level: Any, goal: Any, care: int = 1) -> None:
        self.sim = Simulation(level)
        self.goal = goal
        self._care = care
        # In a strict mission, picking up a wrong object loses: nothing may be cleared away.
        self._may_clear = not (type(goal).__name__ == "PickupInstr" and goal.strict)
        self._needed: Any = None
        self._sealed: set[int] = set()
        self._corridor: list[int] = []
        self._depth = 0

    def moves(self) -> list[Move]:
        plans: dict[str, Callable[[], None]] = {
            "GoToInstr": self._plan_go_to,
            "OpenInstr": self._plan_open,
            "PickupInstr": self._plan_pick_up,
            "PutNextInstr": self._plan_put_next,
        }
        if self.sim.held is not None and self.sim.held.contains is not None:
            # A box in hand cannot be opened, and it may hold the key.
            self._put_away()
        plans[type(self.goal).__name__]()
        return self.sim.moves

    # Goals.

    def _plan_go_to(self) -> None:
        tracked = self.goal.desc.obj_set
        cells = self.sim.find(tracked)
        if not cells and any(self.sim.held is thing for thing in tracked):
            self._put_away()
            return
        # A tracked object that left the grid still counts at its last known position.
        remembered = [int(y) * self.sim.width + int(x) for x, y in self.goal.desc.obj_poss]
        self._face(cells or remembered)
        if not self.sim.moves:
            self._turn_left_and_right()

    def _plan_open(self) -> None:
        doors = self.sim.find(self.goal.desc.obj_set)
        states = self.sim.door_states
        extra = {"closed": 0, "open": 1, "locked": _LOCKED_COST}
        costs = {d: 0 if states[d] == "locked" and self.sim.has_key_for(d) else extra[states[d]] for d in doors}
        route = self.sim.route(self._entry_cost, costs.get)
        if route is None:
            raise NoWayError
        _, door = self.sim.trace(route)
        if not self._lacks_key(door):
            self._face([door])
        if states[door] == "open":
            self.sim.do(Move.TOGGLE)
        self._open(door)

    def _plan_pick_up(self) -> None:
        tracked = self.goal.desc.obj_set
        if not self.sim.find(tracked) and any(self.sim.held is thing for thing in tracked):
            self._put_away()
        # For minigrid, "a grey object" includes grey walls.
        self._pick_up(thing for thing in tracked if thing.can_pickup())

    def _plan_put_next(self) -> None:
        goal = self.goal
        if not any(self.sim.held is thing for thing in goal.desc_move.obj_set):
            self._pick_up(goal.desc_move.obj_set)
        elif goal.preCarrying is not self.sim.held:
            # The verifier must have seen it carried before the drop counts.
            self._turn_left_and_right()
        self._needed = self.sim.held
        while True:
            beside: dict[int, int] = {}
            for cell in self.sim.find(goal.desc_fixed.obj_set):
                for offset in self.sim.offsets:
                    thing = self.sim.cells[cell + offset]
                    if thing is None:
                        beside[cell + offset] = 0
                    elif thing.can_pickup():
                        beside[cell + offset] = _BLOCKER_COST
            self._face(beside)
            if self.sim.do(Move.DROP):
                return
            self.sim.moves.pop()
            self._clear(self.sim.front)

    # Parts of a plan.

    def _turn_left_and_right(self) -> None:
        self.sim.do(Move.LEFT)
        self.sim.do(Move.RIGHT)

    def _face(self, targets: Iterable[int] | Mapping[int, int]) -> None:
        """Walk until one of the target cells is in front, opening and clearing any obstacle."""
        extra = targets if isinstance(targets, Mapping) else dict.fromkeys(targets, 0)
        while len(self.sim.moves) < _MAX_MOVES:
            route = self.sim.route(self._entry_cost, extra.get)
            if route is None:
                raise NoWayError
            locked = next((cell for cell in self.sim.trace(route)[0] if self._lacks_key(cell)), None)
            if locked is not None and (self.sim.held is None or self.sim.held is not self._needed):
                # Fetch the key first, without walking to the door.
                self._open(locked)
                continue
            for done, move in enumerate(route):
                if move is Move.FORWARD and not self.sim.is_free(self.sim.front):
                    walked = len(self._corridor)
                    self._corridor += self.sim.trace(route[done:])[0]
                    self._clear(self.sim.front)
                    del self._corridor[walked:]
                    break
                self.sim.do(move)
            else:
                return
        raise NoWayError

    def _entry_cost(self, cell: int) -> int | None:
        thing = self.sim.cells[cell]
        if thing is None:
            return 0
        if thing.type == "door":
            state = self.sim.door_states[cell]
            if state == "open":
                return 0
            if state == "closed" or self.sim.has_key_for(cell):
                return 1
            return _LOCKED_COST if cell not in self._sealed and self._key_cells(thing.color) else None
        return _BLOCKER_COST if thing.can_pickup() and self._may_clear else None

    def _clear(self, cell: int) -> None:
        """Free the cell in front: open the door or move the object elsewhere."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NoWayError
        if cell in self.sim.door_states:
            self._open(cell)
        else:
            kept = self._free_hands()
            self._face([cell])
            self.sim.do(Move.PICKUP)
            self._put_away(keep_free=cell)
            self._take_back(kept)
        self._depth -= 1

    def _open(self, door: int) -> None:
        """Open the closed door in front, or, from anywhere, a locked door whose key is elsewhere."""
        if self._lacks_key(door):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise NoWayError
            kept = self._free_hands() if self.sim.held is not None and self.sim.held is self._needed else None
            self._sealed.add(door)
            self._fetch_key(self.sim.cells[door].color)
            self._sealed.discard(door)
            needed, self._needed = self._needed, self.sim.held
            self._face([door])
            self._needed = needed
            self.sim.do(Move.TOGGLE)
            if kept is not None:
                self._put_away()
            self._take_back(kept)
            self._depth -= 1
        else:
            self.sim.do(Move.TOGGLE)

    def _lacks_key(self, cell: int) -> bool:
        """Return whether the cell is a locked door whose key is not carried."""
        return self.sim.door_states.get(cell) == "locked" and not self.sim.has_key_for(cell)

    def _fetch_key(self, color: str) -> None:
        cells = self._key_cells(color)
        self._face(cells)
        thing = self.sim.cells[self.sim.front]
        if thing.type == "box":
            key = thing.contains
            self.sim.do(Move.TOGGLE)
            self._pick_up([key])
        else:
            self._pick_up([thing])

    def _key_cells(self, color: str) -> list[int]:
        """Return the cells with a key of that colour on the floor or, if there is none, in a box."""
        cells = self.sim.cells
        loose = [
            c for c, thing in enumerate(cells) if thing is not None and thing.type == "key" and thing.color == color
        ]
        return loose or [
            cell
            for cell, thing in enumerate(cells)
            if thing is not None
            and thing.type == "box"
            and thing.contains is not None
            and (thing.contains.type, thing.contains.color) == ("key", color)
        ]

    def _pick_up(self, things: Iterable[Any]) -> None:
        things = list(things)
        self._face(self.sim.find(things))
        if self.sim.held is not None:
            self._put_away(keep_free=self.sim.front)
            self._face(self.sim.find(things))
        self.sim.do(Move.PICKUP)

    def _free_hands(self) -> Any:
        """Put away the held object. Return it if it is needed afterwards."""
        kept = self.sim.held if self.sim.held is self._needed else None
        if self.sim.held is not None:
            self._put_away(keep_free=self.sim.front)
        return kept

    def _take_back(self, kept: Any) -> None:
        if kept is not None:
            self._pick_up([kept])

    def _put_away(self, keep_free: int | None = None) -> None:
        """Drop the held object where it is least likely to block."""
        route = self.sim.route(
            lambda cell: 0 if self.sim.is_free(cell) else None,
            lambda cell: None if self.sim.cells[cell] is not None else self._blocking_cost(cell, keep_free),
        )
        if route is None:
            raise NoWayError
        for move in route:
            self.sim.do(move)
        self.sim.do(Move.DROP)

    def _blocking_cost(self, cell: int, keep_free: int | None) -> int:
        """Return the cost of an object in `cell`: how much it would block."""
        right, down = 1, self.sim.width
        ring = [cell + o for o in (right, right + down, down, down - right, -right, -right - down, -down, right - down)]
        free = [self.sim.is_free(neighbour) for neighbour in ring]
        doors = any(neighbour in self.sim.door_states for neighbour in ring[::2])
        crowded = sum(thing is not None and thing.can_pickup() for thing in (self.sim.cells[n] for n in ring[::2]))
        passages = sum(free[i] != free[i - 1] for i in range(8)) > 2
        cost = 12 * doors + 10 * passages + 4 * crowded
        return self._care * cost + 100 * (cell == keep_free or cell in self._corridor)


def _plan(level: Any, goal: Any) -> list[Move]:
    for care in (1, 2, 8):
        try:
            return Planner(level, goal, care).moves()
        except NoWayError:
            continue
    raise EnvError("babyai's oracle found no way to reach the goal from here (it misses a few): reset the item")


class Oracle:
    """Gives advice during one episode."""

    def __init__(self, level: Any) -> None:
        self._level = level
        self._goal: Any = None
        self._moves: list[Move] = []
        self._advice = ""
        self._advised_moves = 0

    def advise(self, menu: Mapping[str, tuple[Move, ...]]) -> str:
        """Return the action of `menu` that goes furthest along the plan."""
        goal = next_goal(self._level.instrs)
        if goal is not self._goal or not self._moves:
            self._moves = _plan(self._level, goal)
            self._goal = goal
        walk = Simulation(self._level)
        distance_of = {}
        for distance, move in enumerate(self._moves, start=1):
            walk.do(move)
            distance_of[walk.signature] = distance
        self._advice, self._advised_moves = "", 0
        start = Simulation(self._level)
        for action, moves in menu.items():
            trial = start.copy()
            for move in moves:
                if not trial.do(move):
                    break
            distance = distance_of.get(trial.signature, 0)
            # If a single move and an action on an object both complete the plan, prefer the object.
            if distance > self._advised_moves or distance == self._advised_moves == len(self._moves):
                self._advice, self._advised_moves = action, distance
        if not self._advice:
            raise EnvError(f"babyai's oracle planned {self._moves[0].name}, which no available action does: report it")
        return self._advice

    def record(self, action: str) -> None:
        """Record the agent's action. Keep the plan only if the action was the advice."""
        if action == self._advice:
            del self._moves[: self._advised_moves]
        else:
            self._moves = []
        self._advice = ""
