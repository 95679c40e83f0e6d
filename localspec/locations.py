"""Where localspec keeps things on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path, user_config_path

__all__ = ["cache_dir", "config_dir"]


def config_dir() -> Path:
    """Directory of the user's own settings; ``LOCALSPEC_CONFIG_DIR`` overrides it."""
    given = os.environ.get("LOCALSPEC_CONFIG_DIR")
    return Path(given) if given else user_config_path("localspec", appauthor=False)


def cache_dir() -> Path:
    """Directory of what can be fetched or measured again; ``LOCALSPEC_CACHE_DIR`` overrides it."""
    given = os.environ.get("LOCALSPEC_CACHE_DIR")
    return Path(given) if given else user_cache_path("localspec", appauthor=False)
