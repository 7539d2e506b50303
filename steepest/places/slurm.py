"""Render an sbatch file that starts Ray on all nodes of a Slurm job and trains there."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from steepest.errors import ConfigurationError
from steepest.places.program import Program, add_program_arguments, job_name, program_of, write
from steepest.validation import require_count

_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
#: What an option of sbatch may hold: it stands in a line of its own, as a comment for the shell.
_DIRECTIVE = re.compile(r"--?[a-zA-Z][^\s=]*([= ]\S[^\n]*)?")

_BODY = r"""
set -e
{setup}
# Only now: what is sourced above may read variables that nobody has set, as a login shell's files do with $PS1.
set -uo pipefail

# A folder that all nodes see, for Ray's token, which no one else may read.
job="{shared}/.steepest-$SLURM_JOB_ID"
rm -rf "$job" && mkdir -m 700 "$job"
trap 'rm -rf "$job"' EXIT
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$job/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$job/token"
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT={wait}
export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}" JOB_FOLDER="$job"
# Ray's files on each node, in a folder of this job: those in /tmp/ray are of who came first. Sockets need a short path.
export RAY_TMPDIR="/tmp/steepest-$SLURM_JOB_ID"

# The first node is the one that runs this file.
{address}
case "$ip" in *:*) ip="[$ip]" ;; esac
export RAY_ADDRESS="$ip:{port}"

# What each node runs.
cat > "$job/node" <<'END'
mkdir -m 700 "$RAY_TMPDIR" 2> /dev/null || [ -O "$RAY_TMPDIR" ] || {{
  echo "$(hostname): $RAY_TMPDIR is of another user, or cannot be made" >&2
  exit 1
}}
trap 'rm -rf "$RAY_TMPDIR"' EXIT
ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus={cpus}{gpus} --disable-usage-stats -- bash "$JOB_FOLDER/program"
END

# What Ray runs on the first node. Its exit status is kept, because Ray's own may say nothing of it.
cat > "$job/program" <<'END'
{command} &
echo $! > "$JOB_FOLDER/pid"
status=0
wait $! || status=$?
echo $status > "$JOB_FOLDER/status.new"
mv "$JOB_FOLDER/status.new" "$JOB_FOLDER/status"
exit $status
END

# Shortly before the time is over the program alone is told, while Ray and the workers still run.
leave() {{
  [ ! -s "$job/pid" ] || kill -TERM "$(cat "$job/pid")" 2> /dev/null || true
}}
trap leave TERM

# Not the end of srun is awaited but the program's: other nodes take a minute to see that Ray is gone.
# Environments travel also where sbatch had --export=NONE; no node waits for a rendezvous of MPI.
srun --export=ALL --mpi=none --ntasks-per-node=1 --cpus-per-task={cpus} --no-kill --kill-on-bad-exit=0 \
  bash "$job/node" &
step=$!
while [ ! -s "$job/status" ] && kill -0 "$step" 2> /dev/null; do sleep 1; done
status=$(cat "$job/status" 2> /dev/null || echo 1)
{requeue}exit "$status"
"""
_ADDRESS_BY_NAME = r"""# Its name may stand for a loopback address there.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(getent ahostsv4 "${hosts[0]}" | awk '$1 !~ /^127\./ {print $1; exit}' || true)
ip=${ip:-$(hostname -I | awk '{print $1}')}"""
_ADDRESS_OF_INTERFACE = r"""ip=$(ip -o addr show dev {interface} scope global \
  | awk '{{sub("/.*", "", $4); print $4; exit}}' || true)
[ -n "$ip" ] || {{ echo "$(hostname): the interface {interface} has no address" >&2; exit 1; }}"""
_REQUEUE = r"""if [ "$status" = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A Slurm job that has whole nodes; ConfigurationError: a value is out of range."""

    name: str
    # runs on the first node; its path is relative to the folder where sbatch is called
    program: Program
    nodes: int
    cpus: int  # cpus and gpus of each node
    time: str  # limit, as Slurm writes it, such as "02:00:00" or "1-12"
    gpus: int = 0
    memory: str | None = None  # of each node, as Slurm writes it; None for all of it
    leave: int = 60  # seconds before the time limit at which the program gets SIGTERM
    requeue: bool = False  # whether a job that ended so is put into the queue again
    port: int = 6379  # of Ray's control store, on the first node
    wait: int = 300  # seconds that nodes wait for each other at the start
    # a folder that all nodes see; None for the one where sbatch is called
    shared: str | None = None
    # of the first node, by which the others reach it; None for the one that its name stands for
    interface: str | None = None
    setup: tuple[str, ...] = ()  # shell lines that run first, on the first node
    directives: tuple[str, ...] = ()  # further options of sbatch

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--nodes", self.nodes, 1), ("--cpus-per-task", self.cpus, 1), ("--wait", self.wait, 10),
            ("--gpus-per-node", self.gpus, 0), ("--leave", self.leave, 1), ("--port", self.port, 1024),
        ):  # fmt: skip
            require_count(option, value, least)
        if self.port > 65535:
            raise ConfigurationError(f"--port={self.port}: give one from 1024 to 65535")
        if not _TIME.fullmatch(self.time):
            raise ConfigurationError(
                f"--time={self.time!r}: give minutes, hours:minutes:seconds or days-hours, such as "
                "02:00:00"
            )
        if self.memory is not None and not re.fullmatch(r"\d+[KMGT]?", self.memory):
            raise ConfigurationError(f"--mem={self.memory!r}: give such as 64G")
        if self.shared is not None and not re.fullmatch(r"/[^\s'\"$`\\]*", self.shared):
            raise ConfigurationError(
                f"--shared={self.shared!r}: give the absolute path of a folder that all nodes see, "
                "without blanks and quotes"
            )
        if self.interface is not None and not re.fullmatch(r"[\w.@-]{1,15}", self.interface):
            raise ConfigurationError(
                f"--interface={self.interface!r}: give the name of a network interface, such as ib0"
            )
        for line in self.setup:
            if "\n" in line:
                raise ConfigurationError(f"--setup={line!r}: give it once for each line")
        if "\n" in (command := self.program.command()):
            raise ConfigurationError(
                f"the program's command line has a line break: {command!r}; leave it out, or put the argument "
                "into a file"
            )
        for directive in self.directives:
            if not _DIRECTIVE.fullmatch(directive):
                raise ConfigurationError(
                    f'--sbatch={directive!r}: give an option of sbatch, such as --sbatch="--partition=cpu"'
                )


def batch_file(job: SlurmJob) -> str:
    """Return the text of the file for sbatch.

    Each node runs `ray symmetric-run`: the first starts Ray's head, the others join it, and the program runs on
    the first. The token is made there when the job starts, in a folder that only the job's user may enter; neither
    command lines nor the file hold it.
    """
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus}",
        f"--time={job.time}",
        f"--mem={job.memory or 0}",
        "--exclusive",
        "--no-kill",
        f"--signal=B:TERM@{job.leave}",
        "--requeue" if job.requeue else "--no-requeue",
    ]
    if job.requeue:
        directives.append("--open-mode=append")  # what was printed before stays
    if job.gpus:
        directives.append(f"--gpus-per-node={job.gpus}")
    lines = [f"#SBATCH {directive}" for directive in [*directives, *job.directives]]
    body = _BODY.format(
        setup="\n".join(job.setup),
        shared=job.shared or "$SLURM_SUBMIT_DIR",
        wait=job.wait,
        port=job.port,
        address=(
            _ADDRESS_BY_NAME
            if job.interface is None
            else _ADDRESS_OF_INTERFACE.format(interface=job.interface)
        ),
        command=job.program.command(),
        cpus=job.cpus,
        gpus=f" --num-gpus={job.gpus}" if job.gpus else "",
        requeue=_REQUEUE if job.requeue else "",
    )
    return "\n".join(["#!/bin/bash", "# made by steepest launch slurm", *lines, body])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `steepest launch slurm`."""
    add_program_arguments(parser)
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="of the job")
    add("--cpus-per-task", type=int, required=True, metavar="CPUS", help="of each node")
    add("--gpus-per-node", type=int, default=0, metavar="GPUS", help="of each node (0)")
    add("--time", required=True, help="limit, such as 02:00:00")
    add("--mem", help="of each node, such as 64G (default: all of it)")
    add("--leave", type=int, default=60, metavar="SECONDS", help="for a last checkpoint (60)")
    add("--requeue", action="store_true", help="start again after the time limit")
    add("--port", type=int, default=6379, help="of Ray on the first node (6379)")
    add("--interface", metavar="NAME", help="of the first node's network, such as ib0")
    add("--wait", type=int, default=300, metavar="SECONDS", help="for all nodes to start (300)")
    add("--shared", metavar="FOLDER", help="that all nodes see (default: where sbatch is called)")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="run first on the first node, such as 'source venv/bin/activate'; again",
    )
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help='a line of the file, such as "--partition=cpu"; again',
    )


def run(options: argparse.Namespace) -> int:
    """Write the file for sbatch; return the exit status.

    Raises:
        ConfigurationError: an option is wrong, or the file cannot be written.
    """
    job = SlurmJob(
        name=job_name(options),
        program=program_of(options),
        nodes=options.nodes,
        cpus=options.cpus_per_task,
        gpus=options.gpus_per_node,
        time=options.time,
        memory=options.mem,
        leave=options.leave,
        requeue=options.requeue,
        port=options.port,
        wait=options.wait,
        shared=options.shared,
        interface=options.interface,
        setup=tuple(options.setup),
        directives=tuple(options.sbatch),
    )
    write(batch_file(job), options.output)
    return 0
