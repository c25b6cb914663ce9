"""Plausible wrong answers to exercise 8.1; the sentence that each must show is in the registry."""

import copy

import torch

from fxlab.passes import amp, shape_prop
from fxlab.passes.amp import column

LOW = torch.bfloat16


def _amp(gm, inputs, *, keep=True, share=True, indices=False, own=True, output=True, weights=True):
    """Cast rightly but for the option given."""
    shape_prop(gm, *inputs)
    graph, low, casts, done = gm.graph, {}, {}, set()
    for node in list(graph.nodes):
        values = [value for value in node.all_input_nodes if value in low]
        all_low = bool(values) and all(low[value] for value in values)
        word = "keep" if node.op == "output" else column(node, gm)
        if not keep and word == "keep" and node.op != "output":
            word = "lower"
        wants = word == "lower" or (word in ("follow", "widest") and all_low)
        for value in values if word != "follow" and (output or node.op != "output") else ():
            if low[value] != wants:
                dtype = LOW if wants else torch.float32
                if (value, dtype) not in casts or not share:
                    with graph.inserting_before(node):
                        casts[value, dtype] = graph.call_method("to", (value, dtype))
                node.replace_input_with(value, casts[value, dtype])
        if word == "lower" and node.op == "call_module" and node.target not in done and weights:
            module = gm.get_submodule(node.target)
            gm.set_submodule(node.target, (copy.deepcopy(module) if own else module).to(LOW))
            done.add(node.target)
        dtype = getattr(node.meta.get("tensor_meta"), "dtype", None)
        if dtype == torch.float32 or (indices and node.op == "placeholder"):
            low[node] = wants
    return gm


def wrong_everything(gm, inputs):
    """Runs everything in 16 bits."""
    return _amp(gm, inputs, keep=False)


def wrong_cast_a_reader(gm, inputs):
    """Casts a value once for each reader."""
    return _amp(gm, inputs, share=False)


def wrong_there_and_back(gm, inputs):
    """Wraps each product in casts, one after another."""
    shape_prop(gm, *inputs)
    for node in list(gm.graph.nodes):
        if node.op not in ("placeholder", "output") and column(node, gm) == "lower":
            for value in node.all_input_nodes:
                with gm.graph.inserting_before(node):
                    node.replace_input_with(value, gm.graph.call_method("to", (value, LOW)))
            if node.op == "call_module":
                layer = gm.get_submodule(node.target)
                gm.set_submodule(node.target, copy.deepcopy(layer).to(LOW))
            with gm.graph.inserting_after(node):
                back = gm.graph.call_method("to")
            node.replace_all_uses_with(back)
            back.args = (node, torch.float32)
    return gm


def wrong_casts_indices(gm, inputs):
    """Takes every input for a float."""
    gm = _amp(gm, inputs)
    for node in list(gm.graph.nodes):
        if node.op == "placeholder" and not any(u.target == "to" for u in node.users):
            with gm.graph.inserting_before(node.next):
                cast = gm.graph.call_method("to")
            node.replace_all_uses_with(cast)
            cast.args = (node, LOW)
    return gm


def wrong_in_place(gm, inputs):
    """Casts the modules that the model has."""
    return _amp(gm, inputs, own=False)


def wrong_forgets_output(gm, inputs):
    """Returns what comes out."""
    return _amp(gm, inputs, output=False)


def wrong_forgets_weights(gm, inputs):
    """Casts activations, and leaves weights in float32."""
    return _amp(gm, inputs, weights=False)


def wrong_reads_itself(gm, inputs):
    """Turns all readers to the cast, the cast among them."""
    shape_prop(gm, *inputs)
    for node in list(gm.graph.nodes):
        if node.op == "placeholder" and node.meta["tensor_meta"].dtype == torch.float32:
            with gm.graph.inserting_before(node.next):
                cast = gm.graph.call_method("to", (node, LOW))
            node.replace_all_uses_with(cast)
    return gm


def wrong_delegation(gm, inputs):
    """Calls the kit's."""
    return amp(gm, inputs=tuple(inputs))
