"""The log of a job on standard output."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.logging import PrintableFormatter, _Formatter, setup_logging

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


def test_a_level_that_the_script_has_set_stays_in_run_script():
    script = """
import logging
from megazero.entry import run_script
logger = logging.getLogger("megazero")
logger.setLevel(logging.DEBUG)
run_script(lambda ranks: None, lambda _: logger.debug("line"))
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "DEBUG: line\n"


def test_handlers_of_the_logger_receive_the_log_and_those_of_the_root_do_not(tmp_path):
    script = f"""
import logging
from megazero.logging import setup_logging
logging.basicConfig(filename="{tmp_path}/root")
logging.getLogger("megazero").addHandler(logging.FileHandler("{tmp_path}/own"))
for _ in range(2):
    setup_logging(1)  # whose INFO standard output leaves out
logging.getLogger("megazero.test").info("line")
logging.getLogger("megazero.test").warning("line")
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "WARNING: [rank 1] line\n"
    assert (tmp_path / "own").read_text() == "line\nline\n" and (tmp_path / "root").read_text() == ""


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


@pytest.mark.parametrize("formatter", [PrintableFormatter(), _Formatter(rank=0)])
def test_a_line_of_the_log_does_not_command_the_terminal(formatter):
    text = "a\x00\x1b[2J\x7f\x9b\u202eb\r\u2066\n\tcé\u200f中 \U0001f600"
    record = logging.makeLogRecord({"msg": "%s", "args": (text,), "levelno": logging.INFO})
    assert formatter.format(record) == r"a\x00\x1b[2J\x7f\x9b\u202eb\r\u2066" + "\n\tcé\u200f中 \U0001f600"


@pytest.mark.parametrize("formatter", [PrintableFormatter(), _Formatter(rank=0)])
@pytest.mark.parametrize("kind", [str, Path, ValueError])
def test_a_name_in_a_message_does_not_begin_a_line_of_its_own(formatter, kind):
    args = (kind("data/a\nWARNING: all is lost\n"), 2)
    record = logging.makeLogRecord({"msg": "%s has\n%d lines", "args": args, "levelno": logging.INFO})
    assert formatter.format(record) == r"data/a\nWARNING: all is lost\n has" + "\n2 lines"
    assert record.args == args  # as other handlers get it


def test_the_log_of_a_command_goes_to_standard_error_and_does_not_command_the_terminal():
    code = "import logging; from megazero.logging import log_to_stderr; log_to_stderr(); logging.info('a\\x1b[2Jb')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "a\\x1b[2Jb\n")


@pytest.mark.parametrize(
    "command", ["generate_samples.py --load", "-m megazero.checkpoint verify", "-m data_tools inspect"]
)
def test_a_name_in_an_error_does_not_command_the_terminal(command):
    command = [sys.executable, *command.split(), "no\x1b[31m"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60)
    assert done.stderr.startswith("error: ") and "no\\x1b[31m" in done.stderr and "\x1b" not in done.stderr, done
