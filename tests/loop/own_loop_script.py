"""A script of a user's with its loop at top level, for `steepest run`."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import steepest
from tests.reference import perceptron, samples

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--out")
arguments = parser.parse_args()
model = perceptron()
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
loader = DataLoader(TensorDataset(*samples(12)), batch_size=2, shuffle=True)
model, optimizer, loader = steepest.prepare(model, optimizer, loader)
for _ in steepest.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    steepest.report(loss=loss)
if steepest.rank() == 0:
    torch.save(model.state_dict(), arguments.out)
