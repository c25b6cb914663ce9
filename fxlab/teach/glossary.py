"""The words of the course, one sentence each, under the lecture or exercise that teaches them."""

from __future__ import annotations

TAUGHT: dict[str, dict[str, str]] = {
    "00": {
        "trace": (
            "to run a model once with stand-ins, so that what it does is written down as a graph"
        ),
        "graph": "a list of nodes, one for each operation, in the order in which they run",
        "node": "one operation of a graph: a name, an opcode, a target, arguments",
        "generated code": (
            "the Python that a graph is written back as, and that runs when the module is called"
        ),
        "pass": "a function that changes a graph, or builds another from it",
        "edit": "one change of a graph or of its module's state; a step of a timeline",
        "timeline": "a recording of the edits that passes made, to be stepped, checked and kept",
    },
    "01": {
        "proxy": "the stand-in for a value while tracing: any operation on it becomes a node",
        "opcode": "which of the six kinds a node is",
        "target": "what a node calls or reads: a function, a method's name, or a dotted path",
        "arguments": (
            "what a node is called with, args and kwargs; nodes in them are the graph's edges"
        ),
        "users": "the nodes in whose arguments a node stands",
        "placeholder": "a node that is an input of the program",
        "get_attr": "a node that reads an attribute of the module, such as a parameter",
        "call_function": "a node that calls a function, found before the call",
        "call_method": "a node that calls a method, which the value looks up by name",
        "call_module": "a node that calls a submodule, named by its path",
        "output": "the node that returns the program's result",
        "leaf module": "a module whose call stays one node instead of being traced through",
        "specialization": "what Python decided while tracing is fixed, as it was for that run",
    },
    "1.1": {
        "graph by hand": "a graph built with the Graph's own methods, without a trace",
    },
    "1.2": {
        "level of a capture": "how deep a trace goes: which modules stay whole",
    },
    "04": {
        "control flow": "branches and loops: what decides which operation runs next",
        "concrete_args": (
            "values that a trace takes as given, so that decisions on them can be made"
        ),
        "wrap": "to mark a function, so that its call is recorded and its body is not traced",
        "loop-carried shape": (
            "a shape that each round of a loop changes, so that no one shape is right"
        ),
        "trace warning": "what a trace could not keep, said with file and line",
    },
    "1.3": {
        "ways out": (
            "what to do when a program does not trace: both sides, wrap, a leaf, given values"
        ),
    },
    "02": {
        "insertion point": "the place in a graph where new nodes are put",
        "reroute": "to let a node's readers read another node instead",
        "erase": "to take a node that nobody reads out of its graph",
        "lint": "the check that a graph is well formed, and the definition of it",
        "well formed": (
            "a valid program: order, names, targets and readers agree; not the same as right"
        ),
        "same output": "computes what it did before, on given inputs; not the same as well formed",
    },
    "2.1": {
        "spelling": (
            "one of the ways to call an operation: function, method, module, keyword arguments"
        ),
    },
    "03": {
        "recapture": "to trace a program that a transform made, alone or as a part of another",
        "Interpreter": "runs a graph node by node, so that each value can be seen or changed",
        "Transformer": "an Interpreter fed with proxies: running the old graph records a new one",
    },
    "1.4": {
        "__torch_function__": (
            "the method by which torch asks an argument whether it handles a call itself"
        ),
    },
    "12": {
        "reader": "a node that has another node in its arguments; a user",
        "effect": (
            "what a node does besides returning a value: it writes, draws random numbers, prints"
        ),
        "pure": "without effects: nobody would notice if it ran twice, earlier, or not at all",
        "dead code": "a pure node that nobody reads",
        "common subexpression": "two nodes that compute the same, so that one would do",
        "constant": "what depends on no input, so that it can be computed once, ahead of time",
        "pattern": "a small program that is looked for in a larger one",
    },
    "2.4": {
        "buffer": "a tensor that a module owns and that is no parameter",
    },
    "2.5": {
        "match": "a place in a graph where a pattern fits, node for node",
        "mismatch": "how far a pattern fitted, and what stopped it",
    },
    "07": {
        "fold": "to put what a batch norm does into the weights of the layer before it",
        "fuse": "to make one operation of several that stand together",
        "state of a GraphModule": (
            "its submodules, parameters and buffers, which a pass may replace"
        ),
        "tolerance": "how far two results may differ and still count as the same",
        "packed layout": "weights stored in the order in which a kernel reads them",
    },
    "3.1": {
        "per channel": (
            "one number for each channel, such as the slope of a batch norm in eval mode"
        ),
    },
    "3.2": {
        "shared module": (
            "a module that a graph calls at several places, with one weight for all of them"
        ),
    },
    "3.3": {
        "bisect": "to find the edit from which on a program stays broken",
    },
    "09": {
        "shape propagation": "to find each value's shape and dtype by one walk over the graph",
        "FLOP": "a multiplication or an addition, counted separately",
        "bytes read and written": "the memory traffic of a node: inputs, parameters, results",
        "live range": "from the node that makes a value to the last node that reads it",
        "peak memory": "the most bytes alive at one moment of a run",
        "arithmetic intensity": "FLOP for each byte moved",
        "roofline": "the speed that a device allows at best, for each arithmetic intensity",
    },
    "4.1": {
        "meta": "the dict of a node in which traces and passes keep what they find out about it",
    },
    "4.2": {
        "ridge": (
            "the arithmetic intensity at which a device's memory and arithmetic take equally long"
        ),
    },
    "4.3": {
        "list schedule": "an order made step by step: of the nodes that may run next, the best one",
    },
    "06": {
        "scale and zero point": "the step between two codes, and the code of 0",
        "observer": "a module that watches values and answers with a scale and a zero point",
        "calibration": (
            "to run batches through a prepared program, so that its observers see values"
        ),
        "saturation": "values beyond the range get the last code",
        "SQNR": (
            "signal-to-quantization-noise ratio: power of the right answer over power of the "
            "error, in decibel"
        ),
        "fake quantization": "to round values to what codes can say, and stay in float",
        "straight-through": "a gradient that passes rounding as if it were not there",
    },
    "5.1": {
        "affine and symmetric codes": (
            "codes with a zero point that fits the range, or with 0 in the middle"
        ),
    },
    "5.2": {
        "scale of a channel": "a scale for each output channel of a weight, instead of one for all",
    },
    "5.3": {
        "autograd function": (
            "an operation whose gradient is written by hand: torch.autograd.Function"
        ),
    },
    "08": {
        "lowering": "to write a program in the words of another system, which then runs it",
        "converter": "the function that says one operation in the other system's words",
        "partition": "to cut a program into parts, each of which one device can run",
        "engine": "a part, built for its device and ready to run",
        "phase": (
            "how often the longest way to a node goes from an unsupported node into a supported one"
        ),
        "precision": "how many bits a number has, and so how exact it is",
    },
    "6.1": {
        "cycle of parts": (
            "two parts, each of which needs a result of the other, so that neither can run first"
        ),
    },
    "6.2": {
        "attribute of an ONNX node": (
            "what ONNX fixes when the model is built, as opposed to an input"
        ),
    },
    "05": {
        "IR": "intermediate representation: the form in which a compiler holds a program",
        "level of an IR": "how much one of its operations does: a layer, or an addition",
        "Tracer hook": "a method of Tracer that a subclass overrides to decide what is recorded",
    },
    "10": {
        "blocking call": "a call that does nothing but wait for an answer from elsewhere",
        "start and wait": "a blocking call as two nodes, between which other work can run",
        "stage": "a part of a program that runs in a process of its own",
        "micro-batch": "a slice of a batch, so that several stages have work at one time",
        "bubble": "the time in which a stage waits for the one before or after it",
    },
    "7.1": {
        "hoist": "to move a node as early as its inputs allow",
    },
    "11": {
        "bfloat16": "16 bits with the range of float32 and two to three decimal digits",
        "cast": "to turn values into another dtype",
        "op table": "which operations run in 16 bits, which in 32, and which in either",
        "autocast": "torch's way to choose the dtype of each operation while the program runs",
        "signal-to-noise ratio": "power of the right answer over power of the error, in decibel",
    },
    "8.1": {
        "precision of a value": "the dtype that a value has at one place in a program with casts",
    },
    "13": {
        "symbolic tracing": "to run a program with stand-ins that have no values",
        "example tracing": "to record one run on an example",
        "compiling of source": "to read a program's text instead of running it",
        "deferred execution": (
            "to write operations down in each call and run them when somebody looks"
        ),
        "guard": "a check that what a capture assumed still holds",
        "graph break": "the place where a capture stops, lets Python run, and begins anew",
    },
    "20": {
        "exported program": "what torch.export captures: one graph of operators, or an error",
        "compile backend": "a function that torch.compile hands each graph that it captures",
        "first diverging node": "the first node whose value two programs do not agree on",
        "shrink": "to cut a program down to the few operations that still show a bug",
    },
}
"""Where it is taught -> word -> what it means."""
