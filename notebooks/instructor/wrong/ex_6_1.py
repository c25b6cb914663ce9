"""Plausible wrong answers to exercise 6.1; the sentence that each must show is in the registry."""

import itertools

from fxlab.passes import CapabilityBasedPartitioner
from fxlab.passes.effects import order_constraints
from fxlab.passes.partition import create_op_support


def _computing(gm):
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def _phases(gm, supported, inputs_of):
    """Give each node its phase, by the inputs that are looked at."""
    phase = {}
    for node in gm.graph.nodes:
        mine = supported(node)
        phase[node] = 0 if mine else -1
        for source in inputs_of(node):
            phase[node] = max(phase[node], phase[source] + (mine and not supported(source)))
    return phase


def _by_phase(gm, supported, inputs_of):
    phase = _phases(gm, supported, inputs_of)
    return {n: f"{'device' if supported(n) else 'host'}_{phase[n]}" for n in _computing(gm)}


def _all_inputs(gm):
    earlier = {}
    for before, after in itertools.chain(*order_constraints(gm)):
        earlier.setdefault(after, []).append(before)
    return lambda node: (*node.all_input_nodes, *earlier.get(node, ()))


def wrong_all_in_one(gm, supported):
    """Gives all that is supported to one part."""
    nodes = _computing(gm)
    return {n: "device" if supported(n) else f"host_{i}" for i, n in enumerate(nodes)}


def wrong_runs(gm, supported):
    """Begins a new part whenever the list changes sides."""
    parts, number, last = {}, 0, None
    for node in _computing(gm):
        number += supported(node) is not last
        last = supported(node)
        parts[node] = number
    return parts


def wrong_neighbours(gm, supported):
    """Merges whatever is supported and connected."""
    parts = {}
    for i, node in enumerate(_computing(gm)):
        parts[node] = i
        for source in node.all_input_nodes:
            if source in parts and supported(source) and supported(node):
                old, new = parts[source], parts[node]
                parts = {n: new if p == old else p for n, p in parts.items()}
    return parts


def wrong_first_input(gm, supported):
    """Follows the first input only."""
    return _by_phase(gm, supported, lambda node: node.all_input_nodes[:1])


def wrong_values_only(gm, supported):
    """Forgets what is written into values."""
    return _by_phase(gm, supported, lambda node: node.all_input_nodes)


def wrong_one_host(gm, supported):
    """Puts all that is not supported into one part."""
    phase = _phases(gm, supported, _all_inputs(gm))
    return {n: phase[n] if supported(n) else "host" for n in _computing(gm)}


def wrong_one_number(gm, supported):
    """Lets both sides use the same numbers."""
    phase = _phases(gm, supported, _all_inputs(gm))
    return {n: phase[n] for n in _computing(gm)}


def wrong_delegation(gm, supported):
    """Asks the kit."""
    support = create_op_support(lambda _, node: supported(node))
    partitioner = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
    parts = {n: f"host_{n.name}" for n in _computing(gm)}
    for number, part in enumerate(partitioner.propose_partitions()):
        parts.update(dict.fromkeys(part.nodes, number))
    return parts
