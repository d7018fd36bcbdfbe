"""Hugging Face's Trainer with the engine of megatron_llama.

torchrun --nproc-per-node 2 examples/own_module/hf_trainer.py README.md
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from megatron_llama.integrations.transformers import EngineTrainer

text = Path(sys.argv[1]).read_bytes()
samples = [list(text[start : start + 64]) for start in range(0, len(text) - 64, 64)]
data = [{"input_ids": ids, "labels": ids} for ids in samples]
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4))
arguments = TrainingArguments("runs/hf_trainer", max_steps=12, logging_steps=1, use_cpu=True)
units = {"units": [type(model.model.layers[0])]}
EngineTrainer(model, arguments, train_dataset=data, sharding=units).train()
