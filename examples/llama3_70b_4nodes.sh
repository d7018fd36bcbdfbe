#!/usr/bin/env bash
# LLaMA 3 70B from scratch on 4 machines with eight GPUs of 80 GB each.
# A layout to try before you reserve more machines.
#   bash examples/llama3_70b_4nodes.sh --data-path PREFIX [options]
# It submits a Slurm job. sbatch reads its own options from the environment: SBATCH_PARTITION,
# SBATCH_ACCOUNT, ...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec sbatch --nodes=4 --job-name=llama3_70b_4nodes "$here/launch/slurm.sbatch" pretrain --config "$here/llama3_70b_4nodes.yaml" "$@"
