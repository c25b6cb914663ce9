"""The paper's analyses and transforms (section 6), each in one short file that reads as a lesson.

Which question has a pass? What does a value look like: ``shape_prop``. What does it cost:
``cost``, ``Device``, ``profile``. What can be computed once, earlier, or not at all: ``dce``,
``cse``, ``const_fold``, ``fuse_conv_bn``. In fewer bits: ``amp``. As fast as this CPU can:
``optimize_for_inference``. ``PassManager`` runs a list of them and checks each.

The functions are bound here after their modules are loaded, so ``fxlab.passes.cost`` is the
function, whatever is imported later; ``from fxlab.passes.cost import Cost`` finds the module.
"""

from __future__ import annotations

from fxlab.passes import shape_prop as _shape_prop_module
from fxlab.passes.amp import amp
from fxlab.passes.base import PassBase, PassResult, Report, as_pass, report
from fxlab.passes.cleanup import const_fold, cse, dce
from fxlab.passes.cost import Cost, NodeCost, cost
from fxlab.passes.explain import Mismatch, explain_mismatch
from fxlab.passes.fuse import fold_conv_bn, fuse_conv_bn
from fxlab.passes.manager import Difference, PassError, PassManager, PassRow, compare
from fxlab.passes.matcher import InternalMatch, SubgraphMatcher
from fxlab.passes.memory import LiveRange, live_ranges, lower_peak
from fxlab.passes.optimize import optimize_for_inference, remove_dropout
from fxlab.passes.partition import (
    CapabilityBasedPartitioner,
    OperatorSupport,
    OperatorSupportBase,
    OpSupports,
    any_chain,
    chain,
    create_op_support,
)
from fxlab.passes.pipeline import PipelineError, PipelineRun, pipeline_stages, run_pipeline
from fxlab.passes.profile import Profile, profile
from fxlab.passes.quantize import convert, prepare, prepare_qat, quantize_static
from fxlab.passes.rewriter import replace_pattern, replace_pattern_with_filters
from fxlab.passes.roofline import Device, Prediction, calibrate
from fxlab.passes.schedule import balanced_stages, hoist_async
from fxlab.passes.shape_prop import (
    ShapeError,
    ShapeProp,
    TensorMetadata,
    shape_prop,
    shape_text,
)
from fxlab.passes.split import Partition, split_by_tags, split_module, split_module_simple

__all__ = [
    "CapabilityBasedPartitioner", "OpSupports", "OperatorSupport", "OperatorSupportBase",
    "PipelineError", "PipelineRun", "pipeline_stages", "run_pipeline",
    "Partition", "any_chain", "balanced_stages", "chain", "create_op_support", "hoist_async",
    "split_by_tags", "split_module", "split_module_simple",
    "InternalMatch", "Mismatch", "SubgraphMatcher", "explain_mismatch", "replace_pattern",
    "replace_pattern_with_filters",
    "Cost", "Device", "Difference", "NodeCost", "PassBase", "PassError", "PassManager",
    "PassResult", "PassRow", "Prediction", "Profile", "Report", "ShapeError", "ShapeProp",
    "TensorMetadata", "amp", "as_pass", "calibrate", "compare", "const_fold", "cost", "cse", "dce",
    "fold_conv_bn", "fuse_conv_bn", "optimize_for_inference", "profile", "remove_dropout",
    "convert", "prepare", "prepare_qat", "quantize_static",
    "LiveRange", "live_ranges", "lower_peak",
    "report", "shape_prop", "shape_text",
]  # fmt: skip

# torch.fx has a module of this name: the function answers for it.
for _name in _shape_prop_module.__all__:
    setattr(shape_prop, _name, getattr(_shape_prop_module, _name))
for _part in (Partition, split_module_simple):
    setattr(split_module, _part.__name__, _part)
