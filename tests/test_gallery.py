"""Each error of the gallery says what, where in the user's file, and what to do instead."""

import pickle

import pytest

from tests.gallery import CASES, __file__, message

# Mistakes that happen before there is any node to name.
NO_NODE = {
    "a_module_in_a_plain_list", "a_parameter_of_nobody", "a_wrapper_around_the_model",
    "a_value_that_is_no_program", "a_builtin_without_signature", "concrete_args_of_another_name",
    "concrete_args_of_another_number", "a_proxy_of_an_earlier_trace", "wrap_of_a_number",
    "a_missing_comma", "a_state_that_is_no_module", "a_pass_that_visits_its_own_insertions",
    "a_pattern_without_a_place",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_the_users_line_the_node_and_a_remedy(name):
    error = message(name)
    assert error.where and error.where[0][0] == __file__
    assert f"{__file__}:{error.where[0][1]}" in str(error)
    assert error.hint or error.expected or error.right, str(error)
    assert (error.node is not None) or name in NO_NODE
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
