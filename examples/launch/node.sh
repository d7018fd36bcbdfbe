#!/usr/bin/env bash
# Start a command on all GPUs of this machine: bash examples/launch/node.sh pretrain --config FILE [options]
# PROCESSES: how many (default: one for each GPU). RESTARTS: how often a run that failed is started again (default 3); with
# `load: auto` it goes on from its newest checkpoint. SIGTERM and Ctrl-C end a run behind a checkpoint.
set -euo pipefail
python=${PYTHON:-python}
processes=${PROCESSES:-$("$python" -c 'from megatron_llama.distributed.device import accelerator_count; print(accelerator_count() or 1)')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" --max-restarts "${RESTARTS:-3}" \
    -m megatron_llama "$@"
