"""The step `merge` under its name in Megatron-LM: python data_tools/merge_jsons.py --json_path FOLDER --output_file ALL.json"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.megatron_names import run_script

if __name__ == "__main__":
    run_script("merge", renamed={"--json_path": "--input", "--output_file": "--output"})
