"""The log of a job on standard output."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.logging import setup_logging

LOG = """
import logging
from megazero.logging import setup_logging
setup_logging(0)
for number in range(3):
    logging.getLogger("megazero.test").info("line %d", number)
logging.getLogger("megazero.test").info("%d", "no number")
"""


def test_a_level_that_the_script_has_set_stays_and_one_that_is_asked_for_is_set():
    logger = logging.getLogger("megazero")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    try:
        for before, asked, after in (
            (logging.WARNING, None, logging.WARNING),
            (logging.NOTSET, None, logging.INFO),
            (logging.WARNING, logging.INFO, logging.INFO),
        ):
            logger.setLevel(before)
            setup_logging(0, asked)
            assert logger.level == after
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_log_that_cannot_be_written_is_one_line_and_a_wrong_call_keeps_its_traceback(unbuffered):
    with open("/dev/full", "w") as full:
        command, variables = [sys.executable, "-c", LOG], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=True, env=variables
        )
    first, *rest = done.stderr.splitlines()
    assert first == "WARNING: the log cannot be written, the job goes on: [Errno 28] No space left on device"
    assert rest[0] == "--- Logging error ---" and done.stderr.count("Traceback") == 1 and "TypeError" in done.stderr
