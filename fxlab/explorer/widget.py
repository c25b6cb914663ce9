"""How is a timeline stepped through inside a notebook? With one widget and one static copy of it.

`Explorer` is an anywidget around `viewer.js`. It sends the story once, deflated, and the browser
replays it, so that a dead kernel or a saved notebook still steps. Displaying it publishes two
outputs: the widget, and a closed "static copy" that also GitHub, an untrusted notebook and a reader
without scripts can show.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from fxlab.core.errors import FxlabError
from fxlab.explorer.extras import missing
from fxlab.explorer.page import viewer_source
from fxlab.explorer.static import static_html, text_table
from fxlab.explorer.timeline import Step, Timeline
from fxlab.explorer.view import opening_step, pack, view

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as error:
    what = "the explorer (without it: timeline.to_html, or `fxlab show`)"
    raise missing(error, what) from error

WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"

# Every saved instance of a widget keeps its script, so it travels deflated and unpacks itself: when
# it is rendered, since anywidget gives up on a script that is not ready within two seconds.
LOADER = """\
const packed = "{packed}";
const unpack = async () => {{
const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
const code = await new Response(stream).blob();
const url = URL.createObjectURL(new Blob([code], {{ type: "text/javascript" }}));
const viewer = await import(url);
URL.revokeObjectURL(url);
return viewer.default;
}};
let viewer;
export default {{ render: async (context) => (await (viewer ??= unpack())).render(context) }};
"""


@cache
def packed_viewer() -> tuple[str, str]:
    """The script and the style as the widget sends them."""
    script, style = viewer_source()
    packed = base64.b64encode(zlib.compress(script.encode("utf-8"), 9)).decode("ascii")
    return LOADER.format(packed=packed), style


class Explorer(anywidget.AnyWidget):
    """A timeline, stepped through in a notebook.

    `step` and `selection` work both ways: a cell can read what is selected and drive it.

    Attributes:
        timeline: The story that is shown.
        step: The step in view, 0 (the start) to `len(timeline)`.
        selection: The name of the selected row, or "".
        wall: Whether the explorer fills the window, in large type, for a projector.
        predict: Whether the next step is hidden until it is guessed.
        error: The exception of a model that could not be traced, else None.
    """

    _esm = ""
    _css = ""
    _story = traitlets.Bytes().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    selection = traitlets.Unicode("").tag(sync=True)
    wall = traitlets.Bool(False).tag(sync=True)
    predict = traitlets.Bool(False).tag(sync=True)
    notes = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        timeline: Timeline,
        *,
        step: int | None = None,
        selection: str = "",
        wall: bool = False,
        predict: bool = False,
    ) -> None:
        """Show a timeline.

        Args:
            timeline: The story.
            step: The step to open with; by default `opening_step(timeline)`.
            selection: The name of the row to open with.
            wall: Open in wall mode.
            predict: Open in predict mode.
        """
        self.timeline = timeline
        self.error: BaseException | None = None
        self._data = view(timeline)
        self._esm, self._css = packed_viewer()
        if step is None:
            step = opening_step(timeline)
        super().__init__(
            _story=pack(self._data),
            step=step,
            selection=selection,
            wall=wall,
            predict=predict,
            notes={str(index): text for index, text in timeline.notes.items()},
        )
        self.on_msg(self._answer)

    @traitlets.validate("step")
    def _inside(self, proposal: Any) -> int:
        """Keep the step within the story, counting from the end when it is negative."""
        last = len(self.timeline)
        step = proposal["value"]
        return max(0, min(last, step + last + 1 if step < 0 else step))

    def goto(self, code: str) -> Explorer:
        """Go to a step by its code, such as `fuse_conv_bn:12/bn1`.

        Args:
            code: As shown beside the slider: pass name, step, row name (the last may be missing).

        Returns:
            This explorer.

        Raises:
            ValueError: The code is not one of this timeline.
        """
        self.step, row = self.timeline.goto(code)
        if row is not None:
            self.selection = self.timeline.name(row, self.step)
        return self

    def note(self, step: int | Step, text: str) -> None:
        """Pin a note to a step: it stands under the step's sentence, large in wall mode.

        Args:
            step: A step or its index; 0 is the start.
            text: Shown as plain text; it is saved with the timeline.
        """
        self.timeline.note(step, text)
        index = step.index if isinstance(step, Step) else step
        self.notes = {**self.notes, str(index): text}

    def to_html(self, path: str | Path, **options: Any) -> Path:
        """Write a page at ``path``; ``options`` as in `fxlab.explorer.page.write_html`."""
        from fxlab.explorer.page import write_html

        return write_html(self.timeline, path, **options)

    def close(self) -> None:
        """Take the explorer off the page and out of ipywidgets' memory, with its layout."""
        self.layout.close()
        super().close()

    def static_html(self) -> str:
        """The static copy: inline styles only, no script, at most 24 KB."""
        return static_html(self._data, step=self.step)

    def __repr__(self) -> str:
        """The static copy as a text table: what a terminal and a screen reader get."""
        return text_table(self._data)

    def _answer(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        """Draw the classic picture when the front end asks for it."""
        if content.get("kind") != "picture":
            return
        index = max(0, min(len(self.timeline), int(content.get("step", 0))))
        reply: dict[str, Any] = {"kind": "picture", "step": index}
        try:
            from fxlab.explorer.diagram import timeline_svg

            svg = timeline_svg(self.timeline, index)
            reply["svg"] = base64.b64encode(svg.encode("utf-8")).decode("ascii")
        except (FxlabError, ImportError, OSError, ValueError) as error:
            reply["text"] = f"No picture: {error}"
        self.send(reply)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """All three forms in one bundle, richest first, for hosts that ask for no display."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        rich = {kind: data[kind] for kind in data if kind not in ("text/html", "text/plain")}
        return {**rich, "text/html": self.static_html(), "text/plain": repr(self)}, metadata

    def _ipython_display_(self, **kwargs: Any) -> None:
        """Publish two outputs: the widget, and beneath it the static copy, closed."""
        from IPython.display import display

        data, metadata = self._repr_mimebundle_(**kwargs)
        html = data.pop("text/html")
        display(data, raw=True, metadata=metadata)
        text = "static copy of the explorer above"
        display({"text/html": html, "text/plain": text}, raw=True)
