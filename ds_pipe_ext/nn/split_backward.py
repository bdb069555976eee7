"""Split backward: dX at once, the weight gradients dW and db later.

A zero-bubble schedule runs the backward of a stage as two operations: I (gradient of the input, which the previous stage
waits for) and W (gradient of the weights, which nobody waits for before the optimizer step). `SplitBackward` patches the
`forward` of single module instances so that, inside `collecting(key)`, their backward returns dX and queues the rest;
`run(key)` is W.

Split are `nn.Linear` (and subclasses that keep its forward), Hugging Face `Conv1D` and dense `nn.Embedding`. Everything else
stays in I, and so does a split module's call that cannot be split (see `_splittable`): always correct, W is then smaller.

The gradients are bitwise those of the ordinary backward when the W's run in the order of the I's: the same GEMM in the same
form as ATen's derivative of `mm`, uses of one parameter summed first, one accumulation per parameter and key. They are equal
only up to rounding if one parameter is used partly by operations that are not split or in several reentrant checkpoints, and
under autocast if one leaf input feeds several layers, or one weight is used twice in a backward that is not collected: there
autocast's cast cache makes autograd sum in the low precision, and here the sum is in the parameter's own.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_pipe_ext.nn.grad_hooks import accumulate_grad, hooks_without_absent_grads
from ds_pipe_ext.nn.split_rules import Conv1DRule, EmbeddingRule, LinearRule

_LINEAR_FORWARD = nn.Linear.forward
_EMBEDDING_FORWARD = nn.Embedding.forward


@dataclass(slots=True)
class _Entry:
    """One backward call whose weight gradients are still to be computed; `weight` / `bias` is None if not wanted."""

    rule: object
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    x: Tensor
    dy: Tensor
    versions: tuple[int, int]

    def params(self) -> list[nn.Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if (self.x._version, self.dy._version) != self.versions:
            raise RuntimeError(
                f"the input or output gradient of a layer with weight {tuple(self.params()[0].shape)} was modified in "
                "place between its input-gradient pass and its W; keep those buffers until run(key) returns"
            )
        if self.weight is not None:
            yield self.weight, self.rule.weight_grad(self.dy, self.x)
        if self.bias is not None:
            yield self.bias, self.rule.bias_grad(self.dy, self.x)


class _SplitFunction(torch.autograd.Function):
    """The layer's ordinary function, whose backward asks `owner` whether to return or to queue dW and db."""

    @staticmethod
    def forward(ctx, x, weight, bias, rule, owner, params):
        saves_weight = rule.saves_weight and ctx.needs_input_grad[0]
        ctx.save_for_backward(x, weight if saves_weight else None)
        ctx.rule, ctx.owner, ctx.params = rule, owner, params
        ctx.set_materialize_grads(False)
        out = rule.output(x, weight, bias)
        # Autograd forbids in-place operations on a view made in here; the ordinary output allows them.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        rule, queue = ctx.rule, ctx.owner._queue
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = rule.input_grad(dy, x, weight) if need_x else None
        # Grad mode is on under create_graph: only gradients returned to autograd can be differentiated again.
        if queue is None or torch.is_grad_enabled():
            dw = rule.weight_grad(dy, x) if need_weight else None
            db = rule.bias_grad(dy, x) if need_bias else None
            return dx, dw, db, None, None, None
        weight_param, bias_param = ctx.params
        # x is detached so that the queue does not keep the graph; dy itself is kept, because its reference count
        # tells autograd not to reuse the memory.
        x = x.detach()
        queue.append(
            _Entry(
                rule,
                weight_param if need_weight else None,
                bias_param if need_bias else None,
                x,
                dy,
                (x._version, dy._version),
            )
        )
        return dx, None, None, None, None, None


# ------------------------------------------------------------------------------------------------------- forwards


def _splittable(x, weight, bias) -> bool:
    """Whether this call can be split: plain dense tensors, a trainable leaf weight, and nobody tracing."""
    return (
        torch.is_grad_enabled()
        and type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.is_leaf
        and weight.is_contiguous()
        and not weight.is_complex()
        and (bias is None or type(bias) is nn.Parameter)
        and type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and not x.is_nested
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


def _autocast(t: Tensor | None, device_type: str, dtype: torch.dtype) -> Tensor | None:
    """`t` as autocast would cast it: floating point but not double, on the device of the autocast."""
    eligible = t is not None and t.device.type == device_type and t.is_floating_point() and t.dtype != torch.float64
    return t.to(dtype) if eligible else t


def _gemm(owner: "SplitBackward", rule, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
    device_type = x.device.type
    params = (weight, bias)
    if torch.is_autocast_enabled(device_type):
        # Cast out here: a cast inside the function would enter autocast's cache without a gradient.
        dtype = torch.get_autocast_dtype(device_type)
        x, weight, bias = (_autocast(t, device_type, dtype) for t in (x, weight, bias))
    return _SplitFunction.apply(x, weight, bias, rule, owner, params)


def _linear_forward(owner: "SplitBackward", original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(module, input):
        if torch.compiler.is_compiling() or not _splittable(input, module.weight, module.bias):
            return original(module, input)
        return _gemm(owner, LinearRule, input, module.weight, module.bias)

    return forward


def _conv1d_forward(owner: "SplitBackward", original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(module, x):
        if torch.compiler.is_compiling() or not _splittable(x, module.weight, module.bias):
            return original(module, x)
        return _gemm(owner, Conv1DRule, x, module.weight, module.bias)

    return forward


def _embedding_forward(owner: "SplitBackward", original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(module, input):
        weight = module.weight
        dense = module.max_norm is None and not module.sparse
        if torch.compiler.is_compiling() or not dense or not _splittable(input, weight, None):
            return original(module, input)
        padding_idx = -1 if module.padding_idx is None else module.padding_idx
        rule = EmbeddingRule(weight.shape[0], padding_idx, module.scale_grad_by_freq)
        return _SplitFunction.apply(input, weight, None, rule, owner, (weight, None))

    return forward


def _forward_maker(module: nn.Module) -> Callable | None:
    """Which patched forward fits `module`; None if its class overrides forward or is not known."""
    forward = type(module).forward
    if forward is _LINEAR_FORWARD:
        return _linear_forward
    if forward is _EMBEDDING_FORWARD:
        return _embedding_forward if module.max_norm is None and not module.sparse else None
    # Looked up, not imported: whoever holds a Conv1D has imported transformers already.
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return _conv1d_forward if conv1d is not None and forward is conv1d.forward else None


# ---------------------------------------------------------------------------------------------------------- engine


class SplitBackward:
    """Deferred weight gradients of one engine; two engines in a process never mix.

    Args:
        accumulate: `accumulate(param, grad)`, called once per parameter and `run`; grad has the parameter's shape and
            the dtype autograd would give its `.grad`. The default is autograd's own behaviour.

    Example:
        split = SplitBackward(); split.attach(stage)
        with split.collecting((stage_id, micro_batch)):
            torch.autograd.backward(outputs, output_grads)      # I: input gradients, and all gradients that are not split
        split.run((stage_id, micro_batch))                      # W

    Until `run(key)` the inputs and output gradients of the split modules must not be overwritten. Inside `collecting`,
    `torch.autograd.grad` yields no gradient of a split weight. Run I and W on the same stream, or synchronise. Hooks on a
    parameter's AccumulateGrad node (not on the parameter) see I and cannot be served. `collecting` and `run` are for one
    thread; the backward itself may run in autograd's worker threads.
    """

    def __init__(self, accumulate: Callable[[nn.Parameter, Tensor], None] = accumulate_grad):
        self._accumulate = accumulate
        self._patched: list[tuple[nn.Module, Callable]] = []
        self._pending: dict[Hashable, deque[_Entry]] = {}
        self._active: Hashable = None
        # Read by backward passes in any thread: None = return weight gradients to autograd.
        self._queue: deque[_Entry] | None = None

    def attach(self, module: nn.Module) -> list[str]:
        """Patch every splittable submodule of `module` (itself included); return their names. Idempotent.

        An instance whose `forward` somebody else has replaced is left alone.
        """
        names = []
        ours = {id(sub) for sub, _ in self._patched}
        for name, sub in module.named_modules():
            make = _forward_maker(sub)
            if make is None:
                continue
            if id(sub) not in ours:
                if "forward" in vars(sub):
                    continue
                # A bound method, so that a deep copy of the module calls the copy, not the original.
                sub.forward = make(self, type(sub).forward).__get__(sub)
                self._patched.append((sub, sub.forward))
            names.append(name)
        return names

    def detach(self) -> None:
        """Restore the modules. A forward that somebody has wrapped since stays, and is ordinary outside `collecting`."""
        for module, forward in self._patched:
            if vars(module).get("forward") is forward:
                del module.forward
        self._patched.clear()

    @contextlib.contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Queue under `key` the weight gradients of backward passes run inside. An exception inside drops the key.

        Raises:
            RuntimeError: inside another `collecting`, or `key` still waits for its `run`.
        """
        if self._queue is not None:
            raise RuntimeError(f"collecting({key!r}) inside collecting({self._active!r}): one at a time")
        if key in self._pending:
            raise RuntimeError(f"weight gradients under {key!r} are still pending: run({key!r}) before collecting it again")
        self._active, self._queue = key, deque()
        self._pending[key] = self._queue
        try:
            with hooks_without_absent_grads(self._params()):
                yield
        except BaseException:
            self._pending.pop(key, None)
            raise
        finally:
            self._active, self._queue = None, None

    def run(self, key: Hashable) -> int:
        """W: compute what waits under `key` in the order queued, accumulate it, free it; return the number of gradients.

        A key under which nothing was queued gives 0.

        Raises:
            KeyError: nothing was collected under `key`, or it has been run.
            RuntimeError: `key` is being collected, or a queued tensor has been modified in place.
        """
        if self._queue is not None and key == self._active:
            raise RuntimeError(f"run({key!r}) inside collecting({key!r})")
        entries = self._pop(key)
        uses: dict[int, int] = {}
        for entry in entries:
            for param in (entry.weight, entry.bias):
                if param is not None:
                    uses[id(param)] = uses.get(id(param), 0) + 1
        sums: dict[int, Tensor] = {}
        computed = 0
        with torch.no_grad(), _autocast_off(entries):
            while entries:
                for param, grad in entries.popleft().gradients():
                    computed += 1
                    uses[id(param)] -= 1
                    earlier = sums.pop(id(param), None)
                    if earlier is not None:
                        grad = earlier + grad
                    if uses[id(param)]:
                        sums[id(param)] = grad
                    else:
                        # grad_dtype None: the parameter takes gradients of any dtype.
                        self._accumulate(param, grad.to(getattr(param, "grad_dtype", param.dtype) or grad.dtype))
        return computed

    @property
    def pending(self) -> dict[Hashable, int]:
        """Key -> number of queued backward calls (0 if collected and nothing was split), oldest first."""
        return {key: len(entries) for key, entries in self._pending.items()}

    def pending_bytes(self, key: Hashable = None) -> int:
        """Bytes of the storages that the queue holds (of one key, or all), each counted once, parameters excluded.

        Raises:
            KeyError: unknown key.
        """
        queues = list(self._pending.values()) if key is None else [self._find(key)]
        storages = {}
        for entry in (entry for queue in queues for entry in queue):
            for tensor in (entry.x, entry.dy):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        for param in self._params():
            storages.pop(param.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    def discard(self) -> None:
        """Drop everything that is queued, for use after an error."""
        for entries in self._pending.values():
            entries.clear()
        self._pending.clear()

    def _params(self) -> list[nn.Parameter]:
        params = (module._parameters.get(name) for module, _ in self._patched for name in ("weight", "bias"))
        return list({id(p): p for p in params if p is not None}.values())

    def _find(self, key: Hashable) -> deque[_Entry]:
        if key not in self._pending:
            raise KeyError(f"no weight gradients are pending under {key!r}; pending: {list(self._pending)}")
        return self._pending[key]

    def _pop(self, key: Hashable) -> deque[_Entry]:
        entries = self._find(key)
        del self._pending[key]
        return entries


def _autocast_off(entries: deque[_Entry]) -> contextlib.AbstractContextManager:
    """W computes in the dtypes of I, also if the caller is inside autocast."""
    device_type = entries[0].dy.device.type if entries else "cpu"
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else contextlib.nullcontext()
