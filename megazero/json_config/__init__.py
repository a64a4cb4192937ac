"""The typed, DeepSpeed-shaped JSON configuration."""

from megazero.json_config.config import JsonConfig
from megazero.json_config.load import load_json_config
from megazero.json_source import DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError", "JsonConfig", "load_json_config"]
