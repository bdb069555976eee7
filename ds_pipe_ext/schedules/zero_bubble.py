"""The loop that zb-h1 and zb-h2 share."""


def lagging_weight_grads(op, stage, m, warm, lag):
    """``warm`` forwards, then for every micro-batch: its I, the oldest W if more than ``lag`` wait, the next F; last, all W."""
    warm = min(warm, m)
    for i in range(warm):
        yield op(stage, "F", i)
    done = 0
    for i in range(m):
        yield op(stage, "I", i)
        if i + 1 - done > lag:
            yield op(stage, "W", done)
            done += 1
        if warm + i < m:
            yield op(stage, "F", warm + i)
    for i in range(done, m):
        yield op(stage, "W", i)
