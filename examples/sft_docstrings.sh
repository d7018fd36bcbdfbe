#!/usr/bin/env bash
# From text to an instruction-tuned LLaMA in HuggingFace format, on a CPU in a few minutes:
#   bash examples/sft_docstrings.sh
# It pretrains a small model on Python's documentation, tunes it on pairs of signature and
# documentation with three seeds, and exports all models. Then transformers loads them and measures
# the loss of answers that no model has seen. All files stay in runs/sft_docstrings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh hf
out=runs/sft_docstrings
llama=".venv/bin/python -m megatron_llama"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$out"

if [ ! -e "$out/docs.meta.json" ]; then
    echo "== 1. text and pairs: the documentation that comes with Python"
    .venv/bin/python -c "
from megatron_llama.data.corpus import write_corpus, write_pairs
print(write_corpus('$out/corpus.jsonl'), 'documents,', write_pairs('$out/pairs.jsonl'), 'pairs')"
    $llama preprocess --input "$out/corpus.jsonl" --output-prefix "$out/docs" --overwrite \
        --train-tokenizer --vocab-size 1024 --append-eod
fi

echo "== 2. what the pairs look like to the model"
$llama data preview "$out/pairs.jsonl" --tokenizer-model "$out/docs-tokenizer"
$llama data stats "$out/pairs.jsonl" --tokenizer-model "$out/docs-tokenizer" --seq-length 256 --output "$out/stats.html"

echo "== 3. pretraining"
$llama pretrain --data-path "$out/docs" --hidden-size 96 --intermediate-size 256 --num-layers 2 --num-attention-heads 4 \
    --max-position-embeddings 256 --seq-length 128 --micro-batch-size 16 --train-iters 150 --lr 6e-3 --adam-beta2 0.95 --lr-warmup-iters 10 \
    --log-interval 50 --split 95,5,0 --eval-interval 150 --save "$out/base" --load "$out/base" --export-hf "$out/base-hf"

for seed in 1 2 3; do
    echo "== 4. tuning, seed $seed"
    $llama sft --train-data "$out/pairs.jsonl" --init-from-hf "$out/base-hf" --chat-template plain --packing --on-bad-sample drop \
        --seq-length 256 --micro-batch-size 8 --train-iters 200 --lr 4e-3 --adam-beta2 0.95 --lr-warmup-iters 10 --seed "$seed" \
        --log-interval 50 --split 95,5,0 --eval-interval 100 --eval-iters 0 --export-hf "$out/tuned-$seed-hf"
done

echo "== 5. in transformers: the loss of answers of the held-out pairs"
.venv/bin/python - "$out" <<'PY'
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

out = sys.argv[1]
pairs = [json.loads(line)["messages"] for line in open(f"{out}/pairs.jsonl")]
held_out = pairs[round(0.95 * len(pairs)):]
tokenizer = AutoTokenizer.from_pretrained(f"{out}/tuned-1-hf")


def loss(folder):
    model, total, count = AutoModelForCausalLM.from_pretrained(folder), 0.0, 0
    for messages in held_out:
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(found["input_ids"][:257]), torch.tensor(found["assistant_masks"][1:257], dtype=torch.bool)
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="none")
        total, count = total + float(losses[mask].sum()), count + int(mask.sum())
    return total / count


base = loss(f"{out}/base-hf")
print(f"base model: {base:.4f}")
for seed in (1, 2, 3):
    tuned = loss(f"{out}/tuned-{seed}-hf")
    print(f"seed {seed}: {tuned:.4f}, {1 - tuned / base:.1%} lower")
    assert tuned <= 0.9 * base
PY
