"""REINFORCE on a small environment: each worker plays by itself, all learn one policy.

    python examples/reinforce.py                    # one process, plain PyTorch
    python examples/reinforce.py --workers 2

A loop of the user's own without a loader. The environment, written here, is a walk of nine places: the policy starts
somewhere, goes left or right, and is to reach the right end soon. At first it gets there in one game out of three,
after 40 rounds in each.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
from torch import nn

import steepest

PLACES, MOVES = 9, 12


def play(policy: nn.Module, games: int, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each game the log probability of its moves, and its reward: 1 less what it lasted, -1 if lost."""
    place = torch.randint(1, PLACES - 1, (games,), generator=dice)
    going, reward = torch.ones(games), -torch.ones(games)
    logs = torch.zeros(games)
    for move in range(MOVES):
        scores = policy(nn.functional.one_hot(place, PLACES).float()).log_softmax(dim=1)
        right = torch.rand(games, generator=dice) < scores[:, 1].exp()
        logs = logs + going * torch.where(right, scores[:, 1], scores[:, 0])
        place = torch.where(going > 0, place + 2 * right.long() - 1, place)
        reward = torch.where((going > 0) & (place == PLACES - 1), 1 - move / MOVES, reward)
        going = going * (place > 0) * (place < PLACES - 1)
    return logs, reward


def train(rounds: int, games: int) -> float:
    """Train a policy; return the share of games that are won at last."""
    policy = nn.Linear(PLACES, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    policy, optimizer = steepest.prepare(policy, optimizer)
    won = 0.0
    for number in steepest.epochs(rounds):
        dice = torch.Generator().manual_seed(1000 * number + steepest.rank())
        logs, reward = play(policy, games, dice)
        optimizer.zero_grad()
        (-(reward - reward.mean()) * logs).mean().backward()
        optimizer.step()
        won = (reward > 0).float().mean().item()
        steepest.report(reward=reward.mean(), won=won)
        if number % 20 == 0 and steepest.rank() == 0:
            print(f"round {number}: {won:.0%} of the games are won")
    return won


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--games", type=int, default=64, help="of each worker in a round")
    parser.add_argument("--workers", type=int, default=0, help="0 for none: the script by itself")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    function = functools.partial(train, chosen.rounds, chosen.games)
    if chosen.workers == 0:
        return function()
    return steepest.run(function, num_workers=chosen.workers).metrics["won"]


if __name__ == "__main__":
    main()
