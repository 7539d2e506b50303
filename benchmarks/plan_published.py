"""Published figures beside the simulation of `steepest plan`, with their schedule and with this library's.

    python -m benchmarks.plan_published              # three tables, about four minutes of a processor
    python -m benchmarks.plan_published --staged     # what weights that leave before the commit would bring
    python -m benchmarks.plan_published --chunks     # what smaller chunks bring where there are many hosts; ten minutes

The figures are of other systems on other hardware, so each is compared with two simulations: of *their* schedule, in
which a chunk's result leaves as soon as that chunk is reduced (`steepest.cli.planning.roles.SendingSchedule`), and of
*ours*, in which new weights leave when the whole step is committed. What a model
needs is taken from what others published:

- Ray SGD: ResNet-101 in batches of 64 for each V100, 25 Gbit/s (p3.16xlarge), github.com/ray-project/ray/pull/3033: one
  worker with 1, 2, 4 and 8 GPUs does 218, 388, 759 and 985 images/s. Gradients are cut into shards of 10,000,000 bytes,
  each with a server of its own. What the object store takes for a byte is found from one of the published
  figures (two workers of two GPUs on one host under "simple", 176 images/s); the others are predicted.
- Horovod: 128 hosts of four P100, batch 64, 25 Gbit/s (Sergeev and Del Balso 2018, arXiv:1802.05799, and
  docs/benchmarks.rst of its repository). What P100 do is from TensorFlow's r1 guide (performance/benchmarks.md: DGX-1,
  batch 64): one does 154 images/s of VGG-16, 219 of ResNet-50 and 91.8 of ResNet-152, four of a host together 584,
  852 and 356. ResNet-101 lies between by its FLOPs (3.8, 7.6 and 11.3 billion: He et al. 2016, arXiv:1512.03385,
  table 1). Horovod's buffer of 64 MiB is spread over all hosts, as a ring does.
- BytePS: the optimum of Jiang et al. 2020 (OSDI), theorem 1, for k machines that only sum up: 2n(n-1)M / (n^2+kn-2k)B
  seconds, where each of these has 2(n-1) parts of the model and each worker's machine n-k; k = n at most.

Bytes are those of the models' layers (`RESNET_101`, `VGG_16`); how the work of a pass lies over the layers is from
their FLOPs, and a third of it is the forward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import gcd

import torch

from steepest.cli.planning.events import Links
from steepest.cli.planning.profile import Costs, Profile
from steepest.cli.planning.roles import STAGED, STREAMED, SendingSchedule
from steepest.cli.planning.simulation import make_job, predict, predict_job
from steepest.core.engine.job import Job
from steepest.core.engine.topology import HostMap
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy

Layer = tuple[str, float, float]  # name, millions of parameters, share of the passes' work
RESNET_101: list[Layer] = [
    ("conv1", 0.01, 0.12),
    *((f"layer1.{n}", 0.07, 0.23) for n in range(3)),
    *((f"layer2.{n}", 0.3, 0.25) for n in range(4)),
    *((f"layer3.{n}", 1.134, 0.222) for n in range(23)),
    *((f"layer4.{n}", 4.99, 0.27) for n in range(3)),
    ("fc", 2.05, 0.002),
]
VGG_16: list[Layer] = [
    *((f"conv1.{n}", 0.02, 1.0) for n in range(2)),
    *((f"conv2.{n}", 0.11, 1.4) for n in range(2)),
    *((f"conv3.{n}", 0.49, 1.55) for n in range(3)),
    *((f"conv4.{n}", 1.97, 1.55) for n in range(3)),
    *((f"conv5.{n}", 2.36, 0.46) for n in range(3)),
    ("fc6", 102.76, 0.1),
    ("fc7", 16.78, 0.017),
    ("fc8", 4.1, 0.004),
]
LINKS = Links(25e9 / 8, 5e-5)
BATCH = 64
OURS = SendingSchedule()
#: Images/s: of one P100 and of four in a host, by model; of one worker with so many V100; of Ray SGD by (workers, GPUs
#: of each, strategy).
P100 = {"ResNet-101": 129.0, "VGG-16": 154.0}
FOUR_P100 = {"ResNet-101": 500.0, "VGG-16": 584.0}
V100 = {1: 218.0, 2: 388.0, 4: 759.0, 8: 985.0}
RAY = {
    (2, 2, "simple"): "176",
    (2, 4, "simple"): "349",
    (2, 8, "simple"): "600",
    (4, 4, "simple"): "468",
    (2, 2, "ps"): "623",
    (2, 4, "ps"): "1,031",
    (2, 8, "ps"): "1,661",
    (4, 4, "ps"): "1,712 to 1,817",
}
HOROVOD = {"ResNet-101": 0.90, "VGG-16": 0.68}
FUSED = 64 << 20  # bytes of Horovod's buffer
SHARD = 10_000_000  # bytes of Ray SGD's


def published_profile(
    layers: Sequence[Layer], samples: int, seconds: float, costs: Costs | None = None
) -> Profile:
    """Return the profile of a model of which layers, samples of a batch and seconds of a pass are known."""
    # a third of the pass is the forward pass, of which nothing is sent
    work = sum(share for *_, share in layers)
    ready, before = {}, 0.0
    for name, _, share in layers:
        ready[name] = seconds * (1 - 2 / 3 * before / work)
        before += share
    parameters = [(name, (int(1e6 * size),), torch.float32, True) for name, size, _ in layers]
    stand_in = torch.nn.Parameter(torch.zeros(1))
    spec = OptimizerSpec.read(torch.optim.SGD([stand_in], lr=0.1), {id(stand_in): layers[0][0]})

    def layout(cut: ChunkSpec) -> ParameterLayout:
        return ParameterLayout.plan(
            parameters, chunk_bytes=cut.chunk_bytes, fragments=cut.fragments
        )

    return Profile(samples, seconds, ready, layout, spec, costs=costs or Costs(), on_device=True)


@dataclass(frozen=True)
class Dealt(Job):
    """A job whose chunks are dealt to all servers, wherever they are; the library takes those beside workers alone."""

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The server that answers for each chunk: the one with the fewest bytes so far."""
        held, found = [0] * self.num_servers, []
        for chunk in self.description.layout.chunks:
            least = min(range(self.num_servers), key=held.__getitem__)
            held[least] += chunk.nbytes
            found.append(least)
        return tuple(found)


def placed(
    profile: Profile, strategy: Strategy, workers: int, servers: Sequence[int], devices: int = 1
) -> Job:
    """Return a job whose servers are on hosts of given numbers, of which the first are the workers'."""
    job = make_job(profile, strategy, workers, len(servers), apart=True, devices=devices)
    known = {field.name: getattr(job, field.name) for field in fields(Job)}
    where = HostMap(tuple(range(workers)), tuple(servers))
    return Dealt(**known | {"num_servers": len(servers), "hosts": where})


# -- Ray SGD ------------------------------------------------------------------------------------


def ray_sgd(
    workers: int, gpus: int, name: str, each: float, schedule: SendingSchedule = STREAMED
) -> float:
    """Return the predicted images/s of workers with so many GPUs each, given the seconds of the store for a byte.

    Two hosts where there are 16 GPUs, otherwise one, on which nothing limits how fast bytes pass; the
    store takes its time there too.
    """
    total = workers * gpus
    links = replace(LINKS, bandwidth=LINKS.bandwidth if total > 8 else 1e15)
    costs = Costs(sent=each, received=each, added=3e-11, applied=1e-10)
    profile = published_profile(RESNET_101, BATCH, BATCH * gpus / V100[gpus], costs)
    if name == "simple":  # the driver copies in and out what each worker has
        job = placed(profile, SimpleStrategy(), workers, [workers], gpus)
    else:
        count = -(-profile.nbytes // SHARD)
        strategy = ParameterServerStrategy(num_servers=count, chunk_bytes=SHARD)
        where = [workers + number % workers for number in range(count)]
        job = placed(profile, strategy, workers, where, gpus)
    return predict_job(job, profile, links, schedule).samples_per_second


def seconds_of_store() -> float:
    """Return what Ray's object store takes for a byte, on each side, from one of the published figures."""
    low, high = 1e-10, 1e-8
    for _ in range(30):
        middle = (low + high) / 2
        if ray_sgd(2, 2, "simple", middle) > float(RAY[2, 2, "simple"]):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def show_ray_sgd() -> None:
    """Print the table of Ray SGD."""
    each = seconds_of_store()
    print(
        f"\nRay SGD, ResNet-101, batch 64, V100, 25 Gbit/s; the store takes {each * 1e9:.2f} ns for a byte on each "
        "side\n\n| workers x GPUs, strategy | published images/s | theirs, simulated | our schedule | our sockets too |"
        "\n|---|---|---|---|---|"
    )
    for (workers, gpus, name), published in RAY.items():
        found = [
            ray_sgd(workers, gpus, name, seconds, schedule)
            for seconds, schedule in ((each, STREAMED), (each, OURS), (1.5e-10, OURS))
        ]
        cells = " | ".join(f"{images:,.0f}" for images in found)
        print(f"| {workers} x {gpus}, {name} | {published} | {cells} |", flush=True)


# -- Horovod ------------------------------------------------------------------------------------


def horovod(
    model: str,
    hosts: int,
    schedule: SendingSchedule = STREAMED,
    *,
    chunk_bytes: int | None = None,
) -> float:
    """Return the share of 4 P100 times so many hosts, with chunks of a size, or as by default."""
    profile = four_p100(model)
    job = make_job(profile, AllreduceStrategy(chunk_bytes=chunk_bytes), hosts, devices=4)
    prediction = predict_job(job, profile, LINKS, schedule)
    return prediction.samples_per_second / (4 * hosts * P100[model])


def four_p100(model: str) -> Profile:
    """Return the profile of a model on a host of four P100."""
    layers = {"ResNet-101": RESNET_101, "VGG-16": VGG_16}[model]
    return published_profile(layers, BATCH, 4 * BATCH / FOUR_P100[model])


def show_horovod(hosts: int) -> None:
    """Print the table of Horovod."""
    print(
        f"\nHorovod, {hosts} hosts of 4 P100, 25 Gbit/s; share of {4 * hosts} times one\n\n"
        "| model | published (128 hosts) | theirs, simulated | ours, the same chunks | ours, chunks as by default |"
        "\n|---|---|---|---|---|"
    )
    for model, published in HOROVOD.items():
        fused = FUSED // hosts  # Horovod's buffer over all hosts
        shares = (
            horovod(model, hosts, chunk_bytes=fused),
            horovod(model, hosts, OURS, chunk_bytes=fused),
            horovod(model, hosts, OURS),
        )
        cells = " | ".join(f"{share:.0%}" for share in shares)
        print(f"| {model} | {published:.0%} | {cells} |", flush=True)


def show_chunks(hosts: int) -> None:
    """Print what chunks of several sizes bring in our schedule."""
    each = 1, 2, 4, 8, 16
    print(
        f"\nOur schedule, {hosts} hosts of 4 P100, 25 Gbit/s; share of {4 * hosts} times one, by chunks for each server"
        f"\n\n| model | as by default | {' | '.join(map(str, each))} |\n|---|---|{'---|' * len(each)}"
    )
    for model in HOROVOD:
        sizes = (None, *(four_p100(model).nbytes // (count * hosts) for count in each))
        cells = (f"{horovod(model, hosts, OURS, chunk_bytes=size):.0%}" for size in sizes)
        print(f"| {model} | {' | '.join(cells)} |", flush=True)


# -- BytePS -------------------------------------------------------------------------------------


def byteps_hosts(n: int, k: int) -> list[int]:
    """Return the hosts of servers of equal parts, such that each host has its part of the optimum."""
    alone, beside = (1, 0) if k >= n else (2 * (n - 1), n - k)
    if not k:
        alone, beside = 0, 1
    common = gcd(alone, beside)
    return [n + host for host in range(k) for _ in range(alone // common)] + [
        host for host in range(n) for _ in range(beside // common)
    ]


def byteps_optimum(n: int, k: int, nbytes: float) -> float:
    """Return the seconds of theorem 1; more than n machines that only sum up bring no more."""
    k = min(k, n)
    return 2 * n * (n - 1) * nbytes / ((n * n + k * n - 2 * k) * LINKS.bandwidth)


def byteps(
    n: int, k: int, schedule: SendingSchedule = STREAMED, chunk_bytes: int = 1 << 20
) -> float:
    """Return the seconds of a step of VGG-16 that is hardly more than communication."""
    profile = published_profile(VGG_16, BATCH, 1e-3)
    hosts = byteps_hosts(n, k)
    strategy = ParameterServerStrategy(num_servers=len(hosts), chunk_bytes=chunk_bytes)
    return predict_job(placed(profile, strategy, n, hosts), profile, LINKS, schedule).seconds


def show_byteps(n: int = 8) -> None:
    """Print the table of BytePS."""
    profile = published_profile(VGG_16, BATCH, 1e-3)
    print(
        f"\nBytePS, {n} workers, {profile.nbytes / 1e6:.0f} MB, 25 Gbit/s; seconds of communication\n\n"
        "| hosts that only sum up | their optimum | theirs, simulated | our schedule, the same places | a server "
        "beside each worker |\n|---|---|---|---|---|"
    )
    beside = predict(profile, ParameterServerStrategy(num_servers=n), n, LINKS).seconds
    for k in (0, 1, 2, 4, 8, 16):
        found = byteps_optimum(n, k, profile.nbytes), byteps(n, k), byteps(n, k, OURS), beside
        print(f"| {k} | " + " | ".join(f"{seconds:.3f}" for seconds in found) + " |", flush=True)


# -- weights that leave before the commit ---------------------------------------------------------


def staged_cases() -> dict[str, tuple[Profile, Job, Links]]:
    """Return jobs in which weights could leave before the commit, by what they are."""
    slow, far = Links(1e9 / 8, 1e-4), Links(1e9 / 8, 0.02)
    fast = Links(10e9 / 8, 5e-5)
    resnet = published_profile(RESNET_101, BATCH, BATCH / V100[1])
    vgg = published_profile(VGG_16, BATCH, BATCH / P100["VGG-16"])
    ps, local = ParameterServerStrategy, LocalStrategy(sync_every=8)
    found: dict[str, tuple[Profile, Job, Links]] = {}
    for model, profile in (("ResNet-101", resnet), ("VGG-16", vgg)):
        for name, links in (("10 Gbit/s", fast), ("1 Gbit/s", slow), ("1 Gbit/s, 20 ms", far)):
            where = f"{model}, 8 workers, {name}"
            found |= {
                f"{where}, allreduce": (profile, make_job(profile, AllreduceStrategy(), 8), links),
                f"{where}, 8 servers beside": (profile, make_job(profile, ps(), 8, 8), links),
                f"{where}, 4 servers apart": (
                    *(profile, make_job(profile, ps(), 8, 4, apart=True)),
                    links,
                ),
                f"{where}, 8 servers apart": (
                    *(profile, make_job(profile, ps(), 8, 8, apart=True)),
                    links,
                ),
                f"{where}, local 8": (profile, make_job(profile, local, 8), links),
            }
    return found


def show_staged() -> None:
    """Print what it would bring."""
    print(
        "| case | step, weights leave at the commit | leave early, installed at it | gain |\n|---|---|---|---|"
    )
    for name, (profile, job, links) in staged_cases().items():
        now, early = (
            predict_job(job, profile, links, schedule).seconds for schedule in (OURS, STAGED)
        )
        print(f"| {name} | {now:.3f} s | {early:.3f} s | {now / early - 1:+.0%} |", flush=True)


def show(hosts: int = 128) -> None:
    """Print the tables of published figures."""
    show_ray_sgd()
    show_byteps()
    show_horovod(hosts)


def main(arguments: list[str] | None = None) -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_published", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--hosts", type=int, default=128, help="of Horovod's figures")
    parser.add_argument("--staged", action="store_true", help="what an early leave would bring")
    parser.add_argument("--chunks", action="store_true", help="what smaller chunks bring")
    options = parser.parse_args(arguments)
    if options.staged:
        show_staged()
    elif options.chunks:
        show_chunks(options.hosts)
    else:
        show(options.hosts)


if __name__ == "__main__":
    main()
