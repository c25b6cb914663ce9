"""A function's code says the same whichever Python compiled it."""

from __future__ import annotations

import json
import subprocess
import textwrap
import types

import pytest

from fxlab.core import proxy
from fxlab.tracing import bytecode, questions
from fxlab.tracing.bytecode import steps
from tests.clocks import HANGS
from tests.pythons import found

PROGRAM = textwrap.dedent(
    """
    def program(x, mask, scale=None):
        use(x, mask is None)
        held = x.mask
        if mask is None:
            return x, mask
        other = held
        for x in held:
            other = x, scale
        y = x.size; z = y
        if scale is True or held is None:
            y = use(type(x), z)
        return y
    """
)
# (line of the program, what happens, to which variable)
VARIABLES = [
    (1, "LOAD", "x"), (1, "LOAD", "mask"),
    (2, "LOAD", "x"), (2, "STORE", "held"),
    (3, "LOAD", "mask"),
    (4, "LOAD", "x"), (4, "LOAD", "mask"),
    (5, "LOAD", "held"), (5, "STORE", "other"),
    (6, "LOAD", "held"), (6, "STORE", "x"),
    (7, "LOAD", "x"), (7, "LOAD", "scale"), (7, "STORE", "other"),
    (8, "LOAD", "x"), (8, "STORE", "y"), (8, "LOAD", "y"), (8, "STORE", "z"),
    (9, "LOAD", "scale"), (9, "LOAD", "held"),
    (10, "LOAD", "x"), (10, "LOAD", "z"), (10, "STORE", "y"),
    (11, "LOAD", "y"),
]  # fmt: skip
READ = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("bytecode", sys.argv[1])
module = sys.modules["bytecode"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
place = {}
exec(sys.argv[2], place)
code = place["program"].__code__
told = module.steps(code)
fast = [(s.line - code.co_firstlineno, s.opname[:-5], s.argval) for s in told
        if s.opname in ("LOAD_FAST", "STORE_FAST")]
print(json.dumps([fast, sorted({s.opname for s in told if "FAST" in s.opname})]))
"""


@pytest.mark.parametrize("python", found(), ids=lambda path: path.parent.parent.name)
def test_every_python_of_this_machine_reads_the_same_loads_and_stores_on_the_same_lines(python):
    words = [str(python), "-c", READ, bytecode.__file__, PROGRAM]
    ran = subprocess.run(words, capture_output=True, text=True, check=True, timeout=HANGS)
    fast, kinds = json.loads(ran.stdout)
    assert [tuple(row) for row in fast] == VARIABLES
    assert kinds == ["LOAD_FAST", "STORE_FAST"]


class _Pair:
    """An instruction of 3.13 as its `dis` shows it; there is no such Python everywhere."""

    starts_line, line_number, offset = True, 7, 4

    def __init__(self, opname, argval):
        self.opname, self.argval = opname, argval


@pytest.mark.parametrize(
    ("opname", "kinds"),
    [
        ("LOAD_FAST_LOAD_FAST", ["LOAD_FAST", "LOAD_FAST"]),
        ("STORE_FAST_LOAD_FAST", ["STORE_FAST", "LOAD_FAST"]),
        ("STORE_FAST_STORE_FAST", ["STORE_FAST", "STORE_FAST"]),
        ("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ["LOAD_FAST", "LOAD_FAST"]),
    ],
)
def test_one_instruction_for_two_variables_is_two_steps(opname, kinds, monkeypatch):
    monkeypatch.setattr(bytecode.dis, "get_instructions", lambda code: [_Pair(opname, ("a", "b"))])
    code = compile("1 + 1", opname, "eval")
    assert [tuple(step) for step in steps.__wrapped__(code)] == [
        (kinds[0], "a", 7, 4), (kinds[1], "b", 7, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "asserts"), [("AssertionError", True), ("tuple", False)])
def test_an_assert_of_3_14_loads_its_error_from_the_common_constants(name, asserts, monkeypatch):
    names = ["TO_BOOL", "POP_JUMP_IF_TRUE", "NOT_TAKEN", "LOAD_COMMON_CONSTANT", "RAISE_VARARGS"]
    made = [_Pair(opname, 0) for opname in names]
    for i, instruction in enumerate(made):
        instruction.offset, instruction.argrepr = 2 * i, name if i == 3 else ""
    monkeypatch.setattr(proxy.dis, "get_instructions", lambda code: made)
    frame = types.SimpleNamespace(f_code=None, f_lasti=0)
    assert proxy._is_assert(frame) is asserts


def test_what_is_asked_stands_at_its_variable_and_line():
    place: dict[str, types.FunctionType] = {}
    exec(compile(PROGRAM, "user.py", "exec"), place)
    found = questions.facts(place["program"])
    assert {name: where[:2] for name, where in found.none.items()} == {"mask": ("user.py", 3)}
    assert found.builtins["type", "x"][1] == 12
    assert found.truth["scale"][1] == 11
