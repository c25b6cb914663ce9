"""A check explains, stops what never ends, and leaves the kernel as it was."""

from __future__ import annotations

import importlib
import sys
import threading
import time

import pytest
import torch

import fxlab
from fxlab.core.errors import ExerciseError
from fxlab.core.purity import effect
from fxlab.teach import NotDone, check, exercises, judge, programs
from fxlab.teach.examine import SHRINK_CALLS, examine
from fxlab.teach.exercise import Case, Finding, Part, Property, exercise, part
from fxlab.teach.limits import AnswerError, Guard, refusing
from tests.clocks import HANGS


def good(gm):
    for node in reversed(list(gm.graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not effect(node):
            gm.graph.erase_node(node)
    return gm


def no_effects(gm):
    for node in reversed(list(gm.graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            gm.graph.erase_node(node)


def test_a_good_answer_passes_and_the_card_does_not_say_correct():
    result = check("2.2", good)
    assert result and result.status == "pass" and result.points == result.out_of
    card = str(result) + result._repr_html_()
    assert "public checks passed" in card and "correct" not in card


def test_a_stub_is_neutral_and_only_strict_raises():
    def my_dce(gm):
        raise NotDone("2.2")

    assert check("2.2", my_dce).status == "todo"
    with pytest.raises(NotDone, match=r"2\.2 is not written yet"):
        check("2.2", my_dce, strict=True)
    with pytest.raises(ExerciseError, match="which has an effect"):
        check("2.2", no_effects, strict=True)


def test_the_same_answer_gets_the_same_card_each_time():
    one, other = check("2.2", no_effects), check("2.2", no_effects)
    assert str(one) == str(other) and one._repr_html_() == other._repr_html_()


def test_a_pass_that_drops_an_effect_is_shown_at_most_four_nodes():
    result = check("2.2", no_effects)
    assert len(result.first.finding.graph.graph.nodes) <= 4
    # Generated programs are cut down as far: without the hand-made cases the same holds.
    generated = [case for case in part("2.2")[1].cases() if isinstance(case, Property)]
    result = check("2.2", no_effects, cases=generated)
    assert result.first.title == "generated programs with effects"
    assert len(result.first.finding.graph.graph.nodes) <= 4


def test_the_card_has_status_first_a_diff_a_picture_and_no_script():
    result = check("2.2", no_effects)
    html = result._repr_html_()
    assert "<script" not in html and "<style" not in html and "onerror" not in html
    assert html.index("not yet: a check failed") < html.index("which has an effect")
    assert html.count('<img alt="') == 1 and "data:image/svg+xml;base64," in html
    text = str(result)
    assert text.startswith("2.2 Dead code elimination that keeps effects: not yet")
    assert "-    add_ = x.add_(1.0)" in text and "--- expected" in text


def test_names_of_the_students_are_text_in_the_card():
    def evil(gm):
        raise ValueError("<script>alert(1)</script>")

    html = check("2.2", evil)._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html


def test_explore_steps_through_the_failing_case():
    explorer = check("2.2", no_effects).explore()
    assert [step.edit.kind for step in explorer.timeline.steps] == ["erase"]
    assert 'check("2.2", my_dce).explore()' in str(check("2.2", no_effects))
    with pytest.raises(ExerciseError, match="no program to step through"):
        check("5.1", lambda *args: None).explore()


def test_the_steps_end_where_the_answer_returns_and_begin_with_its_own_edits():
    def forgets(gm, old, new):
        for node in list(gm.graph.find_nodes(op="call_function", target=old)):
            with gm.graph.inserting_after(node):
                gm.graph.call_function(new, (node,))

    result = check("2.1a", forgets)
    steps = result.explore().timeline.steps
    assert [step.edit.kind for step in steps] == ["create"]
    assert {place.function for step in steps for place in step.where[:1]} == {"forgets"}
    assert ".explore()" in str(result) and ".explore()" in result._repr_html_()


def test_the_checks_of_a_bisection_are_no_steps_of_the_pass_that_it_judges():
    from fxlab import record
    from fxlab.teach.exercises import foreign

    def find_a(gm, x):
        wanted = gm(x)
        with record(gm) as timeline:
            foreign.fold_scales(gm)
        timeline.bisect(lambda program: torch.allclose(program(x), wanted))

    gm, _ = foreign.program("a")
    with record(gm) as timeline:
        foreign.fold_scales(gm)
    assert len(check("3.3a", find_a).explore().timeline.steps) == len(timeline.steps)


def test_a_replay_of_feedback_steps_through_the_answers_own_edits_only():
    import base64
    import zlib

    from fxlab.teach import wire
    from fxlab.teach.replaying import replay

    case = next(one for one in part("2.2")[1].cases() if isinstance(one, Case))
    packed = base64.b85encode(zlib.compress(wire.encode(case.args()))).decode()
    steps = replay("2.2", good, packed, explore=True).timeline.steps
    assert steps and {step.where[0].function for step in steps} == {"good"}


def test_stepping_is_not_offered_where_nothing_was_edited():
    import copy

    result = check("3.1", lambda conv, bn: copy.deepcopy(conv))
    assert result.status == "fail"
    assert ".explore()" not in str(result) and ".explore()" not in result._repr_html_()
    by_hand = check("1.1", fxlab.Graph)  # a program is made here, and none is given
    assert not by_hand and ".explore()" not in str(by_hand)


def test_a_hint_of_the_kits_own_error_is_on_the_card_and_no_private_name():
    def lints(gm, old, new):
        for node in list(gm.graph.find_nodes(op="call_function", target=old)):
            with gm.graph.inserting_after(node):
                node.replace_all_uses_with(gm.graph.call_function(new, (node,)))
        gm.graph.lint()

    assert "Try: replace_all_uses_with also rewired" in check("2.1a", lints).sentence

    def texts(gm):
        gm.graph.call_function("relu")

    said = check("2.2", texts).sentence
    assert said.startswith("RewriteError: ") and "Try: call_function takes the function" in said


def test_numbers_on_a_card_are_rounded_and_few():
    import copy
    import re

    def off(conv, bn):
        made = copy.deepcopy(conv)
        made.weight = torch.nn.Parameter(conv.weight * 1.01)
        return made

    text = str(check("3.1", off))
    wide = next(one for one in check("3.1", off).cases if one.title == "three channels").finding
    assert "of shape [1, 1, 1, 1]: " in text and not re.search(r"\d\.\d{6}", text)
    assert "of shape [3, 3, 3, 3]: " in wide.actual and len(wide.actual) < 300


def test_what_a_case_before_explains_is_not_run():
    import operator

    def wrong_opcode():
        graph = fxlab.Graph()
        top = graph.call_function(torch.relu, (graph.placeholder("x"),))
        graph.output(graph.call_function(operator.add, (top, 1)))
        return graph

    by_name = {one.behaviour: one.status for one in check("1.1", wrong_opcode).cases}
    assert by_name["opcodes"] == "fail" and by_name["arguments"] == "not run"
    (alone,) = check("1.1", wrong_opcode, behaviour="arguments").cases
    assert alone.status == "fail"


def test_a_pass_that_stopped_claims_no_nodes():
    from fxlab.explorer.view import strip

    def stops(gm):
        gm.graph.erase_node(gm.graph.output_node())
        raise KeyError("x")

    (span,) = check("2.2", stops).explore().timeline.passes
    assert not any("output" in fact for fact in strip(span))


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("fxlab.teach.checking.Guard", lambda id, asks: Guard(id, asks, 1.0))


def test_an_endless_loop_is_stopped_and_its_line_named(impatient):
    def endless(gm):
        while True:
            pass

    begin = time.process_time()
    result = check("2.2", endless)
    assert time.process_time() - begin < 5
    assert result.status == "error" and "stopped after 1 s" in result.sentence
    assert "of endless" in result.sentence and "list(gm.graph.nodes)" in result.sentence
    assert [one.status for one in result.cases[1:]] == ["not run"] * (len(result.cases) - 1)
    assert check("2.2", good)  # the kernel is usable


def test_a_loop_that_swallows_exceptions_is_stopped_too(impatient):
    def stubborn(gm):
        for _ in range(2):
            try:
                while True:
                    pass
            except BaseException:
                continue

    assert "stopped after" in check("2.2", stubborn).sentence


def test_a_graph_that_grows_without_end_is_stopped_with_the_remedy():
    def visits_its_own(gm):
        for node in gm.graph.nodes:
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.relu, (node,))

    result = check("2.2", visits_its_own)
    assert (
        "your loop visits the nodes it inserts: iterate over list(graph.nodes)" in result.sentence
    )


def test_no_thread_and_no_patch_is_left_after_a_check(impatient):
    codes = [fxlab.passes.dce.__code__, torch.fx.Graph.eliminate_dead_code.__code__]
    before = set(threading.enumerate())
    check("2.2", no_effects)
    check("2.2", fxlab.passes.dce)
    for thread in set(threading.enumerate()) - before:
        thread.join(HANGS)
        assert not thread.is_alive()
    assert codes == [fxlab.passes.dce.__code__, torch.fx.Graph.eliminate_dead_code.__code__]


def test_calling_the_answer_is_no_answer_however_it_is_called():
    imported = fxlab.passes.dce

    def direct(gm):
        return imported(gm)

    def through_torch(gm):
        torch.fx.Graph.eliminate_dead_code(gm.graph)

    def hidden(gm):
        try:
            gm.graph.eliminate_dead_code()
        except Exception:
            return good(gm)

    for answer in (imported, direct, through_torch, hidden):
        result = check("2.2", answer)
        assert result.status == "error" and "2.2 asks you to write this" in result.sentence
        assert result.points == 0


def test_what_is_refused_works_again_outside_and_a_class_refuses_as_a_whole():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    refused = pytest.raises(ExerciseError, match="asks you to write this")
    with refusing("9.9", ("fxlab.core.interpreter.Interpreter",)), refused:
        fxlab.Interpreter(gm).run(torch.ones(1))
    assert fxlab.Interpreter(gm).run(torch.ones(1)) == 1


@pytest.mark.parametrize(
    "answer, sentence",
    [
        (lambda gm: 3, "it returned an int"),
        (lambda gm: gm.graph, "it returned a Graph"),
        (lambda gm: fxlab.GraphModule(gm, gm.graph), "another GraphModule"),
        (lambda gm: None, "is still there"),
        (lambda gm: sys.exit(1), "left Python by SystemExit"),
        (lambda gm: gm.no_such_name, "AttributeError"),
        ("text", "TypeError"),
    ],
)
def test_other_answers_are_told_what_is_wrong(answer, sentence):
    result = check("2.2", answer)
    assert not result and sentence in result.sentence


def test_a_node_that_reads_itself_is_told_in_the_words_of_the_mistake():
    def rewired(gm):
        x = next(iter(gm.graph.nodes))
        with gm.graph.inserting_after(x):
            new = gm.graph.call_function(torch.relu, (x,))
        x.replace_all_uses_with(new)

    assert "replace_all_uses_with also rewired the node you inserted" in str(check("2.2", rewired))


def test_what_is_printed_is_cut_and_shown():
    def loud(gm):
        print("x" * 1_000_000)
        return good(gm)

    result = check("2.2", loud)
    assert result and len(result.printed) < 3000 and "more characters" in result.printed


def test_an_interrupt_of_the_kernel_goes_through():
    def interrupted(gm):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("2.2", interrupted)


def test_show_prints_the_card_and_returns_the_points(capsys):
    assert check("2.2", good).show() == 6
    assert "public checks passed" in capsys.readouterr().out


def test_one_behaviour_can_be_asked_for():
    result = check("2.2", no_effects, behaviour="chains go")
    assert result.status == "pass" and result.out_of == 2


def test_an_unknown_exercise_says_what_there_is():
    with pytest.raises(ExerciseError, match=r"no exercise '9.9'[\s\S]*2\.2"):
        check("9.9", good)
    with pytest.raises(ExerciseError, match="has no part"):
        check("2.1", good)
    assert exercise("2.1a").id == "2.1"


def numbers(most):
    from hypothesis import strategies as st

    return st.tuples(st.integers(0, most))


def a_part(case):
    return Part("2.2", "f", {case.behaviour: 1}, lambda answer, *args: answer(*args),
                lambda: [case], {})  # fmt: skip


def test_a_property_is_cut_down_to_the_smallest_and_bounded():
    calls = []

    def judge_small(args, value):
        calls.append(args)
        return Finding(f"fails at {args[0]}") if args[0] > 17 else None

    case = Property("b", "t", lambda: numbers(10**6), judge_small, examples=50)
    (result,) = examine(a_part(case), lambda args: args[0])
    assert result.sentence == "fails at 18" and result.args == (18,)
    assert len(calls) <= 50 + SHRINK_CALLS


def test_a_judge_that_stumbles_is_a_finding_and_not_an_error_of_the_kit():
    case = Case("b", "t", lambda: (1,), lambda args, value: value.no_such_thing)
    (result,) = examine(a_part(case), lambda args: args[0])
    assert result.status == "fail" and "can't be used: AttributeError" in result.sentence


def test_a_judge_gets_arguments_that_the_answer_has_not_touched():
    def spoil(gm):
        for node in list(gm.graph.nodes):
            if node.op == "call_function":
                node.target = torch.neg
        return gm

    def unspoilt(args, value):
        kept = any(node.target is torch.relu for node in args[0].graph.nodes)
        return None if kept else Finding("the judge sees what the answer did")

    def make(graph):
        graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))

    case = Case("b", "t", lambda: (programs.built(make),), unspoilt)
    assert examine(a_part(case), lambda args: spoil(*args))[0].status == "pass"


def test_guard_names_the_students_line_of_an_error():
    def broken(x):
        return x.missing

    with pytest.raises(AnswerError) as caught:
        Guard("9.9").call(broken, 1)
    assert "return x.missing" in caught.value.sentence
    assert "in broken: return x.missing" in caught.value.trace


def test_check_says_of_a_function_of_ones_own_what_a_grader_would_say():
    def own(x):
        return x

    def calls_own(gm):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.target = own

    result = check("2.2", calls_own)
    assert not result and "which is none of torch's or Python's functions" in str(result)


def test_same_program_sees_outputs_writes_and_random_numbers():
    def gm(f):
        return fxlab.symbolic_trace(f)

    x = [torch.randn(3)]
    plain = gm(lambda x: x + 1)
    assert judge.same_program(plain, gm(lambda x: 1 + x), x) == ""
    assert "differs by" in judge.same_program(plain, gm(lambda x: x + 2), x)
    writes = gm(lambda x: (x.add_(1), x + 0)[1])
    assert "written into input 0" in judge.same_program(plain, writes, x)
    draws = gm(lambda x: (torch.rand_like(x), x + 1)[1])
    assert "random numbers" in judge.same_program(plain, draws, x)
    assert "shape" in judge.same_program(plain, gm(lambda x: (x + 1).sum()), x)


def test_without_hypothesis_the_check_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ExerciseError, match=r"fxlab\[teach\]"):
        check("2.2", good)


def test_every_exercise_is_listed_once_in_order():
    ids = [one.id for one in exercises()]
    assert len(ids) == len(set(ids)) >= 22
    assert ids == sorted(ids, key=lambda id: tuple(map(int, id.split("."))))


SLOW = """import time
end = time.process_time() + {seconds}
while time.process_time() < end:
    pass
whole = True
"""


@pytest.mark.parametrize("cpu", [False, True])
def test_an_import_within_a_call_is_not_cut_in_half_and_is_not_the_answers_time(
    tmp_path, monkeypatch, cpu
):
    (tmp_path / "fxlab_slow_import.py").write_text(SLOW.format(seconds=1.0), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def imports():
        import fxlab_slow_import

        return fxlab_slow_import.whole

    def imports_and_loops():
        imports()
        while True:
            pass

    try:
        assert Guard("9.9", seconds=0.3, cpu=cpu).call(imports) is True
        sys.modules.pop("fxlab_slow_import")
        with pytest.raises(AnswerError, match="stopped after"):
            Guard("9.9", seconds=0.3, cpu=cpu).call(imports_and_loops)
        assert sys.modules["fxlab_slow_import"].whole
    finally:
        sys.modules.pop("fxlab_slow_import", None)


def test_an_import_that_never_ends_is_stopped(tmp_path, monkeypatch):
    (tmp_path / "fxlab_endless_import.py").write_text("while True:\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("fxlab.teach.limits.IMPORTS", 0.3)

    with pytest.raises(AnswerError, match="stopped after"):
        Guard("9.9", seconds=0.2).call(importlib.import_module, "fxlab_endless_import")
