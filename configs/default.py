"""The defaults of all fields. Other configs override them. `python -m mini_gpt.config` lists the fields."""

from ml_collections import ConfigDict

from mini_gpt.config import loading


def get_config() -> ConfigDict:
    return ConfigDict(loading.defaults(), type_safe=False)  # the schema checks types, after the last override
