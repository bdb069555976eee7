"""Plans: operations, checks, simulation, facts, lowering, drawing. Standard library only."""

from .check import check
from .ir import Op, Overlap, Plan, PlanError, parse_csv
from .lower import Instr, Program, forward_only, lower
from .simulate import Costs, Simulation, simulate

__all__ = ["Costs", "Instr", "Op", "Overlap", "Plan", "PlanError", "Program", "Simulation", "check", "forward_only",
           "lower", "parse_csv", "simulate"]
