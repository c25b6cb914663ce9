"""Plausible wrong answers to exercise 5.2; the sentence that each must show is in the registry."""

import torch
from torch import nn

from fxlab.passes.quantize import MinMaxObserver, PerChannelMinMaxObserver, convert, prepare
from fxlab.passes.quantize.convert import quantize_static
from fxlab.passes.quantize.kernels import Codes
from fxlab.passes.quantize.modules import Int8Linear, Quantize
from fxlab.passes.quantize.observers import Observer


def calls_of(gm, kind):
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    return [node for node in calls if isinstance(gm.get_submodule(node.target), kind)]


def _watch(gm, number, value, before=None):
    """Insert an observer behind ``value`` (an input: behind all inputs)."""
    gm.add_submodule(f"observer_{number}", MinMaxObserver())
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    place = before or (inputs[-1] if value in inputs else value).next
    with gm.graph.inserting_before(place):
        return gm.graph.call_module(f"observer_{number}", (value,))


def _values(gm):
    return list(dict.fromkeys(node.all_input_nodes[0] for node in calls_of(gm, nn.Linear)))


def wrong_a_reads_itself(gm):
    """Turns all readers, the observer among them."""
    for number, value in enumerate(_values(gm)):
        value.replace_all_uses_with(_watch(gm, number, value))
    return gm


def wrong_a_one_a_reader(gm):
    """Inserts an observer before each layer."""
    for number, node in enumerate(calls_of(gm, nn.Linear)):
        value = node.all_input_nodes[0]
        node.replace_input_with(value, _watch(gm, number, value, before=node))
    return gm


def wrong_a_one_a_layer(gm):
    """Gives each layer, not each value, an observer: a layer called twice has one."""
    for node in calls_of(gm, nn.Linear):
        value, path = node.all_input_nodes[0], f"{node.target}_observer"
        gm.add_submodule(path, MinMaxObserver())
        with gm.graph.inserting_before(node):
            observer = gm.graph.call_module(path, (value,))
        node.replace_input_with(value, observer)
    return gm


def wrong_a_positions_only(gm):
    """Looks for the input among the positional arguments only."""
    readers = {}
    for node in calls_of(gm, nn.Linear):
        if node.args:
            readers.setdefault(node.args[0], []).append(node)
    for number, (value, layers) in enumerate(readers.items()):
        observer = _watch(gm, number, value)
        for layer in layers:
            layer.args = (observer,)
    return gm


def wrong_a_behind_placeholder(gm):
    """Inserts right behind the value, an input of the program too."""
    for number, value in enumerate(_values(gm)):
        observer = _watch(gm, number, value, before=value.next)
        for node in list(value.users):
            if node is not observer:
                node.replace_input_with(value, observer)
    return gm


def wrong_a_watches_results(gm):
    """Observes what layers write, not what they read."""
    for number, node in enumerate(calls_of(gm, nn.Linear)):
        observer = _watch(gm, number, node)
        node.replace_all_uses_with(observer)
        observer.args = (node,)
    for number, value in enumerate(_values(gm), start=100):
        if not _observed(gm, value):
            observer = _watch(gm, number, value)
            value.replace_all_uses_with(observer, delete_user_cb=lambda n, o=observer: n is not o)
    return gm


def _observed(gm, value):
    return value.op == "call_module" and isinstance(gm.get_submodule(value.target), Observer)


def wrong_a_delegation(gm):
    """Calls the kit's."""
    return prepare(gm)


def _answers(prepared):
    found = {}
    for node in calls_of(prepared, Observer):
        q = prepared.get_submodule(node.target).qparams()
        found[node.args[0].name] = (float(q.scale), int(q.zero_point))
    return found


def wrong_b_first_batch(prepared, batches):
    """Runs one batch."""
    with torch.no_grad():
        for batch in batches:
            prepared(*batch if isinstance(batch, tuple) else (batch,))
            break
    return _answers(prepared)


def wrong_b_with_gradients(prepared, batches):
    """Records gradients all along."""
    for batch in batches:
        prepared(*batch if isinstance(batch, tuple) else (batch,))
    return _answers(prepared)


def wrong_b_one_argument(prepared, batches):
    """Hands a tuple over as one argument."""
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return _answers(prepared)


def wrong_b_silent(prepared, batches):
    """Invents a scale for an observer that saw nothing."""
    with torch.no_grad():
        for batch in batches:
            prepared(*batch if isinstance(batch, tuple) else (batch,))
    if any(prepared.get_submodule(node.target).problem() for node in calls_of(prepared, Observer)):
        return {node.args[0].name: (1.0, 0) for node in calls_of(prepared, Observer)}
    return _answers(prepared)


def _told(prepared, batches, error):
    """Calibrate rightly; raise ``error(name)`` for an observer that saw nothing."""
    with torch.no_grad():
        for batch in batches:
            prepared(*batch if isinstance(batch, tuple) else (batch,))
    for node in calls_of(prepared, Observer):
        if prepared.get_submodule(node.target).problem():
            raise error(node.args[0].name)
    return _answers(prepared)


def wrong_b_nameless(prepared, batches):
    """Raises, and does not say for which value."""
    return _told(prepared, batches, lambda name: ValueError("nothing seen"))


def wrong_b_key_error(prepared, batches):
    """Names the value in an error of another kind."""
    return _told(prepared, batches, KeyError)


def wrong_b_kits_error(prepared, batches):
    """Never asks problem(): the observer's own error comes out."""
    with torch.no_grad():
        for batch in batches:
            prepared(*batch if isinstance(batch, tuple) else (batch,))
    return _answers(prepared)


def wrong_b_delegation(prepared, batches):
    """Calls the kit's three phases in one."""
    return quantize_static(prepared, batches)


def _convert(prepared, *, weights=PerChannelMinMaxObserver, bias=True, in_place=False, clean=True):
    """Convert rightly but for the option given."""
    graph = prepared.graph
    for number, node in enumerate(calls_of(prepared, nn.Linear)):
        layer, source = prepared.get_submodule(node.target), node.all_input_nodes[0]
        if isinstance(layer, nn.Linear):
            q = prepared.get_submodule(source.target).qparams()
            codes = Codes(float(q.scale), int(q.zero_point))
            watch = weights()
            watch(layer.weight)
            w = watch.qparams()
            scale = w.scale if w.scale.dim() else w.scale.repeat(layer.out_features)
            int8 = Int8Linear(
                w.quantize(layer.weight), scale, layer.bias if bias else None, codes, None
            )
        path = node.target if in_place else f"int8_{number}"
        if in_place:
            prepared.set_submodule(path, int8)
        else:
            prepared.add_submodule(path, int8)
        prepared.add_submodule(f"codes_{number}", Quantize(codes))
        with graph.inserting_before(node):
            read = graph.call_module(f"codes_{number}", (source,))
            new = graph.call_module(path, (read,))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    if clean:
        for node in calls_of(prepared, Observer):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return prepared


def wrong_c_one_scale(prepared):
    """Takes one scale for the whole weight."""

    def watch():
        return MinMaxObserver(symmetric=True, signed=True)

    return _convert(prepared, weights=watch)


def wrong_c_keeps_observers(prepared):
    """Leaves the observers where they are."""
    return _convert(prepared, clean=False)


def wrong_c_first_call(prepared):
    """Puts the int8 layer in the layer's place, and gives codes to its first call only."""
    graph = prepared.graph
    for number, node in enumerate(calls_of(prepared, nn.Linear)):
        layer, source = prepared.get_submodule(node.target), node.all_input_nodes[0]
        if not isinstance(layer, nn.Linear):
            continue
        q = prepared.get_submodule(source.target).qparams()
        codes, watch = Codes(float(q.scale), int(q.zero_point)), PerChannelMinMaxObserver()
        watch(layer.weight)
        w = watch.qparams()
        int8 = Int8Linear(w.quantize(layer.weight), w.scale, layer.bias, codes, None)
        prepared.set_submodule(node.target, int8)
        prepared.add_submodule(f"codes_{number}", Quantize(codes))
        with graph.inserting_before(node):
            node.replace_input_with(source, graph.call_module(f"codes_{number}", (source,)))
    for node in calls_of(prepared, Observer):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return prepared


def wrong_c_unsigned(prepared):
    """Makes the weight's codes with an observer of activations: 0 to 255."""
    return _convert(prepared, weights=MinMaxObserver)


def wrong_c_in_its_place(prepared):
    """Puts the int8 layer in the layer's place, so that both calls share one input scale."""
    return _convert(prepared, in_place=True)


def wrong_c_no_bias(prepared):
    """Forgets the bias."""
    return _convert(prepared, bias=False)


def wrong_c_writes_weights(prepared):
    """Rounds the weights where they are."""
    for node in calls_of(prepared, nn.Linear):
        layer = prepared.get_submodule(node.target)
        watch = PerChannelMinMaxObserver()
        watch(layer.weight)
        layer.weight.data.copy_(watch.qparams().fake_quantize(layer.weight))
    return prepared


class WeightsOnly(nn.Module):
    """A linear layer with int8 weights that reads float."""

    def __init__(self, layer):
        super().__init__()
        watch = PerChannelMinMaxObserver()
        watch(layer.weight)
        self.q = watch.qparams()
        self.register_buffer("weight", self.q.quantize(layer.weight))
        self.bias = layer.bias

    def forward(self, input):
        return nn.functional.linear(input, self.q.dequantize(self.weight), self.bias)


def wrong_c_weights_only(prepared):
    """Rounds the weights, and leaves the activations in float."""
    for node in calls_of(prepared, nn.Linear):
        layer = prepared.get_submodule(node.target)
        if isinstance(layer, nn.Linear):
            prepared.set_submodule(node.target, WeightsOnly(layer))
    for node in calls_of(prepared, Observer):
        node.replace_all_uses_with(node.args[0])
        prepared.graph.erase_node(node)
    return prepared


def wrong_c_delegation(prepared):
    """Calls the kit's."""
    return convert(prepared)
