"""decoders.py PROGRAM: logits and greedy tokens of interop_decoders and of transformers on the same folders."""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

program = sys.argv[1]
TOKENS = 64
no_ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.2}
llama = {"vocab_size": 211, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 128, **no_ends}  # fmt: skip
stretched = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 32}  # fmt: skip


def gpt2(**options):
    config = transformers.GPT2Config(vocab_size=211, n_embd=48, n_layer=3, n_head=4, n_positions=128, **no_ends, **options)
    return transformers.GPT2LMHeadModel(config)


def llama_of(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama, **options))


MODELS = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "llama": lambda: llama_of(tie_word_embeddings=False),
    "llama tied, with biases": lambda: llama_of(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama stretched, wide heads": lambda: llama_of(rope_parameters=stretched, head_dim=16),
}


@torch.no_grad()
def compare(name, model, work):
    prompt = torch.randint(0, 211, (1, 13))
    logits = model(prompt).logits
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False)[0, 13:]
    assert len(tokens) == TOKENS
    folder = work / name.replace(" ", "_")
    model.save_pretrained(folder, max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = len(set(index["weight_map"].values()))
    assert shards > 1, "one file: the index is not tested"
    for place in ("resident", "cpu", "disk"):
        out = work / "out.bin"
        ids = ",".join(map(str, prompt[0].tolist()))
        subprocess.run([program, folder, place, work / f"{folder.name}_{place}", ids, str(TOKENS), out], check=True)
        ours = torch.load(out, weights_only=True)
        difference = (ours["logits"] - logits).abs().max().item()
        assert difference < 1e-4, f"{name}, {place}: logits differ by {difference}"
        assert torch.equal(ours["tokens"], tokens), f"{name}, {place}: {ours['tokens'].tolist()} are not {tokens.tolist()}"
        assert (ours["fills"] > TOKENS) == (place != "resident"), f"{name}, {place}: weights came {ours['fills']} times"
        print(f"{name}, {place}: {shards} shards, logits differ by {difference:.1e}, {TOKENS} tokens are equal ({len(set(tokens.tolist()))} kinds)")


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as temporary:
    for name, make in MODELS.items():
        compare(name, make().eval(), pathlib.Path(temporary))
