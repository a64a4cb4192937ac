"""`group_duplicate_url.py` under the name that Megatron-LM documents: python data_tools/group_duplicates_url.py PAIRS GROUPS"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.megatron_names import run_script

if __name__ == "__main__":
    run_script("group_duplicates", ("input", "output"))
