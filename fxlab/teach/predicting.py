"""What will the pass do next? A guess before the look.

`predict` shows a recording with the next step hidden. Whoever watches picks a row and an edit, or a
line of the pass, and learns by the step's sentence whether the guess fits. Any edit that the pass
may do next in the same match counts. Nothing is graded and nothing is kept.
"""

from __future__ import annotations

import functools
import html
from typing import Any

KINDS = ("create", "reroute", "erase", "args", "move", "rename", "target", "module")
_ASKED = (
    "What comes next? Select a row, then an edit; or pick a line of the pass. "
    "Without a widget: .guess(edit, row), such as .guess('erase', 'relu')."
)


def predict(timeline: Any, step: int = 0) -> Any:
    """Show a recording with the next step hidden, for guessing.

    Args:
        timeline: A Timeline, or an Explorer of one.
        step: The step to begin behind; 0 is the start.

    Returns:
        An Explorer in predict mode with a method more: ``guess(edit, row)`` says whether a guess
        fits and, if it does, goes on by a step.

    Example:
        >>> import torch, fxlab
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg())
        >>> with fxlab.record(gm) as timeline:
        ...     for node in gm.graph.nodes:
        ...         if node.target is torch.relu:
        ...             _ = node.replace_all_uses_with(node.args[0])
        ...             gm.graph.erase_node(node)
        >>> shown = predict(timeline)
        >>> print(shown.guess("create", "relu"))
        Not next. What comes: ... the reader of relu (neg) now reads x; nothing reads relu any more
        >>> print(shown.guess("reroute", "relu"))
        Yes: ... the reader of relu (neg) now reads x; nothing reads relu any more
        >>> shown.step
        1
    """
    return _prediction()(getattr(timeline, "timeline", timeline), step=step, predict=True)


@functools.cache
def _prediction() -> Any:
    """The class; made when it is first used, since only a notebook needs its widget."""
    from fxlab.explorer.drawing import Story
    from fxlab.explorer.static import static_html
    from fxlab.explorer.widget import Explorer

    class Prediction(Explorer):
        """An Explorer that keeps the steps to come to itself, in its static copy too."""

        def guess(self, edit: str, row: str = "") -> str:
            """Say whether an edit of a row is what comes next; go on when it is.

            Args:
                edit: One of create, reroute, erase, args, move, rename, target, module.
                row: The name of the node that it is done to.

            Returns:
                The step's sentence, behind "Yes" or "Not next".

            Raises:
                ValueError: There is no such kind of edit.
            """
            if edit not in KINDS:
                raise ValueError(f"{edit!r} is no edit: one of {', '.join(KINDS)}")
            begin = int(self.step)
            steps, told = self._data["steps"][begin:], self.timeline.steps
            if not steps:
                return "This was the last step."
            wanted = {number for number in self.timeline.rows if self._name(number) == row}
            for k, step in enumerate(steps[: steps[0]["n"]]):
                kind = "module" if step["k"] == "attr" else step["k"]
                rows = [step["r"], *step.get("m", []), *step.get("e", [])[2:]]
                if kind == edit and (kind == "module" or wanted.intersection(rows)):
                    self.step = begin + 1
                    return f"Yes: {told[begin + k].sentence}"
            return f"Not next. What comes: {told[begin].sentence}"

        def _name(self, number: int) -> str:
            return self.timeline.name(number, int(self.step))

        def _so_far(self) -> dict[str, Any]:
            return {**self._data, "steps": self._data["steps"][: int(self.step)], "passes": []}

        def static_html(self) -> str:
            """The picture of the step in view, and no word of the next ones."""
            copy = static_html(self._so_far(), step=self.step)
            return copy.replace("</summary>", f"</summary><p>{html.escape(_ASKED)}</p>", 1)

        def __repr__(self) -> str:
            """The rows in view as text, and no word of the next steps."""
            lines = Story(self._data).lines(self.step)
            rows = [f"  {line.text.strip()}" for line in lines if line.state == "live"]
            return "\n".join([f"{self._data['title']}, step {self.step}:", *rows, _ASKED])

    return Prediction
