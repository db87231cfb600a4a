"""Process groups of some of the workers, which wait for each other as long as the run does.

A new group of PyTorch's own waits half an hour for a worker that does not answer, whatever the run was told.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as distributed


def part_of_group(ranks: Sequence[int], whole: distributed.ProcessGroup | None = None) -> distributed.ProcessGroup:
    """A group of these workers, by their ranks among all; only they call it. `whole`: whose patience it takes over."""
    group = distributed.new_group(list(ranks), timeout=patience(whole), use_local_synchronization=True)
    assert isinstance(group, distributed.ProcessGroup)
    return group


def patience(group: distributed.ProcessGroup | None = None) -> timedelta:
    """How long a worker of the group waits for another; None: the group of all."""
    group = group or distributed.group.WORLD
    assert group is not None
    found: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return found
