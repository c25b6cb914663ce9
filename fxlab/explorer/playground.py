"""What does this pass do to that model, and what if I change a line of it?

The playground puts controls around an Explorer: choose a model, add, order and switch off passes,
edit a pass's source and run it again, with the old and the new history compared. It is the paper's
"write a transform in a few lines" (section 6) turned into something to play with. A pass that
raises or is interrupted costs nothing: the last good story stays, and the error stands above it.
"""

from __future__ import annotations

import html
import inspect
import itertools
import linecache
import textwrap
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fxlab.explorer import timeline_of
from fxlab.explorer.extras import missing
from fxlab.explorer.timeline import Timeline
from fxlab.explorer.widget import Explorer

try:
    import ipywidgets
except ModuleNotFoundError as error:
    raise missing(error, "the playground") from error

Pass = Callable[..., Any]
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Entry:
    """One pass of the list.

    Attributes:
        name: What it is called.
        pass_: The function.
        source: Its text, as last run.
        on: Whether it is run.
    """

    name: str
    pass_: Pass
    source: str
    on: bool = True


@dataclass(frozen=True)
class State:
    """What undo and redo go through: the model's name and the list of passes."""

    model: str
    entries: tuple[Entry, ...]


def kit_passes() -> dict[str, Pass]:
    """The kit's passes that need no further arguments, by name."""
    from fxlab import passes

    names = ("fuse_conv_bn", "dce", "cse", "const_fold", "remove_dropout", "optimize_for_inference")
    return {name: getattr(passes, name) for name in names}


def entry_of(pass_: Pass) -> Entry:
    """A pass as an entry of the list; its source is empty when Python does not know it."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(pass_)))
    except (OSError, TypeError):
        source = ""
    return Entry(getattr(pass_, "__name__", type(pass_).__name__), pass_, source)


def edited(entry: Entry, source: str) -> Entry:
    """The same entry with another source: compiled, in the globals of the old function.

    Args:
        entry: The pass as it is.
        source: The new text; it must define a function of the same name.

    Raises:
        SyntaxError: The text is not Python.
        ValueError: It defines no function of that name.
    """
    place = f"{entry.name}-edited-{next(_numbers)}.py"
    code = compile(source, place, "exec")
    # Python reads the text of a cited line from here, and so does the recorder.
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    scope = dict(getattr(inspect.unwrap(entry.pass_), "__globals__", {}))
    exec(code, scope)
    pass_ = scope.get(entry.name)
    own = getattr(inspect.unwrap(pass_), "__code__", None) if callable(pass_) else None
    if own is None or own.co_filename != place:
        del linecache.cache[place]
        raise ValueError(f"the text defines no function {entry.name}")
    weakref.finalize(own, linecache.cache.pop, place, None).atexit = False
    return replace(entry, pass_=pass_, source=source)


class Playground(ipywidgets.VBox):
    """A model, a list of passes, and the explorer of what they do.

    Every button has a method of the same name, so a cell can do what a hand does.

    Attributes:
        explorer: The explorer on the screen; its timeline is the last good story.
        timeline: That story.
        error: What the last run raised, or None.
        difference: How the last story differs from the one before, or None (`Timeline.diff`).

    Args:
        model: A model, or several by name: each a model or a pair (model, inputs).
        inputs: Example inputs of a single model: shapes, costs and the same-output verdict.
        passes: The passes to begin with; the kit's own can be added on screen.
        **view: Handed to the Explorer: `step`, `selection`, `wall`, `predict`.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        inputs: Sequence[Any] | None = None,
        passes: Sequence[Pass] = (),
        **view: Any,
    ) -> None:
        """Build the controls and run once."""
        single = not isinstance(model, Mapping)
        named: Mapping[str, Any] = {type(model).__name__: (model, inputs)} if single else model
        self._models = {
            name: one if isinstance(one, tuple) else (one, inputs) for name, one in named.items()
        }
        self._view = view
        self._kit = {**kit_passes(), **{entry_of(one).name: one for one in passes}}
        self._past: list[State] = []
        self._future: list[State] = []
        self._state = State(next(iter(self._models)), tuple(entry_of(one) for one in passes))
        self._chosen = 0
        self.error: BaseException | None = None
        self.difference: Any = None
        self.explorer: Explorer | None = None
        self._build()
        super().__init__([self._bar, self._list, self._editor, self._message, self._stage])
        self.run()

    @property
    def timeline(self) -> Timeline | None:
        """The last good story."""
        return self.explorer.timeline if self.explorer is not None else None

    @property
    def passes(self) -> list[str]:
        """Names of the passes that are switched on, in order."""
        return [entry.name for entry in self._state.entries if entry.on]

    def add(self, pass_: Pass | str) -> None:
        """Add ``pass_``, a function or the name of one of the kit's, at the end and run."""
        chosen = self._kit[pass_] if isinstance(pass_, str) else pass_
        self._change(entries=(*self._state.entries, entry_of(chosen)))

    def remove(self, index: int) -> None:
        """Take the pass at `index` off the list and run."""
        entries = self._state.entries
        self._change(entries=entries[:index] + entries[index + 1 :])

    def move(self, index: int, by: int) -> None:
        """Move the pass at `index` ``by`` -1 (up) or 1 (down) and run."""
        entries = list(self._state.entries)
        to = max(0, min(len(entries) - 1, index + by))
        entries.insert(to, entries.pop(index))
        self._change(entries=tuple(entries))

    def switch(self, index: int, on: bool) -> None:
        """Switch the pass at `index` on or off and run."""
        self._put(index, replace(self._state.entries[index], on=on))

    def edit(self, index: int, source: str) -> None:
        """Give the pass at `index` another source and run; a text that is no pass is refused."""
        try:
            entry = edited(self._state.entries[index], source)
        except (SyntaxError, ValueError) as error:
            self._fail(error, "not run")
            return
        self._put(index, entry)

    def choose(self, model: str) -> None:
        """Take another model and run."""
        self._change(model=model)

    def undo(self) -> None:
        """Go back to the list as it was before the last change, and run."""
        if self._past:
            self._future.append(self._state)
            self._state = self._past.pop()
            self.run()

    def redo(self) -> None:
        """Take back an undo."""
        if self._future:
            self._past.append(self._state)
            self._state = self._future.pop()
            self.run()

    def export(self, path: str | Path = "playground.html") -> Path:
        """Write the story as one HTML page at ``path``.

        Raises:
            ValueError: There is no story yet.
        """
        if self.timeline is None:
            raise ValueError("there is no story to export yet")
        from fxlab.explorer.page import write_html

        written = write_html(self.timeline, path)
        self._say(f"written: {written}")
        return written

    def close(self) -> None:
        """Close the playground with all that is in it, which ipywidgets keeps otherwise."""
        _close_inside(self)
        super().close()

    def run(self) -> None:
        """Trace the model and run the passes that are on; keep the last good story on an error."""
        self._draw()
        model, inputs = self._models[self._state.model]
        chosen = [entry.pass_ for entry in self._state.entries if entry.on]
        self._say(
            f"running {', '.join(self.passes) or 'the trace'} \u2026 (interrupt the kernel to stop)"
        )
        try:
            timeline = timeline_of(model, chosen, inputs)
        except (Exception, KeyboardInterrupt) as error:
            self._fail(error, "stopped")
            return
        failure = getattr(timeline, "failure", None)
        if failure is not None and self.explorer is not None:
            self._fail(failure, "undone")
            return
        self._show(timeline, failure)

    def _show(self, timeline: Timeline, failure: BaseException | None) -> None:
        old, self.error, self.difference = self.explorer, failure, None
        said = f"{len(timeline)} steps"
        if old is not None and old.error is None and failure is None:
            from fxlab.explorer.hunt import diff

            self.difference = diff(old.timeline, timeline)
            said = f"{said}. Against the story before: {self.difference}"
        self.explorer = Explorer(timeline, **self._view)
        self.explorer.error = failure
        self._stage.children = (self.explorer,)
        if old is not None:
            old.close()
        self._say(str(failure) if failure is not None else said, bad=failure is not None)

    def _fail(self, error: BaseException, what: str) -> None:
        """Say an error in place; the last good story stays."""
        self.error = error
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        self._say(f"{what}; below is the last good story.\n{text}", bad=True)

    def _put(self, index: int, entry: Entry) -> None:
        entries = list(self._state.entries)
        entries[index] = entry
        self._change(entries=tuple(entries))

    def _change(self, **fields: Any) -> None:
        self._past.append(self._state)
        self._future.clear()
        self._state = replace(self._state, **fields)
        self.run()

    def _say(self, text: str, bad: bool = False) -> None:
        color = "#a8201a" if bad else "inherit"
        style = f"margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere;color:{color}"
        word = "<b>error</b> " if bad else ""
        self._message.value = f'<pre role="status" style="{style}">{word}{html.escape(text)}</pre>'

    def _build(self) -> None:
        """Make the controls once; `_draw` fills in what changes."""
        self._model = ipywidgets.Dropdown(options=list(self._models), description="model")
        self._kinds = ipywidgets.Dropdown(options=list(self._kit), description="pass")
        self._bar = ipywidgets.HBox(
            [
                self._model,
                self._kinds,
                _button("add", lambda: self.add(str(self._kinds.value)), "add the pass at the end"),
                _button("undo", self.undo, "undo the last change of the list"),
                _button("redo", self.redo, "redo"),
                _button("export", self.export, "write playground.html"),
            ],
            layout=ipywidgets.Layout(flex_flow="row wrap", align_items="center"),
        )
        self._list = ipywidgets.VBox([])
        self._text = ipywidgets.Textarea(
            layout=ipywidgets.Layout(width="100%", height="220px"), continuous_update=False
        )
        self._editor = ipywidgets.Accordion(
            [
                ipywidgets.VBox(
                    [
                        self._text,
                        _button(
                            "run edited",
                            lambda: self.edit(self._chosen, self._text.value),
                            "run the pass with this text",
                        ),
                    ]
                )
            ],
            titles=("source of the pass",),
        )
        self._message = ipywidgets.HTML()
        self._stage = ipywidgets.VBox([])
        self._model.observe(self._model_chosen, "value")

    def _model_chosen(self, change: Any) -> None:
        if change["new"] != self._state.model:
            self.choose(change["new"])

    def _draw(self) -> None:
        """Make the controls show the state."""
        self._model.value = self._state.model
        entries = self._state.entries
        self._chosen = max(0, min(self._chosen, len(entries) - 1))
        old = self._list.children
        self._list.children = tuple(self._line(k, entry) for k, entry in enumerate(entries))
        for line in old:
            _close_inside(line)
            line.close()
        self._editor.layout.display = "" if entries else "none"
        if entries:
            chosen = entries[self._chosen]
            self._text.value = chosen.source
            self._text.disabled = not chosen.source
            self._editor.titles = (f"source of {chosen.name}",)

    def _line(self, index: int, entry: Entry) -> ipywidgets.HBox:
        box = ipywidgets.Checkbox(entry.on, description=entry.name, indent=False)
        box.observe(lambda change: self.switch(index, change["new"]), "value")
        return ipywidgets.HBox(
            [
                box,
                _button("up", lambda: self.move(index, -1), "earlier"),
                _button("down", lambda: self.move(index, 1), "later"),
                _button("source", lambda: self._open(index), "show its source"),
                _button("remove", lambda: self.remove(index), "take it off the list"),
            ],
            layout=ipywidgets.Layout(align_items="center"),
        )

    def _open(self, index: int) -> None:
        self._chosen = index
        self._draw()
        self._editor.selected_index = 0


def _close_inside(widget: ipywidgets.Widget) -> None:
    """Close what a widget holds: children, layout, style; none of them goes with it by itself."""
    for child in getattr(widget, "children", ()):
        _close_inside(child)
        child.close()
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
        if part is not None:
            part.close()


def _button(text: str, run: Callable[[], Any], tooltip: str) -> ipywidgets.Button:
    button = ipywidgets.Button(
        description=text, tooltip=tooltip, layout=ipywidgets.Layout(width="auto", height="44px")
    )
    button.on_click(lambda _: run())
    return button
