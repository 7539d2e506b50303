"""What a process imports: no torch and no Ray before something needs them."""

from __future__ import annotations

import ast
import pickle
import re
import secrets
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import steepest
import steepest.tables

TOKEN = bytes(16)


def run(program: str, *arguments: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_alone_imports_neither_torch_nor_ray_nor_numpy() -> None:
    program = "import sys, steepest; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert run(program) == "[]\n"


@pytest.mark.long
def test_numba_is_imported_where_tables_are_used_alone() -> None:
    program = (
        "import sys, steepest, steepest.runtime.driver.trainer; assert 'numba' not in sys.modules\n"
        "import steepest.tables; assert 'numba' not in sys.modules\n"
        "steepest.tables.LRU; print('numba' in sys.modules)"
    )
    assert run(program) == "True\n"


@pytest.mark.long
def test_tables_without_numba_say_what_to_install() -> None:
    program = (
        "import sys\nsys.modules['numba'] = None\nimport steepest, steepest.tables\n"
        "for name in 'tables.Adam', 'Embedding', 'Table':\n"
        "    try:\n        eval('steepest.' + name)\n"
        "    except ValueError as error:\n        print(error)\n"
        "from steepest import *\nAllreduceStrategy"
    )
    said = "embedding tables need numba, which is not installed: pip install 'steepest[embedding]'"
    assert run(program).splitlines() == [said] * 3


@pytest.mark.full
@pytest.mark.long
def test_models_of_jax_without_jax_say_what_to_install() -> None:
    program = (
        "import sys\nsys.modules['jax'] = None\nimport steepest\n"
        "try:\n    steepest.JaxModel\nexcept ValueError as error:\n    print(error)\n"
        "from steepest import *\nAllreduceStrategy"
    )
    said = "models of JAX need JAX, Flax and optax, which are not installed: "
    assert run(program) == f"{said}pip install 'steepest[jax]'\n"


@pytest.mark.full
@pytest.mark.long
def test_tensorflow_is_imported_where_a_keras_model_is_made_alone() -> None:
    program = (
        "import sys\nsys.modules['tensorflow'] = None\nfrom steepest import *\nTensorFlowModel\n"
        "try:\n    TensorFlowModel(None, data=None)\nexcept ValueError as error:\n    print(error)\n"
        "print(sorted({'keras'} & set(sys.modules)))"
    )
    said, imported = run(program).splitlines()
    assert said.startswith("TensorFlowModel needs TensorFlow and Keras 3 (")
    assert said.endswith("): pip install 'steepest[tensorflow]'")
    assert imported == "[]"


def test_tables_need_neither_torch_nor_ray() -> None:
    program = (
        "import sys, steepest.tables.rows.shard; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    assert run(program) == "[]\n"


def test_names_and_modules_are_there_when_they_are_asked_for() -> None:
    run(
        "import steepest\n"
        "from steepest import collectives, TorchModel\n"
        "assert steepest.errors.SteepestError and steepest.collectives is collectives\n"
        "assert steepest.TorchModel is TorchModel and steepest.TorchModel.__module__ == "
        "'steepest.tables.modules.torch_model'\nassert set(steepest.__all__) < set(dir(steepest))"
    )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'steepest' has no attribute 'Trainer'"):
        _ = steepest.Trainer
    with pytest.raises(ImportError):
        from steepest import Trainer  # noqa: F401
    with pytest.raises(AttributeError, match="module 'steepest.tables' has no attribute 'AdamW'"):
        _ = steepest.tables.AdamW


@pytest.mark.parametrize("package", [steepest, steepest.tables])
def test_type_checkers_see_the_names_that_python_sees(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {(alias.asname, node.module) for node in imports for alias in node.names if alias.asname}
    hidden = set() if find_spec("jax") else {"JaxModel"}
    assert {name for name, _ in seen} - hidden == set(package.__all__) < set(dir(package))
    for name, module in ((name, module) for name, module in seen if name not in hidden):
        assert getattr(package, name) is getattr(sys.modules[str(module)], name)


# -- users of a parameter server ---------------------------------------------------------------------


def initial() -> dict[str, Any]:
    """Some arrays, of which one is lent in shared memory and others share a chunk."""
    return {
        "large": np.zeros((300, 500)),
        "one": np.zeros(3, "f4"),
        "another": np.zeros((2, 2), "f4"),
    }


CLIENT = """
import pickle, sys
import numpy as np
from steepest.parameter_server.connection import Connection
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport

with open(sys.argv[1], "rb") as file:
    group, address, token = pickle.load(file)
router = Router()
pusher = group.host_user(router, 1)
wire = WireTransport(token, group.user_peers(1), "here", router.destination, sys.argv[2])
router.use(wire)
router.attach(wire.connect(address))
connection = Connection(
    router, pusher, lambda: group.host_client(router, 1), name="it", timeout=60.0, max_in_flight=1
)

def pull(update=None, recycler=connection.recycler):
    wanted, pulled = group.arrays.request(None, None, None, recycler)
    begin = (lambda: pusher.pull(wanted)) if update is None else (lambda: pusher.push(update, wanted))
    return connection.run(begin, "it"), pulled

version, pulled = pull()
assert version == 0 and not any(array.any() for array in pulled.values())
ones = group.arrays.bytes_of({name: np.ones_like(array) for name, array in pulled.items()}, "update")
assert connection.run(lambda: pusher.push(ones), "a push", ones.values()) == 1
version, pulled = pull(ones)
assert version == 2 and all((array == 2.0).all() for array in pulled.values())
assert {array.dtype.name for array in pulled.values()} == {"float32", "float64"}
connection.close()
print(sorted({"torch", "ray"} & set(sys.modules)))
"""


@pytest.mark.long
@pytest.mark.parametrize("ways", ["shared", "tcp"])
def test_a_process_that_uses_a_parameter_server_with_numpy_arrays_never_imports_torch(
    tmp_path: Path, ways: str
) -> None:
    from steepest.core.messages.message import COORDINATOR, server_peer
    from steepest.core.tensors.shared_memory import allocate
    from steepest.core.transport.router import Router
    from steepest.core.transport.sockets import WireTransport
    from steepest.parameter_server.arrays import Arrays
    from steepest.parameter_server.group import ServerGroup
    from steepest.parameter_server.hosting import host_server

    group = ServerGroup(Arrays.plan(initial(), None, None), 1)
    router = Router()
    host_server(group, None, router, 0, allocate(group.arrays.layout.nbytes))
    wire = WireTransport(TOKEN, (server_peer(0), COORDINATOR), "here", router.destination, ways)
    router.use(wire)
    access = tmp_path / "access"
    access.write_bytes(pickle.dumps((group, wire.listen("127.0.0.1"), TOKEN)))
    router.start("server")
    try:
        assert run(CLIENT, str(access), ways) == "[]\n"
    finally:
        router.stop()


def use(server: steepest.ParameterServer) -> tuple[int, bool]:
    """A task: pulls, pushes, waiting or not; the version, and whether all this took torch."""
    zeros = server.pull()
    assert not any(array.any() for array in zeros.values())
    ones = {name: np.ones_like(array) for name, array in zeros.items()}
    server.push(ones)
    server.push_async(ones).result()
    pulled = server.push_pull(ones)
    assert all((array == 3.0).all() for array in pulled.values())
    assert server.pull("one", range=(0, 2)).tolist() == [3.0, 3.0]
    out = server.empty()
    assert server.pull(out=out) is out
    return server.version, "torch" in sys.modules


@pytest.mark.few(1)
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("optimizer", [False, True])
def test_a_task_that_uses_a_parameter_server_with_numpy_arrays_never_imports_torch(
    optimizer: bool,
) -> None:
    import ray
    import torch

    descend = (
        (lambda parameters: torch.optim.SGD(parameters, lr=1.0, maximize=True))
        if optimizer
        else None
    )
    fresh = {
        "env_vars": {"STEEPEST_TEST": secrets.token_hex(8)}
    }  # a process that has run nothing else
    with steepest.ParameterServer(initial(), optimizer=descend) as server:
        assert ray.get(ray.remote(use).options(runtime_env=fresh).remote(server)) == (3, False)


def test_no_test_module_imports_another() -> None:
    """What two of them need is in a helper module, also where a program in a string imports it."""
    root = Path(__file__).parents[2]
    importing = re.compile(
        r"^\s*(?:from|import)\s+(?:[\w.]+\.)?(?:test_\w+|[\w.]+ import test_\w+)\b"
    )
    own = {path.stem for path in root.glob("tests/*/test_*.py")}
    found = []
    for path in [*root.glob("tests/**/*.py"), *root.glob("benchmarks/tests/*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = importing.match(line)
            names = own & set(re.findall(r"test_\w+", match.group())) if match else ()
            if names:
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    assert not found, "move what is imported into a helper module:\n" + "\n".join(found)
