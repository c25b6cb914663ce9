"""Let nbval number the cells it runs, as a person's notebook does.

nbval runs cells without history, so all of them would be ``In[1]``; the explorer and error texts
name the cell that a line is in. Loaded by ``pytest -p tests.nbval_history`` (see the Makefile).
"""

from __future__ import annotations

from nbval.kernel import RunningKernel


def execute_cell_input(
    self: RunningKernel, cell_input: str, allow_stdin: bool | None = None
) -> str:
    """Run one cell and store it in the history; return the id of the request."""
    return self.kc.execute(
        cell_input, silent=False, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
    )


RunningKernel.execute_cell_input = execute_cell_input
