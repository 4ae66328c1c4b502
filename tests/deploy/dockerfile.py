"""The part of the Dockerfile language that deploy/Dockerfile uses, read into stages; its steps run without Docker.

A stage is built as Docker builds it, in an overlay file system of its own over that of its base, by `chroot`; every
step has a private mount namespace, so that nothing stays mounted. The base image is not to be had without a registry
of images: a bare Debian of the same release with its own Python 3.11 stands in for it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

_KEYWORDS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
_STEP_LIMIT_S = 1500
_NONE: Mapping[Path, str] = {}


@dataclass(frozen=True)
class Instruction:
    keyword: str
    value: str


@dataclass
class Stage:
    name: str
    base: str
    """Another stage's name, or an image."""
    instructions: list[Instruction] = field(default_factory=list)


def read_stages(text: str) -> dict[str, Stage]:
    """Stages by name, in order.

    Raises:
        ValueError: an instruction that is not known here.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        keyword, _, value = line.strip().partition(" ")
        if keyword not in _KEYWORDS:
            raise ValueError(f"{keyword}: not an instruction that is known here")
        if keyword == "FROM":
            base, _, name = value.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        else:
            assert stage is not None
            stage.instructions.append(Instruction(keyword, value.strip()))
    return stages


def lineage(stages: Mapping[str, Stage], name: str) -> list[Stage]:
    """The stage and those it is built on, the first one first."""
    stage = stages[name]
    return [*(lineage(stages, stage.base) if stage.base in stages else []), stage]


@dataclass
class Configuration:
    """What the image of a stage says about how it is run."""

    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)

    def apply(self, instruction: Instruction) -> None:
        match instruction.keyword:
            case "ENV":
                for assignment in shlex.split(instruction.value):
                    name, _, value = assignment.partition("=")
                    self.environment[name] = Template(value).substitute(self.environment)
            case "WORKDIR":
                self.workdir = instruction.value
            case "USER":
                self.user = instruction.value
            case "ENTRYPOINT":
                self.entrypoint = json.loads(instruction.value)
            case "EXPOSE":
                self.ports |= {int(port) for port in instruction.value.split()}


_PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def configuration(stages: Mapping[str, Stage], name: str) -> Configuration:
    result = Configuration(dict(_PATH))
    for stage in lineage(stages, name):
        for instruction in stage.instructions:
            result.apply(instruction)
    return result


class CleanMachine:
    """Builds stages in folders of its own, and runs commands in what was built."""

    def __init__(self, stages: Mapping[str, Stage], context: Path, folder: Path) -> None:
        """
        Args:
            context: the folder that the files come from.
            folder: an empty one, on a file system that can be a layer of an overlay.
        """
        self._stages = stages
        self._context = context
        self._folder = folder
        self._layers: dict[str, list[Path]] = {}

    def build(self, name: str) -> None:
        """Runs the steps of the stage, and those of the stages it needs first."""
        if name in self._layers:
            return
        stage = self._stages[name]
        if stage.base in self._stages:
            self.build(stage.base)
            below = self._layers[stage.base]
        else:
            below = [self._stand_in(stage.base)]
        settings = configuration(self._stages, stage.base) if stage.base in self._stages else Configuration(dict(_PATH))
        layer = self._new_folder(f"layer-{name}")
        arguments: dict[str, str] = {}
        for instruction in stage.instructions:
            settings.apply(instruction)
            match instruction.keyword:
                case "ARG":
                    argument, _, default = instruction.value.partition("=")
                    arguments[argument] = default
                case "RUN":
                    self._run(
                        below, layer, settings, {**arguments, **_pip_settings()}, ["/bin/sh", "-c", instruction.value]
                    )
                case "COPY":
                    self._copy(below, layer, settings, instruction.value.split())
                case "WORKDIR":
                    self._in_overlay(below, layer, 'mkdir -p "$root$1"', settings.workdir)
        self._layers[name] = [layer, *below]

    def run(self, name: str, command: Sequence[str], *, mounted: Mapping[Path, str] = _NONE) -> str:
        """Output of a command in the image of a stage, as its user. What it writes is lost.

        Args:
            mounted: folders of this machine, and where copies of them are to be in the container.
        """
        settings = configuration(self._stages, name)
        layer = self._new_folder(f"container-{name}")
        for folder, place in mounted.items():
            self._in_overlay(self._layers[name], layer, 'cp -a "$1" "$root$2"', str(folder), place)
        return self._run(self._layers[name], layer, settings, {}, command)

    def _copy(self, below: Sequence[Path], layer: Path, settings: Configuration, arguments: Sequence[str]) -> None:
        *sources, target = [argument for argument in arguments if not argument.startswith("--")]
        target = os.path.join(settings.workdir, target)  # noqa: PTH118 (an absolute target stays itself)
        flags = [argument for argument in arguments if argument.startswith("--")]
        if flags:
            origin = flags[0].removeprefix("--from=")
            self.build(origin)
            # The stage's own files are all in its last layers: its base is this one's too.
            (folder,) = [layer for layer in self._layers[origin] if layer.name == f"layer-{origin}"]
            roots = [folder / source.lstrip("/") for source in sources]
        else:
            roots = [self._context / source for source in sources]
        for root in roots:
            # A folder's content goes into the target, a file goes under its own name where the target ends with "/".
            script = (
                'mkdir -p "$root$2" && cp -a "$1/." "$root$2/"'
                if root.is_dir()
                else 'mkdir -p "$root$2" && cp -a "$1" "$root$2"'
            )
            self._in_overlay(below, layer, script, str(root), target)

    def _run(
        self,
        below: Sequence[Path],
        layer: Path,
        settings: Configuration,
        extra: Mapping[str, str],
        command: Sequence[str],
    ) -> str:
        environment = {**settings.environment, **extra}
        script = (
            'mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --rbind /sys "$root/sys"; '
            'links="$1"; user="$2"; place="$3"; shift 3; '
            'if [ -n "$links" ]; then mkdir -p "$root$links" && mount --bind "$links" "$root$links"; fi; '
            'exec chroot --userspec="$user" "$root" /usr/bin/env --ignore-environment --chdir="$place" "$@"'
        )
        assignments = [f"{name}={value}" for name, value in environment.items()]
        links = extra.get("PIP_FIND_LINKS", "")
        return self._in_overlay(below, layer, script, links, settings.user, settings.workdir, *assignments, *command)

    def _in_overlay(self, below: Sequence[Path], layer: Path, script: str, *arguments: str) -> str:
        work, root = self._new_folder("work"), self._new_folder("root")
        options = f"lowerdir={':'.join(map(str, below))},upperdir={layer},workdir={work}"
        whole = f"set -e; root={root}; mount -t overlay overlay -o {options} $root; {script}"
        done = subprocess.run(
            ["unshare", "--mount", "/bin/sh", "-c", whole, "sh", *arguments],
            capture_output=True,
            text=True,
            timeout=_STEP_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(
                f"{arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return done.stdout

    def _stand_in(self, image: str) -> Path:
        release = image.rpartition("-")[2]
        root = self._new_folder("debian")
        _checked("debootstrap", "--variant=minbase", "--include=ca-certificates", release, str(root))
        for file in (Path("/etc/resolv.conf"), Path("/etc/ssl/certs/ca-certificates.crt")):
            shutil.copy(file, root / str(file).lstrip("/"))
        prepare = (
            "apt-get update && apt-get install --yes --no-install-recommends python3.11-dev python3.11-venv && "
            "ln -s /usr/bin/python3.11 /usr/local/bin/python"
        )
        self._run(
            [root], layer := self._new_folder("python"), Configuration(dict(_PATH)), {}, ["/bin/sh", "-c", prepare]
        )
        merged = self._new_folder("stand-in")
        _checked("cp", "-a", f"{root}/.", str(merged))
        _checked("cp", "-a", f"{layer}/.", str(merged))
        return merged

    def _new_folder(self, name: str) -> Path:
        number = len(list(self._folder.iterdir()))
        folder = self._folder / name if name.startswith("layer-") else self._folder / f"{number}-{name}"
        folder.mkdir()
        folder.chmod(0o755)
        return folder


def _pip_settings() -> dict[str, str]:
    """How this machine's pip finds packages, as one would hand it to a build behind a mirror."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def _checked(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_LIMIT_S, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
