"""Megatron's ``tools/preprocess_data.py``: the same flags, the same output names
(PREFIX_text_document.bin and .idx)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

from megatron_llama.cli import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", "--megatron-names", *sys.argv[1:]]))
