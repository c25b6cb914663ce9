"""Where can the project be opened without installing it, and what do those places bring?

`REPOSITORY` and `REF` are the one place from which README's badge and the guide's first cell take
the address. The lists are what the hosts document of their images, as far as the kit asks; tests
hold the kit's needs against them, and ``python -m tests.compat --only colab`` installs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.requirements import Requirement

REPOSITORY = "fxlab/fxlab"
REF = "main"  # a release sets this to its tag, see CONTRIBUTING
START = "notebooks/00_start.ipynb"

# --no-deps: the host's own torch, ipywidgets and matplotlib stay as its page expects them.
FIRST_CELL = f"""\
%pip install --quiet --no-deps "fxlab @ git+https://github.com/{REPOSITORY}@{REF}"
%pip install --quiet anywidget graphviz graphviz-pure
"""
# Not of use where the page around the notebook is the host's own.
NOT_THERE = {"jupyterlab"}


@dataclass(frozen=True)
class Host:
    """A service that runs notebooks.

    Attributes:
        name: What it is called.
        source: Where it documents its image, and of when the list is.
        python: Its Python.
        packages: Requirement of each package that it says it has, as far as the kit asks.
        note: What somebody has to know beside.
    """

    name: str
    source: str
    python: str
    packages: tuple[str, ...]
    note: str = ""

    def version(self, name: str) -> str:
        """Return what is documented of a package, such as "==7.7.1"; empty if nothing is."""
        found = {r.name: str(r.specifier) or "any" for r in map(Requirement, self.packages)}
        return found.get(name, "")


COLAB = Host(
    "Google Colab",
    "googlecolab/backend-info, pip-freeze.gpu.txt, June 2026",
    "3.12",
    ("torch==2.11.0", "ipywidgets==7.7.1", "anywidget==0.9.21", "jupyterlab_widgets==3.0.16",
     "graphviz==0.21", "matplotlib==3.10.0", "nbformat==5.10.4", "nbclient==0.10.4",
     "numpy==2.0.2", "ipython==7.34.0", "ipykernel==6.17.1", "traitlets==5.7.1", "pillow==11.3.0",
     "jupyter_client==7.4.9", "setuptools==75.2.0"),
)  # fmt: skip
KAGGLE = Host(
    "Kaggle",
    "Kaggle/docker-python, kaggle_requirements.txt, on top of Colab's image",
    "3.12",
    ("torch", "ipywidgets==8.1.5", "anywidget", "graphviz", "matplotlib<3.8", "jupyterlab",
     "numpy", "onnx==1.18.0"),
    "Switch *Internet* on in the notebook's settings first.",
)  # fmt: skip
HOSTS = (COLAB, KAGGLE)
# Documented below what pyproject asks of a new environment, and why it is enough there.
BELOW = {
    ("Google Colab", "ipywidgets"): "`make compat` runs the explorer's tests with it",
    ("Kaggle", "matplotlib"): "the figures use nothing newer",
}


def badge() -> str:
    """Return the badge of Binder and what stands beneath it."""
    address = f"https://mybinder.org/v2/gh/{REPOSITORY}/{REF}?urlpath=lab/tree/{START}"
    return (
        f"[![Binder](https://mybinder.org/badge_logo.svg)]({address})\n\n"
        "Binder needs minutes to build the image (it installs about 1.3 GB) and less where it has "
        "one; we cannot measure it. Meanwhile\n"
        f"read [00_start]({START}) as it was saved, with everything that it prints. Colab, Kaggle, "
        "VS Code: [elsewhere](notebooks/guides/elsewhere.md)."
    )


def page() -> str:
    """Return the guide to places that are no JupyterLab of one's own."""
    rows = []
    for name in ("torch", "ipywidgets", "anywidget", "graphviz", "matplotlib"):
        cells = []
        for host in HOSTS:
            why = BELOW.get((host.name, name))
            cells.append((host.version(name) or "no") + (f" ({why})" if why else ""))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    names = " | ".join(host.name for host in HOSTS)
    lines = [
        "# Elsewhere: Colab, Kaggle, VS Code, Windows, macOS",
        "",
        "Made by `python -m tests.reference` from `tests/places.py`. Nobody here has a machine of "
        "these kinds: what stands here follows from what they document, and from tests with the "
        "versions that they name.",
        "",
        "## Google Colab and Kaggle",
        "",
        "The first cell:",
        "",
        f"```python\n{FIRST_CELL.rstrip()}\n```",
        "",
        "It leaves the installed torch, ipywidgets and matplotlib as they are. The lectures are in "
        f"the project's folder `notebooks`; each runs alone. {KAGGLE.note} With a wheel that you "
        "built (`python -m build --wheel`) and uploaded: "
        "`%pip install --no-deps fxlab-*.whl` and the second line.",
        "",
        f"| installed there | {names} |",
        "|---|" + "---|" * len(HOSTS),
        *rows,
        "",
        *(f"* {host.name}: {host.source}; Python {host.python}." for host in HOSTS),
        "",
        "`fxlab.explore` shows its widget where the host lets widgets run, and else the same story "
        "as a table of text. `timeline.to_html(path)` writes a page that needs neither.",
        "",
        "## VS Code",
        "",
        "Make the environment as README says and choose it as the notebook's kernel. The Jupyter "
        "extension asks once whether widgets may load their scripts; the explorer's own is in the "
        "notebook and needs no network.",
        "",
        "## Windows and macOS",
        "",
        "README's four commands without make are the way; on Windows the programs are in "
        "`.venv\\Scripts`. Nothing in the kit asks for a shell. Processes are started by `spawn`, "
        "as those systems do: code that runs `run_pipeline` in a script stands under "
        '`if __name__ == "__main__":`. Grading has no limits of memory on Windows; the clock '
        "remains.",
    ]
    return "\n".join(lines) + "\n"
