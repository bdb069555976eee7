"""What travels between layers besides hidden states, and how batches meet DeepSpeed's conventions.

Layers exchange `hidden` alone or `(hidden, side tensors...)`. A side tensor says what it is, so that an absent one needs
no placeholder: bool, or floating with 4 dimensions, is the attention mask, int32 the position ids, floating with fewer
dimensions the router logits of a layer (one or more each, in the order of the layers).
"""

import torch

KNOWN = ("input_ids", "attention_mask", "position_ids")


def prepare_batch(batch):
    """Turn what a data loader yields into DeepSpeed's (inputs, labels).

    Args:
        batch: a mapping with `input_ids` [batch, length], `labels` [batch, length] and optionally `attention_mask` and
            `position_ids`, or a pair (inputs, labels) whose inputs are a tensor, such a mapping without labels, or a
            tuple in the order input_ids, attention_mask, position_ids.

    Returns:
        (inputs, labels): inputs is input_ids alone, or a tuple (input_ids, mask as bool or float, positions as int32).

    Raises:
        ValueError: labels or input_ids missing, or columns that the pipeline does not carry.
    """
    if hasattr(batch, "keys"):
        if batch.get("labels") is None:
            raise ValueError(
                f"The batch has no 'labels' (it has {sorted(batch.keys())}); a pipeline needs them on its last stage. "
                "Add them in the collator, e.g. DataCollatorForLanguageModeling(tokenizer, mlm=False)."
            )
        inputs, labels = {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
    else:
        raise ValueError(
            "A batch must be a mapping with input_ids and labels, or a pair (inputs, labels); got "
            f"{type(batch).__name__}."
        )
    if isinstance(inputs, torch.Tensor):
        return inputs, labels
    if not hasattr(inputs, "keys"):
        if len(inputs) > len(KNOWN):
            raise ValueError(
                f"The inputs hold {len(inputs)} tensors; allowed are at most {len(KNOWN)}, in the order {KNOWN}."
            )
        inputs = dict(zip(KNOWN, inputs))
    unknown = sorted(name for name, value in inputs.items() if name not in KNOWN and value is not None)
    if unknown:
        raise ValueError(
            f"The batch has columns that the pipeline does not carry: {unknown}; allowed are {KNOWN} and labels. "
            "Remove them in the collator."
        )
    if inputs.get("input_ids") is None:
        raise ValueError(
            f"The batch has no 'input_ids' (it has {sorted(inputs)}); inputs_embeds and others are not supported."
        )
    tensors = [inputs["input_ids"]]
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        tensors.append(mask if mask.is_floating_point() and mask.dim() == 4 else mask.bool())
    if positions is not None:
        tensors.append(positions.to(torch.int32))
    return (tensors[0] if len(tensors) == 1 else tuple(tensors)), labels


def unpack(inputs):
    """Split a layer's argument into (hidden, side tensors)."""
    if isinstance(inputs, torch.Tensor):
        return inputs, ()
    return inputs[0], tuple(inputs[1:])


def pack(hidden, side):
    """The inverse of `unpack`."""
    return (hidden, *side) if side else hidden


def split_routed(side):
    """Split side tensors into (those that stand for arguments of the model, router logits)."""
    routed = tuple(tensor for tensor in side if tensor.is_floating_point() and tensor.dim() < 4)
    return side[: len(side) - len(routed)], routed


def side_arguments(side) -> dict:
    """The model's keyword arguments that side tensors stand for, gradients cut.

    The values share storage with the side tensors, so that the shell recognises a micro-batch by them.

    Raises:
        ValueError: a dtype without a meaning (an int64 mask that did not pass `prepare_batch`), or two of one kind.
    """
    arguments = {}
    for tensor in side:
        if tensor.dtype == torch.bool or tensor.is_floating_point():
            name = "attention_mask"
        elif tensor.dtype == torch.int32:
            name = "position_ids"
        else:
            raise ValueError(
                f"A side tensor of dtype {tensor.dtype} and shape {list(tensor.shape)} reached a pipeline layer; "
                "attention masks travel as bool or float, position ids as int32. Pass batches through prepare_batch "
                "first."
            )
        if name in arguments:
            raise ValueError(
                f"Two side tensors stand for {name}; at most one attention mask and one position_ids may be given."
            )
        arguments[name] = tensor.detach()
    return arguments
