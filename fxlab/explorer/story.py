"""How is a timeline saved and read back without trusting the file?

`dump` writes the JSON of `timeline.py`'s schema, version 1. `load` builds a Timeline from text that
may come from anybody: it checks every field, plays all deltas once, and refuses with a
`TimelineError` that says where the file is wrong. Nothing in a file is imported, called or
unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from fxlab.core.errors import TimelineError
from fxlab.explorer.frames import LETTERS, Replay, State, rows_in_state
from fxlab.explorer.timeline import (
    EDIT_KINDS,
    FORMAT,
    VERSION,
    Edit,
    PassSpan,
    Place,
    Program,
    Row,
    Source,
    Step,
    Timeline,
)

MAX_DEPTH = 64  # of a value; the recorder writes at most frames.MAX_DEPTH
Json = Any


def dump(timeline: Timeline, indent: int | None = None) -> str:
    """The timeline as JSON text."""
    rows, steps = timeline.rows, timeline.steps  # a live recording takes in its last events here
    places = {place: index for index, place in enumerate(timeline._places)}
    story = {
        "format": FORMAT,
        "version": VERSION,
        "title": timeline.title,
        "programs": [_program_json(one) for one in timeline.programs],
        "rows": [_row_json(one, places) for one in rows.values()],
        "steps": [_step_json(one, places) for one in steps],
        "passes": [_pass_json(one) for one in timeline.passes],
        "places": [[*place, key] for place, key in timeline._places.items()],
        "sources": {key: asdict(one) for key, one in timeline.sources.items()},
        "notes": {str(index): text for index, text in timeline.notes.items()},
        "error": timeline.error,
    }
    separators = None if indent else (",", ":")
    return json.dumps(story, indent=indent, separators=separators, allow_nan=False)


def _program_json(program: Program) -> Json:
    first = [[row, state._asdict()] for row, state in program.first.items()]
    return {
        "id": program.id,
        "title": program.title,
        "path": program.path,
        "made_from": program.made_from,
        "first": first,
        "modules": program.modules,
    }


def _row_json(row: Row, places: Mapping[Place, int]) -> Json:
    return {
        "id": row.id,
        "program": row.program,
        "shape": row.shape,
        "made_by": row.made_by,
        "source": [places[place] for place in row.source],
        "stack": [list(pair) for pair in row.stack],
        "from": list(row.ancestors),
    }


def _step_json(step: Step, places: Mapping[Place, int]) -> Json:
    edit = step.edit
    return {
        "index": step.index,
        "program": step.program,
        "pass": step.pass_index,
        "edit": {"kind": edit.kind, "row": edit.row, "before": edit.before, "after": edit.after},
        "where": [places[place] for place in step.where],
        "sentence": step.sentence,
        "code": step.code,
        "problem": step.problem,
    }


def _pass_json(span: PassSpan) -> Json:
    fields = {key: getattr(span, key) for key in PassSpan.__slots__}
    fields["shapes"] = {str(row): text for row, text in span.shapes.items()}
    fields["columns"] = {
        name: {str(row): number for row, number in column.items()}
        for name, column in span.columns.items()
    }
    return fields


def refuse(where: str, why: str) -> NoReturn:
    """Raise the TimelineError that says which part of the file is wrong and why."""
    raise TimelineError(
        f"this is no timeline that can be read: {why}",
        where=None,
        expected="a JSON file written by Timeline.to_json (the schema is in fxlab/explorer/"
        "timeline.py)",
        wrong=where,
    )


def load(source: str | Path) -> Timeline:
    """Read a timeline from a path or from JSON text, checking everything.

    Raises:
        TimelineError: With the place in the file and the reason.
    """
    if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
        text = source
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            refuse(str(source)[:200], f"the file can't be read ({error})")
    try:
        story = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        refuse("the file", "it is nested too deep")
    except ValueError as error:
        refuse("the file", f"it is not whole JSON ({error})")
    if not isinstance(story, dict) or story.get("format") != FORMAT:
        refuse("the file", f'it is JSON, but its "format" is not "{FORMAT}"')
    version = story.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        refuse("version", "it has no version number")
    if version > VERSION:
        refuse(
            "version",
            f"it was written by a later fxlab (version {version}; this one reads up to "
            f"{VERSION}). Update fxlab to read it",
        )
    try:
        return _Reader(story).timeline
    except RecursionError:
        refuse("the file", "it is nested too deep")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, TimelineError):
            raise
        refuse("the file", f"its parts don't fit together ({type(error).__name__}: {error})")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def is_text(value: Json) -> bool:
    """A JSON text."""
    return isinstance(value, str)


def is_int(value: Json) -> bool:
    """A JSON integer (true and false are none)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Json) -> bool:
    """A finite JSON number."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float) and math.isfinite(value)


def is_measure(value: Json) -> bool:
    """A number that a float can hold."""
    return is_number(value) and abs(value) < 1e308


def or_null(check: Callable[[Json], bool]) -> Callable[[Json], bool]:
    """The same, or null."""
    return lambda value: value is None or check(value)


def list_of(check: Callable[[Json], bool]) -> Callable[[Json], bool]:
    """A list of such."""
    return lambda value: isinstance(value, list) and all(check(one) for one in value)


def map_of(check: Callable[[Json], bool]) -> Callable[[Json], bool]:
    """An object whose values are such."""
    return lambda value: isinstance(value, dict) and all(check(one) for one in value.values())


def is_value(value: Json, depth: int = 0) -> bool:
    """A value of the schema: what stands as an argument of a node."""
    if value is None or isinstance(value, bool | str) or is_number(value):
        return True
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, list):
        return all(is_value(one, depth + 1) for one in value)
    if not isinstance(value, dict):
        return False
    keys = set(value)
    if keys == {"row"}:
        return is_int(value["row"])
    if keys == {"text"}:
        return is_text(value["text"])
    if keys == {"text", "rows"}:
        return is_text(value["text"]) and list_of(is_int)(value["rows"])
    if keys == {"tuple"} or keys == {"dict"}:
        items = value.get("tuple", value.get("dict"))
        if not isinstance(items, list):
            return False
        pairs_fit = "tuple" in keys or all(isinstance(p, list) and len(p) == 2 for p in items)
        return pairs_fit and all(is_value(one, depth + 1) for one in items)
    if keys == {"slice"}:
        items = value["slice"]
        return isinstance(items, list) and len(items) == 3 and is_value(items, depth + 1)
    return False


def is_stack(value: Json) -> bool:
    """A list of [module path, type]."""
    return list_of(lambda one: list_of(is_text)(one) and len(one) == 2)(value)


STATE = {
    "name": is_text,
    "op": lambda value: is_text(value) and value in LETTERS,
    "target": is_text,
    "args": list_of(is_value),
    "kwargs": map_of(is_value),
    "type": is_text,
}
PROGRAM = {
    "id": is_text,
    "title": is_text,
    "path": is_text,
    "made_from": or_null(map_of(is_text)),
    "first": list_of(lambda one: isinstance(one, list) and len(one) == 2 and is_int(one[0])),
    "modules": map_of(is_text),
}
ROW = {
    "id": is_int,
    "program": is_text,
    "shape": is_text,
    "made_by": is_text,
    "source": list_of(is_int),
    "stack": is_stack,
    "from": list_of(lambda one: isinstance(one, dict)),
}
STEP = {
    "index": is_int,
    "program": is_text,
    "pass": is_int,
    "edit": lambda value: isinstance(value, dict),
    "where": list_of(is_int),
    "sentence": is_text,
    "code": is_text,
    "problem": or_null(is_text),
}
EDIT = {
    "kind": lambda value: is_text(value) and value in EDIT_KINDS,
    "row": or_null(is_int),
    "before": or_null(lambda value: isinstance(value, dict)),
    "after": or_null(lambda value: isinstance(value, dict)),
}
COST = or_null(lambda value: isinstance(value, dict))
VERDICTS = ("not checked", "identical", "rounding", "different", "refused")
PASS = {
    "name": is_text,
    "source": or_null(is_text),
    "first": is_int,
    "last": is_int,
    "cost_before": COST,
    "cost_after": COST,
    "same_output": or_null(
        lambda value: (
            isinstance(value, dict)
            and value.get("verdict") in VERDICTS
            and is_text(value.get("text"))
        )
    ),
    "report": lambda value: True,
    "kind": lambda value: value in ("pass", "trace", "run"),
    "program": is_text,
    "result": is_text,
    "lint": or_null(is_text),
    "sentence": is_text,
    "kept": list_of(is_text),
    "shapes": map_of(is_text),
    "columns": map_of(map_of(is_measure)),
}
STORY = {
    "format": is_text,
    "version": is_int,
    "title": is_text,
    "programs": list_of(lambda one: isinstance(one, dict)),
    "rows": list_of(lambda one: isinstance(one, dict)),
    "steps": list_of(lambda one: isinstance(one, dict)),
    "passes": list_of(lambda one: isinstance(one, dict)),
    "places": list_of(lambda one: isinstance(one, list) and len(one) == 4),
    "sources": map_of(lambda one: isinstance(one, dict)),
    "notes": map_of(is_text),
    "error": or_null(is_text),
}


def checked(fields: Json, schema: Mapping[str, Callable[[Json], bool]], where: str) -> dict:
    """The fields, when they are exactly those of the schema and each is of its kind."""
    if not isinstance(fields, dict):
        refuse(where, f"{where} is not an object")
    for key in schema:
        if key not in fields:
            refuse(f"{where}.{key}", f"{where} lacks {key!r}")
    for key, value in fields.items():
        if key not in schema:
            refuse(f"{where}.{key}", f"{where} has an unknown field {str(key)[:60]!r}")
        if not schema[key](value):
            refuse(f"{where}.{key}", f"{where}.{key} is not what the schema says")
    return fields


class _Reader:
    """Builds one Timeline; every method checks what it takes."""

    def __init__(self, story: Json) -> None:
        self.story = checked(story, STORY, "timeline")
        self.timeline = Timeline(self.story["title"])
        self.timeline.error = self.story["error"]
        self._sources()
        self._programs()
        self._rows()
        self._passes()
        self._steps()
        self._play()
        for text, note in self.story["notes"].items():
            self.timeline.note(int(text), note)

    def _sources(self) -> None:
        schema = {"file": is_text, "line": is_int, "text": is_text}
        for key, fields in self.story["sources"].items():
            self.timeline.sources[key] = Source(**checked(fields, schema, f"sources.{key[:60]}"))
        for file, line, function, key in self.story["places"]:
            fits = is_text(file) and is_int(line) and is_text(function)
            if not fits or not (key is None or key in self.timeline.sources):
                refuse("places", "a place is not [file, line, function, source key]")
            self.timeline._places[Place(file, line, function)] = key
        self.places = [Place(*place[:3]) for place in self.story["places"]]

    def _where(self, indices: list[int]) -> tuple[Place, ...]:
        if any(not 0 <= index < len(self.places) for index in indices):
            refuse("places", "a place index is out of range")
        return tuple(self.places[index] for index in indices)

    def _state(self, fields: Json, where: str) -> State:
        return State(**checked(fields, STATE, where))

    def _programs(self) -> None:
        self.ids: set[str] = set()
        for fields in self.story["programs"]:
            fields = checked(fields, PROGRAM, "program")
            if fields["id"] in self.ids:
                refuse("programs", f"two programs are called {fields['id']!r}")
            self.ids.add(fields["id"])
            first = {row: self._state(state, f"row {row}") for row, state in fields["first"]}
            self.timeline._programs.append(Program(**{**fields, "first": first}))

    def _rows(self) -> None:
        for fields in self.story["rows"]:
            fields = checked(fields, ROW, "row")
            self._known(fields["program"])
            self.timeline._rows[fields["id"]] = Row(
                id=fields["id"],
                program=fields["program"],
                shape=fields["shape"],
                made_by=fields["made_by"],
                source=self._where(fields["source"]),
                stack=tuple((path, kind) for path, kind in fields["stack"]),
                ancestors=tuple(fields["from"]),
            )

    def _known(self, program: str) -> None:
        if program not in self.ids:
            refuse("programs", f"there is no program {program[:60]!r}")

    def _passes(self) -> None:
        count = len(self.story["steps"])
        for fields in self.story["passes"]:
            fields = dict(checked(fields, PASS, "pass"))
            self._known(fields["program"])
            self._known(fields["result"])
            if not (1 <= fields["first"] <= count + 1 and 0 <= fields["last"] <= count):
                refuse("passes", f"pass {fields['name'][:60]!r} has steps that don't exist")
            if fields["source"] is not None and fields["source"] not in self.timeline.sources:
                fields["source"] = None
            fields["shapes"] = {int(row): text for row, text in fields["shapes"].items()}
            fields["columns"] = {
                name: {int(row): number for row, number in column.items()}
                for name, column in fields["columns"].items()
            }
            self.timeline._passes.append(PassSpan(**fields))

    def _steps(self) -> None:
        for number, fields in enumerate(self.story["steps"], 1):
            fields = checked(fields, STEP, f"step {number}")
            edit = checked(fields["edit"], EDIT, f"step {number}.edit")
            if fields["index"] != number:
                refuse(f"step {number}", "steps are not numbered 1, 2, 3, ...")
            self._known(fields["program"])
            if not 0 <= fields["pass"] < len(self.timeline._passes):
                refuse(f"step {number}", "it belongs to no pass")
            row = edit["row"]
            if row is not None and row not in self.timeline._rows:
                refuse(f"step {number}", f"there is no row {row}")
            self._fields(edit, number)
            self.timeline._steps.append(
                Step(
                    index=number,
                    program=fields["program"],
                    pass_index=fields["pass"],
                    edit=Edit(edit["kind"], fields["program"], row, edit["before"], edit["after"]),
                    where=self._where(fields["where"]),
                    sentence=fields["sentence"],
                    code=fields["code"],
                    _timeline=self.timeline,
                )
            )

    def _fields(self, edit: Json, number: int) -> None:
        """The parts of a delta that a replay relies on."""
        for side in ("before", "after"):
            for key, value in (edit[side] or {}).items():
                where = f"step {number}.{side}.{key}"
                if key in STATE and edit["kind"] not in ("module", "attr", "value", "error"):
                    if not STATE[key](value):
                        refuse(where, f"{where} is not what the schema says")
                elif key == "position" and not or_null(is_int)(value):
                    refuse(where, f"{where} is not a row")
                elif key == "users" and side == "before":
                    for user in value:
                        checked_user(user, where)

    def _play(self) -> None:
        """Play every program to its end: deltas that don't fit are found here."""
        for program in self.timeline._programs:
            for row, state in program.first.items():
                if row not in self.timeline._rows:
                    refuse(program.id, f"there is no row {row}")
                if any(one not in self.timeline._rows for one in rows_in_state(state)):
                    refuse(program.id, f"row {row} reads a row that does not exist")
            replay = Replay(program.first, program.id)
            for step in self.timeline._steps:
                try:
                    replay.seek(self.timeline._steps, step.index)
                except (KeyError, TypeError) as error:
                    refuse(
                        f"step {step.index}", f"its change doesn't fit what was before ({error})"
                    )


def checked_user(user: Json, where: str) -> None:
    """Refuse what is not [row, args, kwargs]."""
    fits = isinstance(user, list) and len(user) == 3 and is_int(user[0])
    if not fits or not STATE["args"](user[1]) or not STATE["kwargs"](user[2]):
        refuse(where, f"{where} is not a list of [row, args, kwargs]")
