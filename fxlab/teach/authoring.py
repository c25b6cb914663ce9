"""How does a teacher write an exercise of their own?

`new_exercise` writes three files that work as they are: the exercise's data with one case and one
property, a master notebook with stub, solution and check, and wrong answers. With FXLAB_EXERCISES
set to their folder, `check`, `hint`, `fxlab release` and `fxlab grade` know the exercise.
"""

from __future__ import annotations

from pathlib import Path

from fxlab.core.errors import ExerciseError
from fxlab.teach import masters
from fxlab.teach.exercise import ID, Exercise, Part, plain_registry

DATA = '''"""{id}: {title}."""

from __future__ import annotations

import torch

from fxlab.teach import judge, programs
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property

STUB = \'\'\'{stub}\'\'\'


def entry(answer, gm):
    """Call the student's function: it edits `gm` in place and may return it."""
    return judge.edited(answer, gm)


def judge_answer(args, value):
    """Return a Finding that says what is wrong and what to do, or None when it is right."""
    (gm,) = args
    left = [node.name for node in value.graph.nodes if node.target is torch.relu]
    if left:
        return Finding(f"{{left[0]}} still calls torch.relu", left[0], actual=value, graph=gm)
    expected = programs.copy_of(gm)
    for node in expected.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.sigmoid
    text = judge.same_program(expected, value, programs.fresh_inputs(gm))
    return Finding(text, expected=expected, actual=value, graph=gm) if text else None


def one_relu(graph):
    """The smallest program that has a relu."""
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))


def cases():
    """The public cases, smallest first."""
    yield Case("replaces", "one relu", lambda: (programs.built(one_relu),), judge_answer)
    yield Property(
        "keeps the rest",
        "generated programs",
        lambda: judge.tuples(programs.programs(outputs=2)),
        judge_answer,
    )


EXERCISE = Exercise(
    id="{id}",
    title="{title}",
    level=2,
    minutes=20,
    idea="One sentence: what the exercise is for.",
    needs=("node", "target"),
    teaches=(),
    hints=(
        "The idea again, and where the lecture shows it.",
        "The steps in words: which nodes you look at, and what you do with each.",
        "The call that beginners miss, on another example: node.target = torch.tanh.",
    ),
    asks=(),
    parts=(
        Part(
            id="{id}",
            name="{name}",
            points={{"replaces": 1, "keeps the rest": 1}},
            entry=entry,
            cases=cases,
            wrong={{"nothing": "still calls torch.relu", "erases": "", "all": ""}},
            stub=STUB,
        ),
    ),
)
'''

STUB = '''def {name}(gm):
    """Edit `gm` in place: every torch.relu becomes torch.sigmoid; return `gm`."""
'''

SOLUTION = """\
    ### BEGIN SOLUTION
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.sigmoid
    return gm
    ### END SOLUTION
"""

WRONG = '''"""Wrong answers to {id}, each plausible; the check must tell each its sentence."""

import torch


def wrong_nothing(gm):
    """Do nothing."""
    return gm


def wrong_erases(gm):
    """Drop the call instead of replacing it."""
    for node in list(gm.graph.nodes):
        if node.target is torch.relu:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def wrong_all(gm):
    """Replace every function."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = torch.sigmoid
'''


def new_exercise(id: str, to: str | Path, title: str = "A pass of our own") -> list[Path]:
    """Write the files of a new exercise.

    Args:
        id: Such as "9.1".
        to: Folder; files that are there already are never written over.
        title: The exercise's title.

    Returns:
        The master, the exercise's data, the wrong answers.

    Raises:
        ExerciseError: The id is taken or is no id, or a file is there already.
    """
    if not ID.fullmatch(id):
        raise ExerciseError(f"{id!r} is no id of an exercise", expected="such as 9.1")
    if id in plain_registry():
        raise ExerciseError(f"there is an exercise {id} already", hint="take a number of your own")
    to, stem = Path(to), "ex_" + id.replace(".", "_")
    title = title.replace('"', "'").replace("\\", "/")
    paths = [to / f"{id.replace('.', '_')}.ipynb", to / f"{stem}.py", to / "wrong" / f"{stem}.py"]
    there = [path.name for path in paths if path.exists()]
    if there:
        raise ExerciseError(f"{', '.join(there)} is there already", hint="take another folder")
    name = f"my_pass_{id.replace('.', '_')}"
    stub = STUB.format(name=name)
    paths[2].parent.mkdir(parents=True, exist_ok=True)
    paths[1].write_text(DATA.format(id=id, title=title, name=name, stub=stub), encoding="utf-8")
    paths[2].write_text(WRONG.format(id=id), encoding="utf-8")
    masters.write(paths[0], _cells(id, title, name, stub))
    return paths


def _cells(id: str, title: str, name: str, stub: str) -> list[masters.Cell]:
    part = Part(id, name, {"replaces": 1, "keeps the rest": 1}, _no_entry, tuple, {})
    owner = Exercise(id, title, 2, 20, "", ("node", "target"), (), ("", "", ""), (), (part,))
    rows = {"before, after": "", "time": "20 minutes", "memory": "about 400 MB",
            "needs": "node, target", "teaches": "", "paper": ""}  # fmt: skip
    return [
        *masters.first_cells(f"{id} {title}", rows, "What this notebook is for."),
        masters.markdown("The lesson: the idea, with an example that can be stepped."),
        masters.code("gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)\nfxlab.explore(gm)"),
        masters.exercise_text(owner, "Say what to write, and how it will be judged."),
        masters.solution(id, stub + SOLUTION),
        masters.check_cell(id, part),
        masters.markdown("Now look at what torch.fx does."),
        masters.code("print(gm.code)"),
    ]


def _no_entry() -> None:
    """Stands in the data that only the master's cells are made from."""
