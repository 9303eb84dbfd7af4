"""The model of examples/gpt_model.h."""
import math

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.attend_out = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.expand_out = nn.Linear(4 * width, width)

    def attention(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attend_out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.expand_out(F.gelu(self.expand(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocab=256, block=128, layers=4, heads=4, width=256, tied=False):
        super().__init__()
        self.vocab, self.block, self.tied = vocab, block, tied
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        if not tied:
            self.head = nn.Linear(width, vocab, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, 0, 0.02 / math.sqrt(2 * layers) if name.endswith("_out.weight") else 0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.ln(x)
        return F.linear(x, self.tokens.weight) if self.tied else self.head(x)
