"""Writes tiny folders of GPT-2 and Llama with transformers, and what the models say in expected.json: the scores of all positions
of a prompt, and the tokens that follow it greedily.

The weights are made of whole numbers, so that they are the same on every processor. `gpt2` is one file with tied embeddings, `llama`
several with an index, grouped queries and stretched rotary positions, `llama_tied` has tied embeddings and biases.
"""
# needs: transformers==5.22.2

import json
import pathlib
import shutil

import torch
import transformers

here = pathlib.Path(__file__).parent
no_ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
llama = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, **no_ends}  # fmt: skip
stretched = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16}  # fmt: skip
models = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=41, n_embd=16, n_layer=2, n_head=2, n_positions=32, **no_ends)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(rope_parameters=stretched, tie_word_embeddings=False, **llama)),
    "llama_tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **llama)
    ),
}


def tolerance(case):
    return 1e-5


@torch.no_grad()
def fill(model):
    """Values that look random; norms stay near 1; embeddings and biases are small, or models would repeat a token."""
    start = 1
    for name, parameter in model.named_parameters():
        numbers = torch.arange(start, start + parameter.numel(), dtype=torch.int64)
        values = ((numbers * numbers * 7919 + numbers * 104729) % 4099).double() / 4099 - 0.5
        if parameter.dim() == 1 and name.endswith("weight"):
            values = values + 1
        else:
            values = values * (0.25 if parameter.dim() == 1 or "wte" in name or "embed" in name else 2)
        parameter.copy_(values.float().reshape(parameter.shape))
        start += parameter.numel()
    return model.eval()


@torch.no_grad()
def says(name, model, prompt, tokens):
    ids = torch.tensor([prompt])
    logits = model(ids).logits[0]
    for _ in range(tokens):
        best = model(ids).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3, "too close: other processors might choose another token"
        ids = torch.cat([ids, best.indices[:1, None]], 1)
    return {"model": name, "prompt": prompt, "logits": logits.tolist(), "tokens": ids[0, len(prompt) :].tolist()}


cases = []
for name, make in models.items():
    model = fill(make())
    shutil.rmtree(here / name, ignore_errors=True)
    model.save_pretrained(here / name, max_shard_size="6KB" if name == "llama" else "1GB")
    (here / name / "generation_config.json").unlink(missing_ok=True)
    cases.append(says(name, model, [3, 1, 4, 1, 5], 24))
(here / "expected.json").write_text(json.dumps({"cases": cases}) + "\n")
