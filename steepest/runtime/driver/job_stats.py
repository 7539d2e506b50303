"""A job's counters, read from the coordinator, its processes and the driver."""

from __future__ import annotations

from steepest.core.messages.driver import Counters
from steepest.observe.results import Staleness, Stats, stragglers
from steepest.runtime.cluster import Cluster
from steepest.runtime.driver.calls import Calls
from steepest.runtime.driver.training import Training
from steepest.runtime.owner import Moment
from steepest.runtime.recovery.supervisor import Supervisor
from steepest.tables.job.table_counts import added_counts


def job_stats(cluster: Cluster, training: Training, supervisor: Supervisor, calls: Calls) -> Stats:
    """Return a job's counters and events so far; any thread may ask."""

    def read() -> Counters:
        future = cluster.on_router(lambda: cluster.client.counters())
        counters: Counters = cluster.wait(future, "the coordinator's counters")
        return counters

    counters = calls.reading(read)
    processes = cluster.owner.call(lambda: cluster.workers.answers("counters"), Moment.ANY)
    return Stats(
        step=counters.step,
        version=counters.version,
        generation=counters.generation,
        samples=training.samples,
        seconds=training.seconds,
        bytes_pushed=training.bytes_pushed,
        bytes_pulled=training.bytes_pulled,
        refused=sum(process["refused"] for process in processes.values()),
        memory={str(peer): process["resident"] for peer, process in processes.items()},
        skipped=counters.skipped,
        dropped=counters.dropped,
        staleness=Staleness(dict(counters.staleness)),
        num_workers=cluster.job.num_workers,
        num_servers=cluster.job.num_servers,
        replaced=supervisor.replaced,
        paces=(paces := dict(counters.paces)),
        stragglers=stragglers(paces, dict(counters.slow)),
        events=tuple(cluster.events),
        tables=added_counts(process["tables"] for process in processes.values()),
    )
