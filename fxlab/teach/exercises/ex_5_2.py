"""Exercise 5.2: prepare, calibrate and convert, for linear layers (section 6.2.1, Figure 6).

Each part begins with what the kit's own previous phase made, so that a mistake in (a) costs nothing
in (b).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxlab.core.errors import FxlabError
from fxlab.core.node import Node
from fxlab.explorer.sentences import plural
from fxlab.passes.quantize.observers import Observer
from fxlab.passes.quantize.report import sqnr
from fxlab.teach.exercise import Case, Exercise, Finding, NotDone, Part
from fxlab.teach.exercises.linear import (
    Again,
    Fan,
    Keyword,
    NoLayer,
    One,
    Ranges,
    Reference,
    Two,
    TwoInputs,
    described,
    kits_prepare,
    program,
    rows_of,
    run,
    weight_qparams,
    why_raised,
    without_observers,
)
from fxlab.teach.judge import edited, kind_of
from fxlab.teach.limits import safe_text

# ----------------------------------------------------------------------------------- (a) prepare

STUB_A = '''\
def my_prepare(gm):
    """Edit ``gm`` in place: observe each value that a linear layer reads; return ``gm``.

    Each such value gets one MinMaxObserver of its own, behind it, and the linear layers that read
    the value read the observer instead. The program computes what it did before.

    Args:
        gm: a GraphModule in eval mode. Layers are ``call_module`` nodes of ``nn.Linear``.
    """'''


def entry_a(answer: Any, gm: Any, batches: Iterable = ()) -> Any:
    """Run the answer, then the batches; return the rows, outputs, and each observer's range."""
    made = edited(answer, gm)
    found = described(made, batches)
    found["ranges"] = {
        path: [float(module.low), float(module.high)]
        for path, module in made.named_modules()
        if isinstance(module, Observer)
    }
    return found


def judge_a(args: tuple, found: Any) -> Finding | None:
    """Ask of each linear layer who watches its input; compare the rest with the input program."""
    gm, batches = args
    rows, code = found["rows"], found["code"]

    def wrong(sentence: str, node: str = "") -> Finding:
        return Finding(sentence, node=node, graph=gm, actual=code)

    watches: dict[int, int] = {}  # place of a value -> place of its observer
    paths: dict[str, int] = {}
    for place, row in enumerate(rows):
        if not row["observer"]:
            continue
        value = row["reads"][0]
        if value in watches:
            return wrong(
                f"{rows[value]['name']} has two observers; one a value is enough, "
                "however many layers read it",
                row["name"],
            )
        if row["target"] in paths:
            return wrong(
                f"the observer {row['target']!r} is called in two places, so the ranges of "
                f"{rows[value]['name']} and {rows[paths[row['target']]]['name']} are mixed; "
                "each value needs an observer of its own",
                row["name"],
            )
        watches[value], paths[row["target"]] = place, value
    read = set()
    for row in rows:
        if row["linear"]:
            source = row["reads"][0]
            if not rows[source]["observer"]:
                return wrong(
                    f"the layer {row['name']} reads {rows[source]['name']} directly, past any "
                    "observer",
                    row["name"],
                )
            read.add(source)
    for value, place in watches.items():
        if place not in read:
            return wrong(
                f"{rows[place]['name']} watches {rows[value]['name']}, which no linear layer reads",
                rows[place]["name"],
            )
    if without_observers(rows) != without_observers(rows_of(gm)):
        return wrong("apart from the observers the program is no longer what it was")
    return _compare_a(gm, batches, found, wrong, paths)


def _compare_a(gm: Any, batches: list, found: dict, wrong: Any, paths: dict) -> Finding | None:
    truth = Ranges(gm)
    with torch.no_grad():
        outputs = [truth.run(*batch) for batch in batches]
    for mine, theirs in zip(outputs, found["outputs"], strict=True):
        if not torch.equal(mine, theirs):
            return wrong("the prepared program computes something else than the float program")
    expected = sorted(truth.ranges.values())
    actual = sorted(tuple(found["ranges"][path]) for path in paths)
    if expected != actual:
        return wrong(f"the observers saw the ranges {actual}, the layers read {expected}")
    return None


def cases_a() -> Iterable[Case]:
    """The public cases of (a), smallest first."""
    rows: list[tuple[str, str, Callable[[], nn.Module], int]] = [
        ("each layer's input is observed", "one layer", One, 1),
        ("each layer's input is observed", "two layers", Two, 1),
        ("one observer a value", "one layer is called twice", Again, 1),
        ("one observer a value", "two layers read one value", Fan, 1),
        ("keyword arguments", "fc(input=x)", Keyword, 1),
        ("two inputs", "a program with two inputs", TwoInputs, 2),
        ("nothing else changes", "a program without a layer", NoLayer, 1),
        ("nothing else changes", "two layers", Two, 1),
    ]
    for behaviour, title, make, inputs in rows:
        yield Case(behaviour, title, partial(program, make, inputs), judge_a)


# --------------------------------------------------------------------------------- (b) calibrate

STUB_B = '''\
def my_calibrate(prepared, batches):
    """Run typical batches through ``prepared``; return what its observers answer.

    Args:
        prepared: what the kit's ``prepare`` returned.
        batches: any iterable. A tuple holds the arguments of one call; anything else is the only
            argument. No gradients are recorded.

    Returns:
        For each observer node, by the name of the value it reads: ``(scale, zero_point)``.

    Raises:
        ValueError: an observer saw no data; the message names its value.
    """'''


def _noted(forward: Callable[[Tensor], Tensor], modes: list[bool], x: Tensor) -> Tensor:
    modes.append(torch.is_grad_enabled())
    return forward(x)


def entry_b(answer: Any, prepared: Any, batches: Iterable = (), trainable: bool = False) -> Any:
    """Let the answer calibrate; return its dict, and whether gradients were recorded."""
    for parameter in prepared.parameters():
        parameter.requires_grad_(trainable)
    modes: list[bool] = []
    for module in prepared.modules():
        if isinstance(module, Observer):
            module.forward = partial(_noted, module.forward, modes)  # type: ignore[method-assign]
    batches = list(batches)
    try:
        result = answer(prepared, iter(batches))
    except NotDone:
        raise
    except Exception as error:
        # Only an observer without data is told by an error; any other one is a slip, with its line.
        if batches and not isinstance(error, ValueError | FxlabError):
            raise
        text = error.message if isinstance(error, FxlabError) else safe_text(error)
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        return {
            "raised": text or "without a message",
            "kind": kind,
            "calls": len(modes),
            "gradients": any(modes),
            "answer": {},
        }
    found: dict[str, Any] = {"raised": "", "calls": len(modes), "gradients": any(modes)}
    if not isinstance(result, dict):
        return found | {"answer": kind_of(result)}
    answers = {}
    for name, pair in result.items():
        try:
            scale, zero_point = pair
            answers[str(getattr(name, "name", name))] = [float(scale), float(zero_point)]
        except (TypeError, ValueError):
            answers[str(name)] = type(pair).__name__
    return found | {"answer": answers}


def judge_b(args: tuple, found: Any) -> Finding | None:
    """Compare with the kit's own observers after the same batches."""
    prepared, batches, trainable = args
    calls = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    run(prepared, calls)
    observers = {
        node.args[0].name: prepared.get_submodule(node.target)
        for node in prepared.graph.nodes
        if node.op == "call_module" and isinstance(prepared.get_submodule(node.target), Observer)
    }

    def wrong(sentence: str, **more: Any) -> Finding:
        return Finding(sentence, graph=prepared, **more)

    unseen = [name for name, observer in observers.items() if observer.problem()]
    if unseen:
        if not found["raised"]:
            return wrong(
                f"the observer of {unseen[0]} saw no data, and nobody was told: "
                "a scale made of nothing is worse than an error"
            )
        return why_raised(unseen, found, wrong)
    if found["raised"]:
        return wrong(f"it raised ({found['raised']}), although every observer saw data")
    if found["gradients"] and trainable:
        return wrong(
            "gradients were recorded while calibrating: every batch would stay in memory; "
            "run them under torch.no_grad()"
        )
    answer = found["answer"]
    if not isinstance(answer, dict):
        return wrong(f"my_calibrate returned {answer}; it returns a dict")
    if set(answer) != set(observers):
        return wrong(
            f"the answer has entries for {sorted(answer)}, the observed values are "
            f"{sorted(observers)}"
        )
    if found["calls"] < len(calls) * len(observers):
        return wrong(
            f"{len(calls)} batches were given and the observers were called {found['calls']} "
            f"times; each batch counts"
        )
    for name, observer in observers.items():
        q = observer.qparams()
        expected = [float(q.scale), float(q.zero_point)]
        if isinstance(answer[name], str) or any(
            abs(a - b) > 1e-6 * abs(b) for a, b in zip(answer[name], expected, strict=True)
        ):
            return wrong(
                f"{name}: got {answer[name]}, and its observer says {expected}",
                expected=str(expected),
                actual=str(answer[name]),
            )
    return None


def _to_calibrate(
    make: Callable[[], nn.Module],
    count: int = 3,
    inputs: int = 1,
    trainable: bool = False,
    seed: int = 0,
) -> tuple[Any, list, bool]:
    gm, batches = program(make, inputs, seed)
    given = batches if inputs > 1 else [batch[0] for batch in batches]
    return kits_prepare(gm), given[:count], trainable


def cases_b() -> Iterable[Case]:
    """The public cases of (b), smallest first."""
    rows: list[tuple[str, str, Any]] = [
        ("every batch counts", "one layer, one batch", partial(_to_calibrate, One, 1)),
        ("every batch counts", "two layers, three batches", partial(_to_calibrate, Two)),
        ("a tuple is arguments", "two inputs", partial(_to_calibrate, TwoInputs, 1, 2)),
        ("no gradients", "one layer", partial(_to_calibrate, One, 1, trainable=True)),
        ("no data is an error", "no batches", partial(_to_calibrate, One, 0)),
    ]
    for behaviour, title, make in rows:
        yield Case(behaviour, title, make, judge_b)


# ----------------------------------------------------------------------------------- (c) convert

STUB_C = '''\
def my_convert(prepared):
    """Edit ``prepared`` in place: int8 linear layers, no observers; return it.

    Each call of a linear layer becomes a call of an ``Int8Linear`` that reads the codes of a
    ``Quantize`` and writes float. Its input's scale and zero point are those of the observer that
    the layer read; its weight has one scale an output channel (``PerChannelMinMaxObserver``).

    Args:
        prepared: what the kit's ``prepare`` returned, after calibration. The float model shares
            its weights and stays as it is.
    """'''


def entry_c(answer: Any, prepared: Any, inputs: Iterable = ()) -> Any:
    """Let the answer convert; return rows, outputs, int8 weights, and which weights it wrote to."""
    shared = {name: (value, value.detach().clone()) for name, value in prepared.named_parameters()}
    made = edited(answer, prepared)
    found = described(made, inputs)
    found["written"] = [
        n for n, (value, before) in shared.items() if not torch.equal(value, before)
    ]
    found["codes"] = {}
    for row in found["rows"]:
        if row["op"] == "call_module":
            weight = getattr(made.get_submodule(row["target"]), "weight", None)
            if isinstance(weight, Tensor) and weight.dtype == torch.int8:
                found["codes"][row["name"]] = weight.detach().int()
    return found


def judge_c(args: tuple, found: Any) -> Finding | None:
    """Look for what should be gone; compare weights with their codes, outputs with integers."""
    prepared, inputs = args

    def wrong(sentence: str, node: str = "") -> Finding:
        return Finding(sentence, node=node, graph=prepared, actual=found["code"])

    if found["written"]:
        return wrong(
            f"{found['written'][0]} of the float model has changed: it is shared, so make new "
            "tensors instead of writing into it"
        )
    for row in found["rows"]:
        if row["observer"]:
            return wrong(f"the observer {row['name']} is still there", row["name"])
        if row["linear"]:
            return wrong(f"the layer {row['name']} still computes in float", row["name"])
    layers = [node for node in prepared.graph.nodes if _is_linear(prepared, node)]
    if len(found["codes"]) != len(layers):
        return wrong(
            f"{plural(len(layers), 'call')} of a layer before, and "
            f"{plural(len(found['codes']), 'call')} with int8 weights now"
        )
    for (name, codes), node in zip(found["codes"].items(), layers, strict=True):
        layer: Any = prepared.get_submodule(node.target)
        expected = weight_qparams(layer).quantize(layer.weight).int()
        if codes.shape != expected.shape or (codes - expected).abs().max() > 1:
            return wrong(
                f"the int8 weight of {name} is not that of {node.name} with one scale an output "
                "channel: the largest weight of each row gets the code 127 or -127",
                name,
            )
    return _compare_c(prepared, inputs, found, wrong, len(layers))


def _compare_c(prepared: Any, inputs: list, found: dict, wrong: Any, layers: int) -> Finding | None:
    for batch, output in zip(inputs, found["outputs"], strict=True):
        with torch.no_grad():
            reference = Reference(prepared).run(*batch)
        if output.shape != reference.shape or output.dtype != reference.dtype:
            return wrong(
                f"the output is {output.dtype} {list(output.shape)}; it is "
                f"{reference.dtype} {list(reference.shape)}"
            )
        # Behind the first layer a value may lie on a tie between two codes, and go either way.
        enough = 80 if layers == 1 else 40
        if sqnr(reference, output) < enough:
            return wrong(_why_c(prepared, batch, reference, output))
    return None


def _why_c(prepared: Any, batch: tuple, reference: Tensor, output: Tensor) -> str:
    """Say which mistake gives this output."""
    for options, sentence in (
        ({"bias": False}, "the bias is lost: Int8Linear adds it, when it is given"),
        ({"codes": False}, "the layers read float: their inputs were not made codes by a Quantize"),
    ):
        with torch.no_grad():
            other = Reference(prepared, **options).run(*batch)
        if not torch.equal(other, reference) and sqnr(other, output) > 60:
            return sentence
    return (
        f"the output is {sqnr(reference, output):.0f} dB from what these codes compute: each call "
        "of a layer has its own scale and zero point, those of the observer that it read"
    )


def _is_linear(gm: Any, node: Node) -> bool:
    return node.op == "call_module" and isinstance(gm.get_submodule(node.target), nn.Linear)


def _to_convert(make: Callable[[], nn.Module], inputs: int = 1, seed: int = 0) -> tuple[Any, list]:
    gm, batches = program(make, inputs, seed)
    return run(kits_prepare(gm), batches), batches[:2]


def cases_c() -> Iterable[Case]:
    """The public cases of (c), smallest first."""
    rows: list[tuple[str, str, Callable[[], nn.Module], int]] = [
        ("int8 layers", "one layer", One, 1),
        ("int8 layers", "one layer without bias", partial(One, bias=False), 1),
        ("int8 layers", "two layers", Two, 1),
        ("values read by several", "two layers, and an addition, read one value", Fan, 1),
        ("values read by several", "two inputs", TwoInputs, 2),
        ("a layer called twice", "its two inputs differ", Again, 1),
    ]
    for behaviour, title, make, inputs in rows:
        yield Case(behaviour, title, partial(_to_convert, make, inputs), judge_c)


# ---------------------------------------------------------------------------------- other numbers


def _hidden(cases: Callable[[], Iterable[Case]]) -> Iterable[Case]:
    for seed, case in enumerate(cases(), start=50):
        made: Any = case.args
        yield Case(case.behaviour, case.title, partial(made, seed=seed), case.judge)


_NO_QUANTIZE_STATIC = "fxlab.passes.quantize.convert.quantize_static"

EXERCISE = Exercise(
    id="5.2",
    title="Prepare, calibrate, convert, for linear layers",
    level=4,
    minutes=75,
    idea="Quantization needs activations and weights together, so it is a transform of a graph "
    "and of its modules: three phases (section 6.2.1, Figure 6).",
    needs=("observer", "calibration", "scale and zero point", "reroute", "state of a GraphModule"),
    teaches=("scale of a channel",),
    hints=(
        "The lecture's section 'Three phases, stepped' shows each edit of the kit's own phases. "
        "Step through them again and write down, for one layer, what is inserted, who is turned "
        "to it, and what goes.",
        "(a) Collect the values first: a dict from value to the layers that read it. Then one "
        "observer for each key. (b) Run, then ask each observer for its qparams. (c) For each call "
        "of a layer: the observer that it reads gives the codes of its input; a "
        "PerChannelMinMaxObserver that is shown the weight gives those of the weight. Insert "
        "Quantize and Int8Linear before the layer, turn its readers, erase it. At the end take the "
        "observers out: their readers read the value again.",
        "A node's argument may be by position or by keyword; `node.replace_input_with(old, new)` "
        "finds it in both: after `add = graph.call_function(torch.add, (x,), {'other': y})`, "
        "`add.replace_input_with(y, z)` changes the keyword. A module is added under a path of its "
        "own with `gm.add_submodule('noise_1', nn.Dropout())`.",
    ),
    asks=(
        "fxlab.passes.quantize.prepare.prepare",
        "fxlab.passes.quantize.convert.convert",
        _NO_QUANTIZE_STATIC,
    ),
    parts=(
        Part(
            id="5.2a",
            name="my_prepare",
            points={
                "each layer's input is observed": 3,
                "one observer a value": 2,
                "keyword arguments": 1,
                "two inputs": 1,
                "nothing else changes": 1,
            },
            entry=entry_a,
            cases=cases_a,
            hidden=partial(_hidden, cases_a),
            wrong={
                "reads_itself": "also rewired the node you inserted",
                "one_a_reader": "has two observers",
                "one_a_layer": "each value needs an observer of its own",
                "positions_only": "reads x directly, past any observer",
                "behind_placeholder": "is a placeholder behind an operation",
                "watches_results": "which no linear layer reads",
            },
            stub=STUB_A,
            asks=("fxlab.passes.quantize.prepare.prepare", _NO_QUANTIZE_STATIC),
        ),
        Part(
            id="5.2b",
            name="my_calibrate",
            points={
                "every batch counts": 1,
                "a tuple is arguments": 1,
                "no gradients": 1,
                "no data is an error": 1,
            },
            entry=entry_b,
            cases=cases_b,
            hidden=partial(_hidden, cases_b),
            wrong={
                "first_batch": "each batch counts",
                "with_gradients": "gradients were recorded",
                "one_argument": "missing 1 required positional argument: 'y'",
                "silent": "nobody was told",
                "nameless": "That does not name the value",
                "kits_error": "A ValueError is promised",
                "key_error": "it raised KeyError: 'x'. A ValueError is promised",
            },
            stub=STUB_B,
            asks=("fxlab.passes.quantize.convert.convert", _NO_QUANTIZE_STATIC),
        ),
        Part(
            id="5.2c",
            name="my_convert",
            points={"int8 layers": 4, "values read by several": 2, "a layer called twice": 2},
            entry=entry_c,
            cases=cases_c,
            hidden=partial(_hidden, cases_c),
            wrong={
                "one_scale": "one scale an output channel",
                "keeps_observers": "is still there",
                "in_its_place": "each call of a layer has its own scale",
                "writes_weights": "is shared, so make new tensors",
                "no_bias": "the bias is lost",
                "weights_only": "the layers read float",
                "first_call": "each call needs its own Quantize and Int8Linear",
                "unsigned": "the codes of a weight are int8: use PerChannelMinMaxObserver",
            },
            stub=STUB_C,
            asks=("fxlab.passes.quantize.convert.convert", _NO_QUANTIZE_STATIC),
        ),
    ),
)
