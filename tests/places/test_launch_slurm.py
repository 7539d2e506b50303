"""What `steepest launch slurm` writes runs on two hosts, keeps its token to itself, and ends as it should."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steepest.cli.main import main
from steepest.places.ray_job import Pods, drain_notice
from tests.forked_workers import RAY
from tests.network_namespaces import ip, until
from tests.ray_hosts import ROOT, SECONDS, Place

ADDRESSES = ("10.213.10.1", "10.213.10.2")
EVERY = (
    "--gpus-per-node=2 --mem=64G --leave=90 --requeue --port=7000 --wait=60 --shared=/scratch/me --interface=ib0 "
    "--sbatch=--partition=cpu --sbatch=-A=team --name=other"
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    return path


def rendered(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    given = ["--nodes=4", "--cpus-per-task=8", "--time=02:00:00", *map(str, arguments)]
    assert main(["launch", "slurm", *given]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", ["", EVERY])
def test_the_shell_takes_what_is_written(
    capsys: pytest.CaptureFixture[str], script: Path, options: str
) -> None:
    text = rendered(capsys, script, *options.split())
    assert text.startswith("#!/bin/bash\n")
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_is_asked_for_what_was_given(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    def asked(*options: str) -> list[str]:
        text = rendered(capsys, script, *options)
        lines = re.findall(r"^#SBATCH (.*)$", text, flags=re.MULTILINE)
        commands = text.index("set -e\n")
        assert text.rindex("#SBATCH") < commands, "sbatch reads no option after the first command"
        return lines

    assert asked() == [
        "--job-name=train", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=8", "--time=02:00:00",
        "--mem=0", "--exclusive", "--no-kill", "--signal=B:TERM@60", "--no-requeue",
    ]  # fmt: skip
    assert asked(*EVERY.split()) == [
        "--job-name=other", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=8", "--time=02:00:00",
        "--mem=64G", "--exclusive", "--no-kill", "--signal=B:TERM@90", "--requeue",
        "--open-mode=append", "--gpus-per-node=2", "--partition=cpu", "-A=team",
    ]  # fmt: skip


def test_rays_command_takes_its_options_as_they_are_written(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    """Ray's own parser reads them; those that are not its own go to `ray start`."""
    from ray.scripts import scripts, symmetric_run

    text = rendered(capsys, script, "--gpus-per-node=2").replace("\\\n", " ")
    (line,) = re.findall(r"^ray symmetric-run .*$", text, flags=re.MULTILINE)
    words = shlex.split(line.replace('"$SLURM_JOB_NUM_NODES"', "4"))
    given = words[words.index("symmetric-run") + 1 : words.index("--")]
    context = symmetric_run.symmetric_run.make_context("_", [*given], resilient_parsing=True)
    assert context.params["min_nodes"] == 4
    start = symmetric_run.curate_and_validate_ray_start_args(given)
    parsed = scripts.start.make_context("start", start).params
    assert (parsed["num_cpus"], parsed["num_gpus"]) == (8, 2)


def test_arguments_reach_the_program_as_they_are(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    text = rendered(capsys, script, "--arguments=--name 'a b; rm' --lr 0.1")
    assert f"\npython {script} --name 'a b; rm' --lr 0.1 &\n" in text


def test_setup_comes_before_all_commands(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    text = rendered(
        capsys, script, "--setup=module load python", "--setup=source venv/bin/activate"
    )
    assert "\nset -e\nmodule load python\nsource venv/bin/activate\n" in text
    assert text.index("activate") < text.index("set -uo pipefail")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nodes=0", "--nodes"),
        ("--cpus-per-task=0", "--cpus-per-task"),
        ("--time=soon", "--time='soon': give minutes, hours:minutes:seconds or days-hours"),
        ("--mem=lots", "--mem='lots': give such as 64G"),
        ("--leave=0", "--leave"),
        ("--port=80", "--port"),
        ("--port=65536", "--port=65536: give one from 1024 to 65535"),
        ("--shared=here", "--shared='here': give the absolute path"),
        ("--shared=/a$(b)", "--shared='/a$(b)': give the absolute path"),
        ("--sbatch=partition", "--sbatch='partition': give an option of sbatch"),
        ("--sbatch=--x=1\nrm", "--sbatch='--x=1\\nrm': give an option of sbatch"),
        ("--interface=a b", "--interface='a b': give the name of a network interface"),
        ("--setup=a\nb", "--setup='a\\nb': give it once for each line"),
        ("--arguments='a\nEND'", "the program's command line has a line break"),
        ("--name=Big", "--name='Big': give small letters"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], script: Path, options: str, said: str
) -> None:
    given = ["--nodes=4", "--cpus-per-task=8", "--time=1-12", str(script), options]
    assert main(["launch", "slurm", *given]) == 1
    assert said in capsys.readouterr().err


PROGRAM = """
    from steepest import Checkpoints, ResourceConfig, RunConfig

    class Tell(Callback):
        def on_step(self, sgd, result):
            if result.step == 5:
                print("training", flush=True)

        def on_event(self, sgd, event):
            print("event", event.kind, event.line, flush=True)

    if __name__ == "__main__":
        config = RunConfig(resources=ResourceConfig(cpus_per_worker=2))
        kept = Checkpoints("run", every=10**6)
        with DistributedSGD(linear_model_creator(), 2, run_config=config, checkpoints=kept) as sgd:
            print("hosts", sorted(sgd.foreach_worker(lambda view: view.host)), sys.argv[1:])
            sgd.fit(steps=10_000_000, callbacks=[Tell()], progress=False)
"""
STAND_INS = {
    # a task on each of two hosts: on this one, and on the one of the other namespace
    "srun": """
        echo "$@" >> {folder}/srun
        while [[ $1 == --* ]]; do shift; done
        "$@" &
        ip netns exec {other} unshare --pid --fork --kill-child --mount-proc "$@" &
        wait
    """,
    "scontrol": """
        echo "$@" >> {folder}/scontrol
        [ "$1" = requeue ] || printf 'spnodea\\nspnodeb\\n'
    """,
    "ray": 'exec {python} {ray} "$@"',
    "python": 'exec {python} "$@"',
}


@pytest.fixture
def hosts() -> Iterator[tuple[Place, tuple[str, str]]]:
    """Two network namespaces, and commands that stand for Slurm's."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("namespaces of networks and processes need root, iproute2 and unshare")
    place = Place()
    first, second = spaces = (f"sl{place.mark[:6]}a", f"sl{place.mark[:6]}b")
    try:
        for space in spaces:
            ip("netns", "add", space)
        peer = ("peer", "name", "slb", "netns", second)
        ip("link", "add", "sla", "netns", first, "type", "veth", *peer)
        for space, device, address in zip(spaces, ("sla", "slb"), ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                ip("-n", space, "link", "set", each, "up")
        commands = place.directory / "bin"
        commands.mkdir()
        about = {"folder": place.directory, "other": second, "python": sys.executable}
        for name, text in STAND_INS.items():
            written = text.format(**about, ray=f"-c '{RAY[1]}'")
            (commands / name).write_text(f"#!/bin/bash\n{written}\n")
            (commands / name).chmod(0o755)
        place.environment["PATH"] = f"{commands}{os.pathsep}{place.environment['PATH']}"
        yield place, spaces
    finally:
        place.kill()
        for space in spaces:
            listed = subprocess.run(
                ["ip", "netns", "pids", space], check=False, capture_output=True
            )
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)
        for folder in (place.directory, "/tmp/steepest-77"):  # its hosts were killed
            shutil.rmtree(folder, ignore_errors=True)


def inside(place: Place, space: str, command: str) -> subprocess.Popen[str]:
    """Starts a shell's command beside the raylet of a namespace, with the job's token."""
    listed = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True)
    left = place.left()
    raylet = next(
        int(pid) for pid in listed.stdout.split() if "raylet/raylet" in left.get(int(pid), "")
    )
    about = {
        "RAY_ADDRESS": f"{ADDRESSES[0]}:6379", "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(place.directory / ".steepest-77" / "token"),
    }  # fmt: skip
    settings = [f"{name}={value}" for name, value in about.items()]
    enter = ["nsenter", f"--target={raylet}", "--pid", "--net", "--mount"]
    return place.start(*enter, "env", *settings, "/bin/sh", "-c", command)


def written_job(place: Place, script: str, *options: str) -> Path:
    """Writes the sbatch file of a program on two hosts."""
    job = place.directory / "job.sh"
    given = ["--nodes=2", "--cpus-per-task=2", "--time=10", *options, f"--output={job}"]
    assert main(["launch", "slurm", script, *given]) == 0
    place.environment |= {
        "SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(place.directory),
        "SLURM_JOB_NODELIST": "spnode[a-b]", "SLURM_JOB_NUM_NODES": "2",
    }  # fmt: skip
    return job


def started(place: Place, space: str, job: Path) -> subprocess.Popen[str]:
    """Runs a job's file on the first of its hosts."""
    alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    return place.start("ip", "netns", "exec", space, *alone, "bash", str(job))


def child_of(process: subprocess.Popen[str]) -> int:
    """The child of a command that enters or makes a namespace of processes: it is in there, its parent is not.

    Where nobody waits for an ended process of a namespace, the namespace does not end either. If its
    parent is killed first, it is left to process 1 outside, which may be one that waits for nobody.
    """
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def ended_by_slurm(process: subprocess.Popen[str]) -> str:
    """Signals the shell that runs the file, as --signal=B:TERM@60 has it; returns what else was printed."""
    os.kill(child_of(process), signal.SIGTERM)
    output, _ = process.communicate(timeout=SECONDS)
    return output


@pytest.mark.full
@pytest.mark.cluster
def test_a_job_trains_on_two_hosts_leaves_one_and_writes_a_checkpoint_before_its_time_is_over(
    hosts: tuple[Place, tuple[str, str]],
) -> None:
    """The other host is given notice as a pod of `steepest launch kubernetes` gives it."""
    place, spaces = hosts
    job = written_job(place, place.script(PROGRAM), "--requeue", "--arguments=--lr 0.1")
    with started(place, spaces[0], job) as process:
        try:
            seen = until(process.stdout, "training\n")
            assert f"hosts {list(ADDRESSES)!r} ['--lr', '0.1']" in seen
            folder = place.directory / ".steepest-77"
            token = (folder / "token").read_text()
            assert re.fullmatch("[0-9a-f]{64}", token)
            assert ((folder / "token").stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (
                0o600,
                0o700,
            )
            for pid in place.left():
                with contextlib.suppress(OSError):  # it has ended
                    assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            pods = Pods(image="app", ray_version="2.60.0", workers=1, least=1, most=1)
            with inside(place, spaces[1], drain_notice(pods)) as notice:
                while not re.search("event moved .*\n", seen):
                    seen += until(process.stdout, "\n")
                os.kill(child_of(notice), signal.SIGKILL)  # and nsenter sees it end
            assert f"event draining {ADDRESSES[1]} will go in" in seen
            assert re.search(
                rf"event moved {ADDRESSES[1]} will go: .*worker [01] moved away; 1 workers", seen
            ), seen
            output = ended_by_slurm(process)
        finally:
            place.kill()
    assert process.returncode == 143, seen + output
    assert token not in seen + output
    assert not folder.exists()
    assert list((place.directory / "run").glob("*/manifest.json")), output
    (step,) = (place.directory / "srun").read_text().splitlines()
    assert step.startswith("--export=ALL --mpi=none --ntasks-per-node=1 --cpus-per-task=2 ")
    asked = (place.directory / "scontrol").read_text().splitlines()
    assert asked == ["show hostnames spnode[a-b]", "requeue 77"]


@pytest.mark.full
@pytest.mark.cluster
def test_a_job_whose_worker_was_killed_and_whose_time_was_over_is_resumed_by_its_next_run(
    hosts: tuple[Place, tuple[str, str]],
) -> None:
    place, (space, _) = hosts
    place.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    program = str(ROOT / "tests" / "places" / "interrupted_program.py")
    job = written_job(place, program, "--requeue", "--arguments=slurm")
    try:
        with started(place, space, job) as process:
            seen = until(process.stdout, "after step 7, 1 replaced\n")
            seen += ended_by_slurm(process)
        assert process.returncode == 143, seen
        with started(place, space, job) as process:
            seen, _ = process.communicate(timeout=SECONDS)
    finally:
        place.kill()
    assert process.returncode == 0, seen
    (begun,) = re.findall(r"from step (\d+)\n", seen)
    assert 6 <= int(begun) <= 10, seen  # workers go on while a callback runs
    assert "to step 10\nthe weights of an uninterrupted run\n" in seen, seen


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize(("status", "said"), [(0, "trained"), (7, "")])
def test_the_jobs_status_is_the_programs(
    tmp_path: Path, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's command ends with 0 where it could not start Ray, and the job must not."""
    done = in_a_job(tmp_path, f"print('trained'); raise SystemExit({status})")
    assert done.returncode == status
    assert said in done.stdout


def test_a_ray_that_did_not_start_fails_the_job(tmp_path: Path) -> None:
    assert in_a_job(tmp_path, "print('trained')", ray="exit 0").returncode == 1


def test_what_is_sourced_may_read_variables_that_nobody_has_set(tmp_path: Path) -> None:
    """As /etc/bashrc and conda's scripts of activation do."""
    (tmp_path / "profile").write_text('[ -z "$PS1" ] || echo interactive\nexport SOURCED=yes\n')
    program = "import os; print('sourced', os.environ['SOURCED'])"
    done = in_a_job(tmp_path, program, f"--setup=source {tmp_path / 'profile'}")
    assert (done.returncode, "sourced yes" in done.stdout) == (0, True), done.stderr


def test_a_setup_that_fails_ends_the_job(tmp_path: Path) -> None:
    done = in_a_job(tmp_path, "print('trained')", "--setup=source /no/such/file", "--setup=true")
    assert done.returncode != 0
    assert "trained" not in done.stdout


def test_the_environment_travels_also_where_the_job_exports_none(tmp_path: Path) -> None:
    """sbatch --export=NONE sets SLURM_EXPORT_ENV=NONE, by which srun gives its tasks no variables."""
    done = in_a_job(
        tmp_path, "import os; print('home', os.environ['MINE'])", "--sbatch=--export=NONE",
        "--setup=export MINE=here SLURM_EXPORT_ENV=NONE",
    )  # fmt: skip
    assert (done.returncode, "home here" in done.stdout) == (0, True), done.stderr


def test_the_address_is_that_of_the_interface(tmp_path: Path) -> None:
    program = "import os; print('at', os.environ['RAY_ADDRESS'])"
    ip = 'echo "3: ib0    inet 10.9.8.7/16 brd 10.9.255.255 scope global ib0"'
    done = in_a_job(tmp_path, program, "--interface=ib0", ip=f'[ "$5" = ib0 ] && {ip}')
    assert "at 10.9.8.7:6379\n" in done.stdout, done.stderr
    done = in_a_job(tmp_path, program, "--interface=ib0", ip="exit 1")
    assert done.returncode == 1
    assert "the interface ib0 has no address" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("foreign", [False, True])
def test_ray_writes_where_no_other_user_has_written(tmp_path: Path, foreign: bool) -> None:
    """Ray's own function writes its file as a user to whom /tmp/ray does not belong."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user's process needs root and setpriv")
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, OTHER, OTHER)
    (tmp_path / "ray").mkdir()  # as of root's job before, where TMPDIR would have Ray write
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    write = (
        "import os; from ray._common import utils; from ray._private.utils import write_ray_address; "
        "os.makedirs(utils.get_default_ray_temp_dir(), exist_ok=True); "
        "write_ray_address('10.0.0.2:6379')"
    )
    ray = f'{sys.executable} -c "{write}" || exit; {RAY_STAND_IN}'
    number = secrets.randbelow(10**9) + 10**9
    kept = Path(f"/tmp/steepest-{number}")
    if foreign:
        kept.mkdir(0o755)
    try:
        done = in_a_job(
            tmp_path,
            "print('trained')",
            f"--shared={shared}",
            ray=ray,
            number=number,
            shell=ANOTHER_USER,
        )
        assert kept.exists() == foreign
    finally:
        shutil.rmtree(kept, ignore_errors=True)
    assert done.returncode == (1 if foreign else 0), done.stderr
    assert (f"{kept} is of another user" in done.stderr) == foreign


OTHER = 65532
#: May read what only root may, such as the tests' Python, but not write there.
ANOTHER_USER = (
    "setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups", "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search", "bash",
)  # fmt: skip
RAY_STAND_IN = 'while [ "$1" != -- ]; do shift; done; shift; "$@"'
#: Runs its last two words; gives them no variables where Slurm's would not.
SRUN = (
    'case "$* $SLURM_EXPORT_ENV" in *--export=ALL*) clear=;; *NONE) clear="env -i";; *) clear=;; esac\n'
    'shift $(($# - 2)); $clear "$@"'
)


def in_a_job(
    folder: Path,
    program: str,
    *options: str,
    ray: str = RAY_STAND_IN,
    shell: tuple[str, ...] = ("bash",),
    number: int | None = None,
    **commands: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a job's file with stand-ins for Slurm's commands and Ray's, and others that are given."""
    number = secrets.randbelow(10**9) if number is None else number
    (folder / "train.py").write_text(program)
    assert main([
        "launch", "slurm", str(folder / "train.py"), "--nodes=1", "--cpus-per-task=1", "--time=1",
        *options, f"--output={folder / 'job.sh'}",
    ]) == 0  # fmt: skip
    commands |= {"srun": SRUN, "scontrol": "echo localhost", "ray": ray}
    commands["sleep"] = "exec /bin/sleep 0.02"
    commands["python"] = f'exec {sys.executable} "$@"'
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": str(number),
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1",
        "TMPDIR": str(folder),
    }  # fmt: skip
    environment = {k: v for k, v in environment.items() if k not in ("PS1", "RAY_TMPDIR")}
    done = subprocess.run(
        [*shell, str(folder / "job.sh")], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert not list(folder.glob("**/.steepest-*"))
    return done
