"""Plausible wrong answers to 4.1: a value that the walk loses, or does not see as it is."""

import torch

import fxlab
from fxlab.passes.shape_prop import ShapeProp


def _shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return type(value)(_shapes(part) for part in value)
    return {k: _shapes(v) for k, v in value.items()} if isinstance(value, dict) else None


class wrong_result_lost(fxlab.Interpreter):
    def run_node(self, n):
        value = super().run_node(n)
        if _shapes(value) is not None:
            n.meta["shape"] = _shapes(value)


class wrong_after_the_run(fxlab.Interpreter):
    def run(self, *args):
        result = super().run(*args)
        for node in self.module.graph.nodes:
            node.meta["shape"] = _shapes(self.env[node])
        return result


class wrong_named_without_values(fxlab.Interpreter):
    # Names the node that fails, and loses the values, so that another one fails.
    def run_node(self, n):
        try:
            value = super().run_node(n)
        except Exception as error:
            raise RuntimeError(f"{n.name} failed") from error
        n.meta["shape"] = _shapes(value)


class wrong_functions_only(fxlab.Interpreter):
    # call_function is one opcode of six, and has no node to write to; so it guesses.
    def run(self, *args):
        self._names = [n for n in self.module.graph.nodes if n.op == "call_function"]
        return super().run(*args)

    def call_function(self, target, args, kwargs):
        value = super().call_function(target, args, kwargs)
        self._names.pop(0).meta["shape"] = tuple(value.shape)
        return value


class wrong_first_of_several(fxlab.Interpreter):
    def run_node(self, n):
        value = super().run_node(n)
        first = value[0] if isinstance(value, (tuple, list)) else value
        if isinstance(first, torch.Tensor):
            n.meta["shape"] = tuple(first.shape)
        return value


class wrong_every_value_a_tensor(fxlab.Interpreter):
    def run_node(self, n):
        value = super().run_node(n)
        n.meta["shape"] = tuple(value.shape)
        return value


class wrong_written_once(fxlab.Interpreter):
    def run_node(self, n):
        value = super().run_node(n)
        if _shapes(value) is not None:
            n.meta.setdefault("shape", _shapes(value))
        return value


class wrong_bare_error(fxlab.Interpreter):
    def run_node(self, n):
        value = super().run_node(n)
        if _shapes(value) is not None:
            n.meta["shape"] = _shapes(value)
        return value


class wrong_delegation(ShapeProp):
    def run_node(self, n):
        value = super().run_node(n)
        n.meta["shape"] = n.meta["tensor_meta"].shape
        return value
