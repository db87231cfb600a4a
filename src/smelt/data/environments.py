"""Environments to evaluate policies in: `gym:CartPole-v1`, or `gym:CartPole-v1@100` for 100 episodes.

Only environments that gymnasium itself registers are made: an id may name a module to import, which is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from smelt.errors import DataError, install_command

PREFIX = "gym:"
EPISODES = 20
_SOURCE = re.compile(r"gym:(?P<id>[\w.-]+(/[\w.-]+)?)(@(?P<episodes>[1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Environment:
    """An environment and the number of episodes to run in it. Episode n is reset with the seed n."""

    id: str
    episodes: int = EPISODES

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.id}@{self.episodes}"

    def __len__(self) -> int:
        return self.episodes

    def make(self) -> Any:
        """Return a new gymnasium environment, whose episodes end."""
        gymnasium = _gymnasium()
        try:
            made = gymnasium.make(self.id)
        except (gymnasium.error.Error, ImportError) as error:
            raise DataError(f"{PREFIX}{self.id} cannot be made ({' '.join(str(error).split())[:200]}).") from error
        if made.spec.max_episode_steps is None:
            raise DataError(f"{PREFIX}{self.id} has no limit of steps, so an episode may never end; name another one.")
        return made


def load_environment(source: str) -> Environment:
    """Parse a source and check that its environment exists."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise DataError(f"'{source:.80}' is not an environment: expected gym:NAME or gym:NAME@EPISODES.")
    environment = Environment(match["id"], int(match["episodes"] or EPISODES))
    environment.make().close()
    return environment


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise DataError(f"environments need one more package: {install_command('policies')}.") from error
    return gymnasium
