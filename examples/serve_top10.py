"""Serve the ten best items of each user over plain HTTP, while the tables train.

    python examples/serve_top10.py --port 8000 --epochs 100
    curl 'http://127.0.0.1:8000/top?user=7'

Users like items of their own kind. Two tables learn it on servers. Every so many steps a callback asks
the servers for the rows that have changed since, and takes them into two modules in place; training goes
on meanwhile. Requests are answered from these modules. A user who has not been seen
gets the items that suit the default row.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from steepest import Callback, DistributedSGD, Embedding, ServedTable, StepResult, Table, TorchModel
from steepest.tables import Adagrad, Constant, Normal

USERS, ITEMS, KINDS, DIM = 300, 120, 4, 8


class Taste(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows: dict[str, Any] = {"optimizer": Adagrad(lr=0.3), "initial": Normal(std=0.1)}
        self.users = Embedding(Table("users", DIM, default=Constant(0.1), **rows))
        self.items = Embedding(Table("items", DIM, **rows))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * self.items(items)).sum(1)


def clicks(count: int = 6000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return users, items, and whether the one clicked on the other."""
    chance = torch.Generator().manual_seed(0)
    users = torch.randint(USERS, (count,), generator=chance)
    items = torch.randint(ITEMS, (count,), generator=chance)
    return users, items, (users % KINDS == items % KINDS).float()


class Server(Callback):
    """Answers requests from the rows that it has pulled last."""

    def __init__(self, sgd: DistributedSGD, port: int, every: int) -> None:
        self.sgd, self.every = sgd, every
        self.users = ServedTable(sgd.export_table("users"))
        self.items = ServedTable(sgd.export_table("items"))
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urlsplit(self.path)
                user = parse_qs(asked.query).get("user", [""])[0]
                if asked.path != "/top" or not user.isdecimal() or int(user) >= 2**63:
                    self.send_error(404, "ask for /top?user=NUMBER")
                    return
                answer = json.dumps(outer.top(int(user))).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever)

    def top(self, user: int, count: int = 10) -> dict[str, Any]:
        """Return the best items of a user, and of which update the rows are."""
        with self.lock:
            ids = self.items.ids[: len(self.items)]
            scores = self.items(ids) @ self.users(torch.tensor(user))
            best = ids[scores.topk(min(count, len(ids))).indices]
            return {"user": user, "items": best.tolist(), "version": self.items.version}

    def pull(self) -> None:
        """Take what has changed since the last time; training goes on meanwhile."""
        for served in (self.users, self.items):
            changes = self.sgd.export_table(served.name, since=served.cursor)
            with self.lock:
                served.update(changes)

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        """Pull when it is time; called while workers compute the next steps."""
        if result.step % self.every == 0:
            self.pull()

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def create(worker_index: int, device_index: int) -> TorchModel:
    return TorchModel(
        Taste(),
        loss=binary_cross_entropy_with_logits,
        data=clicks(),
        batch_size=64,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


def main(argv: Sequence[str] | None = None, callbacks: Sequence[Any] = ()) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=50, help="steps between two pulls")
    options = parser.parse_args(argv)
    with (
        DistributedSGD(create, num_workers=2) as sgd,
        Server(sgd, options.port, options.every) as server,
    ):
        host, port = server.http.server_address[:2]
        print(f"ask http://{host}:{port}/top?user=7", flush=True)
        sgd.fit(epochs=options.epochs, callbacks=[server, *callbacks], progress=False)
        server.pull()
        print(f"user 7: {server.top(7)['items']}", flush=True)


if __name__ == "__main__":
    main()
