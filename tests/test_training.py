"""What a configuration asks of precision, ZeRO and optimizer is refused before anything starts."""

import json
from types import SimpleNamespace

import pytest
import torch

from ds_pipe_ext.cli import main
from ds_pipe_ext.training import check_training, problems

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def zero(stage=1, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def optimizer(name, **params):
    return {"optimizer": {"type": name, "params": params}}


def accumulate(dtype):
    return {"data_types": {"grad_accum_dtype": dtype}}


@pytest.mark.parametrize("config", [
    {}, ADAM, zero(), zero() | ADAM, BF16, FP16, zero() | BF16, zero() | FP16, {"zero_optimization": True},
    zero() | BF16 | accumulate("fp32"), zero() | accumulate("bf16"), BF16 | accumulate("bfloat16"), accumulate("float"),
    zero(offload_optimizer={"device": "cpu"}) | ADAM, zero(offload_optimizer={"device": "none"}, offload_param=None),
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"torch_autocast": {"enabled": False, "dtype": "float16"}},
    optimizer("Muon"), zero() | BF16 | optimizer("Muon"), zero() | optimizer("Muon"), optimizer("SGD"), optimizer("Lamb"),
    zero() | optimizer("SGD") | {"zero_allow_untested_optimizer": True},
    zero(compute_grad_norm=False) | {"gradient_clipping": 0},
    {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"},
    zero("auto"), {"managed_gradient_accumulation": True}, FP16 | accumulate("half"),
])
def test_sound(config):
    assert list(problems(config)) == []


UNSOUND = {
    "zero_optimization.stage is 2": zero(2),
    "zero_optimization.stage is 3: a pipeline accumulates gradients over micro-batches": zero(3),
    "fp16.enabled and bf16.enabled are both true": BF16 | FP16,
    "data_types.grad_accum_dtype is 'fp32' with bf16 parameters": BF16 | accumulate("fp32"),
    "data_types.grad_accum_dtype is 'bf16' with fp32 parameters": accumulate("bf16"),
    "data_types.grad_accum_dtype is 'fp32' with fp16 parameters": FP16 | accumulate("fp32"),
    "managed_gradient_accumulation is false": {"managed_gradient_accumulation": False},
    "torch_autocast.dtype is float16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "zero_optimization.offload_optimizer.device is 'cpu' at stage 0": zero(0, offload_optimizer={"device": "cpu"}),
    "zero_optimization.offload_param.device is 'cpu' at stage 1": zero(offload_param={"device": "cpu"}),
    "zero_optimization.offload_optimizer.device is 'nvme'": zero(offload_optimizer={"device": "nvme"}),
    "zero_optimization.zenflow": zero(offload_optimizer={"device": "cpu"}, zenflow={"topk_ratio": 0.1}),
    "compute_grad_norm is false, but gradient_clipping is 1.0": zero(compute_grad_norm=False),
    "optimizer.type is 'OneBitAdam', which was removed from DeepSpeed": optimizer("OneBitAdam"),
    "optimizer.type is 'ZeroOneAdam'": optimizer("ZeroOneAdam"),
    "optimizer.type is 'MuAdam', but the package mup is not installed": optimizer("MuAdam"),
    "optimizer.params.max_grad_norm": optimizer("Adam", max_grad_norm=1.0),
    "optimizer.type is 'Muon' with bf16": BF16 | zero() | accumulate("fp32") | optimizer("Muon"),
    "optimizer.type is 'Lamb', which needs a dynamic loss scale, but fp16.loss_scale is 8":
        {"fp16": {"enabled": True, "loss_scale": 8}} | optimizer("Lamb"),
    "optimizer.type is 'SGD', which DeepSpeed has not tested under ZeRO": zero() | optimizer("SGD"),
    "optimizer.legacy_fusion is true": FP16 | {"optimizer": {"type": "Adam", "legacy_fusion": True}},
    "sparse_gradients was removed": {"sparse_gradients": True},
    "amp was removed": {"amp": {"enabled": True}},
}


@pytest.mark.parametrize("message", UNSOUND)
def test_unsound(message):
    found = list(problems(UNSOUND[message]))
    assert len(found) == 1 and message in found[0], found
    with pytest.raises(ValueError) as error:
        check_training(UNSOUND[message])
    assert str(error.value) == found[0]


def test_the_optimizer_of_the_script_replaces_that_of_the_json():
    assert list(problems(zero() | optimizer("OneBitAdam"), client_optimizer=True)) == []


def test_check_tells_all_of_them(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "pipeline": {"schedule": "zb-h1"}, "sparse_gradients": True,
                                **zero(), **optimizer("SGD")}))
    assert main(["check", str(path), "--ranks", "2"]) == 1
    error = capsys.readouterr().err
    assert "error: sparse_gradients was removed" in error and "error: optimizer.type is 'SGD'" in error


@pytest.mark.parametrize("config,message", [
    (FP16, "fp16.enabled is true, but the accelerator 'cpu' has no fp16 training"),
    (optimizer("Lamb"), "optimizer.type is 'Lamb', which DeepSpeed has no CPU kernel for"),
    (optimizer("Lion"), "optimizer.type is 'Lion', which DeepSpeed has no CPU kernel for"),
    (optimizer("AdamX"), "optimizer.type is 'AdamX' (did you mean 'Adam"),
    (zero(2), "zero_optimization.stage is 2"),
    (zero(offload_optimizer={"device": "cpu"}) | optimizer("Lion"), None),
    (optimizer("RMSprop"), None),
    (ADAM, None),
])
def test_what_the_accelerator_cannot_do(config, message, monkeypatch):
    from ds_pipe_ext.runtime import launch

    cpu = SimpleNamespace(device_name=lambda: "cpu", is_fp16_supported=lambda: False)
    monkeypatch.setattr(launch, "get_accelerator", lambda: cpu)
    if message is None:
        launch.check_config(config)
        return
    with pytest.raises(ValueError) as error:
        launch.check_config(config)
    assert message in str(error.value)
    if "optimizer" in config:
        launch.check_config(config, torch.optim.SGD)
