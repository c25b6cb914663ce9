"""Run a pipeline of processes on one machine or several; ``torchrun`` starts them.

On one machine:

    torchrun --nproc-per-node 2 notebooks/scripts/pipeline.py

On two machines, the same line on each (HOST is the name of the first):

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        notebooks/scripts/pipeline.py

Each process makes the same program, keeps the stage of its rank, and the last one prints the loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.models import TransformerBlock
from fxlab.passes.pipeline import pipeline_stages, run_stage


def main() -> None:
    """Run one batch through the pipeline, forwards and backwards."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gm = fxlab.symbolic_trace(nn.Sequential(*(TransformerBlock() for _ in range(4))))
    x, target = torch.randn(8, 16, 32), torch.randn(8, 16, 32)
    stage = pipeline_stages(gm, [x[:2]], world)[rank]
    result = run_stage(stage, [x], target=target, loss=F.mse_loss, microbatches=4, schedule="1f1b")
    if rank == world - 1:
        print(f"loss {torch.stack(result['losses']).mean():.6f} from {world} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
