"""Timelines of a simulated plan: text for a terminal, CSV to exchange, SVG to show."""

from __future__ import annotations

from html import escape
from statistics import median

from .ir import Op
from .simulate import Simulation

#: fill per kind of operation; the text on it is dark.
COLOURS = {"F": "#8ab4f8", "B": "#f6b26b", "I": "#ffd966", "W": "#93c47d", "U": "#c9a0dc"}
_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "U": "update"}
_LEFT, _ROW, _GAP, _TOP = 64, 26, 6, 34


def text(sim: Simulation) -> str:
    """One line per rank; a column is about the shortest operation's time, ``..`` is idle.

    With one stage a rank the stage is left out (``F0``), else the plan's own form is used (``2F0``).
    """
    unit = _unit(sim)
    short = sim.plan.placement == tuple(range(sim.plan.n_ranks))
    width = _column(sim.makespan, unit)
    cells = [[".."] * width for _ in range(sim.plan.n_ranks)]
    for event in sim.events:
        for column in range(_column(event.start, unit), _column(event.end, unit)):
            cells[event.rank][column] = _label(event.op, short)
    wide = max((len(cell) for line in cells for cell in line), default=2)
    digits = len(str(sim.plan.n_ranks - 1))
    return "".join(f"rank {rank:>{digits}} | {' '.join(cell.ljust(wide) for cell in line).rstrip()}\n"
                   for rank, line in enumerate(cells))


def csv(sim: Simulation) -> str:
    """The plan in its text form: one comma-separated line per rank, without times."""
    return sim.plan.to_csv()


def svg(sim: Simulation) -> str:
    """A self-contained SVG document: one row per rank, boxes to scale, coloured by kind, with legend and time axis."""
    plan, span = sim.plan, sim.makespan or 1.0
    scale = min(max(22.0 / _unit(sim), 600.0 / span), 16000.0 / span)
    short = plan.placement == tuple(range(plan.n_ranks))
    width = _LEFT + span * scale + 20
    bottom = _TOP + plan.n_ranks * (_ROW + _GAP)
    height = bottom + 64
    title = f"{plan.name}: {plan.n_ranks} ranks, {plan.microbatches} micro-batches, {sim.bubble_ratio:.1%} idle"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
           f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
           f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
           f'<text x="{_LEFT}" y="20" font-size="13">{escape(title)}</text>']
    for rank in range(plan.n_ranks):
        top = _TOP + rank * (_ROW + _GAP)
        out.append(f'<text x="8" y="{top + 17}">rank {rank}</text>')
        out.append(f'<rect x="{_LEFT}" y="{top}" width="{span * scale:.2f}" height="{_ROW}" fill="#f1f3f4"/>')
    for event in sim.events:
        left, length = _LEFT + event.start * scale, (event.end - event.start) * scale
        if not length:
            continue
        top = _TOP + event.rank * (_ROW + _GAP)
        label = _label(event.op, short)
        out.append(f'<g><title>{event.op}: {event.start:g} to {event.end:g}</title><rect x="{left:.2f}" y="{top}" '
                   f'width="{length:.2f}" height="{_ROW}" fill="{COLOURS[event.op.kind]}" stroke="#ffffff"/>')
        if length >= 6.5 * len(label) + 2:
            out.append(f'<text x="{left + length / 2:.2f}" y="{top + 17}" text-anchor="middle">{label}</text>')
        out.append("</g>")
    out += _axis(span, scale, bottom)
    left = _LEFT
    for kind in sorted({event.op.kind for event in sim.events}, key="FBIWU".index):
        out.append(f'<rect x="{left}" y="{bottom + 38}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{left + 19}" y="{bottom + 49}">{kind} {_KINDS[kind]}</text>')
        left += 40 + 7 * len(_KINDS[kind])
    return "\n".join([*out, "</svg>", ""])


def _axis(span: float, scale: float, top: int) -> list[str]:
    # Ticks at 1, 2 or 5 times a power of ten, no closer than 60 pixels.
    tick = next(step * 10.0**power for power in range(-12, 13) for step in (1, 2, 5) if step * 10.0**power * scale >= 60)
    out = [f'<line x1="{_LEFT}" y1="{top}" x2="{_LEFT + span * scale:.2f}" y2="{top}" stroke="#5f6368"/>']
    for number in range(int(span / tick * (1 + 1e-9)) + 1):
        x = _LEFT + number * tick * scale
        out.append(f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 4}" stroke="#5f6368"/>'
                   f'<text x="{x:.2f}" y="{top + 17}" text-anchor="middle">{number * tick:g}</text>')
    return out


def _unit(sim: Simulation) -> float:
    durations = [event.end - event.start for event in sim.events if event.end > event.start]
    if not durations:
        return 1.0
    # A few very short operations must not stretch the drawing.
    return max(min(durations), median(durations) / 4)


def _column(time: float, unit: float) -> int:
    return int(time / unit + 0.5 + 1e-9)


def _label(op: Op, short: bool) -> str:
    return str(op)[len(str(op.stage)):] if short else str(op)
