#!/usr/bin/env bash
# A slice of the tests as an old processor runs them: once with AVX2 and no more, once with what every x86-64 has. torch, oneDNN and MKL are
# told so by their variables. Rounding differs there, and bf16 is multiplied in fp32. Arguments are test files in place of the slice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
export OMP_NUM_THREADS=1
slice=(tests/model/nn tests/model/test_hf_logits.py tests/engine/test_muon.py tests/engine/test_moments.py tests/parallel/test_parity.py tests/prove/test_drift.py)
if [ $# -gt 0 ]; then
    slice=("$@")
fi
# capability of torch's own kernels, oneDNN's and MKL's instructions
for processor in "avx2 AVX2 AVX2" "default SSE41 SSE4_2"; do
    read -r aten onednn mkl <<<"$processor"
    echo "a processor with $onednn:"
    ATEN_CPU_CAPABILITY=$aten ONEDNN_MAX_CPU_ISA=$onednn MKL_ENABLE_INSTRUCTIONS=$mkl .venv/bin/python -m pytest "${slice[@]}"
done
