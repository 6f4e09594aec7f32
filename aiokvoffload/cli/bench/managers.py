"""Managers under several policies at several sizes, beside another implementation where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

from aiokvoffload.cli.bench.comparison import ComparedCost, compare_managers
from aiokvoffload.cli.bench.manager import ManagerCost, measure_manager
from aiokvoffload.cli.bench.manager_tables import comparison_tables, detailed_tables, short_tables
from aiokvoffload.cli.bench.rounds import BenchSize
from aiokvoffload.cli.bench.tables import to_markdown, to_text
from aiokvoffload.cli.bench.vllm_manager import COMPARED_POLICIES, PACKAGE, import_vllm
from aiokvoffload.cli.report import progress
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.policies.base import POLICIES


@dataclass(frozen=True, slots=True)
class ManagerFindings:
    """What managers cost.

    Attributes:
        costs: Policy after policy.
        compared: The manager beside another implementation, policy after policy.
        not_compared: Why there is nothing to compare with, or not all of it; empty if there is.
    """

    costs: Sequence[ManagerCost]
    compared: Sequence[ComparedCost]
    not_compared: str = ""

    def to_text(self) -> str:
        """Return all figures for a terminal."""
        return to_text([*detailed_tables(self.costs), *comparison_tables(self.compared)]) + self._note()

    def costs_to_markdown(self) -> str:
        """Return the figures of the manager alone, in short, for a page."""
        return to_markdown(short_tables(self.costs))

    def compared_to_markdown(self) -> str:
        """Return the manager beside the other implementation, for a page."""
        return to_markdown(comparison_tables(self.compared)) + self._note()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the figures as plain values, one dict for each policy and size."""
        return [*(cost.to_dict() for cost in self.costs), *(cost.to_dict() for cost in self.compared)]

    def _note(self) -> str:
        return f"\nNot compared with vLLM in this run: {self.not_compared}.\n" if self.not_compared else ""


def measure_managers(
    policies: Sequence[str], sizes: Sequence[BenchSize], *, is_compared: bool | None
) -> ManagerFindings:
    """Measure every policy at every size; what is compared comes last, as importing it makes the process larger.

    Args:
        policies: Their names.
        sizes: Those of one batch size one after the other.
        is_compared: Whether another implementation is measured too; None for where it is installed.

    Raises:
        ConfigurationError: A policy is unknown, or the other implementation was asked for and cannot be used.
    """
    for policy in policies:
        POLICIES.resolve(policy)
    if is_compared:
        import_vllm()
    batch_sizes = dict.fromkeys(size.batch_size for size in sizes)
    every = [
        (policy, size)
        for policy, batch_size in product(policies, batch_sizes)
        for size in sizes
        if size.batch_size == batch_size
    ]
    not_compared = _reason_not_to_compare(is_compared)
    shared = [] if not_compared else [each for each in every if each[0] in COMPARED_POLICIES]
    costs: list[ManagerCost] = []
    compared: list[ComparedCost] = []
    with progress(len(every) + len(shared), "measuring managers") as advance:
        for policy, size in every:
            costs.append(measure_manager(policy, size))
            advance(1)
        try:
            for policy, size in shared:
                compared.append(compare_managers(policy, size))
                advance(1)
        except ConfigurationError as exc:
            if is_compared:
                raise
            not_compared = str(exc)
    return ManagerFindings(costs, compared, not_compared)


def _reason_not_to_compare(is_compared: bool | None) -> str:
    if is_compared is False:
        return "it was not asked for"
    return "" if find_spec(PACKAGE) else f"{PACKAGE} is not installed"
