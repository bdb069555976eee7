"""Pipeline schedules for DeepSpeed, chosen in the DeepSpeed JSON.

``import ds_pipe_ext`` imports neither torch nor DeepSpeed and patches nothing; names are loaded when they are used.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "initialize": "ds_pipe_ext.runtime.launch",
    "install": "ds_pipe_ext.runtime.launch",
    "uninstall": "ds_pipe_ext.runtime.launch",
    "DataEnded": "ds_pipe_ext.runtime.data",
    "PipelineModule": "ds_pipe_ext.runtime.module",
}
__all__ = [*_LAZY, "__version__"]


def __getattr__(name):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "hf":
        return importlib.import_module("ds_pipe_ext.hf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
