"""Plausible wrong answers to 1.4."""

import functools
import operator

import torch

import fxlab


class _Operators:
    """Makes the operators of a class from what its `_make` does; a mistake is a subclass."""

    turned = "right"

    def __init__(self, node):
        self.node = node

    def _make(self, op, target, args, kwargs=None):
        args = tuple(getattr(a, "node", a) for a in args)
        return type(self)(self.node.graph.create_node(op, target, args, kwargs))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._make("call_method", name, (self, *args), kwargs)


def _apply(self, function, *others):
    return self._make("call_function", function, (self, *others))


def _turned(self, function, order, other):
    return self._make("call_function", function, (self, other)[::order])


def _fill(cls, turned=True, order=-1):
    for name in "add sub mul truediv matmul neg getitem gt".split():
        setattr(cls, f"__{name}__", functools.partialmethod(_apply, getattr(operator, name)))
        if turned and name not in ("neg", "getitem", "gt"):
            reflected = functools.partialmethod(_turned, getattr(operator, name), order)
            setattr(cls, f"__r{name}__", reflected)
    return cls


class wrong_a_not_turned(_Operators):
    """Forget that the operands of a turned operator change places."""


class wrong_a_no_turned(_Operators):
    """Forget turned operators."""


class wrong_a_methods_as_functions(_Operators):
    """Record a method as the function of the same name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(torch, name)
        return lambda *args, **kwargs: self._make("call_function", function, (self, *args), kwargs)


class wrong_a_lost_kwargs(_Operators):
    """Forget keyword arguments of methods."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._make("call_method", name, (self, *args))


class wrong_a_returns_node(_Operators):
    """Return the node instead of its Proxy."""

    def _make(self, op, target, args, kwargs=None):
        return super()._make(op, target, args, kwargs).node


_fill(wrong_a_not_turned, order=1)
_fill(wrong_a_no_turned, turned=False)
_fill(wrong_a_methods_as_functions)
_fill(wrong_a_lost_kwargs)
_fill(wrong_a_returns_node)


def wrong_a_delegation(node):
    """Hand out the kit's own."""
    return fxlab.Proxy(node)


class _Function:
    def __init__(self, node):
        self.node = node


class wrong_b_no_kwargs(_Function):
    """Forget keyword arguments."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        graph = next(a.node.graph for a in (*args, *(kwargs or {}).values()) if hasattr(a, "node"))
        return cls(graph.call_function(func, tuple(getattr(a, "node", a) for a in args)))


class wrong_b_kwargs_required(_Function):
    """Take it that kwargs are always given."""

    @classmethod
    def __torch_function__(cls, func, types, args, kwargs):
        values = (*args, *kwargs.values())
        graph = next(a.node.graph for a in values if hasattr(a, "node"))
        named = {name: getattr(a, "node", a) for name, a in kwargs.items()}
        return cls(graph.call_function(func, tuple(getattr(a, "node", a) for a in args), named))


class wrong_b_first_argument(_Function):
    """Take it that the first argument is always a Proxy."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        graph = args[0].node.graph
        nodes = tuple(getattr(a, "node", a) for a in args)
        return cls(graph.call_function(func, nodes, kwargs or {}))


class wrong_b_by_name(_Function):
    """Record a function as a method of the same name."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        named = {name: getattr(a, "node", a) for name, a in (kwargs or {}).items()}
        nodes = tuple(getattr(a, "node", a) for a in args)
        graph = next(a.graph for a in (*nodes, *named.values()) if hasattr(a, "graph"))
        return cls(graph.call_method(func.__name__, nodes, named))


def wrong_b_delegation(node):
    """Hand out the kit's own."""
    return fxlab.Proxy(node)


def wrong_c_one_level(value):
    """Look one level deep."""
    if isinstance(value, fxlab.Proxy):
        return value.node
    if isinstance(value, tuple | list):
        return type(value)(v.node if isinstance(v, fxlab.Proxy) else v for v in value)
    if isinstance(value, dict):
        return {k: v.node if isinstance(v, fxlab.Proxy) else v for k, v in value.items()}
    return value


def wrong_c_tuples_to_lists(value):
    """Make a list of each tuple."""
    if isinstance(value, fxlab.Proxy):
        return value.node
    if isinstance(value, tuple | list):
        return [wrong_c_tuples_to_lists(v) for v in value]
    if isinstance(value, dict):
        return {k: wrong_c_tuples_to_lists(v) for k, v in value.items()}
    return value


def wrong_c_no_slices(value):
    """Forget slices."""
    if isinstance(value, fxlab.Proxy):
        return value.node
    if isinstance(value, tuple | list):
        return type(value)(wrong_c_no_slices(v) for v in value)
    if isinstance(value, dict):
        return {k: wrong_c_no_slices(v) for k, v in value.items()}
    return value


def wrong_c_no_dicts(value):
    """Forget dicts."""
    if isinstance(value, fxlab.Proxy):
        return value.node
    if isinstance(value, tuple | list):
        return type(value)(wrong_c_no_dicts(v) for v in value)
    return value


def wrong_c_delegation(value):
    """Let map_aggregate do it."""
    return fxlab.map_aggregate(value, lambda v: v.node if isinstance(v, fxlab.Proxy) else v)
