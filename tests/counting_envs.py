"""Tiny environments that count, so that a test can tell where every number came from.

An observation is [step of the episode, episode, a random draw of the episode], and `info` holds that step, too;
`counting_envs:Trunc-v0` is such an id.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Counting(gym.Env):
    """Ends at step `end` in the way `ending`; `reward` of each step, or "nan", "inf", "step"; `fault` at step 3."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(
        self,
        end: int = 5,
        ending: str = "truncate",
        reward: float | str = 1.0,
        action: spaces.Space | None = None,
        observation: spaces.Space | None = None,
        fault: str = "",
        render_mode: str | None = None,
    ):
        self.end, self.ending, self.reward, self.fault, self.render_mode = end, ending, reward, fault, render_mode
        if fault == "key error":
            raise KeyError("level")
        self.action_space = action or spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.counts = observation is None
        self.observation_space = observation or spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.buffer = np.zeros(3, np.float32)
        self.t = self.episode = 0

    def observe(self) -> Any:
        if not self.counts:
            return self.observation_space.sample()
        if self.fault == "global draw":
            self.draw = np.random.random()
        self.buffer[:] = self.t, self.episode, self.draw  # the same array each time, as some simulators do
        if self.fault == "nan observation" and self.t == 3:
            self.buffer[0] = np.nan
        return np.zeros(4, np.float32) if self.fault == "undeclared shape" else self.buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.episode, self.draw = 0, self.episode + 1, float(self.np_random.random())
        return self.observe() if self.fault == "old reset" else (self.observe(), {"t": self.t})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is outside {self.action_space}"
        self.t += 1
        if self.fault == "crash" and self.t == 3:
            raise RuntimeError("the simulator crashed")
        named = {"nan": np.nan, "inf": np.inf, "step": float(self.t)}
        reward = named[self.reward] if isinstance(self.reward, str) else self.reward
        last = self.t >= self.end
        ends = last and self.ending in ("terminate", "both"), last and self.ending in ("truncate", "both")
        if self.fault == "old step":
            return self.observe(), reward, last, {}  # type: ignore[return-value]
        if self.fault == "vector reward":
            return self.observe(), np.ones(2), *ends, {}  # type: ignore[return-value]
        return self.observe(), reward, *ends, {"t": self.t}

    def render(self) -> np.ndarray | None:
        shape = (301, 401, 3) if self.fault == "odd picture" else (64, 64, 3)
        return None if self.fault == "no picture" else np.full(shape, self.t % 256, np.uint8)


box = spaces.Box
IDS: dict[str, dict[str, Any]] = {
    "Trunc": {},
    "Term": {"ending": "terminate"},
    "Both": {"ending": "both"},
    "OneStep": {"end": 1, "ending": "terminate"},
    "Long": {"end": 3000},
    "Hundred": {"end": 100},
    "Step": {"reward": "step"},
    "Zero": {"reward": 0.0},
    "Huge": {"reward": 1e30},
    "Vast": {"reward": 1e200},
    "GlobalDraw": {"fault": "global draw"},
    "OddPicture": {"fault": "odd picture"},
    "NoPicture": {"fault": "no picture"},
    "KeyError": {"fault": "key error"},
    "NanReward": {"reward": "nan"},
    "InfReward": {"reward": "inf"},
    "NanObs": {"fault": "nan observation"},
    "Crash": {"fault": "crash", "end": 50},
    "WrongShape": {"fault": "undeclared shape"},
    "OldStep": {"fault": "old step"},
    "OldReset": {"fault": "old reset"},
    "VectorReward": {"fault": "vector reward"},
    "IntegerBox": {"action": box(0, 10, (2,), np.int64)},
    "WideBox": {"action": box(-1000.0, 1000.0, (2,), np.float32)},
    "Box05": {"action": box(0.0, 5.0, (2,), np.float32)},
    "HalfOpen": {"action": box(np.array([-1.0, -np.inf], np.float32), np.array([np.inf, 1.0], np.float32))},
    "Unbounded": {"action": box(-np.inf, np.inf, (2,), np.float32)},
    "Matrix": {"action": box(-1.0, 1.0, (2, 3), np.float32)},
    "Scalar": {"action": box(-1.0, 1.0, (), np.float32)},
    "Float64": {"action": box(-1.0, 1.0, (2,), np.float64)},
    "DiscreteAction": {"action": spaces.Discrete(4)},
    "DiscreteObs": {"observation": spaces.Discrete(5)},
    "DictObs": {"observation": spaces.Dict({"a": box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3)})},
    "TupleObs": {"observation": spaces.Tuple((box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)))},
    "ImageObs": {"observation": box(0, 255, (96, 96, 3), np.uint8)},
    "FloatImageObs": {"observation": box(-1.0, 1.0, (3, 32, 32), np.float32)},
    "NestedImageObs": {
        "observation": spaces.Dict({"a": spaces.Dict({"b": box(0, 255, (8, 8), np.uint8)}), "c": spaces.Discrete(2)})
    },
    "FlatImageObs": {"observation": box(0, 255, (27_648,), np.uint8)},
    "SequenceAction": {"action": spaces.Sequence(box(-1, 1, (2,), np.float32))},
    "SequenceObs": {"observation": spaces.Sequence(box(-1, 1, (2,), np.float32))},
}


class Plain(Counting):
    """Its constructor takes nothing, not even a render mode."""

    def __init__(self) -> None:
        super().__init__()


for _name, _options in IDS.items():
    gym.register(id=f"{_name}-v0", entry_point="counting_envs:Counting", kwargs=_options)
gym.register(id="Plain-v0", entry_point="counting_envs:Plain")
