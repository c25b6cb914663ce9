"""How do several processes run one program at the same time?

Section 6.2.3 of the paper names software pipelining as a use of program scheduling: the program is
cut into stages, each process runs one of them, and while the second stage works on the first
micro-batch, the first one is already busy with the next. `pipeline_stages` cuts (by `cost`),
`run_pipeline` starts one process a stage on this machine and lets torch.distributed.pipelining move
the values; `run_stage` is what each process does, also when ``torchrun`` started it elsewhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from fxlab.core.errors import FxlabError, RewriteError
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.passes.base import undisturbed
from fxlab.passes.effects import AliasClasses, mutated_inputs
from fxlab.passes.order import Regions, RegionWriter
from fxlab.passes.schedule import balanced_stages

__all__ = ["Event", "PipelineError", "PipelineRun", "pipeline_stages", "run_pipeline", "run_stage"]

SCHEDULES = ("gpipe", "1f1b")
RESERVE = 1.0  # seconds of the limit in which hanging stages say where they are


class PipelineError(FxlabError, RuntimeError):
    """A process of a pipeline died, hung, or raised; the text holds its traceback."""


@dataclass(frozen=True)
class Event:
    """What a stage did with one micro-batch.

    Attributes:
        stage: number of the stage.
        kind: ``"forward"`` or ``"backward"``.
        microbatch: number of the micro-batch.
        start: seconds since the first event of the run.
        seconds: how long it took.
    """

    stage: int
    kind: str
    microbatch: int
    start: float
    seconds: float


@dataclass
class PipelineRun:
    """What a pipeline computed.

    Attributes:
        output: what the program returns for the whole batch.
        losses: loss of each micro-batch, a scalar of the program's dtype; empty without a loss.
        gradients: parameter path -> gradient of the mean loss, of the parameter's shape and dtype;
            empty without a loss.
        buffers: buffer path -> buffer after the run, of its shape and dtype (running statistics);
            empty in eval mode. The stages given to the run keep theirs.
        events: what each stage did when, in order of time.
        processes: process ids, by stage; all of them have ended.
    """

    output: Any
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)


def pipeline_stages(gm: GraphModule, inputs: Sequence[Any], count: int) -> list[GraphModule]:
    """Return new modules which, called one after the other, compute what `gm` does.

    A stage takes what is alive at its beginning and returns what is alive at its end, so values
    that a later stage needs travel through, as copies. Parameters are shared with `gm` under their
    paths.

    Args:
        gm: the program; left untouched. Its inputs and what crosses a cut must be tensors.
        inputs: example inputs, of one micro-batch.
        count: number of stages.

    Raises:
        RewriteError: a value that is no tensor crosses a cut, two values that share memory cross
            one before a write to it, or there are too few nodes.

    Example:
        >>> import fxlab, torch
        >>> gm = fxlab.symbolic_trace(torch.nn.Sequential(*[torch.nn.Linear(4, 4)] * 4))
        >>> first, second = pipeline_stages(gm, [torch.ones(2, 4)], 2)
        >>> x = torch.ones(2, 4)
        >>> torch.equal(second(first(x)), gm(x))
        True
    """
    stage_of = balanced_stages(gm, inputs, count)
    nodes = list(gm.graph.nodes)
    regions = Regions(nodes)
    nodes = [node for node in nodes if node not in regions.borders]
    output = nodes[-1]
    alive = _alive(nodes, stage_of, count, output)
    _check_memory(gm, stage_of, alive)
    stages = []
    for number in range(count):
        graph = Graph()
        env: dict[Node, Node] = {}
        targets: dict[str, Any] = {}
        for value in alive[number]:
            env[value] = graph.placeholder(value.name)
        writer = RegionWriter(graph, regions, env)
        for node in nodes:
            if stage_of.get(node) != number:
                continue
            for value in node.all_input_nodes:
                if value.op == "get_attr" and value not in env:
                    env[value] = graph.node_copy(value)
                    targets[str(value.target)] = _find(gm, str(value.target))
            writer.copy(node)
            if node.op == "call_module":
                targets[str(node.target)] = gm.get_submodule(str(node.target))
        writer.close()
        if number == count - 1:
            graph.node_copy(output, env.__getitem__)
        else:
            values = tuple(env[value] for value in alive[number + 1])
            graph.output(values[0] if len(values) == 1 else values)
        stage = GraphModule(targets, graph, f"Stage{number}")
        stage.train(gm.training)
        stage.graph.lint()
        stages.append(stage)
    with undisturbed(gm, inputs) as given:
        _check_borders(stages, given)
    return stages


def _find(gm: torch.nn.Module, path: str) -> Any:
    found: Any = gm
    for atom in path.split("."):
        found = getattr(found, atom)
    return found


def _alive(
    nodes: Sequence[Node], stage_of: dict[Node, int], count: int, output: Node
) -> list[dict[Node, None]]:
    """For each stage the values that it is given: made before it, read in it or after it."""
    alive: list[dict[Node, None]] = [{} for _ in range(count)]
    for value in nodes:
        if value.op in ("get_attr", "output"):
            continue
        made = -1 if value.op == "placeholder" else stage_of[value]
        readers = [count - 1 if user is output else stage_of.get(user, -1) for user in value.users]
        last = max(readers, default=-1)
        if value.op == "placeholder":
            last = max(last, 0)  # the first stage takes all inputs
        for stage in range(made + 1, last + 1):
            alive[stage][value] = None
    return alive


def _check_memory(
    gm: GraphModule, stage_of: dict[Node, int], alive: Sequence[dict[Node, None]]
) -> None:
    """Refuse a cut that parts what shares memory: a write to one copy is not seen in the other."""
    classes = AliasClasses(gm)
    writes = [(node, value) for node in stage_of for value in mutated_inputs(node, gm)]
    for node, value in writes:
        place = classes.find(value)
        for number in range(1, stage_of[node] + 1):
            shared = [other for other in alive[number] if classes.find(other) is place]
            if len(shared) > 1:
                raise RewriteError(
                    f"{node.name} writes to memory that {shared[0].name} and {shared[1].name} "
                    f"share, and both go into stage {number} as copies",
                    node=node,
                    hint="write to a new value instead (x = x + 1), or cut into fewer stages",
                )


def _check_borders(stages: Sequence[GraphModule], inputs: Sequence[Any]) -> None:
    values = tuple(inputs)
    with torch.no_grad():
        for number, stage in enumerate(stages):
            for node, value in zip(stage.graph.nodes, values, strict=False):
                if not isinstance(value, torch.Tensor):
                    raise RewriteError(
                        f"{node.name} goes into stage {number} and is no tensor but a "
                        f"{type(value).__name__}",
                        node=node,
                        hint="cut with another number of stages, or fix the value while tracing",
                    )
            result = stage(*(v.clone() for v in values))
            values = result if isinstance(result, tuple) else (result,)


class _Recorder:
    """Times what a stage does, by wrapping the two methods of the stage object.

    torch.distributed.pipelining runs a stage once before the first micro-batch, to learn shapes;
    what that wrote into buffers is put back.
    """

    def __init__(self, stage: Any) -> None:
        self.events: list[tuple[str, int, float, float]] = []
        self._kept: list[Any] | None = [(b, b.clone()) for b in stage.submod.buffers()]
        for kind in ("forward", "backward"):
            name = f"{kind}_one_chunk"
            setattr(stage, name, self._timed(kind, getattr(stage, name)))

    def _timed(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(chunk: int, *args: Any, **kwargs: Any) -> Any:
            kept, self._kept = self._kept, None
            with torch.no_grad():
                for buffer, value in kept or ():
                    buffer.copy_(value)
            start = time.monotonic()
            try:
                return method(chunk, *args, **kwargs)
            finally:
                self.events.append((kind, chunk, start, time.monotonic() - start))

        return run


def run_stage(
    stage: GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    target: torch.Tensor | None = None,
    loss: Callable[..., Any] | None = None,
    microbatches: int = 4,
    schedule: str = "gpipe",
) -> dict[str, Any]:
    """Run this process's stage for one batch; torch.distributed must be initialised.

    Every process of the group calls it with the stage of its rank and the same batch. Under
    ``torchrun`` this is the whole program of a process.

    Args:
        stage: the stage whose number is this process's rank.
        inputs: the whole batch; only the first stage looks at it.
        target: what `loss` compares with; only the last stage looks at it.
        loss: ``loss(output, target)``, a mean over the batch; None to compute outputs only.
        microbatches: into how many pieces the batch is cut.
        schedule: ``"gpipe"`` (all forwards, then all backwards) or ``"1f1b"`` (by turns).

    Returns:
        ``output`` and ``losses`` (None and empty but in the last stage), ``gradients``,
        ``buffers`` (in train mode), ``events``.
    """
    import torch.distributed as dist
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    place = pipelining.PipelineStage(stage, rank, world, torch.device("cpu"))
    recorder = _Recorder(place)
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    plan = kind(place, microbatches, loss_fn=loss)
    losses: list[torch.Tensor] = []
    arguments = tuple(inputs) if rank == 0 else ()
    extra = {"target": target, "losses": losses} if loss is not None and rank == world - 1 else {}
    with contextlib.nullcontext() if loss is not None else torch.no_grad():
        output = plan.step(*arguments, **extra)
    gradients = {
        name: parameter.grad
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }
    return {
        "output": None if output is None else _detached(output),
        "losses": [value.detach() for value in losses],
        "gradients": gradients,
        "buffers": dict(stage.named_buffers()) if stage.training else {},
        "events": recorder.events,
    }


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(_detached(item) for item in value)


def run_pipeline(
    stages: Sequence[torch.nn.Module],
    inputs: Sequence[torch.Tensor],
    *,
    target: torch.Tensor | None = None,
    loss: Callable[..., Any] | None = None,
    microbatches: int = 4,
    schedule: str = "gpipe",
    threads: int = 1,
    time_limit: float = 120.0,
) -> PipelineRun:
    """Run stages in processes of their own, one each, and wait for the result.

    Args:
        stages: from `pipeline_stages`; they and `loss` must pickle (a function of torch does).
        inputs: the whole batch: tensors of any dtype and of shape ``[N, ...]``, the same N.
        target: what `loss` compares with: of shape ``[N, ...]`` and the dtype that it takes.
        loss: a mean over the batch; None to compute outputs only.
        microbatches: into how many pieces the batch is cut.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        threads: torch's threads in each process.
        time_limit: seconds after which the run is ended.

    Returns:
        Outputs, losses, gradients by path, and when each stage did what.

    Raises:
        PipelineError: a process raised, died, or the time was up; with the traceback of the stage.
            No process is left behind.
    """
    if schedule not in SCHEDULES:
        raise PipelineError(f"no schedule is called {schedule!r}", expected=f"one of {SCHEDULES}")
    if not stages or not inputs or not all(getattr(v, "ndim", 0) for v in inputs):
        raise PipelineError(
            f"a pipeline of {len(stages)} stages was given {len(inputs)} inputs",
            expected="at least one of each; the inputs are tensors with a batch dimension",
        )
    if microbatches < 1:
        raise PipelineError(f"microbatches is {microbatches}", expected="a whole number from 1")
    size = min(value.shape[0] for value in inputs)
    if size % microbatches:
        raise PipelineError(
            f"a batch of {size} cannot be cut into {microbatches} equal micro-batches",
            hint="choose a number of micro-batches that divides the batch",
        )
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + time_limit
    with tempfile.TemporaryDirectory() as folder:
        crew, lines = [], []
        for rank, stage in enumerate(stages):
            ours, theirs = context.Pipe(duplex=False)
            options = {
                "target": target if rank == len(stages) - 1 else None,
                "loss": loss,
                "microbatches": microbatches,
                "schedule": schedule,
            }
            given = tuple(inputs) if rank == 0 else ()
            # As bytes: torch's own way would move the caller's tensors into shared memory.
            try:
                work = pickle.dumps((stage, given, options))
            except Exception as error:
                raise PipelineError(
                    f"stage {rank} cannot be sent to its process: {error}",
                    hint="use a loss and functions that a module defines by name, no lambda",
                ) from error
            job = (work, rank, len(stages), folder, threads, time_limit, theirs)
            crew.append(context.Process(target=_worker, args=job, daemon=True))
            lines.append(ours)
        try:
            for process in crew:
                process.start()
            results = _collect(crew, lines, folder, deadline)
        finally:
            _end(crew)
            for line in lines:
                line.close()
    return _put_together(results, [process.pid or 0 for process in crew])


def _worker(
    work: bytes,
    rank: int,
    world: int,
    folder: str,
    threads: int,
    time_limit: float,
    line: Any,
) -> None:
    """What a process does: join the others, run the stage, send the result or the traceback."""
    _die_with_parent()
    trace = (Path(folder) / f"trace-{rank}.txt").open("w", encoding="utf-8")
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
    try:
        import torch.distributed as dist

        torch.set_num_threads(threads)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=time_limit),
        )
        stage, inputs, options = pickle.loads(work)
        result = run_stage(stage, inputs, **options)
        line.send_bytes(pickle.dumps(("done", result)))
        dist.destroy_process_group()
    except BaseException:
        line.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    finally:
        line.close()
        trace.close()


def _die_with_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _collect(
    crew: Sequence[Any], lines: Sequence[Any], folder: str, deadline: float
) -> list[dict[str, Any]]:
    """Wait for every stage's result; the first trouble ends the run."""
    results: dict[int, dict[str, Any]] = {}
    while len(results) < len(crew):
        open_ranks = [rank for rank in range(len(crew)) if rank not in results]
        waiting = {lines[rank]: rank for rank in open_ranks}
        sentinels = {crew[rank].sentinel: rank for rank in open_ranks}
        left = deadline - RESERVE - time.monotonic()
        ready = connection.wait([*waiting, *sentinels], timeout=max(left, 0))
        if not ready:
            raise _timed_out(crew, open_ranks, folder)
        errors = []
        for item in ready:
            rank = waiting[item] if item in waiting else sentinels[item]
            if rank in results:
                continue
            try:
                if not lines[rank].poll(0.2 if item in sentinels else 0):
                    raise EOFError
                kind, value = pickle.loads(lines[rank].recv_bytes())
            except EOFError:
                crew[rank].join(1)
                code = crew[rank].exitcode
                errors.append((rank, f"its process died with exit code {code}"))
                continue
            if kind == "error":
                errors.append((rank, value))
            else:
                results[rank] = value
        if errors:
            raise _failed(errors, crew, lines, results)
    return [results[rank] for rank in range(len(crew))]


def _failed(
    errors: list[tuple[int, str]], crew: Sequence[Any], lines: Sequence[Any], results: Any
) -> PipelineError:
    """Name the stage that failed first: the others fail because it is gone."""
    died = [e for e in errors if "died with exit code" in e[1]]
    lost = ("Connection closed by peer", "Connection reset", "Broken pipe")
    own = [e for e in errors if not any(text in e[1] for text in lost)]
    if not died and not own:  # only consequences so far; the cause may still be on its way
        end = time.monotonic() + 2
        for rank, process in enumerate(crew):
            process.join(max(end - time.monotonic(), 0))
            known = {r for r, _ in errors} | set(results)
            if rank not in known:
                with contextlib.suppress(EOFError):
                    if lines[rank].poll(0):
                        kind, value = pickle.loads(lines[rank].recv_bytes())
                        own += [(rank, value)] * (kind == "error")
                if not own and process.exitcode not in (0, None):
                    died.append((rank, f"its process died with exit code {process.exitcode}"))
    rank, text = (own or died or errors)[0]
    return PipelineError(
        f"stage {rank} of the pipeline failed; all processes were ended\n{text.rstrip()}"
    )


def _timed_out(crew: Sequence[Any], ranks: Sequence[int], folder: str) -> PipelineError:
    """Ask the hanging stages where they are, and say it."""
    texts = []
    if hasattr(signal, "SIGUSR1") and hasattr(faulthandler, "register"):
        paths = [Path(folder) / f"trace-{rank}.txt" for rank in ranks]
        asked = []
        for rank, path in zip(ranks, paths, strict=True):
            if crew[rank].is_alive() and path.exists():  # who is still starting does not listen
                os.kill(crew[rank].pid, signal.SIGUSR1)
                asked.append(path)
        end, before = time.monotonic() + RESERVE, None
        while time.monotonic() < end:  # until all have said it, and nothing more comes
            sizes = [path.stat().st_size for path in asked]
            if all(sizes) and sizes == before:
                break
            before = sizes
            time.sleep(0.05)
        for rank, path in zip(ranks, paths, strict=True):
            text = path.read_text("utf-8") if path.exists() else ""
            texts.append(f"stage {rank} is at\n{text.rstrip() or '  (still starting)'}")
    joined = "\n".join(texts)
    return PipelineError(
        f"the pipeline was not done in time; stages without a result: {list(ranks)}\n{joined}",
        hint="raise time_limit, or see where the stages wait",
    )


def _end(crew: Sequence[Any]) -> None:
    """Let finished processes go, end the others, and wait until all are gone."""
    end = time.monotonic() + (0 if sys.exc_info()[0] is not None else 5)
    for process in crew:
        if process.pid is not None:
            process.join(max(end - time.monotonic(), 0))
    for process in crew:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in crew:
        if process.pid is not None:
            process.join()


def _put_together(results: Sequence[dict[str, Any]], processes: list[int]) -> PipelineRun:
    gradients: dict[str, torch.Tensor] = {}
    for result in results:
        for name, value in result["gradients"].items():
            gradients[name] = gradients[name] + value if name in gradients else value
    raw = [
        (start, stage, kind, chunk, seconds)
        for stage, result in enumerate(results)
        for kind, chunk, start, seconds in result["events"]
    ]
    first = min((event[0] for event in raw), default=0.0)
    return PipelineRun(
        output=results[-1]["output"],
        losses=results[-1]["losses"],
        gradients=gradients,
        buffers={name: value for result in results for name, value in result["buffers"].items()},
        events=[
            Event(stage, kind, chunk, start - first, seconds)
            for start, stage, kind, chunk, seconds in sorted(raw)
        ],
        processes=processes,
    )
