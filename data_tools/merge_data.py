"""The step `merge` as a script: python data_tools/merge_data.py --input FOLDER --output ALL.json"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.megatron_names import run_script

if __name__ == "__main__":
    run_script("merge")
