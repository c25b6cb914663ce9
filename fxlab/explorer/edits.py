"""How does one noted event become one edit with its sentence?

`EditWriter` keeps the state of every program while a story is written, row by row, and turns each
event into an `Edit` of plain data and into words.
"""

from __future__ import annotations

from typing import Any

import torch

from fxlab.core.graph import MISSING
from fxlab.core.node import Node
from fxlab.explorer import sentences
from fxlab.explorer.ancestry import node_id
from fxlab.explorer.encode import annotation, encode, state_json
from fxlab.explorer.events import Event
from fxlab.explorer.frames import State, rows_in_state, substitute, substitute_kwargs
from fxlab.explorer.timeline import Edit, Row, Timeline

NODES = (Node, torch.fx.Node)
NOTHING: dict[str, Any] = {}


class EditWriter:
    """The rows of a story and their present state; `Writer` adds programs, passes and steps."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.row_of: dict[Any, int] = {}
        self.node_of: list[Any] = []
        self.row_by_node_id: dict[int, int] = {}
        self.live: dict[str, dict[int, State]] = {}
        self.readers: dict[int, dict[int, None]] = {}
        self.names: list[str] = []
        self.mentions: dict[int, dict[str, int]] = {}

    def _number(self, node: Any) -> int:
        row = self.row_of.get(node)
        if row is None:
            row = self.row_of[node] = len(self.node_of)
            self.node_of.append(node)
            self.names.append("")
            self.row_by_node_id[node_id(node)] = row
        return row

    def _state(self, fields: tuple[Any, ...]) -> State:
        _, name, op, target, args, kwargs, annotated = fields[:7]
        return State(
            name,
            op,
            sentences.target_name(target),
            [self._encode(one) for one in args],
            {key: self._encode(one) for key, one in kwargs.items()} if kwargs else NOTHING,
            annotation(annotated),
        )

    def _encode(self, value: Any) -> Any:
        """A value of the schema; the many mentions of a node share one dict."""
        row = self.row_of.get(value) if isinstance(value, NODES) else None
        if row is None:
            return encode(value, self._row)
        return self.mentions.setdefault(row, {"row": row})

    def _row(self, node: Any) -> int:
        """The row of a node; one that was never heard of (another graph's) gets a row too."""
        row = self.row_of.get(node)
        if row is None:
            row = self._number(node)
            self.names[row] = node.name
            self.timeline._rows[row] = Row(row, "p0")
        return row

    def _enter(self, row: int, state: State) -> None:
        self.names[row] = state.name
        for source in rows_in_state(state):
            self.readers.setdefault(source, {})[row] = None

    def _leave(self, row: int, state: State) -> None:
        for source in rows_in_state(state):
            self.readers.get(source, {}).pop(row, None)

    def _set(self, program: str, row: int, state: State | None) -> None:
        old = self.live[program].get(row)
        if old is not None:
            self._leave(row, old)
        if state is None:
            self.live[program].pop(row, None)
        else:
            self.live[program][row] = state
            self._enter(row, state)

    def _name(self, row: int) -> str:
        return self.names[row]

    def _position(self, node: Any) -> int | None:
        return self.row_of.get(node)

    def _edit(self, event: Event, program: str) -> tuple[Edit, str, str] | None:
        kind = event.kind
        if kind in ("module", "attr"):
            return self._state_edit(event, program)
        if kind in ("value", "error"):
            row = self.row_of.get(event.node)
            name = "error" if row is None else self.names[row]
            fields, text = event.after["json"], event.after["text"]
            if kind == "value":
                freed = [self.row_of[one] for one in event.after["freed"] if one in self.row_of]
                fields = {**fields, "freed": freed}
                text = sentences.value_sentence(name, fields, [self.names[one] for one in freed])
            return Edit(kind, program, row, None, fields), text, name
        row = self.row_of.get(event.node)
        live = self.live[program]
        if row is None or (kind != "create" and row not in live):
            return None
        method = getattr(self, f"_edit_{kind}", None)
        if method is None:
            return None
        made = method(event, program, row)
        if event.after is not None and event.after.get("by") == "snapshot" and made[0].after:
            made[0].after["by"] = "snapshot"
        return made

    def _edit_create(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        assert event.born is not None
        state = self._state(event.born)
        self._set(program, row, state)
        position = self._position(event.after["prev"])
        code = sentences.text_of(sentences.expression(state), self._name)
        after = None if position is None else self.names[position]
        text = sentences.created(state, code, after)
        fields = {"position": position, **state._asdict()}
        return Edit("create", program, row, None, fields), text, state.name

    def _edit_erase(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        state = self.live[program][row]
        code = sentences.text_of(sentences.expression(state), self._name)
        readers = [self.names[one] for one in self.readers.get(row, {}) if one != row]
        self._set(program, row, None)
        fields = {"position": self._position(event.before["prev"]), **state._asdict()}
        text = sentences.erased(state.name, code, readers)
        return Edit("erase", program, row, fields, None), text, state.name

    def _edit_move(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        before = self._position(event.before["prev"])
        after = self._position(event.after["prev"])
        text = sentences.moved(
            self.names[row],
            None if before is None else self.names[before],
            None if after is None else self.names[after],
        )
        return (
            Edit("move", program, row, {"position": before}, {"position": after}),
            text,
            self.names[row],
        )

    def _edit_args(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        new = old._replace(
            args=[self._encode(one) for one in event.after["args"]],
            kwargs={key: self._encode(one) for key, one in event.after["kwargs"].items()},
        )
        self._set(program, row, new)
        text = sentences.rewritten(old.name, old, new, self._name)
        before = {"args": old.args, "kwargs": old.kwargs}
        after = {"args": new.args, "kwargs": new.kwargs}
        return Edit("args", program, row, before, after), text, old.name

    def _edit_target(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        target = sentences.target_name(event.after["target"])
        new = old._replace(op=event.after["op"], target=target)
        self._set(program, row, new)
        before, after = {"op": old.op, "target": old.target}, {"op": new.op, "target": target}
        text = sentences.retargeted(old.name, old, new)
        return Edit("target", program, row, before, after), text, old.name

    def _edit_type(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        new = old._replace(type=annotation(event.after["type"]))
        self._set(program, row, new)
        text = sentences.retargeted(old.name, old, new)
        edit = Edit("target", program, row, {"type": old.type}, {"type": new.type})
        return edit, text, old.name

    def _edit_rename(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        new = old._replace(name=event.after["name"])
        self._set(program, row, new)
        text = sentences.renamed(old.name, new.name)
        edit = Edit("rename", program, row, {"name": old.name}, {"name": new.name})
        return edit, text, new.name

    def _edit_reroute(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        to = self._row(event.after["to"])
        users, before = [], []
        for user, _, _ in event.before["users"]:
            one = self.row_of.get(user)
            if one is None or one not in self.live[program]:
                continue
            old = self.live[program][one]
            users.append(one)
            before.append([one, old.args, old.kwargs])
            self._set(program, one, old._replace(
                args=substitute(old.args, row, to), kwargs=substitute_kwargs(old.kwargs, row, to)
            ))  # fmt: skip
        left = [self.names[one] for one in self.readers.get(row, {})]
        text = sentences.rerouted(
            self.names[row], self.names[to], [self.names[one] for one in users], left
        )
        edit = Edit("reroute", program, row, {"users": before}, {"to": to, "users": users})
        return edit, text, self.names[row]

    def _state_edit(self, event: Event, program: str) -> tuple[Edit, str, str] | None:
        path = event.after["path"]
        old, new = event.before["value"], event.after["value"]
        before: dict[str, Any] = {"path": path, "value": live_json(old)}
        after: dict[str, Any] = {"path": path, "value": live_json(new)}
        if event.node == "snapshot":
            after["by"] = "snapshot"
        if event.after.get("written"):
            text = f"{sentences.path_text(path)}: its numbers were written over in place"
        else:
            text = sentences.restated(event.kind, before, after)
        return Edit(event.kind, program, None, before, after), text, path


def live_json(value: Any) -> dict[str, Any] | None:
    """`state_json`, with null for what was not there or was None."""
    return None if value is MISSING or value is None else state_json(value)
