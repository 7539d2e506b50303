"""What SageMaker tells a host of its training job, from variables and the files below /opt/ml."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError

#: Where SageMaker puts files unless SAGEMAKER_BASE_DIR says otherwise.
BASE = "/opt/ml"


@dataclass(frozen=True, kw_only=True)
class SageMakerJob:
    """A training job as one of its hosts sees it.

    Attributes:
        hosts: names of all hosts, in natural order: algo-2 before algo-10.
        host: name of this one.
        interface: network interface by which the hosts reach each other, such as "eth0".
        base: the folder of SageMaker's files, `/opt/ml` in a container.
        channels: folders of training data by the name of their input channel.
        hyperparameters: their values by name, decoded from JSON where they are JSON.
        model_dir: what is saved here goes to S3 as the model when the job has ended well.
        output_data_dir: what is saved here goes to S3 as other output of the job.
    """

    hosts: tuple[str, ...]
    host: str
    interface: str
    base: Path
    channels: Mapping[str, Path] = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    model_dir: Path
    output_data_dir: Path

    @property
    def leader(self) -> str:
        """The host that runs the program: the first one in natural order."""
        return self.hosts[0]

    @property
    def leads(self) -> bool:
        """Whether this host is the leader."""
        return self.host == self.leader

    @property
    def checkpoints(self) -> Path:
        """The folder that SageMaker copies to `checkpoint_s3_uri`, and fills after a restart."""
        return self.base / "checkpoints"

    @property
    def failure(self) -> Path:
        """The file in which SageMaker looks for the reason of a failure."""
        return self.base / "output" / "failure"

    def arguments(self) -> list[str]:
        """Return the hyperparameters as arguments of a command, as SageMaker's toolkit passes them.

        They are sorted by name; names of one letter have one hyphen, others two.
        """
        words = []
        for name in sorted(self.hyperparameters):
            value = self.hyperparameters[name]
            if isinstance(value, dict):
                value = ",".join(f"{key}={each}" for key, each in sorted(value.items()))
            words += [f"--{name}" if len(name) > 1 else f"-{name}"]
            words += ["" if value is None else str(value)]
        return words

    def variables(self) -> dict[str, str]:
        """Return the environment variables that SageMaker's toolkit would give a program on this host, by name.

        SM_USER_ARGS, SM_TRAINING_ENV, and variables by which the toolkit finds the program, or which tell of
        groups of instances, are left out.
        """
        channels = {f"SM_CHANNEL_{name.upper()}": str(at) for name, at in self.channels.items()}
        hyperparameters = {
            f"SM_HP_{name.upper()}": _written(v) for name, v in self.hyperparameters.items()
        }
        inputs, output = self.base / "input", self.base / "output"
        return {
            "SM_INPUT_DIR": str(inputs),
            "SM_INPUT_CONFIG_DIR": str(inputs / "config"),
            "SM_OUTPUT_DIR": str(output),
            "SM_OUTPUT_INTERMEDIATE_DIR": str(output / "intermediate"),
            "SM_NUM_CPUS": str(os.cpu_count() or 1),
            "SM_NUM_GPUS": str(_number_of_gpus()),
            "SM_HOSTS": json.dumps(self.hosts),
            "SM_CURRENT_HOST": self.host,
            "SM_NETWORK_INTERFACE_NAME": self.interface,
            "SM_CHANNELS": json.dumps(sorted(self.channels)),
            **channels,
            "SM_HPS": json.dumps(dict(self.hyperparameters)),
            **hyperparameters,
            "SM_MODEL_DIR": str(self.model_dir),
            "SM_OUTPUT_DATA_DIR": str(self.output_data_dir),
        }


def _written(value: Any) -> str:
    """Return a hyperparameter's value as the toolkit writes it into a variable."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _number_of_gpus() -> int:
    """Return how many GPUs the driver lists here."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def read_job(environment: Mapping[str, str]) -> SageMakerJob:
    """Return the job that variables describe, and SageMaker's files where a variable is missing.

    Args:
        environment: variables: SM_HOSTS, SM_CURRENT_HOST, SM_NETWORK_INTERFACE_NAME,
            SM_RESOURCE_CONFIG, SM_CHANNELS, SM_CHANNEL_*, SM_HPS, SM_MODEL_DIR,
            SM_OUTPUT_DATA_DIR, and SAGEMAKER_BASE_DIR in place of /opt/ml.

    Raises:
        ConfigurationError: neither variables nor files name the hosts, this host is none of them,
            or one of them is not what SageMaker writes.
    """
    base = Path(environment.get("SAGEMAKER_BASE_DIR") or BASE)
    inputs = base / "input"
    resources = _mapping(environment, "SM_RESOURCE_CONFIG", inputs / "config/resourceconfig.json")
    hosts = resources.get("hosts")
    if "SM_HOSTS" in environment:
        hosts = _json("SM_HOSTS", environment["SM_HOSTS"])
    host = environment.get("SM_CURRENT_HOST") or resources.get("current_host")
    if not hosts:
        raise ConfigurationError(
            f"this does not look like a SageMaker training container: neither SM_HOSTS nor "
            f"{inputs / 'config/resourceconfig.json'} names the hosts; elsewhere run the program "
            "itself"
        )
    if not isinstance(hosts, list) or not all(isinstance(each, str) for each in hosts):
        raise ConfigurationError(f"SM_HOSTS={hosts!r}: give a JSON list of names of hosts")
    if not isinstance(host, str) or host not in hosts:
        raise ConfigurationError(
            f"SM_CURRENT_HOST={host!r} is none of the job's hosts: {', '.join(hosts)}"
        )
    interface = environment.get("SM_NETWORK_INTERFACE_NAME")
    return SageMakerJob(
        hosts=in_natural_order(hosts),
        host=host,
        interface=interface or str(resources.get("network_interface_name") or "eth0"),
        base=base,
        channels=_channels(environment, inputs),
        hyperparameters=_hyperparameters(environment, inputs / "config/hyperparameters.json"),
        model_dir=Path(environment.get("SM_MODEL_DIR") or base / "model"),
        output_data_dir=Path(environment.get("SM_OUTPUT_DATA_DIR") or base / "output" / "data"),
    )


def in_natural_order(names: list[str]) -> tuple[str, ...]:
    """Return distinct names, sorted with their numbers as numbers: algo-2 before algo-10."""

    def parts(name: str) -> list[tuple[int, str]]:
        words = re.split(r"([0-9]+)", name)
        return [(int(word), "") if i % 2 else (-1, word) for i, word in enumerate(words)]

    return tuple(sorted(set(names), key=lambda name: (parts(name), name)))


def _channels(environment: Mapping[str, str], inputs: Path) -> dict[str, Path]:
    if "SM_CHANNELS" in environment:
        names = _json("SM_CHANNELS", environment["SM_CHANNELS"])
    else:
        names = list(_mapping({}, "", inputs / "config/inputdataconfig.json"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"SM_CHANNELS={names!r}: give a JSON list of names of channels")
    return {
        name: Path(environment.get(f"SM_CHANNEL_{name.upper()}") or inputs / "data" / name)
        for name in names
    }


def _hyperparameters(environment: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return them without those by which SageMaker's SDK speaks to its toolkit."""
    values = {}
    for name, value in _mapping(environment, "SM_HPS", path).items():
        if name.startswith("sagemaker_"):
            continue
        if isinstance(value, str) and "SM_HPS" not in environment:
            with contextlib.suppress(ValueError):  # a plain string, as it is written by hand
                value = json.loads(value)
        values[name] = value
    return values


def _mapping(environment: Mapping[str, str], variable: str, path: Path) -> dict[str, Any]:
    """Return the JSON object of a variable, or else of a file; {} where there is neither."""
    if environment.get(variable):
        mapping = _json(variable, environment[variable])
    else:
        try:
            mapping = _json(str(path), path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(mapping, dict):
        raise ConfigurationError(f"{variable or path}: give a JSON object, not {mapping!r}")
    return mapping


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}={text[:100]!r} is not JSON: {error}") from None
