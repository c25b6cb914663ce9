"""How does a program look after step i, and on which line does each of its rows stay?

A timeline keeps a first frame and one delta per edit. `Replay` plays the deltas forwards and
backwards on a linked list, so that walking a timeline costs what the edits cost, and `slots_of`
gives every row one fixed line for the whole of a pass. Rows and values are plain data as in the
schema of `timeline.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fxlab.explorer.sentences import expression

if TYPE_CHECKING:
    from fxlab.explorer.timeline import Step

LETTERS = {
    "placeholder": "P",
    "get_attr": "G",
    "call_function": "F",
    "call_method": ".",
    "call_module": "M",
    "output": "O",
}


class State(NamedTuple):
    """The changing fields of a row; `args` and `kwargs` are values of the schema."""

    name: str
    op: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    type: str = ""

    @property
    def letter(self) -> str:
        """P placeholder, G get_attr, F call_function, . call_method, M call_module, O output."""
        return LETTERS.get(self.op, "?")


class Change(NamedTuple):
    """What one step did to one row; a state is None where the row did not exist."""

    row: int
    before: State | None
    after: State | None


class Slot(NamedTuple):
    """One fixed line: the row lives on it in frames `first` to `last` (None: to the end)."""

    row: int
    first: int
    last: int | None

    def live(self, index: int) -> bool:
        """Whether the row lives on this line in frame `index`."""
        return self.first <= index and (self.last is None or index <= self.last)


@dataclass(slots=True)
class Frame:
    """A whole program at one step: `rows` maps row id to state, in the order of the graph."""

    index: int
    program: str
    rows: dict[int, State]

    def inputs(self, row: int) -> list[int]:
        """The rows that this row reads, in order, each once."""
        return rows_in_state(self.rows[row])

    def readers(self, row: int) -> list[int]:
        """The rows that read this row, in the order of the graph."""
        return [r for r, state in self.rows.items() if row in rows_in_state(state)]

    def name(self, row: int) -> str:
        """The name of a row here; rows that are not here are named by their number."""
        state = self.rows.get(row)
        return state.name if state is not None else f"(row {row}, not here)"

    def parts(self, row: int) -> list[str | int]:
        """The generated line of a row, in pieces: text, and row ids where a name stands."""
        state = self.rows[row]
        pieces = expression(state)
        if state.op in ("placeholder", "output"):
            return pieces
        return [row, " = ", *pieces]

    def line(self, row: int) -> str:
        """The generated line of a row, such as `relu = self.relu(conv1)`."""
        return "".join(p if isinstance(p, str) else self.name(p) for p in self.parts(row))

    def code(self) -> str:
        """Every line, in order; a display form, not the text that is executed."""
        return "\n".join(self.line(row) for row in self.rows)


def rows_in(value: Any) -> Iterator[int]:
    """The row ids in a value of the schema, in order, with repeats. No recursion."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            stack.extend(reversed(one))
        elif isinstance(one, dict):
            if "row" in one:
                yield one["row"]
            elif "rows" in one:
                yield from one["rows"]
            else:
                for key in ("tuple", "dict", "slice"):
                    if key in one:
                        stack.append(one[key])


def rows_in_state(state: State) -> list[int]:
    """The rows that a state reads, each once, in order."""
    found = dict.fromkeys(rows_in(state.args))
    for value in state.kwargs.values():
        found.update(dict.fromkeys(rows_in(value)))
    return list(found)


def substitute(value: Any, old: int, new: int) -> Any:
    """The value with every mention of row `old` made `new`; shares what does not change."""
    if isinstance(value, list):
        return [substitute(one, old, new) for one in value]
    if isinstance(value, dict):
        if value.get("row") == old and "row" in value:
            return {"row": new}
        if "rows" in value:
            return {**value, "rows": [new if r == old else r for r in value["rows"]]}
        return {key: substitute(one, old, new) for key, one in value.items() if key != "text"} | (
            {"text": value["text"]} if "text" in value else {}
        )
    return value


class Replay:
    """One program, played to any step, forwards or backwards.

    The order is a doubly linked list on row ids with None as both ends.
    """

    def __init__(self, first: dict[int, State], program: str) -> None:
        self.program = program
        self.index = 0
        self.states: dict[int, State] = dict(first)
        self.next: dict[int | None, int | None] = {}
        self.prev: dict[int | None, int | None] = {}
        last: int | None = None
        for row in first:
            self._link(row, last)
            last = row
        if not first:
            self.next[None] = self.prev[None] = None

    def _link(self, row: int, before: int | None) -> None:
        after = self.next.get(before)
        self.next[before] = row
        self.prev[row] = before
        self.next[row] = after
        self.prev[after] = row

    def _unlink(self, row: int) -> None:
        before, after = self.prev.pop(row), self.next.pop(row)
        self.next[before] = after
        self.prev[after] = before

    def order(self) -> list[int]:
        """The rows in the order of the graph."""
        rows, row = [], self.next.get(None)
        while row is not None:
            rows.append(row)
            row = self.next[row]
        return rows

    def at(self, steps: Sequence[Step], index: int) -> Frame:
        """The frame after step `index`."""
        self.seek(steps, index)
        return Frame(index, self.program, {row: self.states[row] for row in self.order()})

    def seek(self, steps: Sequence[Step], index: int) -> None:
        """Play to step `index`."""
        while self.index < index:
            self.apply(steps[self.index])
            self.index += 1
        while self.index > index:
            self.index -= 1
            self.revert(steps[self.index])

    def apply(self, step: Step) -> None:
        """Play one step forwards; steps of other programs change nothing."""
        edit = step.edit
        if edit.program != self.program or edit.row is None:
            return
        row, after = edit.row, edit.after or {}
        if edit.kind == "create":
            self._create(row, after)
        elif edit.kind == "erase":
            self._unlink(row)
            del self.states[row]
        elif edit.kind == "move":
            self._unlink(row)
            self._link(row, after["position"])
        elif edit.kind == "reroute":
            for user in after["users"]:
                state = self.states[user]
                self.states[user] = state._replace(
                    args=substitute(state.args, row, after["to"]),
                    kwargs=substitute_kwargs(state.kwargs, row, after["to"]),
                )
        elif edit.kind in ("args", "target", "rename"):
            self.states[row] = self.states[row]._replace(**only_state(after))

    def revert(self, step: Step) -> None:
        """Play one step backwards."""
        edit = step.edit
        if edit.program != self.program or edit.row is None:
            return
        row, before = edit.row, edit.before or {}
        if edit.kind == "create":
            self._unlink(row)
            del self.states[row]
        elif edit.kind == "erase":
            self._create(row, before)
        elif edit.kind == "move":
            self._unlink(row)
            self._link(row, before["position"])
        elif edit.kind == "reroute":
            for user, args, kwargs in before["users"]:
                self.states[user] = self.states[user]._replace(args=args, kwargs=kwargs)
        elif edit.kind in ("args", "target", "rename"):
            self.states[row] = self.states[row]._replace(**only_state(before))

    def _create(self, row: int, fields: dict[str, Any]) -> None:
        self._link(row, fields["position"])
        self.states[row] = State(**only_state(fields))


def only_state(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a delta that belong to a state."""
    return {key: fields[key] for key in State._fields if key in fields}


def substitute_kwargs(kwargs: dict[str, Any], old: int, new: int) -> dict[str, Any]:
    """`substitute` in keyword arguments, whose keys are names and not parts of a value."""
    return {key: substitute(one, old, new) for key, one in kwargs.items()} if kwargs else kwargs


def slots_of(start: list[int], steps: Sequence[Step], index: int, program: str) -> list[Slot]:
    """The fixed lines of the rows in `start` and of all that the steps add or move.

    Args:
        start: Row ids in order, as of frame `index`.
        steps: The steps after that frame.
        index: The frame that `start` is.
        program: Steps of other programs are passed over.

    Returns:
        Slots in the order of the lines. Linear in rows and steps.
    """
    born: list[list[Any]] = [[row, index, None] for row in start]  # row, first, last
    current = {row: slot for slot, row in enumerate(start)}
    after: dict[int | None, int | None] = {None: 0 if start else None}
    for slot in range(len(start)):
        after[slot] = slot + 1 if slot + 1 < len(start) else None

    def insert(row: int, position: int | None, first: int) -> None:
        before = None if position is None else current[position]
        slot = len(born)
        born.append([row, first, None])
        after[slot] = after[before]
        after[before] = slot
        current[row] = slot

    for step in steps:
        edit = step.edit
        if edit.program != program or edit.row is None:
            continue
        if edit.kind == "create":
            insert(edit.row, (edit.after or {})["position"], step.index)
        elif edit.kind == "erase":
            born[current.pop(edit.row)][2] = step.index - 1
        elif edit.kind == "move":
            born[current[edit.row]][2] = step.index - 1
            insert(edit.row, (edit.after or {})["position"], step.index)
    slots, slot = [], after[None]
    while slot is not None:
        slots.append(Slot(*born[slot]))
        slot = after[slot]
    return slots
