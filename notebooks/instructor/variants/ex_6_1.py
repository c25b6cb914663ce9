"""Answers to the variants of exercise 6.1 that a course with a number of its own may draw."""

import itertools

from fxlab.passes.effects import order_constraints


def _phases(gm, supported):
    """Return the phase of each node, and what must run before it."""
    before = {node: list(node.all_input_nodes) for node in gm.graph.nodes}
    for first, second in itertools.chain(*order_constraints(gm)):
        before[second].append(first)
    phase = {}
    for node in gm.graph.nodes:
        mine = supported(node)
        phase[node] = 0 if mine else -1
        for source in before[node]:
            phase[node] = max(phase[node], phase[source] + (mine and not supported(source)))
    return phase, before


def answer_fewest(gm, supported):
    """Let all nodes of one phase share a part."""
    phase, _ = _phases(gm, supported)
    return {
        node: f"{'device' if supported(node) else 'host'}_{phase[node]}"
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    }


def answer_connected(gm, supported):
    """Let nodes of one phase share a part when they are connected."""
    phase, before = _phases(gm, supported)
    leader = {node: node for node in gm.graph.nodes}

    def find(node):
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for node in gm.graph.nodes:
        for source in before[node]:
            if supported(node) and supported(source) and phase[node] == phase[source]:
                leader[find(source)] = find(node)
    return {
        node: f"device_{find(node).name}" if supported(node) else f"host_{phase[node]}"
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    }
