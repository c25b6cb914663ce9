"""Timelines as data: frames, slots, well-formedness, sentences, JSON in and out."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch

import fxlab
from fxlab.core.errors import TimelineError
from fxlab.explorer import sentences
from fxlab.explorer.frames import State, rows_in, substitute
from fxlab.explorer.static import text_table
from fxlab.explorer.timeline import Edit, PassSpan, Place, Program, Row, Source, Step, Timeline
from fxlab.explorer.view import view


def ref(row: int) -> dict[str, int]:
    return {"row": row}


def story(edits: list[tuple], rows: int = 4) -> Timeline:
    """x -> relu -> neg -> output, and the given edits (kind, row, before, after)."""
    timeline = Timeline("chain")
    first = {
        0: State("x", "placeholder", "x", [], {}),
        1: State("relu", "call_function", "torch.relu", [ref(0)], {}),
        2: State("neg", "call_method", "neg", [ref(1)], {}),
        3: State("output", "output", "output", [ref(2)], {}),
    }
    timeline._programs.append(Program("p0", "chain", first=first))
    timeline._rows.update({row: Row(row, "p0") for row in range(rows)})
    place = Place("my_pass.py", 7, "my_pass")
    timeline.sources["k"] = Source("my_pass.py", 5, "def my_pass(gm):\n    pass\n    edit()\n")
    timeline._places[place] = "k"
    for index, (kind, row, before, after) in enumerate(edits, 1):
        edit = Edit(kind, "p0", row, before, after)
        timeline._steps.append(
            Step(index, "p0", 0, edit, (place,), kind, f"my_pass:{index}/r{row}", timeline)
        )
    timeline._passes.append(PassSpan("my_pass", "k", 1, len(edits)))
    return timeline


GELU = {
    "position": 1,
    "name": "gelu",
    "op": "call_function",
    "target": "torch._C._nn.gelu",
    "args": [ref(0)],
    "kwargs": {},
    "type": "",
}
RELU = {
    "position": 0,
    "name": "relu",
    "op": "call_function",
    "target": "torch.relu",
    "args": [ref(0)],
    "kwargs": {},
    "type": "",
}
SWAP = [
    ("create", 4, None, GELU),
    ("reroute", 1, {"users": [[2, [ref(1)], {}]]}, {"to": 4, "users": [2]}),
    ("erase", 1, RELU, None),
]


def test_a_frame_is_the_program_after_its_step_and_frames_can_be_asked_for_in_any_order():
    timeline = story(SWAP, 5)
    codes = [timeline.frame(i).code() for i in range(4)]
    assert codes[0] == "x\nrelu = torch.relu(x)\nneg = relu.neg()\nreturn neg"
    assert codes[1] == "x\nrelu = torch.relu(x)\ngelu = F.gelu(x)\nneg = relu.neg()\nreturn neg"
    assert codes[3] == "x\ngelu = F.gelu(x)\nneg = gelu.neg()\nreturn neg"
    assert [timeline.frame(i).code() for i in (2, 0, 3, 1, 0)] == [
        codes[2],
        codes[0],
        codes[3],
        codes[1],
        codes[0],
    ]
    with pytest.raises(IndexError, match="frames 0 to 3"):
        timeline.frame(4)


def test_every_row_has_one_line_for_the_whole_pass_before_it_exists_and_after_it_is_gone():
    slots = story(SWAP, 5).slots(0, "p0")
    assert [(s.row, s.first, s.last) for s in slots] == [
        (0, 0, None),
        (1, 0, 2),
        (4, 1, None),
        (2, 0, None),
        (3, 0, None),
    ]


def test_a_moved_row_has_its_old_line_and_its_new_one():
    timeline = story([("move", 1, {"position": 0}, {"position": 2})])
    lines = [(s.row, s.first, s.last) for s in timeline.slots(0, "p0")]
    assert lines == [(0, 0, None), (1, 0, 0), (2, 0, None), (1, 1, None), (3, 0, None)]
    assert timeline.steps[0].problem == "neg reads relu, which is computed after it"


def test_changes_tell_the_states_before_and_after():
    timeline = story(SWAP, 5)
    (made,), (changed,), (gone,) = (timeline.changes(i) for i in (1, 2, 3))
    assert (made.before, made.after.name) == (None, "gelu")
    assert (changed.before.args, changed.after.args) == ([ref(1)], [ref(4)])
    assert (gone.before.name, gone.after) == ("relu", None)


def test_well_formed_names_what_reads_an_erased_row_and_when_it_was_erased():
    timeline = story([("erase", 1, RELU, None), ("create", 4, None, {**GELU, "position": 0})], 5)
    assert timeline.steps[0].problem == "neg reads relu, erased at step 1"
    assert not timeline.steps[0].well_formed
    assert timeline.first_ill_formed() is timeline.steps[0]


def test_well_formed_heals_when_the_reader_is_mended():
    mend = ("args", 2, {"args": [ref(1)], "kwargs": {}}, {"args": [ref(0)], "kwargs": {}})
    timeline = story([("erase", 1, RELU, None), mend])
    assert [s.well_formed for s in timeline.steps] == [False, True]


def test_a_node_that_reads_itself_and_two_of_one_name_are_found():
    self_reading = ("args", 1, {"args": [ref(0)], "kwargs": {}}, {"args": [ref(1)], "kwargs": {}})
    renamed = ("rename", 2, {"name": "neg"}, {"name": "relu"})
    timeline = story([self_reading, renamed])
    assert timeline.steps[0].problem == "relu reads itself"
    assert story([renamed]).steps[0].problem == "two nodes are called relu"


def test_a_call_of_a_module_that_is_gone_is_found():
    timeline = story(
        [
            ("target", 2, {"op": "call_method", "target": "neg"},
             {"op": "call_module", "target": "act"}),
            ("module", None, {"path": "act", "value": {"text": "ReLU", "tensors": {}}},
             {"path": "act", "value": None}),
        ]
    )  # fmt: skip
    timeline._programs[0].modules = {"act": "ReLU"}
    assert [s.problem for s in timeline.steps] == [None, "neg names self.act, which does not exist"]


def test_a_second_output_is_found():
    second = {**GELU, "position": 3, "name": "output_1", "op": "output", "target": "output"}
    timeline = story([("create", 4, None, second)], 5)
    assert timeline.steps[0].problem == "output_1 is a second output"


def test_a_step_code_leads_back_to_its_step_and_row():
    timeline = story(SWAP, 5)
    assert timeline.goto("my_pass:2/neg") == (2, 2)
    assert timeline.goto("my_pass:3/relu") == (3, 1)
    assert timeline.goto("my_pass:1") == (1, 4)
    for bad in ("my_pass", "my_pass:9", "my_pass:0/x", ""):
        with pytest.raises(ValueError, match="step"):
            timeline.goto(bad)


def test_a_note_is_kept_in_the_file(tmp_path):
    timeline = story(SWAP, 5)
    timeline.note(timeline.steps[1], "here it turns")
    path = tmp_path / "story.json"
    timeline.to_json(path)
    assert Timeline.from_json(path).notes == {2: "here it turns"}


def test_json_comes_back_as_it_went():
    text = story(SWAP, 5).to_json()
    again = Timeline.from_json(text)
    assert again.to_json() == text
    assert [s.sentence for s in again.steps] == ["create", "reroute", "erase"]
    assert again.frame(3).code() == story(SWAP, 5).frame(3).code()
    assert again.source_of(again.steps[0].where[0])[1].line == 5


@pytest.mark.parametrize("steps", [[], SWAP[:1]])
def test_timelines_of_no_and_of_one_step_are_timelines(steps):
    timeline = Timeline.from_json(story(steps, 5).to_json())
    assert len(timeline) == len(steps)
    assert timeline.slots(None, "p0")
    assert timeline.first_ill_formed() is None


def broken(change):
    data = json.loads(story(SWAP, 5).to_json())
    change(data)
    return json.dumps(data)


REFUSED = {
    "cut off": (lambda d: None, "not whole JSON"),
    "not ours": (lambda d: d.update(format="other"), "format"),
    "later": (lambda d: d.update(version=2), "later fxlab"),
    "no version": (lambda d: d.update(version="1"), "version number"),
    "an unknown field": (lambda d: d.update(extra=1), "unknown field 'extra'"),
    "a missing field": (lambda d: d.pop("rows"), "lacks 'rows'"),
    "a step out of order": (lambda d: d["steps"].reverse(), "numbered"),
    "an unknown kind": (lambda d: d["steps"][0]["edit"].update(kind="eval"), "kind"),
    "an unknown opcode": (lambda d: d["programs"][0]["first"][0][1].update(op="exec"), "op"),
    "a row that is not there": (lambda d: d["steps"][0]["edit"].update(row=99), "no row 99"),
    "a delta that does not fit": (
        lambda d: d["steps"][2]["edit"].update(row=4) or d["steps"][1]["edit"].update(row=77),
        "no row 77",
    ),
    "a value of no kind": (
        lambda d: d["steps"][0]["edit"]["after"].update(args=[{"call": "os.system"}]),
        "schema",
    ),
    "a place out of range": (lambda d: d["steps"][0].update(where=[5]), "out of range"),
    "an erase of what was erased": (
        lambda d: d["steps"].append({**copy.deepcopy(d["steps"][2]), "index": 4}),
        "doesn't fit",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_right_is_refused_with_the_reason(name):
    change, reason = REFUSED[name]
    text = broken(change)
    if name == "cut off":
        text = text[: len(text) // 2]
    with pytest.raises(TimelineError, match=reason):
        Timeline.from_json(text)


def test_a_deeply_nested_file_is_refused_and_does_not_overflow():
    with pytest.raises(TimelineError):
        Timeline.from_json('{"format": ' + "[" * 100_000)
    deep = json.loads(story(SWAP, 5).to_json())
    value: object = 1
    for _ in range(400):
        value = [value]
    deep["steps"][0]["edit"]["after"]["args"] = [value]
    with pytest.raises(TimelineError):
        Timeline.from_json(json.dumps(deep))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(TimelineError, match="can't be read"):
        Timeline.from_json(tmp_path / "not_there.json")


def test_a_timeline_from_a_file_says_that_it_has_no_tensors():
    timeline = Timeline.from_json(story(SWAP, 5).to_json())
    for call in (lambda: timeline.module(1), lambda: timeline.bisect(bool)):
        with pytest.raises(TimelineError, match="needs the tensors"):
            call()


def test_diff_names_what_another_history_did_differently():
    one, other = story(SWAP, 5), story(SWAP[:2], 5)
    difference = one.diff(other)
    assert [s.index for s in difference.only_here] == [3]
    assert difference.first == (3, 3)
    assert ("relu", "", "relu = torch.relu(x)") in difference.lines
    assert str(one.diff(story(SWAP, 5))) == "the two histories are alike"


def line(op, target, args, kwargs=None, annotation=""):
    state = State("it", op, target, args, kwargs or {}, annotation)
    return sentences.text_of(sentences.expression(state), lambda row: f"n{row}")


LINES = {
    "n1 + n2": ("call_function", "operator.add", [ref(1), ref(2)]),
    "n1 + (-1)": ("call_function", "_operator.add", [ref(1), -1]),
    "-n1": ("call_function", "operator.neg", [ref(1)]),
    "operator.iadd(n1, 1)": ("call_function", "operator.iadd", [ref(1), 1]),
    "n1[0]": ("call_function", "operator.getitem", [ref(1), 0]),
    "n1[:, 1:, ::2]": (
        "call_function",
        "operator.getitem",
        [ref(1), {"tuple": [{"slice": [None] * 3}, {"slice": [1, None, None]},
                            {"slice": [None, None, 2]}]}],
    ),
    "n1.shape": ("call_function", "builtins.getattr", [ref(1), "shape"]),
    "F.gelu(n1, approximate='tanh')": (
        "call_function", "torch._C._nn.gelu", [ref(1)], {"approximate": "tanh"},
    ),
    "torch.cat([n1, n2], 1)": ("call_function", "torch.cat", [[ref(1), ref(2)], 1]),
    "n1.view(-1, 4)": ("call_method", "view", [ref(1), -1, 4]),
    'getattr(self.layers, "0").conv(n1)': ("call_module", "layers.0.conv", [ref(1)]),
    "self.weight": ("get_attr", "weight", []),
    "return {'a': n1, 'b': (n2,)}": (
        "output", "output", [{"dict": [["a", ref(1)], ["b", {"tuple": [ref(2)]}]]}],
    ),
    "x: Tensor = 3": ("placeholder", "x", [3], {}, "Tensor"),
    "*args": ("placeholder", "*args", []),
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_a_line_reads_like_the_code(text):
    assert line(*LINES[text]) == text


def test_the_sentences_of_the_design():
    gelu = State("gelu", "call_function", "torch._C._nn.gelu", [ref(0)], {})
    say = sentences
    assert (
        say.created(gelu, "F.gelu(x)", "x") == "adds gelu = F.gelu(x) after x; nothing reads it yet"
    )
    assert say.line_prefix("fxlab/passes/fuse.py", 47, None) == "fuse.py:47 "
    assert say.line_prefix("fxlab/passes/fuse.py", 48, "fxlab/passes/fuse.py") == ":48 "
    assert say.rerouted("bn1", "conv1", ["relu", "add"], []) == (
        "the 2 readers of bn1 (relu, add) now read conv1; nothing reads bn1 any more"
    )
    assert say.erased("bn1", "self.bn1(conv1)", []) == (
        "erases bn1, was self.bn1(conv1); nothing read it"
    )
    names = ["bn1", "conv1", "bn3", "conv3"].__getitem__
    add = State("add", "call_function", "operator.add", [ref(0), ref(2)], {})
    assert say.rewritten("add", add, add._replace(args=[ref(0), ref(3)]), names) == (
        "add: 2nd argument bn3 -> conv3"
    )
    act = State("act", "call_function", "torch.relu", [ref(0)], {})
    assert say.retargeted("act", act, act._replace(target="torch._C._nn.gelu")) == (
        "act now calls F.gelu, was torch.relu"
    )
    old = {"path": "conv1", "value": {"text": "Conv2d", "tensors": {"weight": ["f32[1]", "aa"]}}}
    new = {
        "path": "conv1",
        "value": {
            "text": "Conv2d",
            "tensors": {"weight": ["f32[1]", "bb"], "bias": ["f32[1]", "cc"]},
        },
    }
    assert say.restated("module", old, new) == "self.conv1: weight changed, bias none -> yes"


@pytest.mark.parametrize(("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"),
                                              (21, "21st"), (112, "112th")])  # fmt: skip
def test_ordinals(number, text):
    assert sentences.ordinal(number) == text


def test_a_name_of_ten_thousand_characters_is_shortened_in_sentences_and_kept_in_the_data():
    name = "a" * 10_000
    text = sentences.rerouted(name, "b", ["c"], [])
    assert len(text) < 200
    assert "…" in text


def test_values_are_searched_and_rewritten_without_losing_structure():
    value = [{"tuple": [ref(1), {"dict": [["k", ref(2)]]}]}, {"slice": [ref(1), None, None]}, "s"]
    assert list(rows_in(value)) == [1, 2, 1]
    assert list(rows_in(substitute(value, 1, 9))) == [9, 2, 9]
    deep = {"text": "...", "rows": [1, 5]}
    assert substitute(deep, 5, 6) == {"text": "...", "rows": [1, 6]}


def test_a_row_reroute_and_its_undoing_are_exact_when_the_reader_read_the_new_row_already():
    both = ("args", 2, {"args": [ref(1)], "kwargs": {}}, {"args": [ref(1), ref(0)], "kwargs": {}})
    merge = ("reroute", 1, {"users": [[2, [ref(1), ref(0)], {}]]}, {"to": 0, "users": [2]})
    timeline = story([both, merge])
    assert timeline.frame(2).rows[2].args == [ref(0), ref(0)]
    assert timeline.frame(1).rows[2].args == [ref(1), ref(0)]


def test_integers_of_any_size_come_back_or_are_shown_as_text():
    def scaled(x):
        return x * 10**400 + 10**5000

    gm = fxlab.symbolic_trace(scaled)
    with fxlab.record(gm) as timeline:
        list(gm.graph.nodes)[1].name = "wide"
    text = timeline.to_json()
    again = Timeline.from_json(text)
    assert again.to_json() == text
    lines = [again.frame(1).line(row) for row in again.frame(1).rows]
    assert f"wide = x * {10**400}" in lines
    assert "wide + <an integer of 16,610 bits>" in lines[2]


def test_a_number_that_no_float_can_hold_is_refused_as_a_measure():
    data = json.loads(story(SWAP, 5).to_json())
    data["passes"][0]["columns"] = {"flops": {"1": 10**400}}
    with pytest.raises(TimelineError, match="columns"):
        Timeline.from_json(json.dumps(data))


def test_a_lone_surrogate_in_a_name_breaks_no_rendering(tmp_path):
    text = story(SWAP, 5).to_json().replace('"relu"', '"re\\ud800lu"')
    timeline = Timeline.from_json(text.replace('"title":"', '"title":"\\udfff'))
    page = timeline.to_html(tmp_path / "story.html").read_text("utf-8")
    assert "re" in page
    timeline.to_svg(tmp_path / "story.svg")
    timeline.to_png(tmp_path / "story.png")
    timeline._repr_html_().encode()
    text_table(view(timeline)).encode()


@pytest.mark.parametrize("index", ["a", 1.5, None])
def test_a_frame_is_asked_for_by_number(index):
    with pytest.raises(TypeError, match=r"number of a step, 0 to 3, not .*goto"):
        story(SWAP, 5).frame(index)


def test_a_pass_and_what_was_found_print_as_one_reads_them():
    timeline = story(SWAP, 5)
    assert re.fullmatch(r"<PassSpan '\w+': steps 1 to 3.*>", repr(timeline.passes[0]))
    difference = timeline.diff(story(SWAP[:2], 5))
    assert repr(difference) == str(difference)


def swap_relu(gm):
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh


def swap_relu_lower(gm):
    """The same, further down in its file."""
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
        elif node.target is torch.sin:
            node.target = torch.cos


def test_a_diff_passes_over_line_numbers():
    histories = []
    for pass_ in (swap_relu, swap_relu_lower):
        gm = fxlab.symbolic_trace(lambda x: torch.sin(torch.relu(x)))
        with fxlab.record(gm) as timeline:
            pass_(gm)
        histories.append(timeline)
    one, other = histories
    difference = one.diff(other)
    assert difference.only_here == []
    assert [step.index for step in difference.only_there] == [2]
    assert "+ sin now calls torch.cos, was torch.sin" in str(difference)
    assert "test_timeline.py" not in str(difference)


def test_names_are_cut_and_words_are_not():
    text = f"adds {'a' * 200} + 1 after layer_{'b' * 300}; nothing reads it yet"
    cut = sentences.cut(text, 160)
    assert len(cut) == 160 and re.fullmatch(
        r"adds a+…a+ \+ 1 after layer_b+…b+; nothing reads it yet", cut
    )
    text = "a sentence of words that all are short goes on for longer than there is room for it"
    for room in range(20, len(text)):
        begin, _, end = sentences.cut(text, room, 0.4).partition("…")
        assert len(begin) + len(end) < room
        assert set(re.findall(r"\w+", begin + " " + end)) <= set(text.split())
    assert len(sentences.cut("x" * 300, 40)) <= 40


def test_an_article_is_the_one_that_is_spoken():
    names = "LSTM OptimizedModule ReLU Embedding UNet GRU int str Unflatten"
    assert [sentences.article(name).split()[0] for name in names.split()] == (
        "an an a an a a an a an".split()
    )


def test_a_diff_cuts_long_names():
    histories = []
    for name in ("a", "b"):
        gm = fxlab.symbolic_trace(lambda x: torch.sin(torch.relu(x)))
        with fxlab.record(gm) as timeline:
            gm.graph.find_nodes(op="call_function", target=torch.sin)[0].name = name * 10_000
        histories.append(timeline)
    lines = str(histories[0].diff(histories[1])).splitlines()
    assert len(lines) >= 4 and max(map(len, lines)) < 250
