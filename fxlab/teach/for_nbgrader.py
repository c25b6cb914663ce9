"""What does nbgrader need to make the same student files as `fxlab release`?

Its own way of clearing a solution writes one text for all; ours names the exercise, so that a
stub's error and the check speak of the same number. `nbgrader_config.py` beside the masters takes
these preprocessors. Imported by nbgrader only.
"""

from __future__ import annotations

from typing import Any

from nbgrader import preprocessors as theirs

from fxlab.teach.masters import part_id


class ClearSolutions(theirs.ClearSolutions):
    """Clears a solution to `raise NotDone("2.2")`, the exercise's own number."""

    def preprocess_cell(self, cell: Any, resources: Any, cell_index: int) -> tuple[Any, Any]:
        """Clear one cell."""
        mark = cell.metadata.get("nbgrader", {})
        id = part_id(mark.get("grade_id"))
        stubs: Any = self.code_stub
        self.code_stub = {**stubs, "python": f'raise NotDone("{id}")'}
        return super().preprocess_cell(cell, resources, cell_index)


def generate_preprocessors() -> list[Any]:
    """The preprocessors of `nbgrader generate_assignment`, with ours in the place of theirs."""
    from nbgrader.converters import GenerateAssignment

    trait: Any = GenerateAssignment.preprocessors
    defaults = trait.default_args[0]
    return [ClearSolutions if one is theirs.ClearSolutions else one for one in defaults]
