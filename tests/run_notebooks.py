"""Execute lectures in place, with outputs that are the same on every machine.

``make notebooks`` runs this. What changes from run to run is taken out: the ids of widgets (their
saved state refers to them, so they are numbered), times of execution, the kernel's own version.
What they found beside numbers of the paper is written to ``fxlab/measured.json``, from which `fxlab
paper` and README have their table.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from fxlab import evidence

ROOT = Path(__file__).resolve().parent.parent
ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
STATE = "application/vnd.jupyter.widget-state+json"
VIEW = "application/vnd.jupyter.widget-view+json"


def shown_widgets(notebook: NotebookNode) -> list[str]:
    """List the ids of the widgets that the outputs show, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [o["data"][VIEW]["model_id"] for o in outputs if VIEW in o.get("data", {})]


def reachable(state: dict[str, dict], shown: list[str]) -> list[str]:
    """List the widgets that are shown and those that they refer to, in a stable order."""
    order = dict.fromkeys(shown)
    pending = list(shown)
    while pending:
        text = json.dumps(state.get(pending.pop(0), {}))
        new = [i for i in re.findall(r"IPY_MODEL_([0-9a-f]{32})", text) if i not in order]
        order.update(dict.fromkeys(new))
        pending += new
    return [i for i in order if i in state]


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join what was printed in one go: the kernel sends it in pieces, as time will have it."""
    whole: list[NotebookNode] = []
    for output in outputs:
        last = whole[-1] if whole else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            whole.append(output)
    return whole


def stable(notebook: NotebookNode, name: str) -> NotebookNode:
    """Take out of an executed notebook what differs between two runs."""
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    widgets = notebook.metadata.pop("widgets", {}).get(STATE)
    if widgets is not None and (kept := reachable(widgets["state"], shown_widgets(notebook))):
        widgets["state"] = {i: widgets["state"][i] for i in kept}
        notebook.metadata["widgets"] = {STATE: widgets}
        numbered = {
            i: uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{n}").hex for n, i in enumerate(kept)
        }
        text = ID.sub(lambda m: numbered.get(m[0], m[0]), nbformat.writes(notebook))
        notebook = nbformat.reads(text, as_version=4)
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    }
    notebook.metadata["language_info"] = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
    return notebook


def execute(path: Path) -> None:
    """Execute the notebook at ``path`` from a fresh kernel and write it back."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.pop("widgets", None)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=True,
    )
    client.execute()
    notebook = stable(notebook, path.stem)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def found_by_the_lectures() -> list[evidence.Evidence]:
    """Collect the evidence that the saved outputs of all lectures hold."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            found += evidence.kept(cell.get("outputs", []))
    return found


def main(paths: list[str]) -> int:
    """Execute every notebook of ``paths``, or all lectures."""
    chosen = [Path(p) for p in paths] or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    for path in chosen:
        print(path.name, flush=True)
        execute(path.resolve())
    evidence.dump(found_by_the_lectures(), evidence.SAVED)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
