"""Replay buffers: what is stored, what is sampled, and what a checkpoint restores."""

import itertools

import pytest
import torch

from ppo_lightning.offpolicy.buffer import FrameBuffer, ReplayBuffer


def numbered(first, count):
    return {"reward": torch.arange(first, first + count).float()}


@pytest.mark.parametrize("sizes", [(2,), (4,), (3, 2), (1,) * 9, (3, 3, 3)])
def test_the_newest_transitions_stay_in_order_and_survive_a_checkpoint(sizes):
    buffer, total = ReplayBuffer(4), 0
    for size in sizes:
        buffer.add(numbered(total, size))
        total += size
    kept = torch.arange(max(0, total - 4), total).float()
    assert torch.equal(buffer.gather(torch.arange(len(buffer)))["reward"], kept)
    restored = ReplayBuffer(4)
    restored.load_state_dict(buffer.state_dict(), torch.device("cpu"))
    for other in (buffer, restored):  # both continue alike
        other.add(numbered(total, 2))
    expected = torch.cat([kept, torch.arange(total, total + 2).float()])[-4:]
    assert torch.equal(restored.gather(torch.arange(len(restored)))["reward"], expected)


def play(num_envs, lengths, zeros):
    """Yield stacks of unique frames before and after each step, with episodes of these lengths."""
    frame = 0

    def new():
        nonlocal frame
        frame += 1
        return torch.full((2, 2), frame % 251, dtype=torch.uint8)

    stacks = [None] * num_envs
    for t in range(sum(lengths)):
        for n in range(num_envs):
            if stacks[n] is None or (t + n) % lengths[t % len(lengths)] == 0:
                first = new()  # the rule for the stack after a reset differs between backends
                stacks[n] = torch.stack([first * (not zeros)] * 3 + [first])
        before = torch.stack(stacks)
        stacks = [torch.cat([stack[1:], new()[None]]) for stack in stacks]
        yield before, torch.stack(stacks)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("lengths", [(60,), (3, 5) * 8])
def test_frames_are_stored_once_and_stacked_as_they_were(zeros, lengths):
    buffer, expected = FrameBuffer(40, num_envs=2, channels=4), []
    for before, after in play(2, lengths, zeros):
        expected += [*zip(before, after, strict=True)]
        storage = after.clone()
        buffer.add({"observation": before, "next_observation": storage, "reward": torch.zeros(2)})
        storage.zero_()  # a collector reuses its storage
        rows = buffer.gather(torch.arange(len(buffer)))
        assert 20 <= len(buffer) <= 40 or len(buffer) == len(expected)
        for i, (first, second) in enumerate(expected[-len(buffer) :]):
            assert torch.equal(rows["observation"][i], first)
            assert torch.equal(rows["next_observation"][i], second)
    if len(lengths) == 1:
        assert buffer.frames.added < 1.1 * len(expected) + 8, "one frame a step"
    restored = FrameBuffer(40, num_envs=2, channels=4)
    restored.load_state_dict(buffer.state_dict(), torch.device("cpu"))
    for other in (buffer, restored):
        other.add({"observation": before, "next_observation": after, "reward": torch.zeros(2)})
    indices = torch.arange(len(buffer))
    assert len(restored) == len(buffer)
    for key, rows in restored.gather(indices).items():
        assert torch.equal(rows, buffer.gather(indices)[key])


def test_frames_of_a_long_episode_are_kept_while_short_ones_use_up_the_ring():
    """Transitions that were added later may have older frames."""
    numbers, expected = itertools.count(), []

    def frames(count):
        return torch.stack([torch.full((1, 1), next(numbers)) for _ in range(count)])

    def moved(stack):
        return torch.cat([stack[1:], frames(1)])

    buffer, long = FrameBuffer(400, num_envs=2, channels=4), frames(4)
    for _ in range(150):
        before = frames(4), long
        long = moved(long)
        after = moved(before[0]), long
        expected += zip(before, after, strict=True)
        stacks = {"observation": torch.stack(before), "next_observation": torch.stack(after)}
        buffer.add(stacks | {"reward": torch.zeros(2)})
    assert 50 < len(buffer) < 300
    rows = buffer.gather(torch.arange(len(buffer)))
    for i, pair in enumerate(expected[-len(buffer) :]):
        assert all(map(torch.equal, pair, (rows["observation"][i], rows["next_observation"][i])))
