"""Train Hugging Face's LLaMA on the bytes of a text.

torchrun --nproc-per-node 2 THIS_FILE README.md
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS, SAMPLES, LENGTH = 20, 4, 64

dist.init_process_group()
torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
for module in model.modules():
    if isinstance(module, LlamaDecoderLayer):
        fully_shard(module)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

text = torch.frombuffer(bytearray(Path(sys.argv[1]).read_bytes()), dtype=torch.uint8).long()
for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH, (dist.get_world_size(), SAMPLES))
    ids = torch.stack([text[start : start + LENGTH] for start in starts[dist.get_rank()]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1} loss {loss.item():.6f} norm {float(norm):.6f}")
dist.destroy_process_group()
