"""What a run shows: one progress bar, one W&B run, one summary; all on rank 0."""

from __future__ import annotations

import os

from deepspeed import comm as dist
from tqdm import tqdm


def choose_wandb_mode(enabled: bool) -> None:
    """Offline unless logged in, so that a run without an account neither asks nor fails; WANDB_MODE decides if it is set."""
    if not enabled or os.environ.get("WANDB_MODE") or int(os.environ.get("RANK", 0)) != 0:
        return
    try:
        import wandb
    except ImportError:
        return
    try:
        logged_in = wandb.login(prompt=False)
    except TypeError:
        # Older releases can only ask.
        logged_in = bool(os.environ.get("WANDB_API_KEY"))
    if not logged_in:
        # login() has read the environment already, so setting WANDB_MODE now would come too late.
        wandb.setup(wandb.Settings(mode="offline"))


def _run():
    """The W&B run of this process, if any."""
    if dist.get_rank() != 0:
        return None
    try:
        import wandb
    except ImportError:
        return None
    return wandb.run


def summarise(**values: float) -> None:
    """Adds final numbers to the W&B run."""
    run = _run()
    if run is not None:
        run.summary.update(values)


def finish(failed: bool = False) -> None:
    """Closes the W&B run: an open one keeps its process from ending."""
    try:
        import wandb
    except ImportError:
        return
    if wandb.run is not None:
        wandb.finish(exit_code=int(failed))


def say(text: str) -> None:
    """Prints on rank 0, above the progress bar."""
    if dist.get_rank() == 0:
        tqdm.write(text)


class Bar:
    """A progress bar of training steps.

    Args:
        steps: how many there will be.
        done: how many of them an earlier run did.
    """

    def __init__(self, steps: int, done: int = 0):
        self._bar = tqdm(total=steps, initial=done, desc="train", unit="step", dynamic_ncols=True, disable=dist.get_rank() != 0,
                         bar_format="{desc} {n_fmt}/{total_fmt} |{bar:12}| {elapsed}<{remaining}{postfix}")

    def update(self, loss: float, step: dict) -> None:
        """Shows one step.

        Args:
            loss: mean over its micro-batches.
            step: the engine's ``last_step``.
        """
        bytes_ = step["peak_activation_bytes"]
        fields = [f"loss {loss:.3f}", f"{step['tokens_per_s']:.0f} tok/s", f"{step['step_s']:.2f} s/step",
                  f"bubble {_percent(step['bubble_measured'])} (predicted {_percent(step['bubble_predicted'])})"]
        if any(bytes_):
            # Sampled from the second step on.
            fields.append(f"activations {'/'.join(f'{b / 2**20:.0f}' for b in bytes_)} MiB")
        self._bar.set_postfix_str(", ".join(fields), refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _percent(shares: list[float]) -> str:
    return "/".join(f"{share:.0%}" for share in shares)
