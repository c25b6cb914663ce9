"""Plausible wrong answers to 1.2."""

import fxlab


class _Named(fxlab.Tracer):
    def __init__(self, stop=(), through=()):
        super().__init__()
        self.stop, self.through = tuple(stop), tuple(through)


def _names(group, m, path):
    return any(path == name if isinstance(name, str) else isinstance(m, name) for name in group)


class wrong_forgets_the_others(_Named):
    """Answer no for whatever is not named."""

    def is_leaf_module(self, m, module_qualified_name):
        return _names(self.stop, m, module_qualified_name)


class wrong_part_of_a_path(_Named):
    """Look for the name anywhere in the path."""

    def is_leaf_module(self, m, module_qualified_name):
        for name in self.stop:
            if isinstance(name, str) and name in module_qualified_name:
                return True
        if _names(self.stop, m, module_qualified_name):
            return True
        if _names(self.through, m, module_qualified_name):
            return False
        return super().is_leaf_module(m, module_qualified_name)


class wrong_exact_class(_Named):
    """Compare classes and forget subclasses."""

    def is_leaf_module(self, m, module_qualified_name):
        if module_qualified_name in self.stop or type(m) in self.stop:
            return True
        if module_qualified_name in self.through or type(m) in self.through:
            return False
        return super().is_leaf_module(m, module_qualified_name)


class wrong_super_first(_Named):
    """Ask the default first."""

    def is_leaf_module(self, m, module_qualified_name):
        if super().is_leaf_module(m, module_qualified_name):
            return True
        return _names(self.stop, m, module_qualified_name)


class wrong_paths_only(_Named):
    """Forget that classes may be named."""

    def is_leaf_module(self, m, module_qualified_name):
        if module_qualified_name in self.stop:
            return True
        if module_qualified_name in self.through:
            return False
        return super().is_leaf_module(m, module_qualified_name)


class wrong_through_wins(_Named):
    """Look at `through` first."""

    def is_leaf_module(self, m, module_qualified_name):
        if _names(self.through, m, module_qualified_name):
            return False
        if _names(self.stop, m, module_qualified_name):
            return True
        return super().is_leaf_module(m, module_qualified_name)


class wrong_delegation(_Named):
    """Let symbolic_trace do it."""

    def trace(self, root, concrete_args=None):
        return fxlab.symbolic_trace(root, concrete_args).graph
