"""An OpenEnv environment and its server, as OpenEnv's own template makes them; runs under OpenEnv's interpreter.

Prints the port that it listens on.
"""

import random
import socket

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    number: int


class GuessObservation(Observation):
    hint: str


class GuessEnvironment(Environment):
    """Guess a number from 1 to 100."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._number = random.Random(seed).randint(1, 100)
        return GuessObservation(hint="guess", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        if action.number < 0:
            raise RuntimeError("a bug")
        self._state.step_count += 1
        right = action.number == self._number
        hint = "right" if right else "higher" if action.number < self._number else "lower"
        metadata = {"steps": self._state.step_count}
        return GuessObservation(hint=hint, done=right, reward=float(right), metadata=metadata)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=8)

if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
