"""Writes what `accelerate estimate-memory` of Python Accelerate shows for models that Transformers builds from a config.json:
estimates.json, a list of {"config", "total", "largest", "names", "parameters", "table"}.

Weights that a model ties are tied first; upstream forgets that for models without values and counts them again.

    python tests/reference/estimate/write_reference.py
"""
# needs: transformers==5.22.2

import contextlib
import io
import json
import logging
import pathlib
import types
import warnings
from unittest import mock

import torch
from accelerate import init_empty_weights
from accelerate.commands import estimate
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoConfig, AutoModel

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

SMALL = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 200, "vocab_size": 1000}
CONFIGS = [
    {"model_type": "bert", "vocab_size": 28996},
    {"model_type": "bert", **SMALL, "max_position_embeddings": 64, "type_vocab_size": 4},
    {"model_type": "roberta"},
    {"model_type": "xlm-roberta", "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1},
    {"model_type": "camembert", **SMALL},
    {"model_type": "distilbert"},
    {"model_type": "distilbert", "dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 512, "vocab_size": 500},
    {"model_type": "electra"},
    {"model_type": "electra", **SMALL, "embedding_size": 96},
    {"model_type": "albert"},
    {"model_type": "albert", **SMALL, "num_hidden_groups": 2, "inner_group_num": 2},
    {"model_type": "gpt2"},
    {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 100, "n_positions": 32},
    {"model_type": "gptj"},
    {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 32},
    {"model_type": "gpt_neox"},
    {"model_type": "gpt_neox", **SMALL, "attention_bias": False, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default", "rope_theta": 10000.0}},
    {"model_type": "bloom"},
    {"model_type": "bloom", "hidden_size": 128, "n_layer": 3, "n_head": 4},
    {"model_type": "opt"},
    {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512, "num_hidden_layers": 2, "num_attention_heads": 16, "ffn_dim": 4096, "do_layer_norm_before": False},
    {"model_type": "opt", "num_hidden_layers": 2, "enable_bias": False, "layer_norm_elementwise_affine": False},
    {"model_type": "llama"},
    {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256},
    {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    {"model_type": "mistral"},
    {"model_type": "mistral", **SMALL, "num_key_value_heads": 3, "head_dim": 24},
    {"model_type": "mixtral"},
    {"model_type": "mixtral", **SMALL, "num_key_value_heads": 3, "num_local_experts": 5},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 48},
    {"model_type": "gemma"},
    {"model_type": "gemma", **SMALL, "num_key_value_heads": 1, "head_dim": 32},
    {"model_type": "phi"},
    {"model_type": "phi", **SMALL, "num_key_value_heads": 3, "qk_layernorm": True},
    {"model_type": "phi3"},
    {"model_type": "phi3", **SMALL, "num_key_value_heads": 3, "pad_token_id": 0},
    {"model_type": "t5"},
    {"model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 100, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "feed_forward_proj": "gated-gelu", "vocab_size": 300},
    {"model_type": "bart"},
    {"model_type": "bart", "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 100, "decoder_ffn_dim": 120, "vocab_size": 300},
    {"model_type": "vit"},
    {"model_type": "vit", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 200, "image_size": 64, "patch_size": 8, "num_channels": 1, "qkv_bias": False},
]


def model_of(config):
    options = {key: value for key, value in config.items() if key != "model_type"}
    with init_empty_weights():
        model = AutoModel.from_config(AutoConfig.for_model(config["model_type"], **options), dtype=torch.float32)
    model.tie_weights()
    return model


def table_of(model, name):
    args = types.SimpleNamespace(model_name=name, library_name=None, trust_remote_code=False, dtypes=["float32", "float16", "int8", "int4"])
    shown = io.StringIO()
    with mock.patch.object(estimate, "create_empty_model", lambda *_, **__: model), contextlib.redirect_stdout(shown):
        estimate.estimate_command(args)
    return shown.getvalue()


estimates = []
for config in CONFIGS:
    model = model_of(config)
    total, (largest, names) = calculate_maximum_sizes(model)
    estimates.append({"config": config, "total": total, "largest": largest, "names": names,
                      "parameters": sum(p.numel() for p in model.parameters()), "table": table_of(model, config["model_type"])})
path = pathlib.Path(__file__).parent / "estimates.json"
path.write_text(json.dumps(estimates, indent=1, ensure_ascii=False) + "\n")
