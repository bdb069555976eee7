"""Imports go one way: the planning layers load neither torch nor anything above it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "deepspeed", "transformers", "triton", "wandb", "numpy")
LAYERS = {
    "ds_pipe_ext": HEAVY + ("pydantic", "rich"),
    "ds_pipe_ext.plan": HEAVY + ("pydantic", "rich", "hjson"),
    "ds_pipe_ext.plan.draw": HEAVY + ("pydantic", "rich", "hjson"),
    "ds_pipe_ext.schedules": HEAVY + ("pydantic", "rich", "hjson"),
    "ds_pipe_ext.registry": HEAVY + ("pydantic", "rich", "hjson"),
    "ds_pipe_ext.partition": HEAVY + ("pydantic", "rich", "hjson"),
    "ds_pipe_ext.config": HEAVY + ("rich", ),
    "ds_pipe_ext.training": HEAVY + ("rich", ),
    "ds_pipe_ext.features": HEAVY + ("rich", ),
    "ds_pipe_ext.testing": HEAVY,
    "ds_pipe_ext.doctor": HEAVY,
    "ds_pipe_ext.cli": HEAVY,
}


def python(code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_loads_nothing_above_it(layer):
    loaded = python(f"import sys, {layer}; print(*sys.modules)").split()
    assert not [name for name in LAYERS[layer] if name in loaded]


def test_plan_and_schedules_need_the_standard_library_only():
    loaded = python("import sys, ds_pipe_ext.schedules, ds_pipe_ext.plan.draw; print(*sys.modules)").split()
    startup = set(python("import sys; print(*sys.modules)").split())
    foreign = {name.split(".")[0] for name in loaded if name not in startup} - set(sys.stdlib_module_names) - {"ds_pipe_ext"}
    assert not foreign


def test_import_alone_is_fast_and_patches_nothing():
    python("""if True:
        import time
        start = time.process_time()
        import ds_pipe_ext
        assert time.process_time() - start < 0.2
    """)


def test_import_leaves_deepspeed_alone():
    pytest.importorskip("deepspeed")
    python("""if True:
        import deepspeed
        from deepspeed.runtime.pipe import engine, module
        names = lambda: [{n: id(v) for n, v in vars(o).items()} for o in (deepspeed, engine, module, engine.PipelineEngine,
                                                                          module.PipelineModule)]
        before = names()
        import ds_pipe_ext, ds_pipe_ext.config, ds_pipe_ext.cli
        assert names() == before
    """)


def test_import_names():
    """`kernels` belongs to Hugging Face: nothing that is installed may claim a top-level name but our own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["ds_pipe_ext*"]
    from setuptools import find_packages
    packages = find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    assert "ds_pipe_ext.plan" in packages and {name.split(".")[0] for name in packages} == {"ds_pipe_ext"}
    assert project["project"]["scripts"] == {"ds-pipe": "ds_pipe_ext.cli:main"}


def test_every_import_of_another_package_is_declared():
    """The planning layers import third-party packages by name: each must be a dependency of its own."""
    import ast
    declared = {line.split(">")[0].split("<")[0].split("[")[0].strip()
                for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    files = [*(ROOT / "ds_pipe_ext").glob("*.py"), *(path for layer in ("plan", "schedules", "partition")
                                                      for path in (ROOT / "ds_pipe_ext" / layer).glob("*.py"))]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for name in (name.split(".")[0] for name in names):
                assert name in sys.stdlib_module_names or name in declared, f"{path.name} imports {name}"
