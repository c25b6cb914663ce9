"""The code-aligned layout: lanes are live intervals, and drawing is linear."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from fxlab.explorer.lanes import MAX_LANES, layout
from tests.clocks import own_seconds, times_as_long

VIEWER = Path(__file__).parent.parent / "fxlab" / "explorer" / "viewer.js"
BOTTLENECK = [[], [0], None, [1], [3], [4], [5], [6], [7], [0], [9], [8, 10], [11], [12]]


def random_rows(count: int, seed: int) -> list[list[int] | None]:
    draw = random.Random(seed)
    rows: list[list[int] | None] = []
    for row in range(count):
        live = [k for k in range(max(0, row - 12), row) if rows[k] is not None]
        if draw.random() < 0.1:
            rows.append(None)
        elif draw.random() < 0.15 or not live:
            rows.append([])
        else:
            rows.append(sorted({draw.choice(live) for _ in range(draw.choice((1, 1, 2, 3)))}))
    return rows


def test_a_chain_is_one_straight_lane():
    result = layout([[], [0], [1], [2]])
    assert result.lane == [0, 0, 0, 0]
    assert result.width == 1


def test_a_shortcut_keeps_its_lane_beside_the_branch():
    result = layout(BOTTLENECK)
    assert result.lane == [0, 1, -1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert result.width == 2


@pytest.mark.parametrize("seed", range(20))
def test_lanes_crossing_a_row_are_exactly_the_values_alive_there(seed):
    rows = random_rows(60, seed)
    result = layout(rows)
    for row in range(len(rows)):
        crossing = [
            k
            for k in range(row + 1)
            if rows[k] is not None and any(r and k in r for r in rows[row + 1 :])
        ]
        assert result.live[row] == len(crossing)
        lanes = [result.lane[k] for k in crossing]
        assert len(set(lanes)) == len(lanes), "two values alive at one row share a lane"


@pytest.mark.parametrize("seed", range(20))
def test_as_many_lanes_as_the_most_values_alive_at_once(seed):
    rows = random_rows(80, seed)
    result = layout(rows)
    needed = max(
        1 + sum(1 for k in range(row) if rows[k] is not None and result.end[k] > row)
        for row in range(len(rows))
        if rows[row] is not None
    )
    assert result.width == needed


def test_a_reader_before_its_producer_is_reported_and_not_lost():
    result = layout([[], [2], [0]])
    assert result.back == [(1, 2)]


def test_parameters_go_to_the_right_of_computed_values_when_lanes_run_out():
    count = MAX_LANES + 6
    parameters: list[list[int] | None] = [[] for _ in range(count)]
    rows = [*parameters, []]  # the parameters, then x
    for k in range(count):
        rows.append([len(rows) - 1, k])
    leaf = [True] * count + [False] * (count + 1)
    result = layout(rows, leaf)
    assert {result.lane[row] for row in range(count, len(rows))} == {0}
    assert min(result.lane[:count]) == 1


def test_ten_thousand_rows_are_laid_out_in_linear_time_that_is_near_writing_them_down():
    def chain(count: int) -> list[list[int] | None]:
        rows: list[list[int] | None] = [[row - 1] if row else [] for row in range(count)]
        for row in range(20, count, 7):
            rows[row] = [row - 1, row - 20]
        return rows

    def seconds(work, rows):
        return lambda: own_seconds(lambda: work(rows))

    many = chain(10_000)
    assert times_as_long(seconds(layout, many), seconds(layout, chain(1000))) < 25  # 10 if linear
    assert times_as_long(seconds(layout, many), seconds(json.dumps, many)) < 12


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the viewer's layout")
def test_the_browser_lays_out_the_same_lanes():
    cases = [random_rows(50, seed) for seed in range(10)] + [BOTTLENECK]
    script = (
        "import { readFileSync } from 'node:fs';"
        f"const text = readFileSync({json.dumps(str(VIEWER))}, 'utf8');"
        "const url = 'data:text/javascript;base64,' + Buffer.from(text).toString('base64');"
        "const { layout } = await import(url);"
        f"const cases = {json.dumps(cases)};"
        "console.log(JSON.stringify(cases.map((rows) => layout(rows))));"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True
    )
    for rows, theirs in zip(cases, json.loads(done.stdout), strict=True):
        ours = layout(rows)
        assert (ours.lane, ours.end, ours.width) == (theirs["lane"], theirs["end"], theirs["width"])
