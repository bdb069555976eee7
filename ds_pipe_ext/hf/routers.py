"""Router logits of mixture-of-experts layers: where they are made, and what a layer made in one forward.

transformers collects them by hooks on the modules that a model's `_can_record_outputs` names; a router loss is a sum over
all layers. Here each layer's logits travel to the last stage, where the model's own forward makes the loss of them.
"""

import contextlib

from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from .structure import refusal

KEY = "router_logits"


def routers_of(model, layers):
    """For each decoder layer of `layers` its [(path of a module inside it, index into that module's output)].

    All empty unless config.output_router_logits asks for the router losses of a model that has routers.

    Raises:
        ValueError: it asks for them, but no module is known to make router logits.
    """
    found = [[] for _ in layers]
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return found
    recorders = [recorder for part in model.modules() if isinstance(part, PreTrainedModel) for recorder in _recorders(part)]
    for name, paths in zip(layers, found):
        for path, module in model.get_submodule(name).named_modules():
            index = next((r.index for r in recorders if _makes(r, module, f".{name}.{path}.")), None)
            if index is not None:
                paths.append((path, index))
    if not any(found):
        raise refusal(model, "config.output_router_logits is set, but none of its layers makes router logits; set it to False")
    return found


def _recorders(model):
    entries = (model._can_record_outputs or {}).get(KEY, [])
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, OutputRecorder):
            yield entry
        else:
            yield OutputRecorder(*([None] if isinstance(entry, str) else [entry]), index=1,
                                 class_name=entry if isinstance(entry, str) else None)


def _makes(recorder, module, path) -> bool:
    """Whether transformers would put a hook on `module`, by its own rules."""
    of_class = recorder.target_class is not None and isinstance(module, recorder.target_class)
    named = recorder.class_name is not None and path.rstrip(".").endswith(recorder.class_name)
    layer_name = recorder.layer_name
    return (of_class or named) and (layer_name is None or f".{layer_name.strip('.')}." in path)


@contextlib.contextmanager
def watching(layer, routers):
    """Gives the list of router logits that `layer` makes inside, in the order of its calls."""
    collected = []

    def hook(index):
        def collect(_, __, output):
            value = output[index] if isinstance(output, tuple) else output
            if value is not None:
                collected.append(value)

        return collect

    handles = [layer.get_submodule(path).register_forward_hook(hook(index)) for path, index in routers]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()
