"""How is one recorded edit taken back?

A listener of a graph is told what each edit found and what it left (section 4.2's IR, edited by
section 4.3's transforms). That is enough to revert it, newest edit first: what `record` does when
its block raises.
"""

from __future__ import annotations

from typing import Any

from fxlab.core.graph import Graph
from fxlab.explorer.state import set_state


def undo(kind: str, graph: Graph, node: Any, before: Any, after: Any) -> None:
    """Revert one edit as a listener was told of it; edits are undone newest first.

    Args:
        kind: which of the edits that `Graph.add_listener` knows.
        graph: the graph that was edited.
        node: the node that was edited, or None for an edit of a module's state.
        before: what the edit found.
        after: what it left; not needed.
    """
    if kind == "create":
        graph.erase_node(node)
    elif kind == "erase":
        node._erased = False
        graph._link(node, before["prev"])
        node._edit_args(before["args"], before["kwargs"])
    elif kind == "move":
        graph._move(node, before["prev"], before["prev"].next)
    elif kind in ("args", "reroute"):
        users = before["users"] if kind == "reroute" else [(node, *before.values())]
        for user, args, kwargs in users:
            user._edit_args(args, kwargs)
    elif kind in ("module", "attr"):
        set_state(before["module"], before["path"], before["value"])
    else:
        node._edit_field(kind, **before)
