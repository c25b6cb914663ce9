"""Plausible wrong answers to 4.3: a live range that is too short or too long; an order too free."""

import itertools

from fxlab.passes import lower_peak
from fxlab.passes.alias import makes_new_value
from fxlab.passes.memory import live_ranges, peak_of


def _bytes(node):
    value = node.meta.get("tensor_meta")
    return value.shape.numel() * value.dtype.itemsize if hasattr(value, "shape") else 0


def _peak(gm, *, counted=None, through_views=True, forever=False, before=False):
    nodes = list(gm.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    makes = {n for n in nodes if n.op.startswith("call_") and makes_new_value(n, gm)}
    last = {}
    for node in reversed(nodes):
        ends = [last[u] if through_views and u not in makes else place[u] for u in node.users]
        last[node] = len(nodes) - 1 if forever else max(ends, default=place[node])
    change = [0] * (len(nodes) + 2)
    for node in nodes:
        if node in makes if counted is None else counted(node):
            end = max(last[node], place[node] + 1) if before else last[node] + 1
            change[place[node]] += _bytes(node)
            change[end] -= _bytes(node)
    return max(itertools.accumulate(change))


def wrong_a_never_freed(gm):
    return _peak(gm, forever=True)


def wrong_a_freed_before(gm):
    # Inputs are freed before the result is there.
    return _peak(gm, before=True)


def wrong_a_inputs_counted(gm):
    return _peak(gm, counted=lambda n: n.op == "placeholder" or (
        n.op.startswith("call_") and makes_new_value(n, gm)))  # fmt: skip


def wrong_a_views_counted(gm):
    return _peak(gm, counted=lambda n: n.op.startswith("call_"), through_views=False)


def wrong_a_base_freed(gm):
    return _peak(gm, through_views=False)


def wrong_a_delegation(gm):
    return peak_of(live_ranges(gm), list(gm.graph.nodes))


def _move(gm, order):
    inputs = gm.graph.find_nodes(op="placeholder")
    for before, after in itertools.pairwise([*inputs[-1:], *order]):
        before.append(after)


def _may_run(node, done):
    return node not in done and all(
        i in done or i.op == "placeholder" for i in node.all_input_nodes
    )


def _body(gm):
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


def wrong_b_unchanged(gm):
    return gm


def wrong_b_values_only(gm):
    # A list schedule that knows values and no effects.
    nodes, order = _body(gm), []
    while len(order) < len(nodes):
        done = set(order)
        ready = [n for n in nodes if _may_run(n, done)]

        def growth(node, done=done):
            freed = [i for i in node.all_input_nodes if set(i.users) <= done | {node}]
            return _bytes(node) - sum(_bytes(i) for i in freed if i.op != "placeholder")

        order.append(min(ready, key=growth))
    _move(gm, order)


def wrong_b_depth_first(gm):
    # Each node as late as its first reader allows: what is large is still made on the way.
    order, seen = [], set()

    def visit(node):
        if node not in seen:
            seen.add(node)
            for i in node.all_input_nodes:
                visit(i)
            if node.op not in ("placeholder", "output"):
                order.append(node)

    for node in reversed(_body(gm)):
        if not node.users:
            visit(node)
    visit(gm.graph.output_node())
    _move(gm, order)


def wrong_b_breadth_first(gm):
    # As many as possible first: the widest front, and so the highest peak.
    nodes, order = _body(gm), []
    while len(order) < len(nodes):
        done = set(order)
        order += [n for n in nodes if _may_run(n, done)]
    _move(gm, order)


def wrong_b_delegation(gm):
    return lower_peak(gm)
