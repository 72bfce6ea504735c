"""Workers on a Ray cluster, for simulators that need more cores than one machine has."""

import functools
import logging
import pickle
import signal
import threading
from typing import Any

from ppo_lightning.envs.workers.processes import Host, Reply, Worker
from ppo_lightning.errors import import_extra

ray: Any = import_extra("ray", extra="ray")


class RayWorker(Worker):
    """A Ray actor in the place of a worker process.

    Ray ends the actors of a process that ends. Without an earlier ``ray.init``, Ray connects to the cluster
    of ``RAY_ADDRESS`` or of this machine, or starts one.
    """

    def start(self, seeds: list[int]) -> None:
        """Start the actor, on any node."""
        if not ray.is_initialized():
            handler = signal.getsignal(signal.SIGTERM)
            ray.init(logging_level=logging.ERROR)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's own would end the run without a checkpoint
        pickled = ray.cloudpickle.dumps(functools.partial(self.make, seeds))
        # Half a core, because those of an evaluation work while those of the training wait.
        actor = ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD")(Host)
        self._actor = actor.remote(lambda: pickle.loads(pickled)())

    def send(self, request: tuple, seconds: float) -> None:
        """Send a request, whose reply may take a number of seconds."""
        self._tick = min(1.0, seconds / 10)
        self._ticks = round(seconds / self._tick)
        self._error: Exception | None = None
        self._reply = self._actor.answer.remote(request)

    def receive(self) -> Reply:
        """Return the reply, or raise an error. Time during which this process is stopped is one tick."""
        for _ in range(self._ticks):
            try:
                reply = ray.get(self._reply, timeout=self._tick)
                if self._error is None:
                    return reply
                break
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.ActorUnavailableError as error:
                self._error = error
                # Ray takes some 20 seconds to find that a node is dead, and would place the next actor there.
                self._reply = self._actor.__ray_ready__.options(max_task_retries=-1).remote()
            except ray.exceptions.RayError as error:
                self._error = error
                break
        raise EOFError if self._error else BlockingIOError

    def end(self, late: str, seconds: float) -> str:
        """Return how the actor ended, as a verb."""
        if late:
            return f"hung for {late}"
        # Lines without indentation say why, the last one in its first sentence.
        reason = [line for line in str(self._error).splitlines() if line[:1].strip()][-1]
        return f"was lost ({reason.partition('. ')[0]})"

    def kill(self, seconds: float = 0.0) -> None:
        """End the actor, which may need some seconds for the request ``close``."""
        if ray.is_initialized():
            ray.wait([self._reply], timeout=seconds)
            ray.kill(self._actor)
