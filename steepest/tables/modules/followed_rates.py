"""Learning rates of the model's optimizer that tables follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steepest.core.optim.spec import OptimizerSpec
from steepest.errors import ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.rows.table import Table


def require_followed(table: Table, spec: OptimizerSpec) -> None:
    """Check that the learning rate that a table follows, if any, exists; ConfigurationError otherwise."""
    if (group := table.optimizer.follows) is None:
        return
    groups = spec.groups
    what = f"follows={group} of table {table.name!r}"
    if group >= len(groups):
        raise ConfigurationError(
            f"{what}: the model's optimizer has {len(groups)} parameter groups: give the index of "
            "one"
        )
    if not groups[group][1].get("lr"):
        raise ConfigurationError(
            f"{what}: that parameter group has the learning rate {groups[group][1].get('lr')}: "
            "give the optimizer the rate of which a schedule's are parts"
        )
