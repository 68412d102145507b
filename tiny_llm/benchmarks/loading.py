"""Measurements live in files: of this room, or of the tests beside the project."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tiny_llm.config.errors import UserError


def load_file(file: Path) -> ModuleType:
    """Import a Python file by its path, with its neighbours in reach. Raises UserError when it does not exist."""
    if not file.is_file():
        raise UserError(f"{file} does not exist: this benchmark needs a checkout of the project")
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # so that its functions can be sent to processes of its own
    spec.loader.exec_module(module)
    return module
