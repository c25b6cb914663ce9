"""No private name of torch is used without an entry that says why, and what to do without it."""

from __future__ import annotations

import pytest

from tests.private_names import PRIVATE, exists, in_package, used


def test_the_table_names_what_the_code_uses_and_nothing_else():
    found = in_package()
    unlisted = {name: sorted(files) for name, files in found.items() if name not in PRIVATE}
    assert unlisted == {}, "say in tests/private_names.py why, and what to do when it goes"
    assert PRIVATE.keys() - found.keys() == set(), "no longer used: take it out of the table"


def test_every_entry_says_why_and_what_instead():
    assert all(why and instead for why, instead in PRIVATE.values())


@pytest.mark.parametrize("name", PRIVATE)
def test_the_installed_torch_has_it(name):
    assert exists(name)


def test_the_parser_follows_names_that_imports_bring_in():
    source = (
        "import torch\nimport torch.utils._pytree as pytree\nfrom torch._ops import OpOverload\n"
        "from torch.utils import _device\nfrom torch.fx import _symbolic_trace as st\n"
        "def f():\n    torch._C._set(); pytree.tree_map(); st._wrapped; torch.nn.__name__\n"
        "    own._private; torch.ops.mkldnn._conv.binary\n"
    )
    assert used(source) == {
        "torch.utils._pytree",
        "torch._ops",
        "torch.utils._device",
        "torch.fx._symbolic_trace",
        "torch.fx._symbolic_trace._wrapped",
        "torch._C._set",
        "torch.ops.mkldnn._conv",
    }


def test_a_name_that_is_gone_is_noticed():
    assert not exists("torch._no_such_thing")
    assert exists("torch._C._set_grad_enabled")
