"""2.5: a rewrite by pattern, and why it did not match.

A formula is to become one operation wherever it stands, however it is spelled, and nowhere else.
The number of places is known for each case; what the program computes is compared with what it
computed before; and where nothing matches, an answer must hand on what `explain_mismatch` found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.core.graph_module import GraphModule
from fxlab.core.tracer import symbolic_trace
from fxlab.explorer.sentences import plural
from fxlab.passes.explain import Mismatch
from fxlab.teach import judge
from fxlab.teach.exercise import Case, Exercise, Finding, Part
from fxlab.teach.limits import AnswerError
from fxlab.teach.wire import known

known(F.hardswish)  # torch does not list it among the functions that can be overridden

STUB = '''def use_hardswish(gm):
    """Edit `gm` in place: put F.hardswish(x) for x * clamp(x + 3, 0, 6) / 6, however it is spelled.

    Return the matches. When there are none, return what fxlab.explain_mismatch says instead.
    """
'''


def entry(answer: Callable[[GraphModule], Any], gm: GraphModule) -> dict[str, Any]:
    """Call the rewrite.

    Returns:
        {"gm", "matches": how many it returned, "reason": of the Mismatch or "", "found": how many
        operations of the pattern the Mismatch had found}.
    """
    value = answer(gm)
    judge.whole(gm)
    if isinstance(value, Mismatch):
        reason = "" if value.matches else value.reason
        return {"gm": gm, "matches": 0, "reason": reason, "found": len(value.matched)}
    if not isinstance(value, list | tuple):
        raise AnswerError(
            "type", f"it returned {judge.kind_of(value)}: return the list of matches, or what "
            "explain_mismatch returned",
        )  # fmt: skip
    return {"gm": gm, "matches": len(value), "reason": "", "found": 0}


def _judge(matches: int, why: str, hint: str) -> Callable[[tuple[Any, ...], Any], Finding | None]:
    def judge_rewrite(args: tuple[Any, ...], value: Any) -> Finding | None:
        (gm,) = args
        after = value["gm"]

        def wrong(sentence: str) -> Finding:
            return Finding(sentence, actual=after, graph=gm)

        inputs = [torch.randn(3, 4) * 4 for _ in gm.graph.find_nodes(op="placeholder")]
        made = len(after.graph.find_nodes(op="call_function", target=F.hardswish))
        text = judge.same_program(gm, after, inputs)
        if text and made > matches:
            return wrong(f"a place was rewritten that is no hardswish: {hint} ({text})")
        if text:
            return wrong(f"the rewritten program computes something else: {text}")
        if made < matches:
            places = "a place was" if matches == 1 else f"{matches - made} of {matches} places were"
            return wrong(f"{places} not rewritten: {hint}")
        if made > matches or len(after.graph.nodes) > len(gm.graph.nodes):
            calls = plural(made, "call")
            return wrong(f"{calls} of hardswish where {matches} would be right: {hint}")
        if value["matches"] != matches:
            return wrong(f"it returned {value['matches']} matches, and {matches} were rewritten")
        if matches:
            return None
        if not value["reason"]:
            return wrong(
                "nothing matched, and nobody learns why: return "
                "fxlab.explain_mismatch(pattern, gm) when the list of matches is empty"
            )
        if why not in value["reason"]:
            return wrong(
                f"explain_mismatch was asked about another pattern or place: {hint}; it said: "
                f"{value['reason']}"
            )
        return None

    return judge_rewrite


def _hardswish(x: Any) -> Any:
    return x * torch.clamp(x + 3, 0, 6) / 6


def _with_reader(x: Any) -> Any:
    gate = torch.clamp(x + 3, 0, 6)
    return x * gate / 6 + gate


_METHODS = "a method, a keyword or turned operands mean the same call: match with normalize=True"
_CASES = [
    # behaviour, title, program, how many matches, a part of the reason, what to say
    ("matches", "once", _hardswish, 1, "", "fxlab.explain_mismatch(your_pattern, gm) "
     "says why; two parameters never stand for one value"),
    ("matches", "twice in a row", lambda x: _hardswish(_hardswish(x) - 1), 2, "",
     "replace_pattern finds matches that read each other"),
    ("matches", "one of two terms", lambda x: torch.tanh(x) / 6 + _hardswish(x), 1, "",
     "the rest of the program stays"),
    ("spellings", "methods", lambda x: x.mul(x.add(3).clamp(0, 6)).div(6), 1, "", _METHODS),
    ("spellings", "turned operands", lambda x: torch.clamp(3 + x, 0, 6) * x / 6, 1, "", _METHODS),
    ("spellings", "keywords", lambda x: x * torch.clamp(x + 3, min=0, max=6) / 6, 1, "", _METHODS),
    ("constants", "3.0 and 6.0", lambda x: x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0, 1, "",
     "3.0 in the program is not 3 in the pattern, and explain_mismatch says so"),
    ("constants", "x + 2", lambda x: x * torch.clamp(x + 2, 0, 6) / 6, 0, "",
     "it adds 2, not 3"),
    ("why not", "another operation", lambda x: torch.tanh(x) / 6, 0, "", "there is no clamp"),
    ("why not", "another factor", lambda x, y: y * torch.clamp(x + 3, 0, 6) / 6, 0, "",
     "the factor is y, and the pattern has x in both places"),
    ("why not", "x + 2", lambda x: x * torch.clamp(x + 2, 0, 6) / 6, 0, "2", "it adds 2, not 3"),
    ("why not", "the clamp has another reader", _with_reader, 0, "is read by",
     "the clamp is read outside the match as well"),
]  # fmt: skip
_HIDDEN = [
    ("matches", "three side by side", lambda x: _hardswish(x) + _hardswish(x - 1) + _hardswish(-x),
     3, "", "each place is one match"),
    ("spellings", "a method of turned operands", lambda x: (3 + x).clamp(min=0, max=6).mul(x) / 6,
     1, "", _METHODS),
    ("constants", "3.0 and 6.0, read by a tanh",
     lambda x: torch.tanh(x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0), 1, "",
     "3.0 in the program is not 3 in the pattern, and explain_mismatch says so"),
    ("constants", "divided by 3", lambda x: x * torch.clamp(x + 3, 0, 6) / 3, 0, "",
     "it divides by 3, not 6"),
    ("why not", "divided by 3", lambda x: x * torch.clamp(x + 3, 0, 6) / 3, 0, "3",
     "it divides by 3, not 6"),
]  # fmt: skip


def _cases(rows: list[Any] = _CASES) -> Iterator[Case]:
    for behaviour, title, program, matches, why, hint in rows:
        yield Case(
            behaviour, title, lambda program=program: (symbolic_trace(program),),
            _judge(matches, why, hint),
        )  # fmt: skip


EXERCISE = Exercise(
    id="2.5",
    title="A rewrite by pattern, and why it didn't match",
    level=2,
    minutes=25,
    idea="The plainest transform says what to look for and what to put there, both as programs; "
    "what it does not find it passes by in silence (sections 4.3 and 6).",
    needs=("pattern", "reader", "constant", "call_method", "arguments"),
    teaches=("match", "mismatch"),
    hints=(
        "Lecture 12, 'A rewrite by pattern', replaces a double negation and then asks why another "
        "spelling did not match. Both calls are all that you need.",
        "Write the formula as a function of one parameter, and F.hardswish as another. Replace, by "
        "meaning and not by spelling. Ask explain_mismatch about the programs that don't match, "
        "and read its `try:`; a second pattern takes care of 3.0 and 6.0.",
        "On another example: fxlab.replace_pattern(gm, lambda x: torch.neg(torch.neg(x)), "
        "lambda x: x, normalize=True) also finds x.neg().neg(), and fxlab.explain_mismatch takes "
        "normalize=True as well. A parameter of the pattern matches anything, but the same thing "
        "everywhere.",
    ),
    asks=("torch.fx.replace_pattern", "torch.fx.subgraph_rewriter.replace_pattern_with_filters"),
    parts=(
        Part(
            id="2.5",
            name="use_hardswish",
            points={"matches": 2, "spellings": 2, "constants": 2, "why not": 2},
            entry=entry,
            cases=_cases,
            hidden=partial(_cases, _HIDDEN),
            wrong={
                "by_spelling": "a place was not rewritten: a method, a keyword or turned operands",
                "ints_only": "3.0 in the program is not 3 in the pattern",
                "any_constant": "a place was rewritten that is no hardswish: it adds 2, not 3",
                "two_parameters": "two parameters never stand for one value",
                "silent": "nothing matched, and nobody learns why",
                "half_a_pattern": "the rewritten program computes something else",
            },
            stub=STUB,
        ),
    ),
)
