"""The bootstrap behind the Makefile: what it says and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAIN, CUDA = "llama.cpp · CPU AVX512", "llama.cpp · CUDA NVIDIA H200"
CUDA_ARGS = "-DGGML_CUDA=on"
STAND_IN = """
import json, os, sys
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    print(json.dumps([words, os.environ.get("CMAKE_ARGS"), os.environ.get("CUDACXX")]), file=calls)
if words[0] == "-c":
    print(open({native!r} if "metadata" in words[1] else {device!r}).read())
if "--no-deps" in words and "install" in words:
    open({native!r}, "w").write({version!r})
if "wheel" in words:
    if os.path.exists({broken!r}):
        sys.exit("nvcc fatal: unsupported architecture")
    open(os.path.join(words[words.index("--wheel-dir") + 1], "llama.whl"), "w").close()
"""
"""A python that keeps how it was called; its pip installs nothing and makes an empty wheel."""
NINJA_LINE = "  [96/193] /usr/bin/c++ -DGGML_BUILD -O3 -c ggml.cpp\n"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "install", module)  # where dataclasses look annotations up
    spec.loader.exec_module(module)
    return module


class Environment:
    """A virtual environment whose python is a stand-in, for an `install` that looks into empty folders.

    Attributes:
        folder: of the environment.
        device: file with what llama.cpp computes on.
        broken: file that makes a build fail while it is there.
    """

    def __init__(self, install: ModuleType, folder: Path) -> None:
        self._install = install
        self.folder = folder / "venv"
        self._calls, self.device, self.broken = folder / "calls", folder / "device", folder / "broken"
        self.python = self.folder / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.device.write_text(PLAIN, encoding="utf-8")
        named = {
            "calls": self._calls,
            "device": self.device,
            "broken": self.broken,
            "native": folder / "native",
        }
        version = install._native_pin().partition("==")[2]
        code = STAND_IN.format(version=version, **{name: str(path) for name, path in named.items()})
        self.python.write_text(f"#!{sys.executable}{code}", encoding="utf-8")
        self.python.chmod(0o755)

    def bring_up_to_date(self, *extras: str, again: bool = False) -> list[list[str]]:
        """The calls of pip that this took, each from its verb on."""
        self._calls.write_text("", encoding="utf-8")
        self._install.install(self.folder, list(extras), again=again)
        return [words[2:] for words, _, _ in self.calls() if words[:2] == ["-m", "pip"]]

    def calls(self) -> list[tuple[list[str], str | None, str | None]]:
        """Words, CMAKE_ARGS and CUDACXX of each call of python."""
        return [json.loads(line) for line in self._calls.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def environment(install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A first environment of this machine, which has a compiler and no toolkit."""
    for name in install.BUILT_WITH:
        monkeypatch.delenv(name, raising=False)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("c++", "python3"):
        (programs / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(programs))
    install.KNOWN = install.TOOLKITS
    monkeypatch.setattr(
        install, "TOOLKITS", tuple(install.Toolkit(t.name, t.compiler) for t in install.TOOLKITS)
    )
    return Environment(install, tmp_path / "first")


def test_the_compilation_shows_how_far_it_is(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of compiling are not silent; on a pipe it is a line now and then."""
    monkeypatch.setattr(install, "SLOW_REPORT_S", 0.0)
    progress = install.Progress("building llama.cpp")
    progress.note(NINJA_LINE)
    progress.show()
    progress.note("some other line")
    progress.show()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("building llama.cpp" in line and "96/193 (49 %)" in line for line in lines)


def test_nothing_is_said_before_it_is_time(install: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Thousands of compiler lines do not become thousands of lines here."""
    progress = install.Progress("building llama.cpp")
    progress.note(NINJA_LINE)
    progress.show()
    assert capsys.readouterr().out == ""


def test_a_python_that_is_too_old_is_named(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which version is needed and how to choose another."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(install.SetupError, match=r"3\.11 or newer.*\n.*make PYTHON="):
        install.check_python()


def test_a_python_without_venv_is_told_what_to_install(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's python3 without python3-venv."""
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(install.SetupError, match="apt install python3-venv"):
        install.check_python()


def test_a_machine_without_compiler_is_told_what_to_install(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No compiler and no ready-made wheel is one clear message."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build = install.Build("llama-cpp-python==0.0")
    assert install.find_compiler(build) is None
    job = install.Job(build, None, {}, tmp_path / "log")
    with pytest.raises(install.SetupError, match=r"apt install g\+\+"):
        install._install_native([sys.executable, "-c", "raise SystemExit(1)"], job, again=False)


def test_flags_are_given_only_to_a_compiler_that_takes_them(install: ModuleType, tmp_path: Path) -> None:
    """An unknown flag would stop the build."""
    picky = tmp_path / "c++"
    picky.write_text('#!/bin/sh\ncase "$*" in *-mno-amx*) exit 1;; esac\n', encoding="ascii")
    picky.chmod(0o755)
    assert not install.accepts(str(picky), install.NO_AMX)
    assert install.accepts(str(picky), ())


def test_a_failure_of_pip_shows_the_end_of_its_output(install: ModuleType, tmp_path: Path) -> None:
    """The reason is on the screen, all of it in the log."""
    command = [sys.executable, "-c", "print('no space left'); raise SystemExit(1)"]
    with pytest.raises(install.SetupError, match="no space left"):
        install.run_pip("installing", command, {}, tmp_path / "log")
    assert "no space left" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_native_library_is_pinned_exactly(install: ModuleType) -> None:
    """Pinned versions, the same in both files."""
    pin = install._native_pin()
    assert f'"{pin}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_what_is_up_to_date_is_left_alone(environment: Environment) -> None:
    """The second `make run` starts at once; other inputs, an extra more, or `make rebuild` do not."""
    assert environment.bring_up_to_date("demo")
    assert environment.bring_up_to_date("demo") == []
    added, modules = environment.bring_up_to_date("demo", "dev")
    assert added[-1].endswith("[demo,dev]")
    assert modules[-2:] == ["--no-deps", "mlx-vlm"]
    assert environment.bring_up_to_date("demo") == []
    pinned, *_ = environment.bring_up_to_date("demo", again=True)
    assert "--no-cache-dir" in pinned


def test_an_environment_whose_python_has_gone_is_made_again(
    environment: Environment, install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: its note says what it held; nothing of it runs."""
    environment.bring_up_to_date("demo")
    (environment.folder / "pyvenv.cfg").touch()
    code = environment.python.read_bytes()
    environment.python.unlink()

    def made(folder: Path, **_: bool) -> None:
        (folder / "bin" / "python").write_bytes(code)
        (folder / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(install.venv, "create", made)
    assert environment.bring_up_to_date("demo")


def test_a_folder_that_is_no_environment_is_never_emptied(install: ModuleType, tmp_path: Path) -> None:
    """`make VENV=FOLDER`: the library's way to begin is to remove all that is in the folder."""
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(install.SetupError, match="no environment"):
        install.make_environment(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_change_of_the_project_installs_it_again_with_all_it_had(
    environment: Environment, install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What developers use stays when somebody only wants the demo."""
    environment.bring_up_to_date("demo", "dev")
    monkeypatch.setattr(install, "_digest_of_inputs", lambda: "another")
    again, _ = environment.bring_up_to_date("demo")
    assert again[-1].endswith("[demo,dev]")


def test_cmake_arguments_build_another_wheel_past_the_cache_of_pip(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pip's cache has no key for them, and would hand out the CPU's wheel (D1)."""
    environment.bring_up_to_date("demo")
    monkeypatch.setenv("CMAKE_ARGS", CUDA_ARGS)
    built, installed, _ = environment.bring_up_to_date("demo")
    assert built[0] == "wheel"
    assert "--no-cache-dir" in built
    assert {"--force-reinstall", "--no-deps"} < set(installed)
    assert installed[-1].endswith("llama.whl")
    assert CUDA_ARGS in [args for words, args, _ in environment.calls() if "wheel" in words]


def test_cmake_arguments_are_remembered_until_they_are_taken_back(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make run` keeps what `CMAKE_ARGS=... make run` built; `CMAKE_ARGS= make run` goes back (D1)."""
    monkeypatch.setenv("CMAKE_ARGS", CUDA_ARGS)
    environment.bring_up_to_date("demo")
    monkeypatch.delenv("CMAKE_ARGS")
    assert environment.bring_up_to_date("demo") == []
    monkeypatch.setenv("CMAKE_ARGS", "")
    plain, _ = environment.bring_up_to_date("demo")
    assert "--force-reinstall" in plain
    assert plain[-1].startswith("llama-cpp-python==")


def test_a_build_is_kept_for_the_next_environment(
    environment: Environment, install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of compiling once for each set of options; other options are another wheel (D1)."""
    monkeypatch.setenv("CMAKE_ARGS", CUDA_ARGS)
    environment.bring_up_to_date("demo")
    second = Environment(install, tmp_path / "second")
    assert [words[0] for words in second.bring_up_to_date("demo")] == ["install", "install"]
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert second.bring_up_to_date("demo")[0][0] == "wheel"


def test_a_build_that_failed_is_not_remembered(
    environment: Environment, install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there goes on working, and the reason is shown (D1)."""
    environment.bring_up_to_date("demo")
    environment.broken.touch()
    monkeypatch.setenv("CMAKE_ARGS", CUDA_ARGS)
    with pytest.raises(install.SetupError, match="unsupported architecture"):
        environment.bring_up_to_date("demo")
    monkeypatch.delenv("CMAKE_ARGS")
    assert environment.bring_up_to_date("demo") == []


GPUS = """
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-2)
"""
SMI = f"""#!/bin/sh
case "$*" in
  -L) echo '{GPUS.strip()}';;
  *compute_cap*) printf '9.0\n8.0\n';;
esac
"""
VULKAN = "#!/bin/sh\necho '  deviceType = PHYSICAL_DEVICE_TYPE_{}'\n"


class Machine:
    """What lies on its PATH and below its /dev."""

    def __init__(self, install: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._programs = folder / "programs"
        self._devices = folder / "dev"
        self._devices.mkdir()
        monkeypatch.setattr(install, "DEVICES", self._devices)
        found = tuple(dataclasses.replace(each, folders=()) for each in install.KNOWN)
        monkeypatch.setattr(install, "TOOLKITS", found)

    def has(self, program: str, text: str = "#!/bin/sh\n") -> None:
        """A program of that text."""
        file = self._programs / program
        file.write_text(text, encoding="ascii")
        file.chmod(0o755)

    def lacks(self, program: str) -> None:
        """The program is gone."""
        (self._programs / program).unlink()

    def has_node(self, name: str) -> None:
        """A device as the system shows it."""
        (self._devices / name).parent.mkdir(parents=True, exist_ok=True)
        (self._devices / name).touch()


@pytest.fixture
def machine(
    install: ModuleType, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    """The machine of `environment`, of whose toolkits and devices a test decides."""
    assert environment
    return Machine(install, tmp_path, monkeypatch)


def test_a_toolkit_without_a_device_is_named_and_not_used(
    environment: Environment, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """D1: a build machine, or a driver that answers nothing; the line says how to build all the same."""
    environment.bring_up_to_date("demo")
    assert " here" not in capsys.readouterr().out
    machine.has("nvcc")
    machine.has("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9\n")
    assert environment.bring_up_to_date("demo", again=True)[0][-1].startswith("llama-cpp-python==")
    said = capsys.readouterr().out
    assert "no GPU for it" in said
    assert 'CMAKE_ARGS="-DGGML_CUDA=on" make run' in said


def test_a_gpu_with_its_toolkit_is_built_for(
    environment: Environment, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """D1: `make run` alone, for the kinds of GPU that are here only; the next one keeps it."""
    machine.has("nvcc")
    machine.has("nvidia-smi", SMI)
    assert environment.bring_up_to_date("demo")[0][0] == "wheel"
    assert "builds for CUDA: NVIDIA H100 80GB HBM3; for the CPU alone" in capsys.readouterr().out
    wanted = "-DGGML_CUDA=on '-DCMAKE_CUDA_ARCHITECTURES=80;90'"
    assert wanted in [args for words, args, _ in environment.calls() if "wheel" in words]
    assert shlex.split(wanted)[1] == "-DCMAKE_CUDA_ARCHITECTURES=80;90"
    machine.lacks("nvidia-smi")  # a container of the same folder without its GPU
    assert environment.bring_up_to_date("demo") == []


def test_a_gpu_without_its_toolkit_says_what_to_install(
    environment: Environment, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """D1: the package by name; it is built for the CPU until then, and for the GPU after it."""
    machine.has("nvidia-smi", SMI)
    assert environment.bring_up_to_date("demo")[0][-1].startswith("llama-cpp-python==")
    said = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3 is here; to compute on it install the CUDA toolkit" in said
    assert "apt install nvidia-cuda-toolkit" in said
    machine.has("nvcc")
    assert environment.bring_up_to_date("demo")[0][0] == "wheel"


def test_who_asked_for_the_plain_build_keeps_it(
    environment: Environment, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: `CMAKE_ARGS= make run`, once; what is found changes it no more, nothing is compiled twice."""
    environment.bring_up_to_date("demo")
    monkeypatch.setenv("CMAKE_ARGS", "")
    machine.has("nvcc")
    machine.has("nvidia-smi", SMI)
    (editable,) = environment.bring_up_to_date("demo")
    assert "--editable" in editable
    monkeypatch.delenv("CMAKE_ARGS")
    assert environment.bring_up_to_date("demo") == []


@pytest.mark.parametrize(
    ("programs", "nodes", "wanted"),
    [
        ({"hipcc": "#!/bin/sh\n"}, ["kfd"], "-DGGML_HIP=on"),
        ({"glslc": "#!/bin/sh\n"}, ["dri/renderD128"], "-DGGML_VULKAN=on"),
        ({"glslc": "#!/bin/sh\n", "vulkaninfo": VULKAN.format("DISCRETE_GPU")}, [], "-DGGML_VULKAN=on"),
        ({"glslc": "#!/bin/sh\n", "vulkaninfo": VULKAN.format("CPU")}, ["dri/renderD128"], None),
        ({"glslc": "#!/bin/sh\n", "nvidia-smi": SMI}, ["dri/renderD128"], "-DGGML_VULKAN=on"),
        ({"nvcc": "#!/bin/sh\n"}, ["nvidia0"], "-DGGML_CUDA=on '-DCMAKE_CUDA_ARCHITECTURES=native'"),
        ({"nvcc": "#!/bin/sh\n"}, ["nvidiactl"], None),
    ],
    ids=["rocm", "vulkan", "its own list", "a renderer of the cpu", "no nvcc", "no nvidia-smi", "no gpu"],
)
def test_each_toolkit_is_found_by_its_compiler_and_its_device(
    install: ModuleType, machine: Machine, programs: dict[str, str], nodes: list[str], wanted: str | None
) -> None:
    """D1: CUDA before ROCm before Vulkan; a toolkit alone, or a device alone, is not enough."""
    for name, text in programs.items():
        machine.has(name, text)
    for node in nodes:
        machine.has_node(node)
    assert install.wanted_build(install.Installed()).built_with.get("CMAKE_ARGS") == wanted


def test_a_build_for_a_gpu_that_fails_names_the_way_back(
    environment: Environment, install: ModuleType, machine: Machine
) -> None:
    """D1: a compiler too new for the toolkit stops nobody from a first answer."""
    machine.has("nvcc")
    machine.has("nvidia-smi", SMI)
    environment.broken.touch()
    with pytest.raises(install.SetupError, match=r"unsupported architecture(.|\n)*CMAKE_ARGS= make run"):
        environment.bring_up_to_date("demo")


def test_a_compiler_outside_of_the_path_is_named_to_cmake(
    environment: Environment, install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own installer leaves nvcc out of PATH (D1)."""
    (tmp_path / "cuda").mkdir()
    nvcc = tmp_path / "cuda" / "nvcc"
    nvcc.symlink_to("/bin/true")
    monkeypatch.setattr(install, "CUDA", install.Toolkit("CUDA", "nvcc", (str(nvcc.parent),)))
    monkeypatch.setenv("CMAKE_ARGS", CUDA_ARGS)
    environment.bring_up_to_date("demo")
    assert str(nvcc) in [cudacxx for words, _, cudacxx in environment.calls() if "wheel" in words]


def test_the_end_says_on_what_it_computes(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the word of `stoker doctor`; a build for a GPU that computes on the CPU says so (D1)."""
    environment.bring_up_to_date("demo")
    assert capsys.readouterr().out.splitlines()[-1] == f"  computes on {PLAIN}"
    monkeypatch.setenv("CMAKE_ARGS", CUDA_ARGS)
    environment.bring_up_to_date("demo")
    assert "built for CUDA, but no such device answers" in capsys.readouterr().out
    environment.device.write_text(CUDA, encoding="utf-8")
    environment.bring_up_to_date("demo", again=True)
    assert capsys.readouterr().out.splitlines()[-1] == f"  computes on {CUDA}"


def test_make_run_asks_at_temperature_0_and_says_on_what_it_computed(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo answers what is likeliest, and its last line is that of the build (D1, D30)."""
    environment.bring_up_to_date("demo")
    stoker = environment.folder / "bin" / "stoker"
    stoker.write_text(f'#!{sys.executable}\nimport sys; print(*sys.argv[1:], sep="|")\n', encoding="utf-8")
    stoker.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    command = ["make", "-C", str(ROOT), "run", f"VENV={environment.folder}", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        [*command, "PROMPT=It's 'so'"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "run|--temperature|0|--|It's 'so'" in done.stdout.splitlines()
    assert done.stderr.splitlines()[-1] == f"computed on {PLAIN}"


def test_what_the_install_asks_of_the_package_is_there(install: ModuleType) -> None:
    """Its last line is the package's own word; where that fails it says that llama.cpp does not load (D1)."""
    asked = [sys.executable, "-c", install.COMPUTES_ON]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("llama.cpp · ")
