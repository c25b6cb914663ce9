"""Mixed precision as a pass: half the bytes where it is safe, float32 where it matters.

Beyond the paper, which names the pass among the things that its IR makes easy. ``torch.autocast``
decides while the program runs, again in each call: it casts every weight anew, and a value once
for each of its readers. A graph is known ahead of time. So weights are cast once, now; a value is
cast once for all its readers; a cast of a cast is never made; and a cast moves up through
operations that only rearrange numbers, to where several readers can share it.

The op table has three columns, as autocast's: matrix products run in the low precision, sums of
many terms and exponentials keep float32, and operations that need operands of one dtype get the
widest. Everything else follows its inputs.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node, map_arg
from fxlab.passes.alias import Memory
from fxlab.passes.base import (
    as_pass,
    called_as_a_whole,
    copy_sharing_tensors,
    copy_without_weights,
    is_read,
    module_calls,
    regions,
    report,
    undisturbed,
)
from fxlab.passes.shape_prop import ShapeError, need_graph, shape_prop

__all__ = ["amp", "column"]

LOWER = frozenset(
    "linear matmul mm bmm addmm addbmm baddbmm mv addmv einsum chain_matmul multi_dot conv1d "
    "conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution "
    "convolution scaled_dot_product_attention __matmul__ __rmatmul__".split()
)
KEEP = frozenset(
    "softmax log_softmax softmin logsumexp layer_norm group_norm instance_norm rms_norm "
    "local_response_norm normalize norm exp expm1 log log10 log2 log1p pow rsqrt reciprocal sum "
    "mean prod cumsum cumprod std var cdist dist cosine_similarity pairwise_distance cross_entropy "
    "nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss ctc_loss softplus erfinv "
    "acos asin cosh sinh tan prelu grid_sample interpolate upsample renorm quantile stft".split()
)
WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot index_put index_copy index_add scatter "
    "scatter_add lerp tensordot".split()
)
LOWER_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
                 nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # fmt: skip
KEEP_MODULES = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
                nn.LocalResponseNorm, nn.Softplus, nn.PReLU, nn.modules.loss._Loss)  # fmt: skip
FOLLOW_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# These rearrange numbers or keep their order, so a cast before or after gives the same.
MOVES = frozenset(
    "view reshape flatten unflatten transpose permute contiguous squeeze unsqueeze expand t "
    "swapaxes movedim chunk split getitem relu Flatten Unflatten ReLU Identity T mT".split()
)

# These return several tensors, which no cast takes at once; the next ones do along a dimension.
SEVERAL = frozenset(
    "chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind sort topk kthvalue mode "
    "aminmax cummax cummin var_mean std_mean frexp meshgrid broadcast_tensors lstm gru rnn_tanh "
    "rnn_relu multi_head_attention_forward".split()
)
SEVERAL_ALONG = frozenset("max min median nanmedian".split())
SEVERAL_MODULES = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)
# Attributes of a tensor, or of several, that are tensors of the same dtype.
TENSOR_ATTRIBUTES = frozenset("T mT H mH data values".split())

# Of their tensors, the second (or the attribute ``indices``) is one of integers.
WITH_INDICES = frozenset("sort topk kthvalue mode cummax cummin max min median nanmedian".split())
NO_FLOAT = frozenset(
    "size dim numel lt le gt ge eq ne __lt__ __le__ __gt__ __ge__ __eq__ __ne__ isnan isinf "
    "isfinite isclose isin and_ or_ xor invert logical_and logical_or logical_xor logical_not any "
    "all argmax argmin argsort nonzero count_nonzero bucketize searchsorted multinomial one_hot "
    "bincount".split()
)
CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "int": torch.int32,
    "bfloat16": torch.bfloat16, "long": torch.int64, "short": torch.int16, "bool": torch.bool,
    "byte": torch.uint8, "char": torch.int8,
}  # fmt: skip

# These bring numbers and the elements of a tensor together.
WITH_NUMBERS = frozenset(
    "add sub rsub mul div truediv masked_fill where clamp clamp_min clamp_max clip pad threshold "
    "full_like new_full nan_to_num add_ sub_ mul_ div_ masked_fill_ fill_ clamp_ iadd isub imul "
    "itruediv".split()
)

# Of tensors without dimensions these make one again.
OF_SCALARS = frozenset(
    "add sub mul div truediv neg pow abs exp log sqrt rsqrt reciprocal sigmoid tanh relu softplus "
    "clone detach clamp iadd isub imul itruediv add_ sub_ mul_ div_ zero_ fill_".split()
)
# Without a dimension to go along these give one number.
TO_SCALAR = frozenset("sum mean prod std var norm max min median amax amin dot vdot trace".split())


@as_pass(min_sqnr_db=20.0)
def amp(gm: GraphModule, dtype: torch.dtype = torch.bfloat16, inputs: Any = None) -> GraphModule:
    """Edit ``gm`` in place: run matrix products in ``dtype``; return ``gm``. For inference.

    Inputs and outputs keep their dtypes. Modules of the original model are not touched: the casts
    of their weights are new modules in ``gm``.

    Args:
        gm: The module, float32.
        dtype: torch.bfloat16, or torch.float16 (on a GPU).
        inputs: Example inputs (a tensor or a tuple). With them the dtype of each value is known
            (``shape_prop`` runs first) and the error of the output is measured against float64.

    Raises:
        ValueError: ``dtype`` is not a floating-point type of 16 bits.
        ShapeError: A node does not run on ``inputs``, before or after.

    Example:
        >>> import fxlab
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> gm = amp(fxlab.symbolic_trace(model))
        >>> gm.meta["reports"]["amp"]["casts"], gm(torch.ones(1, 4)).dtype
        (2, torch.float32)
    """
    need_graph(gm)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}; mixed precision is torch.bfloat16 or torch.float16")
    reference, examples = None, inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if inputs is not None:
        shape_prop(gm, *examples)
        reference = copy_sharing_tensors(gm)
    rewrite = _Rewrite(gm, dtype)
    rewrite.run()
    gm.graph.lint()
    gm.recompile()
    facts: dict[str, Any] = {"dtype": str(dtype), "casts": rewrite.casts}
    if reference is not None:
        from fxlab.passes.manager import compare, run_wide

        with torch.no_grad(), undisturbed(gm, examples) as given:
            found = _Run(gm, dtype).run(*given)
            difference = compare(run_wide(reference, examples)[0], found, str(dtype))
        facts |= {"max_rel": difference.max_rel, "sqnr_db": difference.sqnr_db}
    report(gm, "amp", rewrite.changed, rewrite.kept, **facts)
    return gm


def column(node: Node, gm: GraphModule) -> str:
    """Return the op table's word for ``node``: "lower", "keep", "widest" or "follow"."""
    if node.op == "call_module":
        module = gm.get_submodule(node.target)
        if type(module) in LOWER_MODULES:
            return "lower"
        follows = type(module) in FOLLOW_MODULES or not any(True for _ in module.parameters())
        known = type(module).__module__.startswith("torch.nn.")
        return "follow" if known and follows and not isinstance(module, KEEP_MODULES) else "keep"
    if node.op not in ("call_function", "call_method"):
        return "follow"
    name = _name(node)
    if name in LOWER:
        return "lower"
    if name in KEEP or name.startswith(("linalg_", "fft_")):
        return "keep"
    if name in WIDEST:
        return "widest"
    module = getattr(node.target, "__module__", None) or "torch"
    ours = node.op == "call_method" or module.split(".")[0] in ("torch", "_operator", "builtins")
    return "follow" if ours else "keep"  # a user's function may count on float32


def _name(node: Node) -> str:
    if node.op == "call_method":
        return node.target
    return getattr(node.target, "__name__", str(node.target))


class _Run(Interpreter):
    """Run a rewritten program, and name the node that does not."""

    def __init__(self, gm: GraphModule, dtype: torch.dtype) -> None:
        super().__init__(gm)
        self.dtype = dtype

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            raise ShapeError(
                f"{n.name} ran before, and does not in mixed precision: {error}",
                node=n,
                hint=f"a number that {self.dtype} cannot hold is at most "
                f"{torch.finfo(self.dtype).max:g}; torch.bfloat16 reaches as far as float32",
            ) from error


class _Rewrite:
    """One walk: each node is given its operands in the precision of its column."""

    def __init__(self, gm: GraphModule, dtype: torch.dtype) -> None:
        self.gm, self.dtype = gm, dtype
        self.memory, self.region = Memory(gm), regions(gm)
        self.calls = module_calls(gm)
        self.reads = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
        self.is_low: dict[Node, bool | None] = {}  # None: no floating-point tensor of 32 bits
        self.cast: dict[tuple[Node, bool, int], Node] = {}
        self.precast: dict[str, bool] = {}
        self.casts = 0
        self.changed: list[str] = []
        self.kept: list[str] = []

    def run(self) -> None:
        nodes = list(self.gm.graph.nodes)
        wanted_low = self._wanted_low(nodes)
        for node in nodes:
            self._visit(node, wanted_low)

    def _wanted_low(self, nodes: list[Node]) -> set[Node]:
        """Return the rearranging nodes whose readers all want the low precision."""
        wanted: set[Node] = set()
        for node in reversed(nodes):
            if node in self.memory.written or not node.users or self._kind(node) not in MOVES:
                continue
            if self._is_several(node) and not all(map(_takes_one, node.users)):
                continue
            if all(
                user in wanted or (self._column(user) == "lower" and user.op != "output")
                for user in node.users
            ):
                wanted.add(node)
        return wanted

    def _kind(self, node: Node) -> str:
        if node.op == "call_module":
            return type(self.gm.get_submodule(node.target)).__name__
        if node.op not in ("call_function", "call_method"):
            return ""
        return node.args[1] if _is_tensor_attribute(node) else _name(node)

    def _column(self, node: Node) -> str:
        what = column(node, self.gm)
        if what == "follow" and self._beyond(node) is not None and not _writes_first(node):
            return "keep"
        if node.op != "call_module" or what != "lower":
            return what
        return "lower" if self._cannot_precast(node.target) is None else "keep"

    def _beyond(self, node: Node) -> float | None:
        """Return a number among the arguments that the low precision would make infinite."""
        if node.op not in ("call_function", "call_method") or _name(node) not in WITH_NUMBERS:
            return None
        most, numbers = torch.finfo(self.dtype).max, [*node.args, *node.kwargs.values()]
        beyond = (v for v in numbers if isinstance(v, (int, float)) and most < abs(v) < math.inf)
        return next(beyond, None)

    def _cannot_precast(self, path: str) -> str | None:
        if called_as_a_whole(path, self.calls):
            return f"{path} is part of a module that is also called as a whole"
        if is_read(path, self.reads):
            return f"the graph also reads the weights of {path} directly"
        module = self.gm.get_submodule(path)
        if any(p.dtype not in (torch.float32, self.dtype) for p in module.parameters()):
            return f"the weights of {path} are not float32"
        return None

    def _visit(self, node: Node, wanted_low: set[Node]) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.is_low[node] = self._is_low_at_start(node)
            return
        inputs = [i for i in node.all_input_nodes if self.is_low[i] is not None]
        if node.op == "output":
            self._give(node, low=False)
            self.is_low[node] = None
            return
        what = self._column(node)
        if what == "lower":
            if node.op == "call_module":
                self._precast_module(node.target)
            self._give(node, low=True)
            low: bool | None = True
            self.changed.append(f"{node.name} runs in {str(self.dtype).removeprefix('torch.')}")
        elif what == "keep" or (what == "widest" and not all(self.is_low[i] for i in inputs)):
            self._give(node, low=False)
            low = False
            if what == "keep" and inputs:
                reason = self._cannot_precast(node.target) if node.op == "call_module" else None
                if (number := self._beyond(node)) is not None:
                    reason = f"{number:g} is beyond {self.dtype}"
                self.kept.append(f"{node.name} kept in float32: {reason or self._kind(node)}")
        elif _takes_one(node) and self._is_several(node.all_input_nodes[0]):
            low = self.is_low[node.all_input_nodes[0]]
        elif node in wanted_low and inputs:
            self._give(node, low=True)
            low = True
        elif not inputs:
            low = False
        elif self._is_several(node) and not all(map(_takes_one, node.users)):
            self._give(node, low=False)  # who reads several at once is given no casts between
            low = False
        elif _writes_first(node):
            number = self._beyond(node)
            if number is not None and self.is_low.get(node.all_input_nodes[0]):
                self.kept.append(f"{node.name} writes {number:g}, which is beyond {self.dtype}")
            low = self.is_low.get(node.all_input_nodes[0])
        else:  # a tensor of no dimensions gives way to the dtype of one that has some
            counting = [i for i in inputs if not self._is_scalar(i)] or inputs
            low = all(self.is_low[i] for i in counting)
        low = self._by_its_own_word(node, low)
        self.is_low[node] = None if self._no_float(node) else low

    def _give(self, node: Node, low: bool) -> None:
        """Let ``node`` read its operands in the low precision, or in float32."""

        def operand(value: Node) -> Node:
            if self.is_low[value] is None or self.is_low[value] == low or self._is_several(value):
                return value
            key = (value, low, self.region[node])
            if key in self.cast and value not in self.memory.written:
                return self.cast[key]
            with self.gm.graph.inserting_before(node):
                if low and value.op == "get_attr":
                    new = self._precast_attribute(value)
                else:
                    to = self.dtype if low else torch.float32
                    new = self.gm.graph.call_method("to", (value, to))
                    self.casts += 1
            self.cast[key] = new
            return new

        args, kwargs = map_arg(node.args, operand), map_arg(node.kwargs, operand)
        if args != node.args:
            node.args = args
        if kwargs != node.kwargs:
            node.kwargs = kwargs

    def _precast_module(self, path: str) -> None:
        if self.precast.setdefault(path, False):
            return
        old = self.gm.get_submodule(path)
        new = copy_without_weights(old)
        for name, value in old.named_parameters(recurse=False):
            setattr(new, name, nn.Parameter(value.detach().to(self.dtype), requires_grad=False))
        self.gm.set_submodule(path, new)
        self.precast[path] = True

    def _precast_attribute(self, node: Node) -> Node:
        suffix = str(self.dtype).removeprefix("torch.")
        name = f"{node.target.replace('.', '_')}_{suffix}"
        value = _attribute(self.gm, node.target).detach().to(self.dtype)
        self.gm.register_buffer(name, value)
        return self.gm.graph.get_attr(name)

    def _is_low_at_start(self, node: Node) -> bool | None:
        if node.op == "get_attr":
            value = _attribute(self.gm, node.target)
            dtype: Any = value.dtype if isinstance(value, torch.Tensor) else None
        else:
            dtype = getattr(node.meta.get("tensor_meta"), "dtype", torch.float32)
            if "type" in node.meta and "tensor_meta" not in node.meta:
                dtype = None
        return {torch.float32: False, self.dtype: True}.get(dtype)

    def _is_scalar(self, node: Node) -> bool:
        """Say whether the value is known to be a tensor of no dimensions."""
        if node.op == "get_attr":
            value = _attribute(self.gm, node.target)
            return isinstance(value, torch.Tensor) and value.dim() == 0
        shape = getattr(node.meta.get("tensor_meta"), "shape", None)
        if shape is not None:
            return len(shape) == 0
        if node.op not in ("call_function", "call_method"):
            return False
        if _name(node) in OF_SCALARS and node.all_input_nodes:
            return all(map(self._is_scalar, node.all_input_nodes))
        if _name(node) not in TO_SCALAR:
            return False
        return len(node.args) + len(node.kwargs) == 1 + (_name(node) in ("dot", "vdot"))

    def _by_its_own_word(self, node: Node, low: bool | None) -> bool | None:
        """Return the precision that ``node`` itself asks for; ``low`` if it asks for none."""
        if node.op not in ("call_function", "call_method"):
            return low
        name, others = _name(node), [*node.args[1:], *node.kwargs.values()]
        wanted = [CASTS[name]] if node.op == "call_method" and name in CASTS else []
        if name in ("to", "type") or "dtype" in node.kwargs:
            wanted += [value for value in others if isinstance(value, torch.dtype)]
        if wanted:
            return {torch.float32: False, self.dtype: True}.get(wanted[0])
        if name not in ("to", "type_as"):
            return low
        for other in others:
            if isinstance(other, Node):  # a tensor, or the dtype of one
                is_dtype = other.target is getattr and other.args[1] == "dtype"
                return self.is_low[other.all_input_nodes[0] if is_dtype else other]
        return low

    def _is_several(self, node: Node) -> bool:
        """Say whether the value is several tensors."""
        if "type" in node.meta:
            return issubclass(node.meta["type"], (tuple, list, dict))
        if node.op == "call_module":
            module = self.gm.get_submodule(node.target)
            known = type(module).__module__.startswith("torch.nn.")
            if isinstance(module, SEVERAL_MODULES) or self._gives_indices(node):
                return True
            return not known and any(map(_takes_one, node.users))
        if node.target is operator.getitem and node.args[1] == 1:  # the state of an LSTM is a pair
            owner = node.all_input_nodes[0]
            lstm = owner.op == "call_module" and self.gm.get_submodule(owner.target)
            return isinstance(lstm, nn.LSTM)
        name = _name(node)
        along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        return (
            name in SEVERAL
            or self._gives_indices(node)
            or (name in SEVERAL_ALONG and isinstance(along, int))
            or (
                node.op == "call_function"
                and column(node, self.gm) == "keep"
                and name not in KEEP
                and any(map(_takes_one, node.users))
            )
        )

    def _gives_indices(self, node: Node) -> bool:
        if node.op == "call_module":
            return getattr(self.gm.get_submodule(node.target), "return_indices", False) is True
        return node.kwargs.get("return_indices") is True

    def _no_float(self, node: Node) -> bool:
        """Say whether the value is known to be no float32 tensor (indices, masks, sizes)."""
        if "type" not in node.meta:
            if node.target is getattr:
                return not _is_tensor_attribute(node)
            if node.target is operator.getitem and node.args[1] == 1:
                owner = node.all_input_nodes[0]
                several = self._is_several(owner) and self._kind(owner) in WITH_INDICES
                return several or self._gives_indices(owner)
            return node.op != "call_module" and _name(node) in NO_FLOAT
        meta = node.meta.get("tensor_meta")
        return meta is None or getattr(meta, "dtype", torch.float32) != torch.float32


def _takes_one(node: Node) -> bool:
    """Say whether ``node`` reads one of several tensors."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return node.target is operator.getitem or _is_tensor_attribute(node)


def _is_tensor_attribute(node: Node) -> bool:
    return node.target is getattr and len(node.args) > 1 and node.args[1] in TENSOR_ATTRIBUTES


def _writes_first(node: Node) -> bool:
    name = _name(node) if node.op != "call_module" else ""
    return name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv")


def _attribute(gm: GraphModule, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(gm.get_submodule(owner), name, None)
