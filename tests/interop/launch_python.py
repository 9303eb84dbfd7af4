"""A program of a Python Accelerate user, started by our launcher. launch_python.sh says how."""
import argparse
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail_on", type=int, default=-1)
    parser.add_argument("--succeed_at", type=int, default=0)
    parser.add_argument("--lonely", action="store_true")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    ranks = accelerator.gather(torch.tensor([rank])).tolist()
    pids = gather_object([os.getpid()])
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"rank {rank} of {accelerator.num_processes} gathered {ranks} in {len(set(pids))} processes, "
          f"{accelerator.distributed_type}, precision {accelerator.mixed_precision}, restarts {restarts}", flush=True)
    if rank == arguments.fail_on or restarts < arguments.succeed_at:
        raise ValueError(f"rank {rank} does not like it")
    if arguments.lonely:
        accelerator.wait_for_everyone()  # for those who failed
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
