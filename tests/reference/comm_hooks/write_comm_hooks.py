"""Writes comm_hooks.json: the gradients of DistributedDataParallel with each communication hook. Run with torch 2.11.

Two processes meet through Gloo. The network is Linear(20, 24), tanh, Linear(24, 24), tanh, Linear(24, 3) in float32; nothing is
drawn. Parameter p in the order of `parameters()` has value[i] = cos(0.7 i + p) * 0.3, the input of rank r in step s has
x[i] = sin(0.3 i + s + 2 r), both computed in float64 and then rounded; the batch has 6 rows, the loss is the mean of the squared
outputs. After each step the parameters move by -0.1 of their gradient. Stored are some elements of each gradient, `STRIDE` apart.

In torch 2.11 `batched_powerSGD_hook` fails an assertion as soon as it compresses: it hands a matrix to a function that wants a
stack of matrices. Here it gets a stack of one.
"""

import json
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power

STEPS = 5
STRIDE = 13
SMALL = {"start_powerSGD_iter": 2}
CASES = [
    (hook, wrapper, options)
    for hook in ("fp16", "bf16", "power_sgd", "batched_power_sgd")
    for wrapper in ("no", "fp16", "bf16")
    for options in ([SMALL] if hook.endswith("sgd") else [{}])
] + [
    ("power_sgd", "no", SMALL | {"matrix_approximation_rank": 2}),
    ("power_sgd", "no", SMALL | {"matrix_approximation_rank": 3, "random_seed": 7}),
    ("power_sgd", "no", SMALL | {"matrix_approximation_rank": 3, "min_compression_rate": 3.5}),
    ("power_sgd", "no", SMALL | {"matrix_approximation_rank": 2, "orthogonalization_epsilon": 0.01}),
    ("power_sgd", "no", SMALL | {"warm_start": False}),
    ("power_sgd", "no", SMALL | {"use_error_feedback": False}),
    ("power_sgd", "no", {"start_powerSGD_iter": 0, "warm_start": False, "use_error_feedback": False}),
    ("power_sgd", "no", SMALL | {"batch_tensors_with_same_shape": True, "min_compression_rate": 0.5}),
    ("batched_power_sgd", "no", SMALL | {"matrix_approximation_rank": 3, "random_seed": 12345}),
    ("batched_power_sgd", "no", SMALL | {"warm_start": False, "use_error_feedback": False}),
]


def tolerance(run):
    """How far two processors may differ: they add up the products of a matrix in another order. In 16 bits a sum may then round the
    other way, by 2^-11 of itself in fp16 and by 2^-8 in bf16, and what was lost comes again as error feedback."""
    if "bf16" in (run["hook"], run["wrapper"]):
        return 2e-3
    return 2e-4 if "fp16" in (run["hook"], run["wrapper"]) else 1e-6


def stacked(orthogonalize):
    def call(matrices, epsilon=0):
        orthogonalize(matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon)

    return call


def formula(shape, f):
    size = 1
    for n in shape:
        size *= n
    return f(torch.arange(size, dtype=torch.float64)).to(torch.float32).reshape(shape)


def network():
    net = torch.nn.Sequential(
        torch.nn.Linear(20, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)
    )
    for p, parameter in enumerate(net.parameters()):
        parameter.data.copy_(formula(parameter.shape, lambda i: torch.cos(0.7 * i + p) * 0.3))
    return net


def run(rank, hook, wrapper, options):
    net = network()
    # One bucket: with several, the steps of PyTorch's PowerSGD mix their messages up on Gloo.
    model = torch.nn.parallel.DistributedDataParallel(net)
    state = dist.group.WORLD
    if hook.endswith("sgd"):
        state = power.PowerSGDState(process_group=None, **options)
    function = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": power.powerSGD_hook,
        "batched_power_sgd": power.batched_powerSGD_hook,
    }[hook]
    if wrapper != "no":
        wrap = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}[wrapper]
        function = wrap(function)
    model.register_comm_hook(state=state, hook=function)
    steps = []
    for s in range(STEPS):
        x = formula([6, 20], lambda i: torch.sin(0.3 * i + s + 2 * rank))
        model(x).pow(2).mean().backward()
        steps.append([p.grad.reshape(-1)[::STRIDE].tolist() for p in net.parameters()])
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
    return steps


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    power._orthogonalize = stacked(power._orthogonalize)
    runs = []
    for hook, wrapper, options in CASES:
        steps = run(rank, hook, wrapper, options)
        runs.append({"hook": hook, "wrapper": wrapper, "options": options, "steps": steps})
    if rank == 0:
        lines = ",\n".join(json.dumps(one) for one in runs)
        path = pathlib.Path(__file__).parent / "comm_hooks.json"
        path.write_text('{"stride": %d, "runs": [\n%s\n]}\n' % (STRIDE, lines))
    dist.barrier()
    os._exit(0)  # threads that still hold tensors would abort an ordinary end


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(main, args=(folder,), nprocs=2)
