"""What did the lectures measure, and what does another machine say to the same questions?

A lecture that reproduces an exhibit of the paper ends with an `Evidence`: in the notebook it reads
as a table, and behind the text the same numbers are kept as data, with every sample. `saved` is
what the lectures found when they were last executed; `run` executes them anew on this machine;
`overview` sets paper and machine side by side for all eight figures and five tables, `comparison`
two machines; `footnotes` names the machines. Verdicts follow `fxlab.paper.verdict`, and nobody
writes one by hand. Ratios and their intervals are computed from the samples, also those of a file.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from fxlab.paper import (
    COUNTS,
    EXHIBITS,
    READING,
    Exhibit,
    Machine,
    Pair,
    Ratio,
    Slot,
    machine,
    table,
    verdict,
)

__all__ = [
    "Evidence",
    "Measured",
    "comparison",
    "counts",
    "footnotes",
    "markdown",
    "overview",
    "ratios",
    "run",
    "saved",
]

MIME = "application/vnd.fxlab.evidence+json"
FORMAT, VERSION = "fxlab.results", 1
SAVED = Path(__file__).with_name("measured.json")
PAPERS_METHOD = "the paper's method"
_SIDES = ("base", "new")

Number = Ratio | float | None


@dataclass(frozen=True)
class Measured:
    """One number of the paper and the same one here.

    Attributes:
        label: What it is about: a batch size, a device, a system.
        quantity: "speed-up" for a ratio of seconds, else what was counted: "nodes", "lines".
        paper: The paper's number; None where it has none.
        here: This machine's; None where nothing ran.
        method: ``PAPERS_METHOD``, or the name of one beyond the paper.
        why: Why there is no number here; empty when there is one.
        differs: What keeps the two from being compared, as for `fxlab.paper.verdict`.
        samples: Seconds of every run, "base" and "new" taken in turns; empty for a count.
        of: The label of the paper's row that it goes with, which may be another: "ResNet50".
        threads: How many torch had; 0 for a count.
    """

    label: str
    quantity: str
    paper: Number
    here: Number
    method: str = PAPERS_METHOD
    why: str = ""
    differs: tuple[str, ...] = ()
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    of: str = ""
    threads: int = 0

    @property
    def verdict(self) -> str:
        """Judge it by the rule; empty for a method beyond the paper."""
        if self.method != PAPERS_METHOD:
            return ""
        if self.paper is None:
            return "not comparable (not in the paper)"
        return verdict(self.paper, self.here, differs=self.differs)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measured:
        """Read ``row``, which `Evidence.to_json` wrote.

        Raises:
            ValueError: A number in it is none.
        """
        samples = {
            side: tuple(map(_number, row.get("samples", {}).get(side, ()))) for side in _SIDES
        }
        here = _read(row["here"])
        if samples["base"]:
            here = _rounded(Pair(samples["base"], samples["new"]).speedup)
        return cls(
            label=str(row["label"]),
            quantity=str(row["quantity"]),
            paper=_read(row["paper"]),
            here=here,
            method=str(row["method"]),
            why=str(row["why"]),
            differs=tuple(map(str, row["differs"])),
            samples=samples if samples["base"] else {},
            of=str(row.get("of", "")),
            threads=int(_number(row.get("threads", 0))),
        )


def _read(value: Any) -> Number:
    if value is None:
        return None
    if isinstance(value, list):
        return Ratio(*map(_number, value))
    return _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"not a number: {value!r}")
    return value


@dataclass(frozen=True)
class Evidence:
    """What one exhibit of the paper comes to on one machine.

    Attributes:
        exhibit: "Figure 7".
        rows: The numbers.
        form: "quick" or "paper-sized".
        machine: Description of the machine by field; empty where nothing depends on it.
        text: How it reads in a lecture.
    """

    exhibit: str
    rows: tuple[Measured, ...]
    form: str = "quick"
    machine: Mapping[str, Any] = field(default_factory=dict)
    text: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """In which form, on which machine and when; empty where nothing depends on it."""
        if not self.machine:
            return ""
        threads = [row.threads for row in self.rows]
        return f"{self.form} form; {Machine(**self.machine).described(threads)}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data: dicts, lists, texts, numbers."""
        rows = [{**asdict(row), "verdict": row.verdict} for row in self.rows]
        data = {"exhibit": self.exhibit, "form": self.form, "machine": dict(self.machine)}
        return json.loads(json.dumps({**data, "rows": rows}))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evidence:
        """Read ``data``, which `to_json` wrote; verdicts are judged anew.

        Raises:
            ValueError: It is no evidence.
        """
        try:
            rows = tuple(Measured.from_json(row) for row in data["rows"])
            about = {str(key): value for key, value in data["machine"].items()}
            if about:  # it is said of the numbers, so it has to be complete
                Machine(**about).described()
            return cls(str(data["exhibit"]), rows, str(data["form"]), about)
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"this is no evidence: {error!r}") from error

    def __repr__(self) -> str:
        return self.text or f"{self.exhibit}: {summary(self.rows)}; {verdicts(self.rows)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self), MIME: self.to_json()}


def _form() -> str:
    return "paper-sized" if os.environ.get("FXLAB_PAPER_SIZE") == "1" else "quick"


def ratios(exhibit: str, slots: Sequence[Slot]) -> Evidence:
    """Keep the speed-ups of a figure, with the seconds of every run.

    Args:
        exhibit: "Figure 7".
        slots: As given to `fxlab.paper.draw`.

    Returns:
        The evidence; in a notebook it reads like `fxlab.paper.table`.

    Example:
        >>> from fxlab.paper import APPENDIX_C, Pair, Slot
        >>> slots = [Slot("one thread", APPENDIX_C[2], Pair((2.0, 2.0), (1.6, 1.6)))]
        >>> [row.verdict for row in ratios("Figure 7", slots).rows]
        ['agrees']
    """
    rows = []
    for slot in slots:
        row = slot.paper
        methods = {PAPERS_METHOD: slot.here, **slot.beyond}
        for method, found in methods.items():
            ran = isinstance(found, Pair)
            rows.append(
                Measured(
                    label=slot.label.replace("\n", ", "),
                    quantity="speed-up",
                    paper=row.speedup if row and method == PAPERS_METHOD else None,
                    here=_rounded(_kept(found).speedup) if ran else None,
                    method=method,
                    why="" if ran else str(found),
                    differs=slot.differs if method == PAPERS_METHOD else (),
                    samples=dict(zip(_SIDES, astuple(_kept(found)), strict=False)) if ran else {},
                    of=row.label if row else "",
                    threads=found.threads if ran else 0,
                )
            )
    return Evidence(exhibit, tuple(rows), _form(), asdict(machine()), table(slots))


def _rounded(ratio: Ratio) -> Ratio:
    return Ratio(*(round(value, 4) for value in ratio))


def _kept(pair: Pair) -> Pair:
    """Round the seconds to the digits that a file keeps: what is computed is what can be again."""
    base, new = (tuple(float(f"{t:.6g}") for t in runs) for runs in (pair.base, pair.new))
    return Pair(base, new, pair.threads)


def counts(
    exhibit: str,
    found: Mapping[str, float | None],
    *,
    unit: str = "nodes",
    differs: Mapping[str, Sequence[str]] | None = None,
) -> Evidence:
    """Keep what was counted here beside what the paper counted (`fxlab.paper.COUNTS`).

    Args:
        exhibit: "Figure 5".
        found: What was counted -> how many here, in the exhibit's unit; None where nothing ran.
        unit: What was counted where the paper has no such number.
        differs: What was counted -> what keeps it from being compared, such as "version".

    Returns:
        The evidence, the same on every machine.

    Raises:
        KeyError: If the paper has no such exhibit.

    Example:
        >>> counts("Figure 1", {"as traced": 4})
        Figure 1: as traced: 4 nodes; exact
    """
    rows = []
    for label, number in found.items():
        fact = COUNTS[exhibit].get(label)
        rows.append(
            Measured(
                label,
                unit if fact is None else fact.unit,
                None if fact is None else fact.value,
                number,
                why="nothing ran here" if number is None else "",
                differs=tuple((differs or {}).get(label, ())),
            )
        )
    return Evidence(exhibit, tuple(rows))


def summary(rows: Iterable[Measured]) -> str:
    """Say in one line what was found here: the paper's method, then the range of each other.

    What goes with one row of the paper is a range: the best alone would be a selection.
    """
    ours: dict[str, list[Measured]] = {}
    beyond: dict[str, list[Measured]] = {}
    for row in rows:
        if row.method == PAPERS_METHOD:
            ours.setdefault(row.of or row.label, []).append(row)
        elif isinstance(row.here, Ratio):
            beyond.setdefault(row.method, []).append(row)
    texts = _grouped((name, _range(same, name)) for name, same in ours.items())
    if beyond:
        ranges = [f"{method} {_range(same)}" for method, same in beyond.items()]
        texts.append(f"beyond the paper: {', '.join(ranges)}")
    return "; ".join(texts)


def _range(rows: Sequence[Measured], named: str = "") -> str:
    """Say the lowest and the highest ratio, and of what; or why there is none.

    Args:
        rows: Of one method.
        named: What of their labels is said already.
    """
    ran = [row for row in rows if row.here is not None]
    if not ran or not isinstance(ran[0].here, Ratio):
        return "; ".join(dict.fromkeys(map(_text, rows)))
    ends = (min(ran, key=lambda row: row.here), max(ran, key=lambda row: row.here))  # type: ignore
    said = {row.label: row.label.removeprefix(named).removeprefix(", ") for row in ends}
    return " to ".join(
        dict.fromkeys(
            f"{_text(row)} ({said[row.label]})" if said[row.label] else _text(row) for row in ends
        )
    )


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Say what is the same of several labels once."""
    said: dict[str, list[str]] = {}
    for label, text in pairs:
        said.setdefault(text, []).append(label)
    return [f"{' and '.join(labels)}: {text}" for text, labels in said.items()]


def _text(row: Measured, number: str = "here") -> str:
    value = getattr(row, number)
    if value is None:
        return row.why if number == "here" else "-"
    if isinstance(value, Ratio):
        other = number == "paper" and row.of not in ("", row.label)
        return f"{row.of}: {value}" if other else str(value)
    return f"{value:g} {row.quantity.removesuffix('s') if value == 1 else row.quantity}"


def verdicts(rows: Iterable[Measured]) -> str:
    """Join the verdicts on the paper's method, each said once, with what it is about."""
    judged = [row for row in rows if row.verdict]
    words: dict[str, set[str]] = {}
    for row in judged:
        words.setdefault(row.of, set()).add(row.verdict)
    if len(set().union(*words.values())) == 1:
        return judged[0].verdict
    pairs = ((r.of if r.of and len(words[r.of]) == 1 else r.label, r.verdict) for r in judged)
    return "; ".join(_grouped(dict.fromkeys(pairs)))


def kept(outputs: Iterable[Mapping[str, Any]]) -> list[Evidence]:
    """Find the evidence in the outputs of an executed notebook's cells."""
    found = [output.get("data", {}).get(MIME) for output in outputs]
    return [Evidence.from_json(data) for data in found if data is not None]


def dump(evidence: Iterable[Evidence], path: Path) -> None:
    """Write a file that `load` reads."""
    rows = [one.to_json() for one in evidence]
    data = {"format": FORMAT, "version": VERSION, "exhibits": rows}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> list[Evidence]:
    """Read a file of results; nothing in it is run.

    Raises:
        ValueError: If it is no such file, or of a newer version.
        OSError: If it can't be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = data["format"] == FORMAT and data["version"] == VERSION
        exhibits = list(data["exhibits"])
    except (ValueError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path.name} is no file of results (`fxlab paper --run --out FILE` writes one): {why}"
        ) from error
    if not known:
        raise ValueError(f"{path.name} is of another format or version than {FORMAT} {VERSION}")
    return [Evidence.from_json(one) for one in exhibits]


def saved() -> list[Evidence]:
    """Return what the lectures found when they were last executed.

    Example:
        >>> "Figure 5" in [evidence.exhibit for evidence in saved()]
        True
    """
    return load(SAVED)


def overview(evidence: Iterable[Evidence]) -> list[dict[str, str]]:
    """Set paper and machine side by side: one row for each figure and table.

    Args:
        evidence: As from `saved`, `run` or `load`.

    Returns:
        Rows of texts: exhibit, section, claim, paper, here, verdict, beware, lecture, minutes,
        and the machine that "here" is.

    Example:
        >>> [row["verdict"] for row in overview(saved()) if row["exhibit"] == "Figure 1"]
        ['exact']
    """
    found: dict[str, list[Evidence]] = {}
    for one in evidence:
        found.setdefault(one.exhibit, []).append(one)
    return [_row(exhibit, found.get(exhibit.evidence, [])) for exhibit in EXHIBITS]


def _row(exhibit: Exhibit, found: Sequence[Evidence]) -> dict[str, str]:
    rows = [row for one in found for row in one.rows]
    here, word = summary(rows), verdicts(rows)
    if not rows:
        here, word = "not run", "not comparable (nothing ran here)"
    elif exhibit.title.startswith("Table") and exhibit.evidence.startswith("Figure"):
        ours = [row for row in rows if row.method == PAPERS_METHOD]
        of = {row.of or row.label: False for row in ours}
        of |= {row.of or row.label: True for row in ours if row.samples}
        here = f"{sum(of.values())} of the {len(of)} ran here; ratios as in {exhibit.evidence}"
        word = "not comparable (seconds of another machine)"
    return {
        "exhibit": exhibit.title,
        "section": exhibit.section,
        "claim": exhibit.claim,
        "paper": exhibit.number or "no number",
        "here": here,
        "verdict": word,
        "beware": exhibit.trap,
        "lecture": exhibit.notebook,
        "minutes": str(exhibit.minutes),
        "machine": "; ".join(dict.fromkeys(one.where for one in found)),
    }


def footnotes(rows: Sequence[dict[str, str]]) -> list[str]:
    """Take out of ``rows`` what is the same of many, and say it once: machines and how to read.

    Args:
        rows: As from `overview` or `comparison`; their columns "machine ..." are removed.

    Example:
        >>> rows = [{"exhibit": "Figure 7", "here": "1.07x [1.04, 1.10]", "machine": "quick form"}]
        >>> footnotes(rows)[0], list(rows[0])
        ('machine, of Figure 7: quick form', ['exhibit', 'here'])
    """
    said: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for column in [name for name in row if name.startswith("machine")]:
            if text := row.pop(column):
                said.setdefault((column, text), {})[row["exhibit"]] = None
    notes = [f"{column}, of {', '.join(of)}: {text}" for (column, text), of in said.items()]
    ratio = any("x [" in text for row in rows for text in row.values())
    return [*notes, READING] if ratio else notes


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    r"""Write rows of texts as a Markdown table; nothing in a text can leave its cell.

    Args:
        rows: Column -> text; the first row's columns are the table's.

    Example:
        >>> print(markdown([{"a": "1 | 2", "b": "<i>"}]))
        | a | b |
        |---|---|
        | 1 \| 2 | &lt;i> |
    """
    if not rows:
        return ""
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    cells = [
        [
            " ".join(cell.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
            for cell in line
        ]
        for line in lines
    ]
    head, *body = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def comparison(
    one: Sequence[Evidence], other: Sequence[Evidence], names: tuple[str, str]
) -> list[dict[str, str]]:
    """Set two machines side by side, number by number.

    Args:
        one: Evidence of the first machine.
        other: Evidence of the second.
        names: What to call the two.

    Returns:
        Rows of texts: exhibit, what, method, paper, the two machines by ``names``, the verdict of
        the rule on the second against the first, and both machines described. That they are two
        machines keeps nothing from being compared; that one ran another form does.
    """
    first, second = _by_key(one), _by_key(other)
    rows = []
    for key in [*first, *(key for key in second if key not in first)]:
        pair = (first.get(key), second.get(key))
        exhibit, label, _, method = key
        measured = [found[1] for found in pair if found is not None]
        cells = ("-" if found is None else _text(found[1]) for found in pair)
        where = ("" if found is None else found[0].where for found in pair)
        rows.append(
            {
                "exhibit": exhibit,
                "what": label,
                "method": method,
                "paper": _text(measured[0], "paper") if method == PAPERS_METHOD else "-",
                **dict(zip(names, cells, strict=True)),
                "verdict": _judged(*pair),
                **dict(zip((f"machine {name}" for name in names), where, strict=True)),
            }
        )
    return rows


_Found = tuple[Evidence, Measured] | None


def _by_key(evidence: Sequence[Evidence]) -> dict[tuple[str, ...], tuple[Evidence, Measured]]:
    return {(e.exhibit, r.label, r.quantity, r.method): (e, r) for e in evidence for r in e.rows}


def _judged(one: _Found, other: _Found) -> str:
    """Judge the second machine's number against the first's."""
    if one is None or other is None:
        return "only one has it"
    a, b = one[1], other[1]
    if a.here is None or b.here is None:
        return "not comparable (nothing ran on one)"
    differs = set(a.differs) ^ set(b.differs)  # from the paper, and so from each other
    if isinstance(a.here, Ratio) and one[0].form != other[0].form:
        differs.add("size")
    return verdict(a.here, b.here, differs=sorted(differs))


def run(
    lectures: Sequence[Path],
    *,
    paper_size: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Evidence], list[str]]:
    """Execute lectures on this machine, each in a process of its own, and collect their evidence.

    Args:
        lectures: Notebooks; they are not written to.
        paper_size: Take the paper's sizes and repeats, which needs minutes and gigabytes.
        progress: Is told what is being done, a line at a time.

    Returns:
        The evidence, and a line for each lecture that failed.

    Raises:
        ImportError: If nbformat or nbclient is not installed (they come with ``fxlab[teach]``).
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    evidence, failed = [], []
    size = {"FXLAB_PAPER_SIZE": "1"} if paper_size else {}
    environment = {
        k: v for k, v in os.environ.items() if k not in ("FXLAB_TEST", "FXLAB_PAPER_SIZE")
    }
    for number, path in enumerate(lectures, 1):
        notebook = nbformat.read(path, as_version=4)
        where = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(notebook, timeout=None, kernel_name="python3", resources=where)
        code = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        try:
            with client.setup_kernel(env={**environment, **size}, stderr=subprocess.DEVNULL):
                for done, place in enumerate(code, 1):
                    cell = notebook.cells[place]
                    progress(f"[{number}/{len(lectures)}] {path.stem}: cell {done} of {len(code)}")
                    client.execute_cell(cell, place)
                    evidence += kept(cell.outputs)
        except CellExecutionError as error:
            failed.append(f"{path.stem} failed: {error.ename}: {error.evalue}")
        except RuntimeError as error:  # the kernel died: not enough memory, most often
            failed.append(f"{path.stem} failed: {error}")
    return evidence, failed
