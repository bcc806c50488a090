"""An environment that says which actions are valid: take 1, 2 or 3 of 21 matches in turn; the last one wins.

PYTHONPATH=examples python ppo_discrete.py --env-id nim:Nim-v0
"""

from typing import Any

import gymnasium
import numpy as np


class Nim(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(22)  # matches that are left
    action_space = gymnasium.spaces.Discrete(3)

    def valid(self) -> dict[str, Any]:
        return {"action_mask": np.arange(1, 4) <= self.matches}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.matches = 21
        return self.matches, self.valid()

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.matches -= int(action) + 1
        won = self.matches == 0
        if not won:  # the other one takes what it likes
            self.matches -= int(self.np_random.integers(1, min(3, self.matches) + 1))
        return self.matches, float(won), self.matches == 0, False, self.valid()


gymnasium.register("Nim-v0", "nim:Nim")
