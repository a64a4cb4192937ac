"""Puts the GPT-2 job's flags into its JSON document wherever the document must be checked as it will run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from megazero.json_config.config import ZERO
from megazero.json_config.schema import AUTO, join, show
from megazero.json_source import DeepSpeedConfigError
from megazero.optim.lr_schedule import LRScheduleConfig
from megazero.optim.schedules import SCHEDULES, TORCH_SCHEDULES
from megazero.option import as_given

logger = logging.getLogger(__name__)

BATCH_KEYS = {"batch_size": "train_micro_batch_size_per_gpu", "global_batch_size": "train_batch_size"}
STEPS_KEY = "gradient_accumulation_steps"
TYPES = "data_types"  # the name of a section
DTYPE_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}

# The fields that the keys of each home stand for.
HOME_KEYS = {
    "offload_optimizer": {
        "device": "offload_optimizer",
        "nvme_path": "nvme_path",
        "pin_memory": "pin_memory",
        "ratio": "offload_optimizer_ratio",
    },
    "offload_param": {"device": "offload_param", "nvme_path": "nvme_path", "pin_memory": "pin_memory"},
}

# The fields of flags that describe a schedule of their own, instead of the file's; and those of its warmup.
SCHEDULE_FIELDS = [field.name for field in fields(LRScheduleConfig) if field.name != "lr"]
WARMUP_FIELDS = ("warmup", "lr_warmup_iters")
# The parameter of the file's schedule that --lr stands for; where there is none, it scales the optimizer's own rate.
PEAK_LR = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
    "CyclicLR": "max_lr",
}


class Flags:
    """The flags of a command line, together with the JSON file that it names.

    Args:
        given: the flags that were given, by field name of `components`.

    Attributes:
        written: the flags that have been put into the document, each by the path of its key.
    """

    def __init__(self, path: str, given: Mapping[str, Any], components: Sequence[type], world_size: int) -> None:
        self.path = path
        self.given = given
        self.world_size = world_size
        self._fields: dict[str, Field] = {f.name: f for component in components for f in fields(component)}
        self.written: dict[str, str] = {}
        self.describe_schedule = False  # if so, the file's is checked but not used

    @property
    def source(self) -> str:
        """The file, and the flags that have been put into it, for error messages."""
        flags = ", ".join(dict.fromkeys(self.written.values()))
        return f"--deepspeed_config {self.path}" + (f" with {flags}" if flags else "")

    def value(self, field: str) -> Any:
        """The flag's value, or its default."""
        return self.given.get(field, self._fields[field].default)

    def text(self, field: str) -> str:
        """The flag as it was given."""
        value = self.given[field]
        if (field, value) == ("offload_optimizer", "cpu") and "cpu_optimizer" in self.given:
            return self.given["cpu_optimizer"]
        return as_given(self._fields[field], value)

    def note(self, field: str, key: str, value: Any, written: Any) -> None:
        """Logs that a given flag overrides the file's `key`, unless it has the same `value`, `written` in the file."""
        if field in self.given and self.given[field] != value:
            self._wins(field, key, written)

    def _wins(self, field: str, key: str, written: Any) -> None:
        logger.info("%s wins over %s %s of %s", self.text(field), key, show(written), self.path)

    def put(
        self, section: dict[str, Any], key: str, field: str, path: str = "", words: Mapping[Any, Any] | None = None
    ) -> None:
        """Puts a flag, if it was given, into the section at `path`, and logs what it overrides there.

        Args:
            words: what the file has instead of the flag's words, where these differ.
        """
        if field in self.given:
            value = self.given[field]
            value = value if words is None else words.get(value, value)
            is_decided = section.get(key) != AUTO or field == "placement"  # where "auto" is a value
            if key in section and is_decided and section[key] != value:
                self._wins(field, join(path, key), section[key])
            section[key] = value
            self.written[join(path, key)] = self.text(field)

    def write_into(self, document: dict[str, Any]) -> None:
        """Puts the flags into a document in the current forms: batch sizes, dtype, schedule, ZeRO's stage and homes.

        Raises:
            DeepSpeedConfigError: --lr means nothing to the file's schedule.
        """
        _write_batch(document, self)
        _write_dtype(document, self)
        _write_schedule(document, self)
        _write_zero(document, self)


def _write_batch(document: dict[str, Any], flags: Flags) -> None:
    """Writes the batch sizes, so that their equation is checked for what will run."""
    for key in (*BATCH_KEYS.values(), STEPS_KEY):
        if document.get(key) in (AUTO, None):
            document.pop(key, None)
    for field, key in BATCH_KEYS.items():
        flags.put(document, key, field)
    if not document.keys() & BATCH_KEYS.values():
        document[BATCH_KEYS["batch_size"]] = flags.value("batch_size")
    if flags.given.keys() >= BATCH_KEYS.keys() and STEPS_KEY in document:  # it follows from the two flags
        steps, ranks = document.pop(STEPS_KEY), flags.world_size // flags.value("model_parallel_size")
        if steps * flags.given["batch_size"] * ranks != flags.given["global_batch_size"]:
            both = " and ".join(flags.text(field) for field in BATCH_KEYS)
            logger.info("%s win over %s %s of %s", both, STEPS_KEY, show(steps), flags.path)


def _write_dtype(document: dict[str, Any], flags: Flags) -> None:
    """Writes --fp16, --bf16, or the --no-... form of one: the document's other keys may name that dtype."""
    wanted = next((dtype for dtype in ("fp16", "bf16") if flags.given.get(dtype)), None)
    if wanted and not any(name in document for name, dtype in DTYPE_SECTIONS.items() if dtype == wanted):
        document[wanted] = {}
    for name, dtype in DTYPE_SECTIONS.items():
        if isinstance(section := document.get(name), Mapping):
            document[name] = dict(section)
            flags.put(document[name], "enabled", wanted or dtype, name, {True: dtype == wanted})


def _write_schedule(document: dict[str, Any], flags: Flags) -> None:
    """Makes --lr the peak of the file's schedule, unless flags describe another one."""
    section = document.get("scheduler")
    if not isinstance(section, Mapping) or not isinstance(section.get("params", {}), Mapping):
        return  # there is none, or the reader will report what is wrong
    kind, params = section.get("type"), dict(section.get("params", {}))
    if kind not in SCHEDULES and kind not in TORCH_SCHEDULES:
        return  # the reader will name the known ones
    others = [field for field in SCHEDULE_FIELDS if field in flags.given]
    if params.get("warmup_num_steps") == AUTO:
        others = [field for field in others if field not in WARMUP_FIELDS]
    if others:
        logger.info("%s wins over scheduler %s of %s", " ".join(map(flags.text, others)), kind, flags.path)
        flags.describe_schedule = True
    elif "lr" in flags.given:
        if kind == "LRRangeTest":
            raise DeepSpeedConfigError(
                f"{flags.text('lr')} means nothing to scheduler {kind}, which tries its own rates."
            )
        if kind in PEAK_LR:
            flags.put(params, PEAK_LR[kind], "lr", "scheduler.params")
            document["scheduler"] = {**section, "params": params}


def _write_zero(document: dict[str, Any], flags: Flags) -> None:
    """Writes ZeRO's stage, homes and dtypes: the file's settings of a home then apply to the home that the flag names.

    `--cpu-optimizer` implies `--offload-optimizer cpu`, unless the file's home is nvme.
    """
    zero = document.get(ZERO, {})
    if not isinstance(zero, dict):
        return  # the reader will report what is wrong
    document[ZERO], home = zero, zero.get("offload_optimizer")
    # Updates of states on nvme, in whatever case the file writes it, run on the host as well.
    on_nvme = isinstance(home, Mapping) and str(home.get("device")).lower() == "nvme"
    if "cpu_optimizer" in flags.given and not on_nvme:
        flags.given = {"offload_optimizer": "cpu", **flags.given}
    for name, keys in HOME_KEYS.items():
        section = zero.get(name)
        if (section is None and name not in flags.given) or not isinstance(section, (Mapping, type(None))):
            continue
        zero[name] = dict(section or {})
        for key, field in keys.items():
            flags.put(zero[name], key, field, f"{ZERO}.{name}")
    for name in ("stage", "placement", "overlap_param_gather", "delayed_param_update"):
        flags.put(zero, name, name, ZERO)
    flags.put(zero, "mics_shard_size", "shard_size", ZERO)
    enabled = (dtype for name, dtype in DTYPE_SECTIONS.items() if _is_enabled(document.get(name)))
    words = {"compute": next(enabled, "fp32"), "same": None}
    flags.put(document, "communication_data_type", "reduce_dtype", "", words)
    if isinstance(types := document.get(TYPES, {}), Mapping):
        document[TYPES] = dict(types)
        flags.put(document[TYPES], "grad_accum_dtype", "grad_dtype", TYPES, words)


def _is_enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True
