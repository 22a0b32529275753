"""The launch examples, as far as they can be tried without a cluster.

Shell scripts are linted. The Slurm script runs with a ``srun`` and a ``scontrol`` that start all on this machine.
Manifests are held against the schemas of Kubernetes and against this package. The Dockerfile's steps run in a virtual
environment.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rpc_reading_service import cli
from rpc_reading_service.reading_service import KEYS_VARIABLE, WORKERS_VARIABLE

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = [ROOT / ".ci/run", *EXAMPLES.rglob("*.sbatch"), *EXAMPLES.rglob("*.sh")]
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.33"
USER = 65532

Fields = dict[str, Any]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_have_no_lint(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent) or "shellcheck"
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Slurm.

NODES = "127.0.0.2", "127.0.0.3"

SRUN = """#!/bin/bash
# One task on each node of a component; a node has its own address in the place of 0.0.0.0.
trap 'kill -KILL $(jobs -p)' TERM
trap 'kill -USR1 $(jobs -p)' USR1
nodes=127.0.0.1
if [ "$1" = --het-group=1 ]; then nodes="127.0.0.2 127.0.0.3"; fi
shift
for node in $nodes; do "${@//0.0.0.0/$node}" & done
status=0
for task in $(jobs -p); do
    while kill -0 "$task" 2>/dev/null; do status=0; wait "$task" || status=$?; done
done
exit "$status"
"""

SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then tr , '\\n' <<<"$3"; else echo "scontrol $*"; fi
"""


@pytest.fixture
def cluster(tmp_path: Path, folder: Path, free_port: int) -> Fields:
    """The environment of a heterogeneous job with two CPU nodes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (commands / "rpc-reading-worker").write_text(f'#!/bin/sh\nexec {sys.executable} -m rpc_reading_service "$@"\n')
    (commands / "rpc-reading-worker").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST_HET_GROUP_1": ",".join(NODES),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        KEYS_VARIABLE: str(folder),
        "PORT": str(free_port),
    }


class Job:
    """The Slurm script, with ``preemptible_train.py`` to run, read line by line."""

    def __init__(self, environment: Fields) -> None:
        train = [sys.executable, "-u", str(EXAMPLES / "preemptible_train.py"), "--checkpoint", "train.pt"]
        self.process = subprocess.Popen(
            ["bash", str(EXAMPLES / "slurm/train.sbatch"), *train, "--epochs", "2", "--elements", "8000"],
            env=environment,
            cwd=environment["SLURM_SUBMIT_DIR"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.lines.close()
        self.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slurm_job_that_is_preempted_goes_on_where_it_was(cluster: Fields) -> None:
    with Job(cluster) as job:
        for line in job.lines:
            if line.startswith("step 10:"):
                job.process.send_signal(signal.SIGUSR1)
                break
        told = [line.strip() for line in job.lines]
        assert job.process.wait() == os.EX_TEMPFAIL
    assert any(re.fullmatch(r"interrupted in epoch 0 at step \d+", line) for line in told)
    assert told[-1] == "scontrol requeue 1234"
    with Job(cluster) as job:
        again = [line.strip() for line in job.lines]
        assert job.process.wait() == 0
    ready = f":{cluster['PORT']}, 1 slot"
    assert {line.removeprefix("rpc-reading-worker ready on ").removesuffix(ready) for line in again} >= set(NODES)
    assert [line for line in again if line.startswith("epoch")] == [f"epoch {i}: 8000 elements" for i in (0, 1)]
    assert "step 10:" not in " ".join(again)


# Kubernetes.


def objects(path: Path) -> dict[tuple[str, str], Fields]:
    """The manifests of a file by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(path.read_text())}


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], Fields]:
    return {key: each for path in MANIFESTS for key, each in objects(path).items()}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_fields_that_kubernetes_knows(path: Path) -> None:
    for each in objects(path).values():
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def pods(manifests: dict[tuple[str, str], Fields]) -> list[Fields]:
    kinds = "Deployment", "Job"
    return [each["spec"]["template"]["spec"] for (kind, _), each in manifests.items() if kind in kinds]


def containers(manifests: dict[tuple[str, str], Fields]) -> list[Fields]:
    return [each for pod in pods(manifests) for each in (*pod["initContainers"], *pod["containers"])]


def test_pods_run_as_nobody_with_nothing_to_write_to(manifests: dict[tuple[str, str], Fields]) -> None:
    for pod in pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == USER
        assert not pod["automountServiceAccountToken"]
    for container in containers(manifests):
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"]
        assert not confined["allowPrivilegeEscalation"]
        assert confined["capabilities"] == {"drop": ["ALL"]}
    for container in (each for pod in pods(manifests) for each in pod["containers"]):
        assert {"/tmp", "/dev/shm", "/keys"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_every_mount_and_every_name_is_there(manifests: dict[tuple[str, str], Fields]) -> None:
    text = "".join(path.read_text() for path in MANIFESTS)
    for pod in pods(manifests):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in (*pod["initContainers"], *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        for volume in volumes.values():
            made = [f"secret generic {volume['secret']['secretName']}"] if "secret" in volume else []
            made += [f"configmap {volume['configMap']['name']}"] if "configMap" in volume else []
            assert all(f"kubectl create {each}" in text for each in made)


def test_the_training_finds_the_workers_that_the_service_selects(manifests: dict[tuple[str, str], Fields]) -> None:
    service = manifests["Service", "rpc-reading-workers"]["spec"]
    deployment = manifests["Deployment", "rpc-reading-workers"]["spec"]
    training = manifests["Job", "training"]["spec"]["template"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == deployment["template"]["metadata"]["labels"] == deployment["selector"]["matchLabels"]
    environment = {each["name"]: each["value"] for each in training["spec"]["containers"][0]["env"]}
    port = service["ports"][0]["port"]
    assert environment == {WORKERS_VARIABLE: f"dns://rpc-reading-workers:{port}", KEYS_VARIABLE: "/keys"}
    policy = manifests["NetworkPolicy", "rpc-reading-workers"]["spec"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == training["metadata"]["labels"]
    options = parsed(deployment["template"]["spec"]["containers"][0]["args"])
    assert options["port"] == port
    open_ports = [(each["port"], each.get("endPort", each["port"])) for each in policy["ingress"][0]["ports"]]
    assert open_ports == [(port, port), (options["data_ports"][0], options["data_ports"][-1])]
    assert options["grace"] < deployment["template"]["spec"]["terminationGracePeriodSeconds"]


def parsed(arguments: list[str]) -> Fields:
    """What ``rpc-reading-worker`` makes of its command line."""
    return cli.main.make_context("rpc-reading-worker", list(arguments)).params


# systemd.


def test_systemd_takes_the_unit_and_the_daemon_its_options(tmp_path: Path) -> None:
    text = (EXAMPLES / "systemd/rpc-reading-worker.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.+(?:\\\n.+)*)$", text, re.MULTILINE)
    path, *arguments = start.replace("\\\n", " ").split()
    assert parsed(arguments)["grace"] < float(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    unit = tmp_path / "rpc-reading-worker.service"
    unit.write_text(text.replace(path, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# Docker.


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, in order."""
    text = (EXAMPLES / "kubernetes/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


@pytest.fixture
def image() -> Iterator[Path]:
    """A folder that the user of a container could read."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


# As in the container: another user, whom the system does not know, and a file system that is read-only but for two.
CONFINED = f"""
mount -o remount,bind,ro /
mount -t tmpfs tmpfs "$WRITABLE"
mount -t tmpfs tmpfs /dev/shm
exec unshare --user --map-user={USER} --map-group={USER} "$@"
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dockerfile_s_steps_make_a_daemon_that_runs_as_nobody_and_writes_nothing(image: Path) -> None:
    """In a virtual environment that finds torch where these tests do, so that it is not installed once more."""
    subprocess.run([sys.executable, "-m", "venv", image / "venv"], check=True)
    (packages,) = (image / "venv/lib").glob("python*/site-packages")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "tests.pth").write_text(f"{here}\n")
    environment = {**os.environ, "PATH": f"{image / 'venv/bin'}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    made = follow(instructions(), image, environment)
    assert made == {"FROM": "python:3.11-slim-bookworm", "USER": f"{USER}:{USER}", "EXPOSE": "5555"} | {
        "ENTRYPOINT": '["rpc-reading-worker"]'
    }
    inside = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"])
    if inside.returncode != 0:
        pytest.skip("no namespaces here")
    writable = image / "tmp"
    writable.mkdir()
    confined = {**environment, "WRITABLE": str(writable), "TMPDIR": str(writable), "HOME": str(writable)}
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", CONFINED, "sh"]
    script = "import rpc_reading_service, sys; print(rpc_reading_service.__file__); open(sys.argv[1], 'w')"
    told = subprocess.run(
        [*command, "python", "-c", script, str(image / "file")], env=confined, cwd=image, capture_output=True, text=True
    )
    assert told.stdout.startswith(str(packages))
    assert "Read-only file system" in told.stderr
    train = [*command, "python", str(image / "opt/rpc-reading-service/examples/preemptible_train.py")]
    arguments = ["--checkpoint", str(writable / "train.pt"), "--epochs", "1", "--elements", "640"]
    done = subprocess.run([*train, *arguments], env=confined, cwd=image, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["epoch 0: 640 elements"]), done.stderr


def follow(steps: list[tuple[str, str]], image: Path, environment: Fields) -> Fields:
    """Do in a folder what an image would be made by; returns what only Docker can do."""
    workdir, rest = image, {}
    for name, text in steps:
        match name:
            case "WORKDIR":
                workdir = image / text.removeprefix("/")
                workdir.mkdir(parents=True)
            case "COPY":
                *sources, target = text.split()
                copy([ROOT / source for source in sources], workdir / target)
            case "RUN":
                subprocess.run(["sh", "-c", text], cwd=workdir, env=environment, check=True)
            case "ENV":
                environment |= dict(pair.split("=") for pair in text.split())
            case "ARG":
                pass
            case _:
                rest[name] = text
    return rest


def copy(sources: list[Path], target: Path) -> None:
    """As Docker's COPY does it, whose target is a folder or, for one source, a new name."""
    for source in sources:
        into = target / source.name if len(sources) > 1 else target
        into.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, into)
        else:
            shutil.copy(source, into)
