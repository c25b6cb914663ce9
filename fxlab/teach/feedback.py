"""What does a student get back, and what does the teacher see of the class?

One page of HTML a student: points by behaviour, the card of each part with the smallest failing
program, and a cell to paste that shows each lost point. One page for the teacher: which check
failed how often, with the commonest wrong program. No script, no address, no time of day: the same
grades make the same pages.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from fxlab.teach.collect import Submission, folded
from fxlab.teach.exercise import part
from fxlab.teach.marking import Marked

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
    "color:#1a2233;background:#fff}table{border-collapse:collapse}td,th{border:1px solid #d3dae4;"
    "padding:4px 8px;text-align:left;vertical-align:top}pre{overflow-x:auto;background:#f4f6f8;"
    "padding:8px}"
)


def _e(text: object) -> str:
    return html.escape(str(text), quote=True)


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{_e(title)}</h1>{body}</body></html>\n"
    )


def file_names(students: Sequence[str]) -> dict[str, str]:
    """Student -> name of the feedback's file: safe on every system, different for each student."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for student in students:
        stem = re.sub(r"[^\w.-]+", "_", student, flags=re.ASCII).strip("._")[:80]
        stem = stem or folded(student)[:80] or "student"
        name, number = stem, 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name.casefold())
        names[student] = f"{name}.html"
    return names


def page(one: Submission, marks: Sequence[Marked]) -> str:
    """One student's feedback."""
    points, out_of = sum(m.points for m in marks), sum(m.out_of for m in marks)
    out = [f"<p>{_e(one.name) + ': ' if one.name else ''}<b>{points} of {out_of} points</b></p>"]
    if not one.files:
        out.append("<p>Nothing was handed in.</p>")
    for problem in one.problems:
        out.append(f"<p>Could not be read: {_e(problem)}</p>")
    rows = []
    for mark in marks:
        behaviours = ", ".join(f"{_e(n)} {a}/{b}" for n, (a, b) in mark.behaviours.items())
        title = part(mark.id)[0].title
        rows.append(f"<tr><td>{_e(mark.id)} {_e(title)}</td><td>{mark.points} of {mark.out_of}"
                    f"</td><td>{behaviours}</td></tr>")  # fmt: skip
    head = "<tr><th>exercise</th><th>points</th><th>for</th></tr>"
    out.append(f"<table>{head}{''.join(rows)}</table>")
    for mark in marks:
        if mark.status in ("nothing", "pass"):
            continue
        out.append(f"<h2>{_e(mark.id)} {_e(part(mark.id)[0].title)}</h2>")
        out.append(mark.card or f"<p>{_e(mark.sentence)}</p>")
        if mark.paste:
            text = _e("\n".join(mark.paste))
            out.append("<p>Paste this into a cell below your answer to see each lost point:</p>"
                       f"<pre>{text}</pre>")  # fmt: skip
    return _page(f"Feedback for {one.student}", "".join(out))


def counted(ids: Sequence[str], marks: Mapping[str, Sequence[Marked]]) -> dict[str, Counter[str]]:
    """Part -> how many students lost each behaviour; "" counts those who handed it in."""
    found: dict[str, Counter[str]] = {id: Counter() for id in ids}
    for own in marks.values():
        for mark in own:
            if mark.status in ("nothing", "missing", "todo"):
                continue
            found[mark.id][""] += 1
            for behaviour, (earned, possible) in mark.behaviours.items():
                found[mark.id][behaviour] += earned < possible
    return found


def summary(
    ids: Sequence[str], submissions: Sequence[Submission], marks: Mapping[str, Sequence[Marked]]
) -> str:
    """The teacher's page about the class."""
    nothing = [one.student for one in submissions if not one.notebooks]
    totals = sorted(sum(m.points for m in own) for own in marks.values())
    out_of = sum(part(id)[1].total for id in ids)
    middle = totals[len(totals) // 2] if totals else 0
    out = [f"<p>{len(submissions)} students; median {middle} of {out_of} points; "
           f"{len(nothing)} without a readable notebook.</p>"]  # fmt: skip
    if nothing:
        out.append(f"<p>{_e(', '.join(nothing))}</p>")
    lost = counted(ids, marks)
    for id in ids:
        owner, asked = part(id)
        handed = lost[id][""]
        out.append(f"<h2>{_e(id)} {_e(owner.title)}</h2><p>{handed} answers</p>")
        rows = "".join(
            f"<tr><td>{_e(name)}</td><td>{lost[id][name]} of {handed}</td><td>{points}</td></tr>"
            for name, points in asked.points.items()
        )
        out.append(
            f"<table><tr><th>behaviour</th><th>lost by</th><th>points</th></tr>{rows}</table>"
        )
        out.append(_commonest(id, marks))
    problems = "".join(
        f"<li>{_e(one.student)}: {_e(text)}</li>" for one in submissions for text in one.problems
    )
    if problems:
        out.append(f"<h2>Could not be read</h2><ul>{problems}</ul>")
    return _page("Summary", "".join(out))


def _commonest(id: str, marks: Mapping[str, Sequence[Marked]]) -> str:
    own = [m for marked in marks.values() for m in marked if m.id == id and m.sentence]
    own = [m for m in own if m.status in ("fail", "error")]
    out = []
    for (sentence, wrong), count in Counter((m.sentence, m.wrong) for m in own).most_common(3):
        if count > 1 or not out:
            out.append(f"<p>{count} times: {_e(sentence)}</p>")
            out.append(f"<pre>{_e(wrong)}</pre>" if wrong else "")
    return "".join(out)
