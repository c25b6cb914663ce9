"""Plausible wrong answers to 1.1."""

import operator

import torch

import fxlab
from fxlab.teach.exercises.ex_1_1 import Score


def _start():
    graph = fxlab.Graph()
    x = graph.placeholder("x")
    return graph, graph.call_module("linear", (x,))


def _finish(graph, h, relu="method", keyword=True):
    if relu == "method":
        h = graph.call_method("relu", (h,))
    else:
        h = graph.call_function(torch.relu, (h,))
    total = graph.call_method("sum", (h,) if keyword else (h, -1), {"dim": -1} if keyword else {})
    return total, graph.call_function(operator.add, (total, 1))


def wrong_method_as_function():
    """Take a method for the function of the same name."""
    graph, linear = _start()
    h = graph.call_function(torch.sub, (linear, graph.get_attr("bias")), {"alpha": 2})
    top, score = _finish(graph, h, relu="function")
    graph.output({"score": score, "parts": [h, top]})
    return graph


def wrong_positional_dim():
    """Write a keyword argument as a positional one."""
    graph, linear = _start()
    h = graph.call_function(torch.sub, (linear, graph.get_attr("bias")), {"alpha": 2})
    top, score = _finish(graph, h, keyword=False)
    graph.output({"score": score, "parts": [h, top]})
    return graph


def wrong_lost_alpha():
    """Forget a keyword argument."""
    graph, linear = _start()
    h = graph.call_function(torch.sub, (linear, graph.get_attr("bias")))
    top, score = _finish(graph, h)
    graph.output({"score": score, "parts": [h, top]})
    return graph


def wrong_dict_as_node():
    """Make a node of the dict that is returned."""
    graph, linear = _start()
    h = graph.call_function(torch.sub, (linear, graph.get_attr("bias")), {"alpha": 2})
    top, score = _finish(graph, h)
    graph.output(graph.call_function(dict, (), {"score": score, "parts": [h, top]}))
    return graph


def wrong_bias_as_input():
    """Take a parameter of the module for a parameter of forward."""
    graph = fxlab.Graph()
    x = graph.placeholder("x")
    bias = graph.placeholder("bias")
    linear = graph.call_module("linear", (x,))
    h = graph.call_function(torch.sub, (linear, bias), {"alpha": 2})
    top, score = _finish(graph, h)
    graph.output({"score": score, "parts": [h, top]})
    return graph


def wrong_counted_twice():
    """Compute a value again where it is read again."""
    graph, linear = _start()
    h = graph.call_function(torch.sub, (linear, graph.get_attr("bias")), {"alpha": 2})
    _, score = _finish(graph, h)
    top = graph.call_method("sum", (graph.call_method("relu", (h,)),), {"dim": -1})
    graph.output({"score": score, "parts": [h, top]})
    return graph


def wrong_delegation():
    """Call the tracer."""
    return fxlab.symbolic_trace(Score()).graph


def wrong_plus_on_a_node():
    """Compute with a Node as if it were a value."""
    graph, linear = _start()
    top = graph.call_method("sum", (linear,), {"dim": -1})
    graph.output({"score": top + 1, "parts": [linear, top]})
    return graph


def wrong_text_as_function():
    """Give a function by its name."""
    graph, linear = _start()
    graph.output(graph.call_function("torch.sub", (linear, 1)))
    return graph


def wrong_module_itself():
    """Give a module itself, not its path."""
    graph = fxlab.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module(Score().linear, (x,)))
    return graph
