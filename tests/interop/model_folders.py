"""model_folders.py PROGRAM REFERENCE: model folders of interop_models in Python, and those of Python in interop_models."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator
from accelerate import disk_offload
from accelerate.utils import OffloadedWeightsLoader, load_checkpoint_in_model, offload_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

program, reference = sys.argv[1:]
sys.path.insert(0, reference)
from write_reference import Mixed, Small, Tied, filled  # noqa: E402


def python_loads(folder):
    """What Accelerate loads from our folders is what the models hold."""
    count = 0
    for path in sorted(folder.iterdir()):
        kind = {"small": Small, "tied": Tied, "mixed": Mixed}[path.name.split("_")[0]]
        model = kind()
        # Accelerate's strict loading wants every name of a tied tensor, which safetensors files do not have.
        load_checkpoint_in_model(model, path, strict=not (kind is Tied and "safetensors" in path.name))
        for name, tensor in filled(kind()).state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), f"{path.name}: {name} differs"
        count += 1
    print(f"Python loads {count} folders of save_model")


def numbered(state):
    """A line per tensor: its name, the number of its storage, its rank and sizes."""
    numbers = {}
    for name, tensor in state.items():
        number = numbers.setdefault(tensor.data_ptr(), len(numbers))
        yield " ".join(map(str, (name, number, tensor.dim(), *tensor.shape)))


def copied(folder, model, work):
    """The model, loaded strictly and written again by the program."""
    names, out = work / "names", work / "copy.bin"
    names.write_text("\n".join(numbered(model.state_dict())) + "\n")
    subprocess.run([program, "copy", folder, names, out], check=True)
    state = torch.load(out, weights_only=True)
    assert list(state) == list(model.state_dict()) or sorted(state) == sorted(model.state_dict()), "other names"
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), f"{folder.name}: {name} differs"


def transformers_models(work):
    """Real folders: several shards with an index, weights tied or not."""
    config = transformers.GPT2Config(vocab_size=211, n_embd=32, n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    llama = transformers.LlamaConfig(vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                                     num_key_value_heads=1, tie_word_embeddings=False)  # fmt: skip
    for name, model in (("gpt2", transformers.GPT2LMHeadModel(config)), ("llama", transformers.LlamaForCausalLM(llama))):
        folder = work / name
        model.save_pretrained(folder, max_shard_size="30KB")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        shards, tied = len(set(index["weight_map"].values())), len(model.state_dict()) - len(index["weight_map"])
        copied(folder, model, work)
        print(f"{name} of transformers: {len(index['weight_map'])} tensors in {shards} shards and {tied} tied names load here")
        assert shards > 1 and tied == (1 if name == "gpt2" else 0)


def save_shards(rank, processes, state, work):
    """What FSDP saves with SHARDED_STATE_DICT: each process writes its rows of every tensor."""
    dist.init_process_group("gloo", init_method=f"file://{work}/store", rank=rank, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    dcp.save({"model": sharded}, storage_writer=dcp.FileSystemWriter(work / "pytorch_model_fsdp_0"))
    dist.destroy_process_group()


def distributed_checkpoints(work):
    config = transformers.GPT2Config(vocab_size=211, n_embd=32, n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    torch.multiprocessing.spawn(save_shards, (2, state, work), nprocs=2)
    copied(work / "pytorch_model_fsdp_0", model, work)
    print(f"{len(state)} tensors that 2 processes saved with torch.distributed.checkpoint load here")


def offload_folders(work):
    """Offload folders of both sides, one inside the other, and a model of Python that runs on one of ours."""
    path = pathlib.Path(reference).parent / "offload" / "write_reference.py"
    spec = importlib.util.spec_from_file_location("offload_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = transformers.GPT2Config(vocab_size=211, n_embd=32, n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
                                     tie_word_embeddings=False)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    folder = work / "spill"
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    offload_state_dict(folder, {name: tensor.to(torch.bfloat16) if "mlp" in name else tensor for name, tensor in state.items()})
    subprocess.run([program, "offload", folder], check=True)
    weights, out = OffloadedWeightsLoader(save_folder=folder), work / "offloaded.bin"
    subprocess.run([program, "copy_offloaded", folder, out], check=True)
    copied = torch.load(out, weights_only=True)
    assert list(weights) == list(copied) == list(state) + list(module.tensors()), "other names"
    for name, tensor in copied.items():
        assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name]), f"{name} differs"
    for name, tensor in module.tensors().items():
        assert torch.equal(weights[name], tensor), f"{name} differs"
    print(f"{len(copied)} tensors in an offload folder that Python and we have written")

    names, inputs = work / "names", torch.arange(8)[None]
    with torch.no_grad():
        expected = model(inputs).logits
    names.write_text("\n".join(numbered(state)) + "\n")
    model.save_pretrained(work / "weights")
    subprocess.run([program, "disk", work / "weights", names, work / "ours_spill"], check=True)
    disk_offload(model, work / "ours_spill", execution_device="cpu")
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, expected), "the model differs on our folder"
    print("a model of transformers runs on an offload folder of load_checkpoint_in_model")


def main(work):
    subprocess.run([program, "save", work / "ours"], check=True)
    python_loads(work / "ours")
    transformers_models(work)
    distributed_checkpoints(work)
    offload_folders(work)
    accelerator = Accelerator(cpu=True)
    for limit in ("10GB", "1KB"):
        for safe in (True, False):
            folder = work / f"python_{limit}_{safe}"
            model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0))
            accelerator.save_model(model, folder, max_shard_size=limit, safe_serialization=safe)
            copied(folder, model, work)
    print("4 folders of Python's save_model load here")


if __name__ == "__main__":  # the processes of spawn import this file
    with tempfile.TemporaryDirectory() as temporary:
        main(pathlib.Path(temporary))
