"""A pipeline of processes computes what one process computes, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab import models
from fxlab.core.errors import RewriteError
from fxlab.passes.pipeline import PipelineError, PipelineRun, pipeline_stages, run_pipeline
from tests.clocks import HANGS


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _transformer() -> tuple[fxlab.GraphModule, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(models.TransformerBlock(), models.TransformerBlock())
    tracer = fxlab.Tracer(autowrap_functions=())
    return fxlab.GraphModule(model, tracer.trace(model)), torch.randn(8, 6, 32)


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("this stage is broken")


class Hangs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or x.device.type == "cpu":
            time.sleep(1000)
        return x


class Dies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os._exit(7)


def _run(*stages: nn.Module, time_limit: float) -> PipelineRun:
    return run_pipeline(stages, [torch.ones(4, 4)], microbatches=2, time_limit=time_limit)


def test_stages_in_a_row_compute_what_the_program_does() -> None:
    gm, x = _transformer()
    for count in (1, 2, 3, 5):
        value = (x,)
        for stage in pipeline_stages(gm, [x], count):
            value = stage(*value)
            value = value if isinstance(value, tuple) else (value,)
        assert torch.equal(value[0], gm(x))


def test_every_parameter_is_in_one_stage_under_its_own_path() -> None:
    gm, x = _transformer()
    found: dict[str, nn.Parameter] = {}
    for stage in pipeline_stages(gm, [x], 2):
        for name, parameter in stage.named_parameters():
            assert name not in found
            found[name] = parameter
    wanted = dict(gm.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(found[name] is wanted[name] for name in wanted)


def test_two_processes_are_bit_equal_to_the_same_micro_batches_in_one() -> None:
    gm, x = _transformer()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            expected = torch.cat([gm(part) for part in x.chunk(4)])
    finally:
        torch.set_num_threads(threads)
    run = run_pipeline(pipeline_stages(gm, [x[:2]], 2), [x], microbatches=4)
    assert torch.equal(run.output, expected)
    assert len(set(run.processes)) == 2
    assert os.getpid() not in run.processes
    assert all(_gone(pid) for pid in run.processes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_and_losses_are_those_of_one_process(schedule: str) -> None:
    gm, x = _transformer()
    target = torch.randn(8, 6, 32)
    run = run_pipeline(
        pipeline_stages(gm, [x[:2]], 2), [x], target=target, loss=F.mse_loss, microbatches=4,
        schedule=schedule,
    )  # fmt: skip
    loss = F.mse_loss(gm(x), target)
    loss.backward()
    torch.testing.assert_close(torch.stack(run.losses).mean(), loss.detach())
    wanted = {name: p.grad for name, p in gm.named_parameters()}
    assert run.gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(run.gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert all(_gone(pid) for pid in run.processes)
    kinds = [(e.stage, e.kind, e.microbatch) for e in run.events]
    assert sorted(kinds) == sorted(
        (stage, kind, part)
        for stage in (0, 1)
        for kind in ("forward", "backward")
        for part in range(4)
    )
    order = [kind for stage, kind, _ in kinds if stage == 1]
    by_turns = ["forward", "backward"] * 4
    in_blocks = ["forward"] * 4 + ["backward"] * 4
    assert order == (by_turns if schedule == "1f1b" else in_blocks)


def test_an_error_in_a_stage_ends_the_run_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        _run(nn.Linear(4, 4), Fails(), time_limit=HANGS)
    assert "stage 1" in str(caught.value)
    assert "ArithmeticError: this stage is broken" in str(caught.value)
    assert "test_pipeline.py" in str(caught.value)
    assert time.monotonic() - start < HANGS


def test_a_process_that_dies_ends_the_run_with_its_exit_code() -> None:
    with pytest.raises(PipelineError, match=r"stage 0[\s\S]*exit code 7"):
        _run(Dies(), nn.Linear(4, 4), time_limit=HANGS)
    assert multiprocessing.active_children() == []


def test_a_process_that_hangs_is_ended_in_time_and_says_where_it_was() -> None:
    start = time.monotonic()
    _run(nn.Linear(4, 4), nn.Linear(4, 4), time_limit=HANGS)
    limit = 5 + 3 * (time.monotonic() - start)  # a busy machine takes longer to begin
    start = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        _run(nn.Linear(4, 4), Hangs(), time_limit=limit)
    assert time.monotonic() - start < 2 * limit
    text = str(caught.value)
    assert "not done in time" in text
    assert "in forward" in text
    assert "test_pipeline.py" in text
    assert multiprocessing.active_children() == []


def test_values_that_are_no_tensors_cannot_cross_a_cut() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        y = torch.matmul(x, x)
        return torch.matmul(y, y) * n

    with pytest.raises(RewriteError, match="no tensor but a int"):
        pipeline_stages(fxlab.symbolic_trace(program), [torch.ones(64, 64)], 2)


def test_batches_and_schedules_that_do_not_fit_are_refused_before_any_process_starts() -> None:
    stages = [nn.Linear(4, 4)]
    with pytest.raises(PipelineError, match="batch of 4 cannot be cut into 3"):
        run_pipeline(stages, [torch.ones(4, 4)], microbatches=3)
    with pytest.raises(PipelineError, match="no schedule"):
        run_pipeline(stages, [torch.ones(4, 4)], schedule="zigzag")
    with pytest.raises(PipelineError, match="microbatches is 0"):
        run_pipeline(stages, [torch.ones(4, 4)], microbatches=0)
    for wrong in ([], [torch.tensor(1.0)]):
        with pytest.raises(PipelineError, match="batch dimension"):
            run_pipeline(stages, wrong)
    with pytest.raises(PipelineError, match="batch dimension"):
        run_pipeline([], [torch.ones(4, 4)])
    with pytest.raises(PipelineError, match="stage 0 cannot be sent to its process"):
        run_pipeline(stages, [torch.ones(4, 4)], target=torch.ones(4, 4), loss=lambda a, b: a.sum())


class Views(nn.Module):
    """A view that the last layer reads, of a value that is written between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        view = base.view(-1, 2, 2)
        y = self.b(self.a(base))
        base.add_(10)
        return y + view.flatten(1)


def test_a_cut_that_parts_what_shares_memory_before_a_write_is_refused() -> None:
    gm = fxlab.symbolic_trace(Views())
    x = torch.ones(4, 4)
    with pytest.raises(RewriteError, match=r"add_ writes to memory that .* share"):
        pipeline_stages(gm, [x], 2)
    (whole,) = pipeline_stages(gm, [x], 1)
    assert torch.equal(whole(x.clone()), gm(x.clone()))


def test_running_statistics_come_back_from_a_run_in_train_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    gm = fxlab.symbolic_trace(model)
    x = torch.randn(8, 4)
    stages = pipeline_stages(gm, [x[:4]], 2)
    before = {name: value.clone() for name, value in model.named_buffers()}
    run = run_pipeline(stages, [x], microbatches=2, time_limit=HANGS)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    for half in x.chunk(2):
        model(half)
    assert set(run.buffers) == set(before)
    for name, value in model.named_buffers():
        torch.testing.assert_close(run.buffers[name], value)
