"""Compiles a model, runs it by our program, and compares the results: `compiled_models.py PROGRAM FOLDER`."""

import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file

program, folder = sys.argv[1:]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x, mask):
        hidden = torch.relu(self.first(x)) * mask
        return self.second(hidden), hidden.sum(dim=1)


torch.manual_seed(5)
model, other = Net().eval(), Net().eval()
batch = torch.export.Dim("batch", min=2, max=64)
example = (torch.randn(4, 8), torch.ones(4, 16))
exported = torch.export.export(model, example, dynamic_shapes=({0: batch}, {0: batch}))
torch._inductor.aoti_compile_and_package(exported, package_path=f"{folder}/model.pt2",
                                         inductor_configs={"aot_inductor.link_libtorch": False, "always_keep_tensor_constants": True})
save_file(other.state_dict(), f"{folder}/other.safetensors")

x, mask = torch.randn(7, 8), (torch.rand(7, 16) > 0.5).float()
save_file({"x": x, "mask": mask}, f"{folder}/inputs.safetensors")
subprocess.run([program, folder], check=True)
found = load_file(f"{folder}/results.safetensors")
for name, net in (("own", model), ("other", other)):
    with torch.no_grad():
        logits, sums = net(x, mask)
    torch.testing.assert_close(found[f"{name}_logits"], logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[f"{name}_sums"], sums, rtol=1e-5, atol=1e-6)
print("compiled models: 2 outputs with 2 sets of weights are Python's")
