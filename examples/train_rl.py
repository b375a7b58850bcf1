"""Reinforcement learning on one device, with the parts of each cycle marked.

A cycle has a rollout without gradients, rewards, and several updates with what was
rolled out. With --offload the optimizer's state is in host memory meanwhile.

    ebbtide profile -o rl.ebb -- python examples/train_rl.py
    ebbtide cycles rl.ebb -o cycle.png
"""

import argparse

import torch
from torch import nn

import ebbtide

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--width", type=int, default=64, help="Width of the layers.")
parser.add_argument("--cycles", type=int, default=6, help="Number of cycles.")
parser.add_argument("--updates", type=int, default=4, help="Updates in a cycle.")
parser.add_argument("--tokens", type=int, default=32, help="Length of a rollout.")
parser.add_argument("--batch", type=int, default=64, help="Rollouts in a cycle.")
parser.add_argument("--offload", action="store_true", help="Move the state around.")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
width = options.width


class Layer(nn.Module):
    """A residual layer of two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


policy = nn.Sequential(*[Layer() for _ in range(8)]).to(device)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)


def move_state(to: str) -> None:
    """Move the moments of the optimizer."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if value.dim():
                state[key] = value.to(to)


@ebbtide.step("rollout")
@torch.no_grad()
def rollout() -> torch.Tensor:
    """Return one state per token and rollout."""
    state = torch.randn(options.batch, width, device=device)
    states = []
    for _ in range(options.tokens):
        state = torch.tanh(policy(state)) + 0.1 * torch.randn_like(state)
        states.append(state)
    return torch.stack(states, 1)


for cycle in range(options.cycles):
    if options.offload:
        with ebbtide.step("state out"):
            move_state("cpu")
    states = rollout()
    with ebbtide.step("reward"):
        rewards = -states.square().mean(-1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        weights = advantages.clamp(-1, 1).exp()
    if options.offload:
        with ebbtide.step("state in"):
            move_state(device)
    with ebbtide.step("update"):
        for _ in range(options.updates):
            outputs = policy(states[:, :-1])
            errors = (outputs - states[:, 1:]).square().mean(-1)
            loss = (weights[:, 1:] * errors).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"cycle {cycle}: reward {rewards.mean().item():.3f}")
