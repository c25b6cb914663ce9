"""Plausible wrong answers to exercise 7.1; the sentence that each must show is in the registry."""

from fxlab.passes import hoist_async
from fxlab.passes.effects import order_constraints
from fxlab.passes.schedule import start_call, wait_for


def _hoist(gm, function, *, up=True, down=True, keywords=True, effects=True, top=False, waits=True):
    """Hoist rightly but for the option given."""
    graph, earlier, later = gm.graph, {}, {}
    for before, after in order_constraints(gm)[0] if effects else ():
        earlier.setdefault(after, set()).add(before)
        later.setdefault(before, set()).add(after)
    starts = {}
    for call in graph.find_nodes(op="call_function", target=function):
        above = {*call.all_input_nodes}
        above.update(starts.get(node, node) for node in earlier.get(call, ()))
        spot = call.prev
        while up and (top or spot not in above) and spot.op not in ("placeholder", "root"):
            spot = spot.prev
        with graph.inserting_before(spot.next):
            args, kwargs = (function, 1, *call.args), call.kwargs if keywords else {}
            start = starts[call] = graph.call_function(start_call, args, kwargs)
        below = {*call.users}
        below |= {node for node in later.get(call, ()) if node.target is not function}
        spot = call.next
        while down and spot not in below and spot.op != "output":
            spot = spot.next
        wait = None
        if waits or call.users:
            with graph.inserting_before(spot):
                wait = graph.call_function(wait_for, (start,))
            call.replace_all_uses_with(wait)
        graph.erase_node(call)
    return gm


def wrong_where_it_stood(gm, function):
    """Starts where the call stood."""
    return _hoist(gm, function, up=False)


def wrong_waits_at_once(gm, function):
    """Waits where the call stood."""
    return _hoist(gm, function, down=False)


def wrong_no_keywords(gm, function):
    """Forgets keyword arguments that have a default."""
    return _hoist(gm, function, keywords=False)


def wrong_values_only(gm, function):
    """Looks at values, and not at what is written."""
    return _hoist(gm, function, effects=False)


def wrong_never_waits(gm, function):
    """Waits only for what is read."""
    return _hoist(gm, function, waits=False)


def wrong_at_the_top(gm, function):
    """Starts at the top, whatever the call needs."""
    return _hoist(gm, function, top=True)


def wrong_reads_the_start(gm, function):
    """Waits once for each reader."""
    for call in gm.graph.find_nodes(op="call_function", target=function):
        with gm.graph.inserting_before(call):
            start = gm.graph.call_function(start_call, (function, 1, *call.args), call.kwargs)
        call.replace_all_uses_with(start)
        gm.graph.erase_node(call)
        for reader in list(start.users):
            if reader.op != "output":
                with gm.graph.inserting_before(reader):
                    wait = gm.graph.call_function(wait_for, (start,))
                    again = gm.graph.call_function(wait_for, (start,))
                reader.replace_input_with(start, wait if reader.args else again)
    return gm


def wrong_delegation(gm, function):
    """Calls the kit's."""
    return hoist_async(gm, function)
