"""Was the program a valid graph after each step, and if not, what was wrong?

The first of the explorer's two verdicts (the other, same output, is in `sameness.py`). All steps
are judged in one forward replay: the fixed lines of `slots_of` turn "is defined before it is read"
into the comparison of two integers, and an edit makes only the rows that it touched and their
readers be looked at again. Linear in steps and edges.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from fxlab.core.graph import _enter_region, _exit_region
from fxlab.core.node import target_text
from fxlab.explorer.frames import Replay, State, rows_in_state, slots_of
from fxlab.explorer.sentences import path_text, short
from fxlab.explorer.timeline import Program, Step, Timeline

ENTER, EXIT = (target_text(one) for one in (_enter_region, _exit_region))


class Checker:
    """The rules of a valid graph, kept up to date while one program is replayed."""

    def __init__(self, program: Program, steps: list[Step]) -> None:
        self.replay = Replay(program.first, program.id)
        self.problems: dict[int, str] = {}
        self.readers: dict[int, dict[int, None]] = {}
        self.names: dict[str, dict[int, None]] = {}
        self.last_name: dict[int, str] = {}
        self.erased_at: dict[int, int] = {}
        self.paths = set(program.modules)
        self.by_path: dict[str, dict[int, None]] = {}
        self.outputs: dict[int, None] = {}
        self.regions: dict[int, None] = {}
        self.region_problem: str | None = None
        self.unclosed: int | None = None
        # Lines of placeholders, of all others and of all but outputs; old entries stay until met.
        self.placeholder_lines: list[tuple[int, int]] = []
        self.other_lines: list[tuple[int, int]] = []
        self.value_lines: list[tuple[int, int]] = []
        self.check_paths = bool(program.modules)
        # A row's line: the index of its slot, which never changes while it stays where it is.
        self.lines: dict[int, list[tuple[int, int]]] = {}
        for line, slot in enumerate(slots_of(list(program.first), steps, 0, program.id)):
            self.lines.setdefault(slot.row, []).append((slot.first, line))
        for row in self.lines:
            self.lines[row].sort()
        self.line = {row: self.lines[row][0][1] for row in program.first}
        self.inputs: dict[int, list[int]] = {}
        for row, state in program.first.items():
            self._enter(row, state)
        for row in program.first:
            self._judge(row)
        self.region_problem = self._nesting()

    def _enter(self, row: int, state: State) -> None:
        self.names.setdefault(state.name, {})[row] = None
        self.last_name[row] = state.name
        self.inputs[row] = rows_in_state(state)
        for source in self.inputs[row]:
            self.readers.setdefault(source, {})[row] = None
        line = self.line[row]
        if state.op == "placeholder":
            heappush(self.placeholder_lines, (-line, row))
        else:
            heappush(self.other_lines, (line, row))
        if state.op == "output":
            self.outputs[row] = None
        else:
            heappush(self.value_lines, (-line, row))
        if state.target in (ENTER, EXIT):
            self.regions[row] = None
        if state.op in ("call_module", "get_attr"):
            self.by_path.setdefault(state.target, {})[row] = None

    def _leave(self, row: int, state: State) -> None:
        self.names[state.name].pop(row, None)
        for source in self.inputs.pop(row, ()):
            self.readers.get(source, {}).pop(row, None)
        self.outputs.pop(row, None)
        self.regions.pop(row, None)
        self.by_path.get(state.target, {}).pop(row, None)
        self.problems.pop(row, None)

    def _judge(self, row: int) -> None:
        problem = self._problem(row)
        if problem is None:
            self.problems.pop(row, None)
        else:
            self.problems[row] = problem

    def _problem(self, row: int) -> str | None:
        state = self.replay.states[row]
        name = short(state.name, 40)
        for source in self.inputs[row]:
            if source == row:
                return f"{name} reads itself"
            if source not in self.replay.states:
                when = self.erased_at.get(source)
                gone = f"erased at step {when}" if when else "which is not in this program"
                return (
                    f"{name} reads {short(self.last_name.get(source, f'row {source}'), 40)}, {gone}"
                )
            if source in self.outputs:
                return f"{name} reads {short(self.last_name[source], 40)}, which is no value"
            if self.line[source] > self.line[row]:
                other = short(self.last_name[source], 40)
                return f"{name} reads {other}, which is computed after it"
        if len(self.names[state.name]) > 1:
            return f"two nodes are called {name}"
        if state.op == "output" and len(self.outputs) > 1:
            return f"{name} is a second output"
        if state.op == "output" and (len(state.args) != 1 or state.kwargs):
            return f"{name} must return one value"
        missing = state.op in ("call_module", "get_attr") and self.check_paths
        if missing and not self._resolves(state.target):
            return f"{name} names {short(path_text(state.target))}, which does not exist"
        return None

    def _resolves(self, path: str) -> bool:
        return path in self.paths or path.rpartition(".")[2] == "training"

    def step(self, step: Step) -> None:
        """Play one step, and look again at what it touched."""
        edit = step.edit
        if edit.program != self.replay.program:
            return
        if edit.kind in ("module", "attr"):
            self._state_edit(edit.before or {}, edit.after or {})
            return
        if edit.kind in ("result", "value", "error") or edit.row is None:
            return
        row = edit.row
        touched = {row: None}
        users = list((edit.after or {}).get("users", ())) if edit.kind == "reroute" else [row]
        named_before = []
        had_region = any(one in self.regions for one in (row, *users))
        for one in users:
            state = self.replay.states.get(one)
            if state is not None:
                named_before.append(state.name)
                self._leave(one, state)
        self.replay.apply(step)
        if edit.kind == "erase":
            self.erased_at[row] = step.index
        if edit.kind in ("create", "move"):
            self.line[row] = self._line_at(row, step.index)
        for one in users:
            state = self.replay.states.get(one)
            if state is not None:
                self._enter(one, state)
                touched[one] = None
        if edit.kind in ("create", "erase", "move", "rename"):
            touched.update(self.readers.get(row, {}))
            touched.update(dict.fromkeys(self._namesakes(named_before, row)))
        touched.update(self.outputs if len(self.outputs) != 1 else {})
        if had_region or any(one in self.regions for one in touched):
            self.region_problem = self._nesting()
        for one in touched:
            if one in self.replay.states:
                self._judge(one)

    def _namesakes(self, names: list[str], row: int) -> list[int]:
        """Rows that share a name which this step gave up or took."""
        state = self.replay.states.get(row)
        wanted = {*names, *([state.name] if state is not None else [])}
        return [one for name in wanted for one in self.names.get(name, ())]

    def _line_at(self, row: int, index: int) -> int:
        return next(line for first, line in reversed(self.lines[row]) if first <= index)

    def _state_edit(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        path = after.get("path") or before.get("path") or ""
        if after.get("value") is None:
            gone = {one for one in self.paths if one == path or one.startswith(f"{path}.")}
            self.paths -= gone
        else:
            self.paths.add(path)
            self.paths.update(f"{path}.{one}" for one in after["value"].get("inner", ()))
            gone = {path}
        for one in gone:
            for row in self.by_path.get(one, {}):
                self._judge(row)

    def verdict(self) -> str | None:
        """What is wrong now: the oldest trouble that is left."""
        return (
            next(iter(self.problems.values()), None)
            or self._order()
            or self.region_problem
            or self._left_open()
        )

    def _order(self) -> str | None:
        """Whether placeholders come first and the output last."""
        first = self._top(self.other_lines, 1, lambda op: op != "placeholder")
        last = self._top(self.placeholder_lines, -1, lambda op: op == "placeholder")
        if first is not None and last is not None and last[0] > first[0]:
            return f"{short(self.last_name[last[1]], 40)} is a placeholder behind an operation"
        value = self._top(self.value_lines, -1, lambda op: op != "output")
        output = next(iter(self.outputs), None)
        if output is not None and value is not None and value[0] > self.line[output]:
            return f"{short(self.last_name[value[1]], 40)} stands behind the output"
        return None

    def _top(
        self, heap: list[tuple[int, int]], sign: int, fits: Callable[[str], bool]
    ) -> tuple[int, int] | None:
        """The first line of a heap that still holds, with its row."""
        while heap:
            line, row = heap[0]
            state = self.replay.states.get(row)
            if state is not None and self.line[row] == sign * line and fits(state.op):
                return sign * line, row
            heappop(heap)
        return None

    def _nesting(self) -> str | None:
        """Whether `with` regions nest: each exit leaves the innermost one that is open."""
        opened: list[int] = []
        for row in sorted(self.regions, key=lambda one: self.line[one]):
            state = self.replay.states[row]
            if state.target == ENTER:
                opened.append(row)
            elif not opened or state.args[:1] != [{"row": opened[-1]}]:
                name = short(state.name, 40)
                return f"{name} leaves a region that is not the innermost one"
            else:
                opened.pop()
        self.unclosed = opened[-1] if opened else None
        return None

    def _left_open(self) -> str | None:
        """A region that a finished program never leaves; while it is being built that is fine."""
        if self.unclosed is None or not self.outputs:
            return None
        return f"the region {short(self.last_name[self.unclosed], 40)} is never left"


def check_steps(timeline: Timeline) -> None:
    """Fill in `problem` of every step; does nothing when no step came since the last call."""
    steps = timeline.steps
    if timeline._checked == len(steps):
        return
    checkers = {one.id: Checker(one, steps) for one in timeline.programs}
    for step in steps:
        checker = checkers[step.program]
        checker.step(step)
        step._problem = checker.verdict()
    timeline._checked = len(steps)
