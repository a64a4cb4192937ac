"""The step `filter_urls` under its name in Megatron-LM: python data_tools/blacklist_urls.py URLS CLEAN_URLS.txt [flags]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.megatron_names import run_script

if __name__ == "__main__":
    run_script("filter_urls", ("input", "output"))
