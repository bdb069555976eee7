"""Hooks of parameters when a gradient arrives later than autograd visits the parameter."""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn


def accumulate_grad(param: nn.Parameter, grad: Tensor, skip: Collection[int] = ()) -> None:
    """Add `grad` (shape of `param`) to `param.grad` as autograd does, hooks of the parameter included.

    `skip`: ids of post-accumulate hooks that are not to run.
    """
    if not param.requires_grad:
        return
    for hook in list((param._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    if param.grad is not None and param.grad.is_sparse:
        param.grad = param.grad + grad
    elif param.grad is not None:
        param.grad.add_(grad)
    elif grad.stride() == param.stride():
        param.grad = grad
    else:
        param.grad = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)
    for hook_id, hook in list((param._post_accumulate_grad_hooks or {}).items()):
        if hook_id not in skip:
            hook(param)


@contextlib.contextmanager
def hooks_without_absent_grads(params: list[nn.Parameter]) -> Iterator[None]:
    """Hide absent gradients from the hooks of `params`.

    Autograd visits a parameter whose gradient was queued with "no gradient" and still calls its tensor hooks (with None)
    and its post-accumulate hooks. Inside, the hooks run only if a gradient did arrive (from a use that is not split).
    """
    arrived: dict[int, bool] = {}
    replaced: list[tuple[dict, int, Callable]] = []
    handles = []

    def replace(hooks, make):
        for hook_id, hook in list((hooks or {}).items()):
            replaced.append((hooks, hook_id, hook))
            hooks[hook_id] = make(hook)

    for param in params:
        if not param.requires_grad or not (param._backward_hooks or param._post_accumulate_grad_hooks):
            continue
        replace(param._backward_hooks, lambda hook: lambda grad: None if grad is None else hook(grad))
        replace(param._post_accumulate_grad_hooks, lambda hook: lambda p: hook(p) if arrived.get(id(p)) else None)
        handles.append(param.register_hook(lambda grad, key=id(param): arrived.__setitem__(key, grad is not None)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for hooks, hook_id, hook in replaced:
            if hook_id in hooks:
                hooks[hook_id] = hook
