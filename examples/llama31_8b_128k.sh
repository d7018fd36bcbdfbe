#!/usr/bin/env bash
# LLaMA 3.1 8B on sequences of 131072 tokens, on 4 machines with eight GPUs of 80 GB each: the last phase of its training.
#   bash examples/llama31_8b_128k.sh --data-path PREFIX [options]        (sbatch's own options: SBATCH_PARTITION, SBATCH_ACCOUNT, ...)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec sbatch --nodes=4 --job-name=llama31_8b_128k "$here/launch/slurm.sbatch" pretrain --config "$here/llama31_8b_128k.yaml" "$@"
