"""Split backward: I then W gives the gradients of the ordinary backward, bit for bit, and fails loudly when it cannot."""

import contextlib
import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_pipe_ext.nn.split_backward import SplitBackward


class Block(nn.Module):
    """Norm, attention-like mixing and a gated MLP: split and unsplit parameters, residuals, an in-place operation."""

    def __init__(self, d=24, ffn=40, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=bias) for _ in range(4))
        self.up, self.down = nn.Linear(d, ffn, bias=bias), nn.Linear(ffn, d, bias=bias)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        y = self.down(F.relu(self.up(x), inplace=True))
        y += x
        return y


def gradients(model, batches, lag=None, order=None, context=contextlib.nullcontext, call=None, after_attach=None):
    """Gradients after accumulating all batches. lag None: ordinary backward; else W's run `lag` micro-batches later."""
    model = copy.deepcopy(model)
    split = SplitBackward()
    if lag is not None:
        assert split.attach(model)
    if after_attach:
        after_attach(model)
    inputs, waiting = [], []
    for i, batch in enumerate(batches):
        x = batch.detach().requires_grad_() if batch.is_floating_point() else batch
        inputs.append(x)
        with context():
            out = (call or (lambda m, t: m(t)))(model, x)
        with split.collecting(i) if lag is not None else contextlib.nullcontext():
            (out.float().square().sum() if out.dtype == torch.bfloat16 else out.square().sum()).backward()
        waiting.append(i)
        if lag is not None and order is None and len(waiting) > lag:
            split.run(waiting.pop(0))
    if lag is not None:
        for i in order or waiting:
            assert split.run(i) > 0
        assert split.pending == {}
    return {**{n: p.grad for n, p in model.named_parameters()}, **{f"x{i}": x.grad for i, x in enumerate(inputs)}}


def assert_same(got, expected, equal=torch.equal):
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None:
            assert got[name] is None, name
            continue
        assert got[name] is not None, name
        assert got[name].dtype == grad.dtype and got[name].stride() == grad.stride(), name
        assert equal(got[name], grad), name


def batches_of(*shape, n=4, dtype=torch.float32):
    return [torch.randn(*shape, dtype=dtype) for _ in range(n)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


# ---------------------------------------------------------------------------------------------------- bitwise equal


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_block_is_bitwise_equal(dtype, lag, bias):
    model, batches = Block(bias=bias).to(dtype), batches_of(2, 16, 24, dtype=dtype)
    assert_same(gradients(model, batches, lag), gradients(model, batches))


@pytest.mark.parametrize("lag", [0, 2])
def test_autocast_is_bitwise_equal(lag):
    model, batches = Block(), batches_of(2, 16, 24)
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    assert_same(gradients(model, batches, lag, context=context), gradients(model, batches, context=context))


def test_autocast_sums_a_weight_used_twice_in_the_low_precision():
    model, batches = nn.Linear(24, 24), batches_of(16, 24)
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    twice = lambda m, x: m(torch.tanh(m(x)))  # noqa: E731
    assert_same(gradients(model, batches, 1, context=context, call=twice), gradients(model, batches, context=context, call=twice))


def test_autocast_does_not_poison_the_weight_cache():
    layer = nn.Linear(8, 8)
    SplitBackward().attach(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(3, 8))
        # An ordinary use of the same weight takes its cast from autocast's cache.
        F.linear(torch.randn(3, 8), layer.weight).float().sum().backward()
    assert layer.weight.grad is not None


SHAPES = {
    "1-D": lambda: torch.randn(24),
    "2-D": lambda: torch.randn(37, 24),
    "one row": lambda: torch.randn(1, 24),
    "3-D": lambda: torch.randn(3, 17, 24),
    "4-D": lambda: torch.randn(2, 3, 5, 24),
    "no rows": lambda: torch.randn(0, 24),
    "no rows 3-D": lambda: torch.randn(2, 0, 24),
    "column-major": lambda: torch.randn(24, 37).t(),
    "transposed 3-D": lambda: torch.randn(17, 3, 24).transpose(0, 1),
    "inner transposed": lambda: torch.randn(3, 24, 17).transpose(1, 2),
    "one by column-major": lambda: torch.randn(1, 24, 17).transpose(1, 2),
    "strided": lambda: torch.randn(37, 48)[:, ::2],
    "expanded": lambda: torch.randn(1, 1, 24).expand(3, 17, 24),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_every_input_shape(shape, dtype, bias):
    model, batches = nn.Linear(24, 40, bias=bias).to(dtype), [SHAPES[shape]().to(dtype) for _ in range(3)]
    assert_same(gradients(model, batches, 1), gradients(model, batches))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (7, 1), (257, 129)])
def test_linear_of_odd_sizes(sizes):
    model, batches = nn.Linear(*sizes), batches_of(33, sizes[0])
    assert_same(gradients(model, batches, 1), gradients(model, batches))


@pytest.mark.parametrize("grad", ["expanded", "transposed"])
def test_output_gradient_that_is_not_contiguous(grad):
    model = nn.Linear(24, 40)
    call = {
        "expanded": lambda m, x: m(x).sum(1, keepdim=True),
        "transposed": lambda m, x: m(x).transpose(1, 2).contiguous(),
    }[grad]
    batches = batches_of(3, 17, 24)
    assert_same(gradients(model, batches, 1, call=call), gradients(model, batches, call=call))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 24), (3, 17, 24)])
def test_conv1d(dtype, shape):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(40, 24).to(dtype)
    batches = batches_of(*shape, dtype=dtype)
    assert_same(gradients(conv1d, batches, 1), gradients(conv1d, batches))
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    assert_same(gradients(conv1d, batches, 1, context=context), gradients(conv1d, batches, context=context))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": 0}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(options, dtype):
    model = nn.Embedding(11, 24, dtype=dtype, **options)
    batches = [torch.randint(11, (3, 17)) for _ in range(4)]
    assert_same(gradients(model, batches, 1), gradients(model, batches))


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}])
def test_embedding_that_cannot_be_split_is_ordinary(options):
    model = nn.Sequential(nn.Embedding(11, 24, **options), nn.Linear(24, 24))
    split = SplitBackward()
    assert split.attach(model) == ["1"]
    with split.collecting(0):
        model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad is not None and model[1].weight.grad is None


def test_w_out_of_order_is_close():
    model, batches = Block(), batches_of(2, 16, 24)
    close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-4)
    assert_same(gradients(model, batches, 0, order=[3, 1, 0, 2]), gradients(model, batches), close)


# --------------------------------------------------------------------------------------- sharing, freezing, adapters


def test_tied_weights_and_a_module_used_twice():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(11, 24), nn.Linear(24, 24), nn.Linear(24, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.mix(torch.tanh(self.mix(self.embed(ids)))))

    model, batches = Tied(), [torch.randint(11, (3, 17)) for _ in range(4)]
    expected = gradients(model, batches)
    assert_same(gradients(model, batches, 2), expected)


def test_weight_also_used_by_an_unsplit_operation():
    model, batches = nn.Linear(24, 24), batches_of(16, 24)
    call = lambda m, x: F.linear(m(x), m.weight)  # noqa: E731
    close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-3)
    assert_same(gradients(model, batches, 1, call=call), gradients(model, batches, call=call), close)


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_frozen_parameters_decided_at_call_time(frozen):
    def freeze(model):
        for name in frozen:
            getattr(model[1], name).requires_grad_(False)

    def thaw(model):
        model.requires_grad_(True)

    model, batches = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)), batches_of(16, 24)
    got = gradients(model, batches, 1, after_attach=freeze)
    assert_same(got, gradients(model, batches, after_attach=freeze))
    assert [name for name in ("weight", "bias") if got[f"1.{name}"] is None] == list(frozen)
    freeze(model)
    assert_same(gradients(model, batches, 1, after_attach=thaw), gradients(model, batches, after_attach=thaw))


def test_lora_wrapped_linear():
    class LoraLinear(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base.requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)

        def forward(self, x):
            return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))

    model, batches = nn.Sequential(LoraLinear(nn.Linear(24, 24)), LoraLinear(nn.Linear(24, 24))), batches_of(16, 24)
    got = gradients(model, batches, 1)
    assert_same(got, gradients(model, batches))
    assert got["0.base_layer.weight"] is None and got["0.lora_A.weight"] is not None


def test_input_that_needs_no_gradient():
    layer, reference = nn.Linear(24, 40), nn.Linear(24, 40)
    reference.load_state_dict(layer.state_dict())
    split, x = SplitBackward(), torch.randn(16, 24)
    split.attach(layer)
    with split.collecting(0):
        layer(x).square().sum().backward()
    assert layer.weight.grad is None and split.run(0) == 2
    reference(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, reference.weight.grad) and torch.equal(layer.bias.grad, reference.bias.grad)


# -------------------------------------------------------------------------------------------------- ordinary forward


def split_count(model, call):
    """How many backward calls of `model` are queued; the gradients must be right either way."""
    split = SplitBackward()
    split.attach(model)
    with split.collecting(0):
        call(model).sum().backward()
    return split.pending[0]


def test_subclass_that_overrides_forward_is_not_split():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    split = SplitBackward()
    assert split.attach(nn.ModuleDict({"doubled": Doubled(2, 2), "named": Named(2, 2)})) == ["named"]


def test_instance_patched_by_someone_else_is_not_split():
    layer = nn.Linear(4, 4)
    theirs = lambda x: F.linear(x, layer.weight, layer.bias) + 1  # noqa: E731
    layer.forward = theirs
    split = SplitBackward()
    assert split.attach(layer) == []
    split.detach()
    assert layer.forward is theirs


def test_two_owners_do_not_share_a_module():
    layer, first, second = nn.Linear(4, 4), SplitBackward(), SplitBackward()
    assert first.attach(layer) == [""] and second.attach(layer) == []
    with second.collecting(0):
        layer(torch.ones(1, 4)).sum().backward()
    assert second.pending == {0: 0} and second.run(0) == 0 and layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_that_is_no_leaf_is_ordinary(norm):
    model, batches = nn.Sequential(nn.Linear(24, 24), norm(nn.Linear(24, 24))), batches_of(16, 24)
    with torch.random.fork_rng():
        norm_model = model[1]
        split = SplitBackward()
        split.attach(model)
        with split.collecting(0):
            model(batches[0]).sum().backward()
    assert split.pending[0] == 1
    got = {n: p.grad for n, p in norm_model.named_parameters()}
    assert all(grad is not None for grad in got.values())


def test_functional_call_and_torch_func():
    layer = nn.Linear(4, 4)
    params = {n: p.detach() for n, p in layer.named_parameters()}
    x = torch.randn(3, 4)
    loss = lambda p: torch.func.functional_call(layer, p, (x,)).square().sum()  # noqa: E731
    expected = torch.func.grad(loss)(params)
    SplitBackward().attach(layer)
    got = torch.func.grad(loss)(params)
    assert all(torch.equal(got[n], expected[n]) for n in params)
    assert torch.func.vmap(layer)(x).shape == (3, 4)


def test_tensor_subclass_is_ordinary():
    class Tagged(torch.Tensor):
        pass

    layer = nn.Linear(4, 4)
    assert split_count(layer, lambda m: m(torch.randn(3, 4).as_subclass(Tagged))) == 0
    assert layer.weight.grad is not None


def test_compile_and_jit_trace_see_an_ordinary_module():
    layer = nn.Linear(4, 4)
    split, x = SplitBackward(), torch.randn(3, 4)
    split.attach(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    assert "linear" in str(torch.jit.trace(layer, x).graph)


def test_evaluation_and_plain_backward_are_ordinary():
    model, batches = Block(), batches_of(2, 16, 24)
    attached = copy.deepcopy(model)
    SplitBackward().attach(attached)
    with torch.no_grad():
        assert torch.equal(attached(batches[0]), model(batches[0])) and not attached(batches[0]).requires_grad
    for m in (model, attached):
        for x in batches:
            m(x).square().sum().backward()
    assert_same({n: p.grad for n, p in attached.named_parameters()}, {n: p.grad for n, p in model.named_parameters()})


def test_double_backward_is_ordinary():
    def penalty(attach, autocast):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4, requires_grad=True)
        split = SplitBackward()
        if attach:
            split.attach(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = model(x)
        # Inside collecting too: a gradient to be differentiated again cannot wait.
        with split.collecting(0):
            (grad,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        assert split.run(0) == 0
        grad.square().sum().backward()
        return {n: p.grad for n, p in model.named_parameters()} | {"x": x.grad}

    for autocast in (False, True):
        close = functools.partial(torch.allclose, rtol=2e-2 if autocast else 1e-5)
        assert_same(penalty(True, autocast), penalty(False, autocast), close)


# ------------------------------------------------------------------------------------------------------ checkpointing


class Counted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.forwards = inner, 0

    def forward(self, x):
        self.forwards += 1
        return self.inner(x)


CHECKPOINTS = {
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "non-reentrant": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "nested": lambda m, x: checkpoint(lambda t: checkpoint(m, t, use_reentrant=False), x, use_reentrant=False),
    "nested reentrant": lambda m, x: checkpoint(lambda t: checkpoint(m, t, use_reentrant=True), x, use_reentrant=True),
    "mixed": lambda m, x: checkpoint(lambda t: checkpoint(m, t, use_reentrant=False), x, use_reentrant=True),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoint_recomputes_as_often_as_without_split(kind, autocast):
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=autocast)
    counts = []

    def call(model, x):
        counts.append(model)
        return CHECKPOINTS[kind](model, x)

    model, batches = Counted(Block()), batches_of(2, 16, 24, n=3)
    got, expected = (gradients(model, batches, lag, context=context, call=call) for lag in (2, None))
    assert_same(got, expected)
    split_model, ordinary_model = counts[0], counts[-1]
    assert split_model is not ordinary_model
    # 3 batches: one forward and one recompute each; a reentrant outer checkpoint makes the inner one recompute again.
    recomputes = 2 if kind in ("nested reentrant", "mixed") else 1
    assert (split_model.forwards, ordinary_model.forwards) == (3 * (1 + recomputes),) * 2


def test_saved_tensor_hooks():
    model, batches = Block(), batches_of(2, 16, 24)
    offload = torch.autograd.graph.save_on_cpu
    assert_same(gradients(model, batches, 1, context=offload), gradients(model, batches, context=offload))


# -------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("twice", [False, True])
def test_parameter_hooks_run_once_per_w(twice):
    def train(lag):
        model, calls = Block(), []
        model.load_state_dict(state)
        split = SplitBackward()
        if lag:
            split.attach(model)
        for name, param in model.named_parameters():
            param.register_hook(lambda grad, n=name: calls.append((n, "tensor")) or grad * 2)
            param.register_post_accumulate_grad_hook(lambda p, n=name: calls.append((n, "post", p.grad.sum().item())))
        for i, x in enumerate(batches):
            before = len(calls)
            with split.collecting(i) if lag else contextlib.nullcontext():
                (model(model(x)) if twice else model(x)).square().sum().backward()
            if lag:
                assert {name for name, *_ in calls[before:]} == {"norm.weight", "norm.bias"}
                split.run(i)
        return {n: p.grad for n, p in model.named_parameters()}, sorted(calls)

    state, batches = Block().state_dict(), batches_of(2, 16, 24, n=2)
    (got, got_calls), (expected, expected_calls) = train(True), train(False)
    assert got_calls == expected_calls
    assert_same(got, expected)


def test_hooks_of_a_weight_with_an_unsplit_use_see_each_gradient():
    layer, seen = nn.Linear(4, 4, bias=False), []
    handle = layer.weight.register_hook(lambda grad: seen.append(grad))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    split = SplitBackward()
    split.attach(layer)
    with split.collecting(0):
        F.linear(layer(torch.ones(1, 4)), layer.weight).sum().backward()
    assert len(seen) == 2 and seen[0] is not None
    split.run(0)
    assert len(seen) == 4
    handle.remove()
    assert not layer.weight._backward_hooks


def test_module_hooks_run():
    layer, calls = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda *a: calls.append("pre"))
    layer.register_forward_hook(lambda *a: calls.append("forward"))
    layer.register_full_backward_pre_hook(lambda *a: calls.append("backward pre"))
    layer.register_full_backward_hook(lambda m, gi, go: calls.append(("backward", gi[0].shape)))
    assert split_count(layer, lambda m: m(torch.randn(3, 4, requires_grad=True))) == 1
    assert calls == ["pre", "forward", "backward pre", ("backward", (3, 4))]


def test_custom_accumulator_gets_each_parameter_once():
    got = []
    split, layer = SplitBackward(lambda param, grad: got.append((param, grad.dtype))), nn.Linear(4, 4)
    split.attach(layer)
    with split.collecting("a"), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(layer(torch.randn(3, 4))).float().sum().backward()
    assert split.run("a") == 4 and layer.weight.grad is None
    assert [p is q for (p, _), q in zip(got, (layer.weight, layer.bias), strict=True)] == [True, True]
    assert {dtype for _, dtype in got} == {torch.float32}


def test_w_inside_autocast_computes_in_the_dtype_of_i():
    layer, x = nn.Linear(24, 24), torch.randn(16, 24)
    reference = copy.deepcopy(layer)
    split = SplitBackward()
    split.attach(layer)
    with split.collecting(0):
        layer(x).square().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        split.run(0)
    reference(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, reference.weight.grad)


# ----------------------------------------------------------------------------------------------------- queue and keys


def collected(key=0, rows=5):
    layer, split = nn.Linear(4, 6), SplitBackward()
    split.attach(layer)
    with split.collecting(key):
        layer(torch.randn(rows, 4, requires_grad=True)).square().sum().backward()
    return layer, split


def test_a_dropped_w_is_seen():
    model, batches = Block(), batches_of(2, 16, 24)
    with pytest.raises(AssertionError):
        assert_same(gradients(model, batches, 1), gradients(model, batches[:-1] + [torch.zeros(2, 16, 24)]))
    layer, split = collected(key=(1, 7))
    assert split.pending == {(1, 7): 1}
    assert layer.weight.grad is None and layer.bias.grad is None
    assert split.run((1, 7)) == 2 and split.pending == {}


def test_errors_name_the_key():
    layer, split = collected(key=(1, 7))
    with pytest.raises(RuntimeError, match=r"\(1, 7\)"), split.collecting((1, 7)):
        pass
    assert split.pending == {(1, 7): 1}
    for call in (split.run, split.pending_bytes):
        with pytest.raises(KeyError, match=r"\(0, 3\).*pending: \[\(1, 7\)\]"):
            call((0, 3))
    with split.collecting((0, 3)):
        with pytest.raises(RuntimeError, match=r"\(0, 4\).*inside.*\(0, 3\)"), split.collecting((0, 4)):
            pass
        with pytest.raises(RuntimeError, match=r"run\(\(0, 3\)\) inside"):
            split.run((0, 3))
        # W of an earlier micro-batch may run between.
        assert split.run((1, 7)) == 2
    assert split.pending == {(0, 3): 0}


def test_failed_collection_leaves_nothing():
    layer, split = nn.Linear(4, 4), SplitBackward()
    split.attach(layer)
    hook = layer.weight.register_hook(lambda grad: grad)
    with pytest.raises(ZeroDivisionError), split.collecting(0):
        layer(torch.randn(2, 4)).sum().backward()
        1 / 0
    assert split.pending == {} and len(layer.weight._backward_hooks) == 1
    hook.remove()
    with split.collecting(0):
        layer(torch.randn(2, 4)).sum().backward()
    split.discard()
    assert split.pending == {} and split.pending_bytes() == 0 and layer.weight.grad is None


def test_pending_bytes_counts_each_storage_once():
    model, split = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)]), SplitBackward()
    split.attach(model)
    x = torch.randn(10, 8)
    with split.collecting("shared x"):
        torch.autograd.backward([m(x) for m in model], [torch.ones(10, 8) for _ in model])
    with split.collecting("parameter as input"):
        model[0](model[1].weight).backward(torch.ones(8, 8))
    assert split.pending_bytes("shared x") == 3 * 10 * 8 * 4
    assert split.pending_bytes("parameter as input") == 8 * 8 * 4
    assert split.pending_bytes() == (3 * 80 + 64) * 4
    split.run("shared x")
    assert split.pending_bytes() == 64 * 4


def test_queue_does_not_keep_the_graph():
    model, split = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), SplitBackward()
    split.attach(model)
    with split.collecting(0):
        model(torch.randn(2, 4)).sum().backward()
    assert all(not e.x.requires_grad and e.dy.grad_fn is None for e in split._pending[0])


@pytest.mark.parametrize("buffer", ["x", "dy"])
def test_buffer_reused_before_w_is_an_error(buffer):
    layer, split = nn.Linear(4, 6), SplitBackward()
    split.attach(layer)
    tensors = {"x": torch.randn(5, 4), "dy": torch.randn(5, 6)}
    with split.collecting(0):
        layer(tensors["x"]).backward(tensors["dy"])
    tensors[buffer].zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        split.run(0)


def test_weight_updated_between_forward_and_backward_is_an_error():
    layer, split = nn.Linear(4, 4), SplitBackward()
    split.attach(layer)
    out = layer(torch.randn(2, 4, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), split.collecting(0):
        out.sum().backward()


# ------------------------------------------------------------------------------------------------- attach and detach


def test_attach_twice_and_detach_restores():
    model, split = Block(), SplitBackward()
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    names = split.attach(model)
    assert names == split.attach(model) == ["q", "k", "v", "o", "up", "down"]
    split.detach()
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert split.attach(model) == names


def test_copies_use_their_own_weights():
    layer = nn.Linear(4, 4)
    SplitBackward().attach(layer)
    clones = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    x = torch.randn(2, 4)
    assert torch.equal(clones[0](x), clones[1](x)) and clones[0](x).abs().sum() > 0
    assert layer(input=x).abs().sum() == 0


def test_import_needs_torch_only():
    code = (
        "import sys, ds_pipe_ext.nn.split_backward; "
        "print([m for m in ('deepspeed', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
