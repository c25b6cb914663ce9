"""The one table of deliberate differences between fxlab and torch.fx; README prints it.

Each row is a kind of program, not one program. Tests look rows up by name: a parity test may expect
another answer than torch.fx's only where a row says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: what torch.fx 2.13 does, what fxlab does, and why."""

    name: str
    torch_fx: str
    fxlab: str
    why: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "in-place operators",
        "`x += 1` is recorded as `x + 1`; the caller's tensor keeps its value",
        "recorded as `operator.iadd(x, 1)`, which the caller sees, as in eager mode",
        "the traced program must do what the program does",
    ),
    Difference(
        "item assignment",
        "`x[0] = 1` on a Proxy is a TypeError",
        "recorded as `operator.setitem`",
        "it is an operation like any other, and has an effect that passes respect",
    ),
    Difference(
        "regions",
        "`with torch.no_grad():` (autocast, inference_mode, record_function, fork_rng) vanishes",
        "a pair of enter and exit nodes that prints as a `with` block; no pass moves across it",
        "gradients and dtypes would change without a word",
    ),
    Difference(
        "global switches",
        "`torch.manual_seed(0)`, `set_default_dtype`, `set_grad_enabled(False)` happen while "
        "tracing, for good, and are not in the graph",
        "calls of the graph; the trace leaves the process as it was. A factory that is recorded "
        "inside `with torch.device(...)` gets that device as an argument",
        "the traced program must do what the program does, and tracing must not",
    ),
    Difference(
        "training flag",
        "`training=self.training` is frozen at the value it had while tracing",
        "a `get_attr` node that reads the flag when the module runs. What can only use a bool "
        "(a branch, `is True`, also in a function that gets the flag) gets the bool, with a "
        "warning; a program that raises on the flag (`json.dumps`) is run once more with bools",
        "`train()` and `eval()` of the traced module keep their meaning",
    ),
    Difference(
        "buffers",
        "what is computed from a buffer (`self.table.sum()`) is frozen while tracing",
        "recorded like what is computed from a parameter; a branch on it is fixed, with a warning",
        "a buffer is state: `load_state_dict` and `to` must reach what depends on it",
    ),
    Difference(
        "errors of the tracer",
        "a TypeError, NameError or a text without a line for a branch, loop, `len`, `int`, ...",
        "always a TraceError, also of the type that Python promises; node, line, ways out",
        "a failed capture must name the place and what to try",
    ),
    Difference(
        "refusals in other words",
        "what takes no Proxy (numpy's functions, `torch.vmap`, `torch.func.grad`, functions in C) "
        "fails with its own error, far from the line",
        "a TraceError with the user's line and the way out",
        "the program's author did not call with a Proxy, and cannot know what one is",
    ),
    Difference(
        "what is lost is said",
        "text of a Proxy as a key or in a comparison, `isinstance`, `match`, `x.__class__`, "
        "`type(x)`, `callable(x)`, `hasattr`, `x.grad_fn is None`, `x.dtype is torch.float32`, "
        "`x is None` for an optional input, `x is y`, a dtype or a shape as a key, "
        "operations in a `try`, parameters that `parameters()` gives, "
        "`torch.is_grad_enabled()`, a dispatch mode, a mode changed for a while, a `__call__` of "
        "the model's own, a random constant, a Proxy stored on the model or in a global: silently "
        "baked",
        "a TraceWarning with file and line, kept in `gm.meta['trace_warnings']`. `is`, "
        "`type` and `callable` ask no method of a Proxy: they are read from the code of the traced "
        "function and of forwards, for their parameters only",
        "a trace must not change meaning without a word",
    ),
    Difference(
        "autograd Functions",
        "`Fn.apply(x)` is traced into: the operations of its forward, without its backward",
        "one call of `Fn.apply`; torch's own Functions are traced into",
        "gradients would change without a word",
    ),
    Difference(
        "shapes at trace time",
        "`n, *rest = x.shape`, `f(*x.shape)` are errors",
        "work when `example_inputs` make the rank known",
        "published models do this",
    ),
    Difference(
        "factories of Proxies",
        "`torch.zeros(x.shape[0], 4)` and `torch.tensor(x.size(0))` are TypeErrors",
        "recorded as `call_function`",
        "the size is a value of the program",
    ),
    Difference(
        "tensor constants",
        "stored on the user's model while tracing; a second trace finds them there",
        "stored on the new GraphModule; the model is left exactly as it was",
        "capture must not change what it captures",
    ),
    Difference(
        "tensors that the program writes into",
        "`h = torch.zeros(3); h[0] = x.sum()` is one constant that all calls share",
        "each call has its own clone; a TraceWarning where a view of it, or a tensor from outside, "
        "is still shared, also if a leaf function's code may write into it",
        "the second call would read what the first one wrote",
    ),
    Difference(
        "generators of random numbers",
        "`torch.rand(3, generator=g)` is one constant, and tracing draws from `g`",
        "recorded if the model, a global or a closure holds `g`; the numbers of a generator that "
        "the program makes are fixed, with a TraceWarning",
        "each call must draw anew, and tracing must not",
    ),
    Difference(
        "edits and code",
        "the generated code is stale until `recompile()`",
        "the next call compiles, also where `torch.compile` took the module or one that holds it; "
        "`recompile()` is allowed and cheap",
        "stale code gives wrong numbers silently",
    ),
    Difference(
        "submodules named like a GraphModule's own",
        "a name of GraphModule's (`code`, `recompile`) fails when the module runs, or later",
        "a RewriteError names the node, for private names too (`_compile`, `_edit`, `_original`) "
        "and for `original_type`, which torch.fx has not",
        "`self._compile` in generated code would find the method",
    ),
    Difference(
        "inserting after a node",
        "several nodes made in one `inserting_after(n)` stand in reverse order",
        "they stand in the order in which they were made",
        "a node that reads the one made before it would stand in front of it",
    ),
    Difference(
        "dead code",
        "`eliminate_dead_code` erases in-place methods, `out=`, train-mode batch norm, print",
        "one purity table keeps what has an effect; with `torch.fx.Node.is_impure`, torch.fx's",
        "erasing an effect changes the program",
    ),
    Difference(
        "lint",
        "passes two outputs, a placeholder after an operation, users that do not agree with inputs",
        "a LintError that names the node and the rule",
        "`lint` is the definition of a valid graph",
    ),
    Difference(
        "copies and pickles",
        "pickle re-traces the source: names, meta and user attributes are lost",
        "the graph itself is kept: names, order, types, meta",
        "provenance must survive",
    ),
    Difference(
        "signatures",
        "keyword-only parameters lose their kind; defaults and annotations are pasted as text",
        "names, kinds, order, defaults (the same objects) and annotations are kept",
        "callers use keywords",
    ),
    Difference(
        "constants in code",
        "objects as arguments are printed by `repr`, which may fail or mean something else",
        "a constant table holds the object itself",
        "no `repr` of a user's object is ever executed",
    ),
    Difference(
        "containers in outputs",
        "an OrderedDict becomes a dict",
        "the same type comes back, or a clear error",
        "callers rely on the type",
    ),
    Difference(
        "place of a replacement",
        "`replace_pattern` puts new nodes before the first reader of the match",
        "puts them where the match's last node stood",
        "an in-place operation between the match and its reader would be seen by the new nodes",
    ),
    Difference(
        "matches that cannot be one step",
        "replaced although something between their nodes writes into tensors or opens a region",
        "left alone; `explain_mismatch` names the node in the way",
        "moving a read past a write changes its value",
    ),
    Difference(
        "replacements that share memory",
        "`x.clone()` is replaced by `x` although the graph writes into one of the two",
        "left alone; the report says why",
        "the write would be seen through the other",
    ),
    Difference(
        "matches back to back",
        "a match that reads another one through a list keeps reading erased nodes",
        "reads the replacement; overlapping matches: the first counts, as in torch.fx",
        "torch.fx's result fails its own lint",
    ),
    Difference(
        "arguments in patterns",
        "nodes in dicts and slices never match; keyword order matters; `nan` never equals `nan`",
        "dicts and slices are matched by their parts, keywords by name, `nan` is `nan`",
        "they mean the same call",
    ),
    Difference(
        "unusable patterns",
        "a KeyError or AssertionError for unused parameters and dead code",
        "a RewriteError that names the pattern's node and says what to write",
        "the error should say what is wrong with the pattern",
    ),
    Difference(
        "constants of a replacement",
        "a tensor made inside a replacement function is not copied; running the result fails",
        "copied into the edited module under a free name",
        "the result must run",
    ),
    Difference(
        "order of readers",
        "an edit of a node's arguments moves it to the end of `users` of every node that it still "
        "reads, `node.args = node.args` too",
        "it keeps its place there; it goes to the end where it begins to read",
        "who steps through an edit sees what it changed, and nothing else",
    ),
    Difference(
        "names in parts",
        "`split_module` names the nodes of its parts anew (`add` in each), if it is not told to "
        "keep their names",
        "a node has the name in its part that it had before",
        "who compares the parts with the program finds each value again",
    ),
    Difference(
        "pass manager",
        "`PassManager` edits the module that it is given; the one of `passes.pass_manager` returns "
        "a module",
        "works on a copy and returns a PassResult, under both paths; a pass may return None",
        "the program before the pass that broke it is kept",
    ),
)

MISSING: dict[str, str] = {
    # torch.fx's name -> why fxlab does not have it
    "graph_module.reduce_graph_module": "unpickling helper of torch.fx's re-tracing pickle; fxlab "
    "pickles the graph itself",
    "graph_module.reduce_package_graph_module": "the same, for torch.package",
    **dict.fromkeys(
        (
            "passes.pass_manager.PassManager.build_from_passlist",
            "passes.pass_manager.PassManager.remove_pass",
            "passes.pass_manager.PassManager.replace_pass",
            "passes.pass_manager.PassManager.validate",
        ),
        "of the older of torch.fx's two pass managers; both paths lead to the newer one here",
    ),
    "proxy.ScopeContextManager": "bookkeeping inside torch.fx's call_module",
    "proxy.MetaProxy": "an experiment of torch.fx that executes fake tensors while tracing; "
    "`example_inputs` of symbolic_trace serves the purpose",
    "graph.Graph.create_size_node": "belongs to torch.export's symbolic shapes; write "
    "`graph.call_method('size', (x, 0))`",
    "graph.Graph.create_stride_node": "the same: `graph.call_method('stride', (x, 0))`",
    "graph.Graph.create_storage_offset_node": "`graph.call_method('storage_offset', (x,))`",
    "graph.Graph.materialize_symint": "turns torch.export's symbolic sizes into nodes; needs its "
    "shape environment",
    "graph.Graph.materialize_symints": "the same, for several",
    "_symbolic_trace.is_fx_tracing_warning": "warns about a deprecated function of torch.compiler",
}


def markdown() -> str:
    """Return the table as README prints it."""
    rows = ["| | torch.fx 2.13 | fxlab | why |", "|---|---|---|---|"]
    rows += [f"| {d.name} | {d.torch_fx} | {d.fxlab} | {d.why} |" for d in DIFFERENCES]
    return "\n".join(rows)
