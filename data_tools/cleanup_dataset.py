"""The step `clean` under its name in Megatron-LM: python data_tools/cleanup_dataset.py DATA.json CLEANED.json [flags]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.megatron_names import run_script

if __name__ == "__main__":
    run_script("clean", ("input", "output"))
