"""A folder of submissions becomes a table; whatever one student does costs only that student."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from fxlab.cli import main
from fxlab.core.errors import ExerciseError
from fxlab.teach import replay, slicing, wire
from fxlab.teach.collect import Submission, class_list, collect, owner_of, read_notebook, unpack
from fxlab.teach.exercise import part
from fxlab.teach.grading import grade
from fxlab.teach.limits import AnswerError
from fxlab.teach.marking import Marker, hidden_cases
from fxlab.teach.student import FORKS, Student, call_message
from tests import submissions as made
from tests.clocks import HANGS
from tests.submissions import IMPORTS, MY_DCE

STUB = 'def my_dce(gm):\n    raise NotDone("2.2")\n'


# -- which lines an answer needs -----------------------------------------------------------------


def chosen(cells, name="f", marked=None):
    found, _ = slicing.statements(cells)
    space = {}
    failed = slicing.run(slicing.answer(found, name, marked), cells, space)
    return space, failed


def test_an_answer_takes_with_it_what_it_reads_and_nothing_else():
    cells = [
        "import math\nimport json",
        "TABLE = {}\nother = 1 / 0",
        "def helper(x):\n    return TABLE[x]",
        "TABLE['a'] = 1\nTABLE.update(b=2)",
        "def f(x):\n    gm = 3\n    return helper(x)",
        "gm = undefined_thing()\nprint(f('a'))",
    ]
    space, failed = chosen(cells)
    assert not failed and space["f"]("a") == 1 and space["f"]("b") == 2
    assert "json" not in space and "gm" not in space and "other" not in space


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_cells_does_not_matter(order):
    cells = ["import math", "class Base:\n    half = math.pi / 2", "class f(Base):\n    pass"]
    space, failed = chosen([cells[k] for k in order])
    assert not failed and space["f"].half > 1.5


def test_of_several_definitions_the_last_written_one_counts():
    first, second = "def f():\n    return 1", "def f():\n    return 2"
    stub = 'def f():\n    raise NotDone("1.1")'
    assert chosen([first, second])[0]["f"]() == 2
    assert chosen([first, second, stub])[0]["f"]() == 2
    assert chosen([second, first], marked=0)[0]["f"]() == 2
    with pytest.raises(NameError):  # only the stub is there, and this notebook imports nothing
        chosen([stub])[0]["f"]()


def test_what_a_cell_does_to_a_class_after_defining_it_comes_along():
    cells = [
        "class f:\n    pass\n\nfor name in ('a', 'b'):\n    setattr(f, name, name)\n"
        "def fill(cls):\n    cls.d = 4\nfill(f)\n",
        "if True:\n    f.c = 3\nprint(f)",
    ]
    space, _ = chosen(cells)
    assert (space["f"].b, space["f"].c, space["f"].d) == ("b", 3, 4)


def test_ipythons_lines_and_broken_cells_are_passed_over():
    cells = ["%matplotlib inline\n!ls\nx = 1", "def g(:\n", "%%bash\nrm -rf /", "f = x\nhelp?"]
    found, broken = slicing.statements(cells)
    space = {}
    slicing.run(slicing.answer(found, "f"), cells, space)
    assert space["f"] == 1 and list(broken) == [1] and "line 1" in broken[1]


# -- who handed in what --------------------------------------------------------------------------


def notebook(*cells, **metadata):
    return {"cells": [{"cell_type": "code", "source": c, "metadata": {}} for c in cells],
            "metadata": metadata, "nbformat": 4}  # fmt: skip


@pytest.mark.parametrize(
    "name, who, number",
    [
        ("Ada Lovelace_1234567_assignsubmission_file_", "Ada Lovelace", "1234567"),
        ("Ada Lovelace_1234567_assignsubmission_file_02.ipynb", "Ada Lovelace", "1234567"),
        ("lovelaceada_77_9001_02_transform.ipynb", "lovelaceada", "77"),
        ("lovelaceada_LATE_77_9001_02_transform-3.ipynb", "lovelaceada", "77"),
        ("ada.ipynb", "ada", ""),
        ("ada (2).zip", "ada", ""),
        ("ada", "ada", ""),
    ],
)
def test_bulk_downloads_name_their_student(name, who, number):
    assert owner_of(name)[:2] == (who, number)


def test_the_latest_file_wins(tmp_path):
    folder = tmp_path / "all"
    for number, source in (("-1", "x = 1"), ("", "x = 0"), ("-10", "x = 10"), ("-2", "x = 2")):
        made.write(folder / f"adal_5_9{abs(int(number or 0))}_hw{number}.ipynb", notebook(source))
    (one,) = collect(folder, tmp_path / "room")
    assert [found.cells for found in one.notebooks][-1] == ["x = 10"]
    assert len(one.notebooks) == 4


def test_by_time_when_no_number_tells(tmp_path):
    for name, source, seconds in (("b", "x = 1", 2000), ("a", "x = 2", 3000)):
        path = tmp_path / "all" / "ada" / f"{name}.ipynb"
        made.write(path, notebook(source))
        os.utime(path, (seconds, seconds))
    (one,) = collect(tmp_path / "all", tmp_path / "room")
    assert one.notebooks[-1].cells == ["x = 2"]


def test_a_class_list_gives_ids_and_those_who_handed_in_nothing(tmp_path):
    path = tmp_path / "class.csv"
    path.write_text(
        "ID number;First name;Last name\ns1;Ada;Lovelace\ns2;Zoë;Müller\ns3;A;B\n", "utf-8"
    )
    made.write(tmp_path / "all" / "Ada Lovelace_1_assignsubmission_file_x.ipynb", notebook("x = 1"))
    made.write(tmp_path / "all" / "mullerzoe_2_3_x.ipynb", notebook("x = 2"))
    found = collect(tmp_path / "all", tmp_path / "room", class_list(path))
    assert [(one.student, one.name, len(one.notebooks)) for one in found] == [
        ("s1", "Ada Lovelace", 1), ("s2", "Zoë Müller", 1), ("s3", "A B", 0)
    ]  # fmt: skip


def test_two_students_of_one_name_stay_two(tmp_path):
    for number, source in ((1, "x = 1"), (2, "x = 2")):
        name = f"Ada Lovelace_{number}_assignsubmission_file_"
        made.write(tmp_path / "all" / name / "x.ipynb", notebook(source))
    found = collect(tmp_path / "all", tmp_path / "room")
    assert [(one.student, one.notebooks[0].cells) for one in found] == [
        ("Ada Lovelace 1", ["x = 1"]), ("Ada Lovelace 2", ["x = 2"])
    ]  # fmt: skip


def test_a_folder_around_all_submissions_is_looked_through(tmp_path):
    path = tmp_path / "download.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for student in ("ada", "bob"):
            archive.writestr(
                f"homework 1/{student}/02_transform.ipynb", json.dumps(notebook("x = 1"))
            )
        archive.writestr("__MACOSX/homework 1/._x", "")
    assert [one.student for one in collect(path, tmp_path / "room")] == ["ada", "bob"]
    made.write(tmp_path / "one" / "ada" / "02_transform.ipynb", notebook("x = 1"))
    assert [one.student for one in collect(tmp_path / "one", tmp_path / "room2")] == ["ada"]


def test_what_an_earlier_grading_wrote_into_the_folder_is_no_submission(tmp_path):
    made.write(tmp_path / "ada" / "02_transform.ipynb", made.filled("02_transform", {}))
    one = grade(tmp_path, tmp_path / "grades.csv", exercises=["2.2"]).to_csv()
    assert grade(tmp_path, tmp_path / "grades.csv", exercises=["2.2"]).to_csv() == one
    assert one.count("\n") == 2


@pytest.mark.parametrize("content", ["{ not json", "", "[]", '{"cells": 3}', "\0\0", "[" * 100_000])
def test_what_is_no_notebook_says_so(tmp_path, content):
    path = tmp_path / "x.ipynb"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ExerciseError, match="no notebook"):
        read_notebook(path)


def test_old_and_odd_notebooks_are_read(tmp_path):
    path = tmp_path / "x.ipynb"
    odd = [{"cell_type": "code", "input": ["x = 1\n", "y = 2"]}, None, {"cell_type": "code"},
           {"cell_type": "code", "source": [3], "metadata": 7}]  # fmt: skip
    path.write_text(json.dumps({"worksheets": [{"cells": odd}]}), encoding="utf-8")
    assert read_notebook(path).cells == ["x = 1\ny = 2", "", ""]


def test_a_zip_that_leads_out_of_its_folder_is_refused(tmp_path):
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../outside.txt", "x")
    assert "leads out" in unpack(path, tmp_path / "in")
    assert not (tmp_path.parent / "outside.txt").exists()


def test_a_zip_that_grows_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fxlab.teach.collect.LARGEST", 1000)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", "0" * 5000)
    assert "unpacks to more" in unpack(path, tmp_path / "in")


# -- the student's process -----------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def server():
    with made.one_server() as server:
        yield server


def outcome(server, cells, seconds=5.0, calls=1, **more):
    """(points, first sentence) of 2.2 for these cells."""
    from fxlab.teach.examine import examine, points_of

    asked = part("2.2")[1]
    with Student(server, seconds=seconds, **more) as student:
        try:
            student.start("2.2", cells)
        except AnswerError as error:
            return 0, error.sentence
        found = examine(asked, student.call, list(asked.cases())[:3])
    first = next((one.sentence for one in found if one.status != "pass"), "")
    return sum(points_of(asked, found).values()), first


def deed(body):
    return [IMPORTS, "import os, time, ctypes, sys\n", f"def my_dce(gm):\n{body}"]


def test_a_good_answer_is_marked_over_the_pipe(server):
    assert outcome(server, [IMPORTS, MY_DCE]) == (1, "")


def test_each_answer_has_a_python_of_its_own_where_forking_is_not_possible():
    assert outcome(None, [IMPORTS, MY_DCE]) == (1, "")
    assert "exit code 0" in outcome(None, deed("    os._exit(0)"))[1]


def test_a_python_of_its_own_answers_over_pipes_as_on_systems_without_sockets():
    command = [sys.executable, "-m", "fxlab.teach.process", "pipes", str(1 << 30)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        start = {"do": "start", "part": "2.2", "cells": [IMPORTS + "print('noise')", MY_DCE],
                 "marked": None, "seconds": 5.0, "course": None}  # fmt: skip
        wire.send(child.stdin, wire.encode(start))
        assert wire.decode(wire.receive(child.stdout))["ready"] is True
        (args,) = [case.args() for case in list(part("2.2")[1].cases())[:1]]
        wire.send(child.stdin, call_message(args))
        value = wire.decode(wire.receive(child.stdout))["value"]
        assert len(value.graph.nodes) == 2
        child.stdin.close()
        assert child.wait(HANGS) == 0


@pytest.mark.parametrize(
    "body, sentence",
    [
        ("    while True: pass", "stopped after 0.1 CPU s"),
        ("    time.sleep(600)", "no answer within 10 s"),
        ("    return sum(range(10**14))", ""),
        ("    a = []\n    while True: a.append(bytearray(10**8))", "ran out of memory"),
        ("    os._exit(3)", "ended with exit code 3"),
        ("    ctypes.string_at(0)", "ended by SIGSEGV"),
        ("    sys.exit(3)", "left Python by SystemExit"),
        ("    return object()", "it returned an object"),
        ("    gm.register_forward_hook(print)\n    return gm", "hooks"),
        ("    os.close(3); os.close(4); os.close(5); os.close(6)", ""),
    ],
)
def test_whatever_the_answer_does_there_is_a_sentence_and_the_next_is_marked(
    server, body, sentence
):
    # It is ended after 10 s by the wall's clock, too: that much must be left on a busy machine.
    seconds = 0.1 if "CPU" in sentence else 0.5
    points, said = outcome(server, deed(body), seconds=seconds, memory=400 << 20)
    assert points == 0 and said and sentence in said
    assert outcome(server, [IMPORTS, MY_DCE]) == (1, "")


def test_what_an_answer_leaves_running_is_ended(server, tmp_path):
    if server is None:
        pytest.skip("only where one server forks the answers")
    body = (
        "    for _ in range(3):\n        if (pid := os.fork()) == 0:\n            os.setsid()\n"
        "            time.sleep(600)\n            os._exit(0)\n"
        f"        open({str(tmp_path)!r} + f'/{{pid}}', 'w').close()\n    return gm"
    )
    outcome(server, deed(body))
    forked = {int(path.name) for path in tmp_path.iterdir()}
    assert len(forked) >= 3
    left = [process for process in psutil.process_iter() if process.pid in forked]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


def test_files_that_came_with_a_notebook_can_be_read_and_are_a_copy(server, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("7", encoding="utf-8")
    body = MY_DCE + "assert open('data.txt').read() == '7'\nos.remove('data.txt')\n"
    cells = [IMPORTS + "import os\nNUMBER = open('data.txt').read()\nos.remove('data.txt')\n",
             MY_DCE.replace("return gm", "return gm if NUMBER == '7' else None")]  # fmt: skip
    assert outcome(server, cells, files=(data,)) == (1, "")
    assert data.exists() and body


def test_a_server_imports_once_what_the_calls_of_a_part_import_late(server):
    if server is None:
        pytest.skip("only where one server forks the answers")
    late = "this"  # nothing else imports it
    cells = [f"import sys\ndef my_dce(gm):\n    print({late!r} in sys.modules)\n    return gm\n"]

    def printed(loads):
        with Student(server, loads=loads) as student:
            student.start("2.2", cells)
            student.call(next(iter(part("2.2")[1].cases())).args())
            return student.printed.strip()

    assert printed(()) == "False"
    assert printed((late, "no_such_module")) == "True"
    assert part("5.3")[1].loads and part("6.2")[1].loads


def test_the_trusted_side_is_not_what_a_student_patches(server):
    patch = "import fxlab.teach.judge as j\nj.same_program = lambda *a, **k: ''\nj.dead = print\n"
    assert (
        outcome(server, [IMPORTS, patch, STUB.replace('raise NotDone("2.2")', "return gm")])[0] == 0
    )


# -- grading -------------------------------------------------------------------------------------


def expected_of(handed, ids):
    return [handed.points.get(id, 0) for id in ids]


def compare(folder, handed, out, **options):
    grades = grade(folder, out, **options)
    rows = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert [row["student"] for row in rows] == [one.student for one in handed]
    for row, one in zip(rows, handed, strict=True):
        points = [int(row[id]) for id in grades.ids]
        assert points == expected_of(one, grades.ids), (one, row)
        assert int(row["points"]) == sum(points) and one.remark in row["remarks"], (one, row)
        page = out.with_name(out.stem + "-feedback") / f"{one.student}.html"
        text = page.read_text(encoding="utf-8")
        assert f"{sum(points)} of {grades.out_of} points" in text and "<script" not in text
    return grades


@pytest.fixture(scope="module")
def small_class(tmp_path_factory):
    """One good, one partial, one untouched, and a few of the quickly broken."""
    folder = tmp_path_factory.mktemp("class")
    ids = made.parts_of("02_transform")
    made.write(folder / "ada" / "02_transform.ipynb", made.good("02_transform"))
    answers = {"2.1a": made.solution("02_transform", "2.1a"),
               "2.2": made.wrong_source("2.2", "forward")}  # fmt: skip
    made.write(folder / "bob.ipynb", made.filled("02_transform", answers))
    made.write(folder / "cyd.ipynb", made.filled("02_transform", {}))
    handed = [
        made.Handed("ada", "good", made.total(ids)),
        made.Handed("bob", "partial", {"2.1a": part("2.1a")[1].total,
                                       "2.2": made.checked_points("2.2", "forward")}),
        made.Handed("cyd", "untouched"),
    ]  # fmt: skip
    for student, kind in (("dan", "leaves"), ("eve", "fails lint"), ("fay", "not JSON"),
                          ("gil", "deleted cell"), ("hal", "broken cells")):  # fmt: skip
        handed.append(made._broken(folder, student, kind, "02_transform"))
    return folder, handed


@pytest.fixture(scope="module")
def graded(small_class, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "grades.csv"
    folder, handed = small_class
    return compare(folder, handed, out, similar_pairs=True), out


def test_each_gets_the_points_that_check_gives(graded):
    grades, _ = graded
    assert grades.ids == made.parts_of("02_transform")
    assert grades.marks["bob"][grades.ids.index("2.2")].status == "fail"


def test_the_same_command_writes_the_same_bytes_with_more_jobs_too(graded, small_class, tmp_path):
    _, out = graded
    again = tmp_path / "grades.csv"
    grade(small_class[0], again, jobs=2)
    assert again.read_bytes() == out.read_bytes()
    for page in sorted(out.with_name("grades-feedback").glob("*.html")):
        assert (tmp_path / "grades-feedback" / page.name).read_bytes() == page.read_bytes()


def test_feedback_shows_the_smallest_program_and_a_cell_to_paste(graded):
    _, out = graded
    page = (out.with_name("grades-feedback") / "bob.html").read_text(encoding="utf-8")
    assert "walk from the end" in page and "<img alt=" in page
    assert "check(&quot;2.2&quot;, my_dce, behaviour=&#x27;chains go&#x27;).show();" in page
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")


def test_the_summary_counts_and_shows_the_commonest_wrong_program(graded):
    _, out = graded
    summary = out.with_name("grades-summary.html").read_text(encoding="utf-8")
    assert "8 students" in summary and "without a readable notebook" in summary
    assert "walk from the end" in summary and "fay.ipynb" in summary


def test_names_that_are_formulas_or_markup_do_no_harm(tmp_path):
    student = "=cmd|' <script>alert(1)</script>"
    folder = tmp_path / "all" / student.replace("/", "")
    folder.mkdir(parents=True)
    out = tmp_path / "g.csv"
    grade(tmp_path / "all", out, exercises=["2.2"])
    row = out.read_text(encoding="utf-8").splitlines()[1]
    assert row.startswith("'=cmd") or row.startswith("\"'=cmd")
    (page,) = (tmp_path / "g-feedback").glob("*.html")
    assert "<script" not in page.read_text(encoding="utf-8")


HIDDEN = """
import torch
from fxlab.teach import judge, programs
from fxlab.teach.exercise import Case
from fxlab.teach.exercises import ex_2_2

def two(graph):
    x = graph.placeholder("x")
    y = graph.call_function(torch.tanh, (x,))
    graph.call_function(torch.exp, (graph.call_function(torch.cos, (y,)),))
    graph.output(y)

CASES = {"2.2": [Case("dead nodes go", "hidden", lambda: (programs.built(two),), ex_2_2.judge_dce)]}
"""


def test_hidden_cases_catch_an_answer_that_fits_the_public_ones(tmp_path, capsys):
    path = tmp_path / "cases.py"
    path.write_text(HIDDEN, encoding="utf-8")
    fitted = MY_DCE.replace(
        "and not effect(node)", "and not effect(node) and 'cos' not in node.name"
    )
    made.write(tmp_path / "all" / "ada.ipynb", notebook(IMPORTS, fitted))
    open_ones = grade(tmp_path / "all", tmp_path / "a.csv", exercises=["2.2"])
    hidden = grade(tmp_path / "all", tmp_path / "b.csv", exercises=["2.2"], hidden=path)
    assert open_ones.points("ada") == 6
    (mark,) = hidden.marks["ada"]
    assert mark.points == 5 and mark.behaviours["dead nodes go"] == (0, 1)
    (line,) = [line for line in mark.paste if line.startswith("replay(")]
    packed = line.split("'")[1] if "'" in line else line.split('"')[-2]
    replay("2.2", lambda gm: gm, packed)
    assert "torch.cos" in capsys.readouterr().out


def test_the_kit_has_a_second_set_for_some_exercises():
    found = hidden_cases(Path("kit"))
    assert found and all(case.behaviour in part(id)[1].points for id in found for case in found[id])


def test_a_file_of_hidden_cases_that_says_something_else_is_refused(tmp_path):
    path = tmp_path / "cases.py"
    path.write_text("CASES = 3", encoding="utf-8")
    with pytest.raises(ExerciseError, match="has no CASES"):
        hidden_cases(path)
    path.write_text(HIDDEN.replace("dead nodes go", "no such"), encoding="utf-8")
    with pytest.raises(ExerciseError, match="dead nodes go"):
        hidden_cases(path)


def test_a_time_out_is_run_once_more_alone(tmp_path):
    slow = (
        IMPORTS
        + "import time\n"
        + MY_DCE.replace(
            "def my_dce(gm):\n", "def my_dce(gm):\n    time.sleep(0.0)\n    while True: pass\n"
        )
    )
    made.write(tmp_path / "all" / "ada.ipynb", notebook(slow))
    begun = []
    original = Marker.mark_part

    def counted(self, submission: Submission, id: str):
        begun.append(id)
        return original(self, submission, id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Marker, "mark_part", counted)
        grades = grade(tmp_path / "all", tmp_path / "g.csv", exercises=["2.2"], seconds=0.5)
    assert begun == ["2.2", "2.2"] and grades.marks["ada"][0].kind == "time"


def test_similar_answers_are_listed_and_lose_no_points(tmp_path):
    helpers = [f"def helper_{k}(a, b):\n    return [a.foo_{k}(x) for x in b]" for k in range(9)]
    long = MY_DCE + "\n".join(helpers)
    other = MY_DCE + "def own(a):\n    while a:\n        a = a.next or a.previous\n    return a * 2"
    for name, source in (("ada", long), ("bob", re.sub(r"\bnode\b", "n", long)), ("cyd", other)):
        made.write(tmp_path / "all" / f"{name}.ipynb", notebook(IMPORTS, source))
    grades = grade(tmp_path / "all", tmp_path / "g.csv", exercises=["2.2"], similar_pairs=True)
    assert [pair[:3] for pair in grades.pairs] == [("2.2", "ada", "bob")]
    assert {grades.points(student) for student in ("ada", "bob", "cyd")} == {6}
    assert "2.2,ada,bob,1.00" in (tmp_path / "g-similar.csv").read_text(encoding="utf-8")


def test_what_is_missing_is_said_before_anything_is_marked(tmp_path):
    with pytest.raises(ExerciseError, match="no folder"):
        grade(tmp_path / "nothing", tmp_path / "g.csv")
    with pytest.raises(ExerciseError, match="no exercise"):
        grade(tmp_path, tmp_path / "g.csv", exercises=["99.9"])
    with pytest.raises(ExerciseError, match="hidden cases"):
        grade(tmp_path, tmp_path / "g.csv", hidden=tmp_path / "none.py")
    with pytest.raises(ExerciseError, match="nobody handed in anything"):
        grade(tmp_path, tmp_path / "g.csv")
    latin = tmp_path / "class.csv"
    latin.write_bytes("id;name\n1;Zoë\n".encode("latin-1"))
    with pytest.raises(ExerciseError, match=r"class\.csv is no text in UTF-8"):
        grade(tmp_path, tmp_path / "g.csv", students=latin)
    with pytest.raises(ExerciseError, match="no folder and no zip"):
        grade(latin, tmp_path / "g.csv")


def test_the_command_writes_the_table_and_says_a_mistake_in_one_line(tmp_path, capsys):
    made.write(tmp_path / "all" / "ada.ipynb", notebook(IMPORTS, MY_DCE))
    words = ["grade", str(tmp_path / "all"), "--out", str(tmp_path / "g.csv"), "--json"]
    assert main([*words, "--exercises", "2.2"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["points"] == 6 and "no sandbox" in said.err
    assert (tmp_path / "g.csv").read_text(encoding="utf-8").startswith("student,name,points")
    assert main(["grade", str(tmp_path / "nothing")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "fxlab grade: there is no folder 'nothing' of submissions"


@pytest.mark.skipif(not FORKS, reason="asks Linux to end the workers with their parent")
def test_nothing_goes_on_when_the_grader_is_ended(tmp_path):
    endless = IMPORTS + "import time\ndef my_dce(gm):\n    time.sleep(600)\n"
    for name in ("ada", "bob"):
        made.write(tmp_path / "all" / f"{name}.ipynb", notebook(endless))
    words = ["grade", str(tmp_path / "all"), "--out", str(tmp_path / "g.csv"), "--jobs", "2",
             "--exercises", "2.2", "--seconds", "60"]  # fmt: skip
    grader = subprocess.Popen([sys.executable, "-m", "fxlab.cli", *words])
    family: list[psutil.Process] = []
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline and len(family) < 7:  # the seventh tracks shared memory
        family = psutil.Process(grader.pid).children(recursive=True)
        with pytest.raises(subprocess.TimeoutExpired):
            grader.wait(0.2)
    assert len(family) >= 6  # two workers, their servers, the students' processes
    grader.kill()
    grader.wait()
    _, alive = psutil.wait_procs(family, timeout=HANGS)
    assert not alive


def test_broken_ways_are_all_in_the_generator(tmp_path):
    handed = made.make(tmp_path, 150, ["02_transform"])
    kinds = {one.kind for one in handed}
    assert kinds >= {*made.DEEDS, *made.SHAPES, "good", "partial", "untouched", "zip", "no zip",
                     "not JSON", "no cells", "empty file", "deleted cell"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_class_of_two_hundred_is_graded_right_and_in_time(tmp_path):
    folder = tmp_path / "class"
    handed = made.make(folder, 200, ["02_transform", "01_capture", "03_fusion", "04_analysis"])
    handed.sort(key=lambda one: one.student)
    grades = compare(folder, handed, tmp_path / "one.csv", jobs=2)
    print(f"200 submissions, {len(grades.ids)} parts: {grades.seconds:.0f} s with two jobs")
    assert grades.seconds < 20 * 60
    grade(folder, tmp_path / "two.csv", jobs=2)
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
