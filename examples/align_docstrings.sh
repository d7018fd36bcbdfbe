#!/usr/bin/env bash
# From an instruction-tuned LLaMA to one that tells true documentation from corrupted one (DPO), on
# a CPU in a few minutes:
#   bash examples/align_docstrings.sh              # three seeds
#   SEEDS=1 bash examples/align_docstrings.sh      # one
# It pretrains a small model on Python's documentation and tunes it on pairs of signature and
# documentation, as examples/sft_docstrings.sh does. Then it tunes it on preferences: the
# documentation of a signature is chosen, the same text with a third of its words replaced by common
# ones is rejected. At the end transformers loads all models and counts, for signatures that no
# tuning has seen, how often each prefers the true documentation. All files stay in
# runs/align_docstrings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh hf
out=runs/align_docstrings
llama=".venv/bin/python -m megatron_llama"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
seeds=${SEEDS:-1 2 3}
mkdir -p "$out"

if [ ! -e "$out/docs.meta.json" ]; then
    echo "== 1. text, pairs and preferences: the documentation that comes with Python"
    .venv/bin/python -c "
from megatron_llama.data.corpus import write_corpus, write_pairs, write_preferences
print(write_corpus('$out/corpus.jsonl'), 'documents,', write_pairs('$out/pairs.jsonl'), 'pairs')
print('%d preferences, %d held out' % write_preferences('$out/preferences.jsonl', '$out/held-out.jsonl'))"
    $llama preprocess --input "$out/corpus.jsonl" --output-prefix "$out/docs" --overwrite \
        --train-tokenizer --vocab-size 1024 --append-eod
fi

echo "== 2. pretraining"
$llama pretrain --data-path "$out/docs" --hidden-size 96 --intermediate-size 256 --num-layers 2 --num-attention-heads 4 \
    --max-position-embeddings 512 --seq-length 128 --micro-batch-size 16 --train-iters 150 --lr 6e-3 --adam-beta2 0.95 --lr-warmup-iters 10 \
    --log-interval 50 --split 95,5,0 --eval-interval 150 --save "$out/base" --load "$out/base" --export-hf "$out/base-hf"

for seed in $seeds; do
    echo "== 3. tuning on pairs, seed $seed"
    $llama sft --train-data "$out/pairs.jsonl" --init-from-hf "$out/base-hf" --chat-template plain --packing --on-bad-sample drop \
        --seq-length 256 --micro-batch-size 8 --train-iters 200 --lr 4e-3 --adam-beta2 0.95 --lr-warmup-iters 10 --seed "$seed" \
        --log-interval 50 --split 95,5,0 --eval-interval 200 --eval-iters 0 --export-hf "$out/tuned-$seed-hf"
done

echo "== 4. what a preference looks like to the model"
$llama data preview "$out/preferences.jsonl" --tokenizer-model "$out/tuned-${seeds%% *}-hf"

for seed in $seeds; do
    echo "== 5. tuning on preferences, seed $seed"
    $llama align --method dpo --beta 0.01 --init-from-hf "$out/tuned-$seed-hf" --train-data "$out/preferences.jsonl" \
        --valid-data "$out/held-out.jsonl" --packing --seq-length 512 --micro-batch-size 4 --train-iters 360 --lr 1e-3 \
        --adam-beta2 0.95 --lr-warmup-iters 10 --seed "$seed" --log-interval 60 --eval-interval 360 --eval-iters 0 \
        --save "$out/aligned-$seed" --save-interval 360 --export-hf "$out/aligned-$seed-hf"
done

echo "== 6. in transformers: which of the held-out documentation is more likely?"
.venv/bin/python - "$out" $seeds <<'PY'
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

out, seeds = sys.argv[1], sys.argv[2:]
held_out = [json.loads(line) for line in open(f"{out}/held-out.jsonl")]
tokenizer = AutoTokenizer.from_pretrained(f"{out}/tuned-{seeds[0]}-hf")


def log_probability(model, messages):
    """The sum over the tokens of the answer, and their number."""
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"][1:], dtype=torch.bool)
    with torch.no_grad():
        logps = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    return float(logps[mask].sum()), int(mask.sum())


def accuracy(folder):
    """The share of pairs whose true documentation is more likely, as a whole and by its mean token."""
    model, whole, mean = AutoModelForCausalLM.from_pretrained(folder), 0, 0
    for pair in held_out:
        true, true_tokens = log_probability(model, pair["prompt"] + pair["chosen"])
        other, other_tokens = log_probability(model, pair["prompt"] + pair["rejected"])
        whole += true > other
        mean += true / true_tokens > other / other_tokens
    return whole / len(held_out), mean / len(held_out)


for seed in seeds:
    before, after = (accuracy(f"{out}/{name}-{seed}-hf") for name in ("tuned", "aligned"))
    log = [json.loads(line) for line in open(f"{out}/aligned-{seed}/log.jsonl")]
    [*_, rewards] = [line["validation_rewards/accuracies"] for line in log if "validation_rewards/accuracies" in line]
    print(f"seed {seed}: true documentation is more likely in {before[0]:.1%} of the pairs before, in {after[0]:.1%} after;"
          f" by the mean token {before[1]:.1%} and {after[1]:.1%}; its reward is higher in {rewards:.1%}")
    assert 0.4 < before[0] < 0.6 and after[0] > 0.9 and rewards > 0.9
PY
