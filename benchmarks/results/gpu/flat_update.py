"""One update of PPO's two 64-64 networks with the parameters apart and as one flat vector.

`python benchmarks/results/gpu/flat_update.py DEVICE ROWS ...` prints a line of JSON for each form and number
of rows: microseconds of a compiled update (loss, gradients, clipping, Adam), and on a GPU of the same update
replayed as a CUDA graph, medians of seven measurements in alternation.
"""

import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.adam import adam as guarded_adam

adam = inspect.unwrap(guarded_adam)


def mlp(outputs: int) -> nn.Sequential:
    """Return a network for CartPole's observations."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Loss(nn.Module):
    """PPO's loss of a minibatch with clipped values and normalized advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(2), mlp(1)

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        logits = self.actor(rows["observation"]).log_softmax(-1)
        ratio = (logits.gather(1, rows["action"]).squeeze(1) - rows["log_prob"]).exp()
        advantage = (rows["advantage"] - rows["advantage"].mean()) / (rows["advantage"].std() + 1e-8)
        policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        value = self.critic(rows["observation"]).squeeze(1)
        clipped = rows["value"] + (value - rows["value"]).clamp(-0.2, 0.2)
        errors = torch.maximum((value - rows["return"]) ** 2, (clipped - rows["return"]) ** 2)
        entropy = -(logits.exp() * logits).sum(-1).mean()
        return policy - 0.01 * entropy + 0.25 * errors.mean()


def make_update(flat: bool, count: int, device: str) -> Callable[[], Tensor]:
    """Return a compiled update of all parameters with a fixed minibatch of `count` rows."""
    torch.manual_seed(0)
    loss = Loss().to(device)
    names = [name for name, _ in loss.named_parameters()]
    weights = [parameter.detach().clone() for parameter in loss.parameters()]
    shapes, sizes = [w.shape for w in weights], [w.numel() for w in weights]
    rows = {key: torch.randn(count, device=device) for key in ("advantage", "value", "return")}
    rows["observation"] = torch.randn(count, 4, device=device)
    rows["action"] = torch.randint(2, (count, 1), device=device)
    rows["log_prob"] = torch.full((count,), -0.69, device=device)
    params = [torch.cat([w.flatten() for w in weights])] if flat else weights
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    steps = [torch.zeros((), device=device) for _ in params]
    lr = torch.tensor(2.5e-4, device=device)

    def evaluate(params: list[Tensor]) -> Tensor:
        views = params
        if flat:
            views = [part.view(shape) for part, shape in zip(params[0].split(sizes), shapes, strict=True)]
        return torch.func.functional_call(loss, dict(zip(names, views, strict=True)), (rows,))

    @torch.compile
    def update() -> Tensor:
        grads, value = torch.func.grad_and_value(evaluate)(params)
        scale = (0.5 / (torch.nn.utils.get_total_norm(grads, foreach=False) + 1e-6)).clamp(max=1.0)
        options = {"foreach": False, "amsgrad": False, "beta1": 0.9, "beta2": 0.999, "lr": lr}
        options |= {"weight_decay": 0.0, "eps": 1e-5, "maximize": False}
        adam(params, [grad * scale for grad in grads], means, squares, [], steps, **options)
        return value

    return update


def microseconds(call: Callable[[], object], device: str, repeats: int = 200) -> float:
    """Return the mean duration of a call."""
    begin = 0.0
    for count in (5, repeats):  # the first calls warm up
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / repeats


@torch.no_grad()
def main() -> None:
    """Measure both forms in alternation."""
    device, *counts = sys.argv[1:]
    for count in map(int, counts):
        calls: dict[tuple[bool, str], Callable[[], object]] = {}
        for flat in (False, True):
            calls[flat, "compiled_us"] = update = make_update(flat, count, device)
            microseconds(update, device)
            if device == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    update()
                calls[flat, "cuda_graph_us"] = graph.replay
        durations: dict[tuple[bool, str], list[float]] = {key: [] for key in calls}
        for _ in range(7):
            for key, call in calls.items():
                durations[key].append(microseconds(call, device))
        for flat in (False, True):
            row = {key[1]: round(statistics.median(d), 1) for key, d in durations.items() if key[0] == flat}
            print(json.dumps({"flat": flat, "B": count} | row))


if __name__ == "__main__":
    main()
