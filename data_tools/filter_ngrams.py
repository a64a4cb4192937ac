"""The step `decontaminate` under its name in Megatron-LM, with its own flags: python data_tools/filter_ngrams.py --input ..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.megatron_names import run_script

if __name__ == "__main__":
    run_script("decontaminate")
