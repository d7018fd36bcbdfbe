#!/usr/bin/env bash
# LLaMA 3 8B from scratch on 64 machines with eight GPUs of 80 GB each.
#   bash examples/llama3_8b_64nodes.sh --data-path PREFIX [options]
# It submits a Slurm job. sbatch reads its own options from the environment: SBATCH_PARTITION,
# SBATCH_ACCOUNT, ...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec sbatch --nodes=64 --job-name=llama3_8b_64nodes "$here/launch/slurm.sbatch" pretrain --config "$here/llama3_8b_64nodes.yaml" "$@"
