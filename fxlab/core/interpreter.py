"""How is a Graph run one Node at a time, and how does the same loop rewrite it?

An `Interpreter` runs a program Node by Node; subclasses look at the values (shape propagation,
profiling) or replace what an operation does. A `Transformer` is an Interpreter that is fed with
Proxies, so that running the program writes a new one: retargetable capture, section 4.3 of the
paper.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from .codegen import last_uses
from .errors import RewriteError, add_run_note
from .graph import MISSING, Graph, _enter_region, _exit_region
from .graph_module import GraphModule
from .node import Args, Argument, Kwargs, Node, Target, _map, add_ancestors, lookup, map_aggregate
from .proxy import Proxy
from .tracer import Tracer


class Interpreter:
    """Runs a Graph Node by Node: `run` calls `run_node`, which calls the method of the opcode.

    Args:
        module: the Module whose Graph is run and whose state it reads.
        garbage_collect_values: drop each value behind its last use. Without it `env` holds all.
        graph: run this Graph instead of `module.graph`.

    `env` maps Nodes to values. The method of an opcode gets a Node's `target`, and its `args` and
    `kwargs` with values in the place of Nodes; it returns the Node's value.

    >>> import fxlab, torch
    >>> class Count(Interpreter):
    ...     calls = 0
    ...     def call_function(self, target, args, kwargs):
    ...         self.calls += 1
    ...         return super().call_function(target, args, kwargs)
    >>> count = Count(fxlab.symbolic_trace(lambda x: torch.relu(x) + 1))
    >>> count.run(torch.zeros(2)), count.calls
    (tensor([1., 1.]), 2)
    """

    def __init__(self, module: nn.Module, garbage_collect_values: bool = True,
                 graph: Graph | None = None) -> None:  # fmt: skip
        self.module = module
        self.submodules: dict[str, nn.Module] = dict(module.named_modules())  # pyright: ignore
        self.graph: Graph = graph if graph is not None else module.graph  # type: ignore[assignment]
        self.env: dict[Node, Any] = {}
        self.name, self.extra_traceback = "Interpreter", True
        self.garbage_collect_values = garbage_collect_values
        self.args_iter: Iterator[Any] = iter(())
        self._named: Kwargs = {}
        self._regions = ExitStack()
        self.user_to_last_uses = last_uses(self.graph.nodes) if garbage_collect_values else {}

    def run(
        self, *args: Any, initial_env: dict[Node, Any] | None = None, enable_io_processing: bool
        = True, **kwargs: Any) -> Any:  # fmt: skip
        """Run the program and return its result.

        Args:
            args: the values of the placeholders, in order.
            initial_env: values that are known already; their Nodes are not run.
            enable_io_processing: take arguments as `forward` does (with structures) and return
                what it returns; else one value per placeholder, and the output Node's value.
            kwargs: values of placeholders by name.

        Raises:
            RewriteError: a placeholder got no value, or a value is for none.
        """
        self.env = env = initial_env if initial_env is not None else {}
        self.args_iter = iter(self.graph.process_inputs(*args) if enable_io_processing else args)
        self._named = kwargs
        if kwargs:
            self._check_names(kwargs)
        dying = self.user_to_last_uses
        with ExitStack() as self._regions:
            for node in self.graph.nodes:
                if node in env:
                    continue
                try:
                    env[node] = self.run_node(node)
                except Exception as error:
                    if self.extra_traceback:
                        add_run_note(error, node)
                    raise
                for used in dying.get(node, ()):
                    del env[used]
                if node._op == "output":
                    value = env[node]
                    return self.graph.process_outputs(value) if enable_io_processing else value
        return None

    def _check_names(self, kwargs: Kwargs) -> None:
        names = [str(n._target) for n in self.graph.find_nodes(op="placeholder")]
        takes_all = any(name.startswith("**") for name in names)
        for name in kwargs:
            if name not in names and not takes_all:
                raise RewriteError(f"run() got a value for {name}, which is no parameter",
                                   expected=", ".join(names))  # fmt: skip

    def boxed_run(self, args_list: list[Any]) -> Any:
        """Run with the arguments in `args_list`, which is emptied to free inputs early.

        Raises:
            RewriteError: it has not one value for each placeholder.
        """
        nodes = [n for n in self.graph.nodes if n._op == "placeholder"]
        if len(args_list) != len(nodes):
            raise RewriteError(f"boxed_run got {len(args_list)} values",
                               expected=f"{len(nodes)}, one for each placeholder")  # fmt: skip
        env = dict(zip(nodes, args_list, strict=True))
        args_list.clear()
        return self.run(initial_env=env)

    def run_node(self, n: Node) -> Any:
        """Run one Node, `n`, on the values of its arguments and return its value."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n._op)(n._target, args, kwargs)

    def placeholder(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Return the next argument of `run`, all that are left for `*args`, or the default.

        Raises:
            RewriteError: `run` got no value for it, and it has no default.
        """
        name = str(target).lstrip("*")
        if str(target).startswith("**"):
            named, self._named = self._named, {}
            return next(self.args_iter, named)
        if name != target:
            return tuple(self.args_iter)
        if name in self._named:
            return self._named.pop(name)
        value = next(self.args_iter, *args) if args else next(self.args_iter, MISSING)
        if value is MISSING:
            raise RewriteError(f"run() got no value for the parameter {name}",
                               hint="pass one value per placeholder, in their order")  # fmt: skip
        return value

    def get_attr(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Return an attribute of the Module by its dotted path."""
        return self.fetch_attr(target)  # type: ignore[arg-type]

    def call_function(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Call a function. A region's enter and exit are undone too when an error passes."""
        if target is _enter_region:
            region = ExitStack()
            region.enter_context(args[0](*args[1:], **kwargs))
            return self._regions.enter_context(region)
        if target is _exit_region:
            return args[0].close()
        return target(*args, **kwargs)  # type: ignore[operator]

    def call_method(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Call a method of `args[0]`."""
        return getattr(args[0], target)(*args[1:], **kwargs)  # type: ignore[arg-type]

    def call_module(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Call a sub-module by its dotted path."""
        return self.fetch_attr(target)(*args, **kwargs)  # type: ignore[arg-type]

    def output(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Return the program's result."""
        return args[0]

    def fetch_attr(self, target: str) -> Any:
        """Return what the dotted path `target` leads to in the Module.

        Raises:
            RewriteError: nothing is there.
        """
        try:
            return lookup(self.module, target)
        except AttributeError as error:
            raise RewriteError(f"nothing is at {target!r}: {error}") from error

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[Args, Kwargs]:
        """Return `n`'s arguments with values in the place of Nodes."""
        args = self.map_nodes_to_values(n._args, n)
        return args, self.map_nodes_to_values(n._kwargs, n) if n._kwargs else {}

    def map_nodes_to_values(self, args: Argument, n: Node) -> Argument:
        """Return `args`, an argument of `n`, with values in the place of Nodes.

        Raises:
            RewriteError: a Node in it has no value yet.
        """
        env = self.env
        try:
            return _map(args, lambda a: env[a] if type(a) is Node else a, list, dict)
        except KeyError as error:
            raise RewriteError(f"{n._name} reads {error}, which has no value (yet)", node=n,
                               hint="graph.lint() says what is out of order") from None  # fmt: skip


class _CopyTracer(Tracer):
    """Records everything as it is: no module is traced into."""

    def __init__(self, graph: Graph, root: nn.Module) -> None:
        super().__init__()
        self.graph, self.root, self.tensor_attrs = graph, root, {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class Transformer(Interpreter):
    """Writes a new GraphModule by running the old one with Proxies.

    Override the methods of the opcodes to change operations. What is not overridden is copied, with
    its name, meta and type; every new Node knows the old one it stands for (`meta["from"]`).

    Args:
        module: the GraphModule to rewrite; it is left as it is.

    >>> import fxlab, operator, torch
    >>> class Negate(Transformer):
    ...     def call_function(self, target, args, kwargs):
    ...         target = torch.sub if target is operator.add else target
    ...         return super().call_function(target, args, kwargs)
    >>> gm = Negate(fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)).transform()
    >>> gm(torch.ones(2))
    tensor([0., 0.])
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.new_graph = Graph(tracer_cls=self.graph._tracer_cls)
        self.new_graph.set_codegen(module.graph._codegen)
        self.tracer: Tracer = _CopyTracer(self.new_graph, module)
        self._old: Node | None = None

    def run_node(self, n: Node) -> Any:
        """Run a Node, `n`; what it adds to the new Graph inherits its meta and knows its origin."""
        self._old, root = n, self.new_graph._root
        last = root._prev
        value = super().run_node(n)
        made = value.node if isinstance(value, Proxy) else None
        node = last._next
        while node is not root:
            _inherit(node, n, node is made)
            node = node._next
        return value

    def _proxy(self, op: str, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Record an operation, under the old Node's name if it is the same one."""
        old = self._old
        name = old._name if old is not None and old._op == op and old._target == target else None
        return self.tracer.create_proxy(op, target, args, kwargs, name)

    def placeholder(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Add the same input to the new Graph."""
        proxy = self._proxy("placeholder", target, (), kwargs)
        proxy.node._args = tuple(args)  # a default is kept as the object that it is
        return proxy

    def get_attr(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Add the same read to the new Graph."""
        return self._proxy("get_attr", target, args, kwargs)

    def call_function(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Add the call to the new Graph; nothing is run."""
        return self._proxy("call_function", target, args, kwargs)

    def call_method(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Add the method call to the new Graph, if its object is a traced value."""
        if not isinstance(args[0], Proxy):
            return super().call_method(target, args, kwargs)
        return self._proxy("call_method", target, args, kwargs)

    def call_module(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        """Add the call to the new Graph, or trace into the module if the tracer says so."""
        module = self.fetch_attr(target)  # type: ignore[arg-type]
        if self.tracer.is_leaf_module(module, target):  # type: ignore[arg-type]
            return self._proxy("call_module", target, args, kwargs)
        return self.tracer.call_module(module, module.forward, args, kwargs)

    def transform(self) -> GraphModule:
        """Return the new GraphModule; the old one is left as it is."""
        result = super().run(enable_io_processing=False)
        old = self.graph._root._prev
        if old._op == "output":
            value = map_aggregate(result, lambda a: a.node if isinstance(a, Proxy) else a)
            _inherit(self.new_graph.create_node("output", "output", (value,)), old, True)
        return GraphModule(self.module, self.new_graph)


def _inherit(node: Node, old: Node, same: bool) -> None:
    """Give a new Node the meta of the one it stands for; all of it if it is the very value."""
    kept = old.meta if same else {k: v for k, v in old.meta.items() if k in _ABOUT_SOURCE}
    node.meta = {**kept, "from": (), **node.meta}
    add_ancestors(node, [old])
    if same:
        node._type = old._type if node._type is None else node._type
        node.__dict__.update(old.__dict__)


_ABOUT_SOURCE = ("source", "nn_module_stack", "stack_trace", "made_by")
