"""Tiny environments that count, so that a test can tell where every number came from.

An observation is [step of the episode, episode, a random draw of the episode], and `info` holds that step, too;
`counting_envs:Trunc-v0` is such an id.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Counting(gym.Env):
    """Ends at step `end` in the way `ending`; `reward` of each step, or "nan", "inf", "step"; `fault` at step 3.

    A `mask` goes with its observations: "clock" allows one action of each component, the (step + episode)-th;
    "final" allows nothing at the end, where nobody chooses; "short", "list", "empty" and "shrinks" are wrong.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(
        self,
        end: int = 5,
        ending: str = "truncate",
        reward: float | str = 1.0,
        action: spaces.Space | None = None,
        observation: spaces.Space | None = None,
        fault: str = "",
        mask: str = "",
        render_mode: str | None = None,
    ):
        self.end, self.ending, self.reward, self.fault, self.render_mode = end, ending, reward, fault, render_mode
        self.mask = mask
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

    def info(self) -> dict[str, Any]:
        if not self.mask:
            return {"t": self.t}
        space: Any = self.action_space
        sizes = np.ravel(getattr(space, "nvec", getattr(space, "n", 0)))
        parts = [np.ones(size, np.int8) for size in sizes]
        if self.mask == "clock":
            parts = [np.eye(size, dtype=np.int8)[(self.t + self.episode) % size] for size in sizes]
        if (self.mask == "empty" and self.t == 3) or (self.mask == "final" and self.t == self.end):
            parts[-1][:] = 0
        mask = np.concatenate(parts)
        if self.mask == "short" or (self.mask == "shrinks" and self.t > 0):
            mask = mask[1:]
        return {"t": self.t, "action_mask": list(mask) if self.mask == "list" else mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.episode, self.draw = 0, self.episode + 1, float(self.np_random.random())
        return self.observe() if self.fault == "old reset" else (self.observe(), self.info())

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
        return self.observe(), reward, *ends, self.info()

    def render(self) -> np.ndarray | None:
        shape = (301, 401, 3) if self.fault == "odd picture" else (64, 64, 3)
        return None if self.fault == "no picture" else np.full(shape, self.t % 256, np.uint8)


box = spaces.Box
multi: Any = spaces.MultiDiscrete
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
    "MultiAction": {"action": spaces.MultiDiscrete([3, 5, 2], start=[2, 0, -1])},
    "TableAction": {"action": multi([[2, 4], [3, 2]], np.int32)},
    "Clock": {"mask": "clock", "action": spaces.MultiDiscrete([3, 5, 2], start=[2, 0, -1])},
    **{f"{mask.title()}Mask": {"mask": mask} for mask in ("final", "short", "list", "empty", "shrinks")},
    "SequenceAction": {"action": spaces.Sequence(box(-1, 1, (2,), np.float32))},
    "SequenceObs": {"observation": spaces.Sequence(box(-1, 1, (2,), np.float32))},
}


class Masked(gym.Env):
    """Each step shows a situation and which actions are valid, and pays the part that these earn of what they could.

    `invalid` counts the components that were chosen against the mask, which earn nothing; all right pay 1 a step.
    """

    action_space = spaces.MultiDiscrete([3, 5, 2])
    observation_space = spaces.Box(0.0, 1.0, (14,), np.float32)
    invalid = 0

    def __init__(self, masked: bool = True, render_mode: str | None = None):
        self.masked = masked
        rng = np.random.default_rng(0)
        sizes = self.action_space.nvec
        self.worth = [[1 + rng.permutation(size) for size in sizes] for _ in range(4)]

    def observe(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.situation = int(self.np_random.integers(4))
        self.valid = [self.np_random.random(size) < 0.5 for size in self.action_space.nvec]
        for valid in self.valid:
            valid[self.np_random.integers(len(valid))] = True
        mask = np.concatenate(self.valid).astype(np.int8)
        obs = np.concatenate([np.eye(4)[self.situation], mask]).astype(np.float32)
        return obs, {"action_mask": mask} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        earned, possible = 0.0, 0.0
        for a, worth, valid in zip(action, self.worth[self.situation], self.valid, strict=True):
            earned += float(worth[a] * valid[a])
            possible += float(max(worth * valid))
            Masked.invalid += int(not valid[a])
        obs, info = self.observe()
        return obs, earned / possible, self.t == 10, False, info


class Recall(gym.Env):
    """Shows one of two cues, then eight times nothing, then asks for the cue, which pays 1: ten steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)

    def observe(self) -> np.ndarray:
        return np.array([self.t == 0 and self.cue == 0, self.t == 0 and self.cue == 1, self.t == 9], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(2))
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == 10
        return self.observe(), float(over and action == self.cue), over, False, {}


class Leak(gym.Env):
    """Two to five steps show 0 or 1 by chance, and each is paid for telling what the first of them showed; all 1.

    No observation tells where an episode begins, so that a memory which is not emptied cannot know which of them was
    the first, and one that is emptied a step late has forgotten it.
    """

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)

    def observe(self) -> np.ndarray:
        self.shown = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.shown]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        obs = self.observe()
        self.t, self.length, self.cue = 0, int(self.np_random.integers(2, 6)), self.shown
        return obs, {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        right = float(action == self.cue)
        return self.observe(), right / self.length, self.t == self.length, False, {}


class Ragged(gym.Env):
    """Episodes of 1, 2 or 9 steps that die or are cut, all by chance; [step / 10, three draws], each once in a run.

    An action pays what the last observation's first draw says, so that a return tells the actions of an episode.
    """

    action_space = spaces.Discrete(4)
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observe(self) -> np.ndarray:
        self.obs = np.array([self.t / 10, *self.np_random.normal(size=3)], np.float32)
        return self.obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.choice([1, 1, 2, 9]))
        self.dies = bool(self.np_random.integers(2))
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = float(self.obs[1]) * int(action)
        over = self.t == self.length
        return self.observe(), reward, over and self.dies, over and not self.dies, {}


class Plain(Counting):
    """Its constructor takes nothing, not even a render mode."""

    def __init__(self) -> None:
        super().__init__()


for _name, _options in IDS.items():
    gym.register(id=f"{_name}-v0", entry_point="counting_envs:Counting", kwargs=_options)
    _choice = {"action": spaces.Discrete(3, start=5)} | _options  # the same for those who choose
    gym.register(id=f"Choice{_name}-v0", entry_point="counting_envs:Counting", kwargs=_choice)
gym.register(id="Masked-v0", entry_point="counting_envs:Masked")
gym.register(id="Unmasked-v0", entry_point="counting_envs:Masked", kwargs={"masked": False})
for _kind in (Recall, Leak, Ragged):
    gym.register(id=f"{_kind.__name__}-v0", entry_point=f"counting_envs:{_kind.__name__}")
gym.register(id="Plain-v0", entry_point="counting_envs:Plain")
