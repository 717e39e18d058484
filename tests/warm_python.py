"""A Python that has imported what takes long, and runs each command in a fork of itself.

Importing torch is most of the time that a small command takes, and what a plain function is tried
on first is most of the rest (``kept_evidence.py``). ``Servers.run`` takes a command as
``subprocess.run`` does: it has a process, a folder, an environment and descriptors of its own, and
ends as Python ends. Only what it imports first may be there already, so a test of imports, of
descriptors or of signals starts a real Python, and so does at least one test of each verb.

``python warm_python.py ADDRESS MODULE…`` is the server, which ends with its standard input.
"""

import atexit
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path

from attncheck.core.own_process import FOREIGN_CODE, end_process

_KEPT = Path(__file__).with_name("kept_evidence.py")
# What Python reads when it starts, or a module when it is imported: servers differ in it.
_READ_EARLY = ("PYTHON", "OMP_", "MKL_", "NPY_", "OPENBLAS_", "TRITON_INTERPRET")
_READ_LATE = {"PYTHONPATH", "PYTHONIOENCODING"}  # by the fork
_KEEP_AFTER = 2  # commands: of a server with an environment of a test's own there are hardly more

# Nothing here imports Triton, which may be interpreted only if nobody imported it before.
_HEAVY = ("torch", "torch.nn.attention.flex_attention", "sympy", "networkx", "mpmath", "ml_dtypes")
# Imports Triton: where the environment says that it is interpreted, whoever imports it.
_HEAVY_IF_INTERPRETED = ("torch._dynamo",)
_ROOMS = (
    "attncheck.diagnose.diagnosis",
    "attncheck.verify.claims",
    "attncheck.verify.evidence_builder",
    "attncheck.verify.executor",
    "attncheck.verify.kernel_server",
    "attncheck.reporting.rendering",
    "attncheck.verify.verify",
    "attncheck.workers.worker_main",
    "attncheck.subjects.capabilities.configuration",
)
# Plugins, Hypothesis among them, pytest wants to import itself, to rewrite their assertions.
_OWN = {
    "attncheck": (*_ROOMS, "attncheck.cases.strategies.problems", "attncheck.cli.check"),
    "pytest": _ROOMS,
}


class Servers:
    """Servers of one folder, started as they are needed, by the process that made the folder.

    Attributes:
        folder: Where they listen: another process says ``Servers(folder)`` and uses them.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._own = folder is None
        # Not pytest's folder: the address of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="warm-")) if folder is None else folder
        self._processes: list[subprocess.Popen[str]] = []

    def run(
        self,
        module: str,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        forks: bool = True,
        keeps: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """What ``python -m module …`` says, and how it ends; or ``python module.py`` or ``-c``.

        With ``forks`` the workers that it starts are forks of it: they import nothing anew either.
        Not with a GPU, which no fork can use. The fixture ``forked_workers`` does so in a test.
        With ``keeps`` it has what the server keeps of exact results.
        """
        env = dict(os.environ if env is None else env)
        forks = forks and not sees_gpu(env)
        address = self.start(module, env)
        words = [module, *arguments]
        asked = {"words": words, "cwd": str(cwd), "env": env, "forks": forks, "keeps": keeps}
        with socket.socket(socket.AF_UNIX) as line, _file() as out, _file() as err:
            line.connect(str(address))
            socket.send_fds(line, [b"."], [out.fileno(), err.fileno()])
            line.sendall(f"{json.dumps(asked)}\n".encode())
            with line.makefile() as said:
                process = int(said.readline())
                line.settimeout(timeout)
                try:
                    code = int(said.readline())
                except TimeoutError:
                    os.kill(process, signal.SIGKILL)
                    line.settimeout(None)
                    line.recv(1)  # until it has ended
                    raise subprocess.TimeoutExpired(words, timeout or 0) from None
            texts = [_read(file) for file in (out, err)]
        return subprocess.CompletedProcess(words, code, *texts)

    def start(self, module: str, env: Mapping[str, str]) -> Path:
        """The address of the server for ``module`` in such an environment, started if need be."""
        kind = module if module in _OWN else "attncheck"
        early = {k: v for k, v in env.items() if k.startswith(_READ_EARLY) and k not in _READ_LATE}
        key = hashlib.sha256(json.dumps([kind, early], sort_keys=True).encode()).hexdigest()[:12]
        address = self.folder / key
        if not address.exists():
            assert self._own, f"no server for {kind} with {early}"
            interpreted = early.get("TRITON_INTERPRET") == "1"
            heavy = (*_HEAVY, *(_HEAVY_IF_INTERPRETED if interpreted else ()))
            others = {k: v for k, v in env.items() if k not in _READ_LATE}
            if "PYTHONPATH" in os.environ:  # what is tested may be another than what is installed
                others["PYTHONPATH"] = os.environ["PYTHONPATH"]
            self._listen(address, (*heavy, *_OWN[kind]), others)
        return address

    def _listen(self, address: Path, modules: tuple[str, ...], env: dict[str, str]) -> None:
        with _file() as err:
            process = subprocess.Popen(
                [sys.executable, __file__, str(address), *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env=env,
            )
            self._processes.append(process)
            assert process.stdout is not None
            ready = process.stdout.readline()
            # In a real process it would stand in what every command says.
            said = _read(err)
            assert (ready, said) == ("ready\n", ""), said

    def stop(self) -> None:
        """End those that this process started."""
        for process in self._processes:
            process.communicate()  # closes its standard input
        shutil.rmtree(self.folder)


def sees_gpu(env: Mapping[str, str]) -> bool:
    """Whether a process with such an environment sees a GPU."""
    return Path("/dev/nvidiactl").exists() and env.get("CUDA_VISIBLE_DEVICES") != ""


def _file():
    return tempfile.TemporaryFile()


def _read(file) -> str:
    file.seek(0)
    return file.read().decode(errors="backslashreplace").replace("\r\n", "\n")


def _serve(address: str, keep) -> tuple[dict, list[int]]:
    """Ends where standard input does; in a fork it returns what is to be run.

    Before the first command of attncheck's after ``_KEEP_AFTER`` others it calls ``keep``.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    commands = 0
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        line, _ = listener.accept()
        _, descriptors, _, _ = socket.recv_fds(line, 1, 2)
        with line.makefile() as asked:
            request = json.loads(asked.readline())
        if request["words"][0] == "attncheck":
            if commands == _KEEP_AFTER:
                keep()
            commands += 1
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_again(line)
            return request, descriptors
        for descriptor in (line.detach(), *descriptors):
            os.close(descriptor)


def _fork_again(line: socket.socket) -> None:
    """Returns in a second fork alone: the first tells its id, and how it ends."""
    process = os.fork()
    if process == 0:
        line.close()
        return
    with contextlib.suppress(BrokenPipeError):  # who asked no longer waits
        line.sendall(f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict, descriptors: list[int]) -> None:
    os.setsid()  # what it does to its process group is not done to the server
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in zip((nothing, *descriptors), (0, 1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    if encoding:
        sys.stdin.reconfigure(encoding=encoding, errors=errors or "strict")
        sys.stdout.reconfigure(encoding=encoding, errors=errors or "strict")
        sys.stderr.reconfigure(encoding=encoding, errors="backslashreplace")
    path = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [entry for entry in path.split(os.pathsep) if entry]
    importlib.invalidate_caches()


_PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)


class Forked(subprocess.Popen):
    """A worker of attncheck's as a fork of this process."""

    def _execute_child(self, *arguments) -> None:
        how = dict(zip(_PARAMETERS, (self, *arguments), strict=True))
        if not any("worker_main" in str(word) for word in how["args"][2:3]):
            super()._execute_child(*arguments)
            return
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._work(how)
            finally:
                os._exit(1)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(how[name] for name in ends))

    def _work(self, how: dict) -> None:
        os.setsid()
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            os.dup2(how[name], number)
        kept = sorted({2, *how["pass_fds"]})
        for low, high in itertools.pairwise((*kept, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(low + 1, high)
        if how["cwd"]:
            os.chdir(how["cwd"])
        os.environ.clear()
        os.environ.update(how["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdin = os.fdopen(0, closefd=False)
        for name, number in (("stdout", 1), ("stderr", 2)):
            # As Python has them: standard error line by line.
            kind = {"errors": "backslashreplace", "closefd": False}
            stream = os.fdopen(number, "w", 1 if number == 2 else -1, **kind)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if "pytest" in sys.modules:
            atexit._clear()  # what it has registered is for its own end
        _end(_exit_code([*how["args"][1:]]))


def _run(words: list[str]) -> None:
    sys.argv = words
    if words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(words[1], vars(main))  # noqa: S102  # what ``-c`` does
    elif words[0].endswith(".py"):
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _exit_code(words: list[str]) -> int:
    """As Python says it, and with what Python says then."""
    try:
        _run(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001  # nobody is above
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """Take nothing down, whoever's it is: what a fork shares is most of what is there."""
    FOREIGN_CODE.clear()
    try:
        end_process(code)
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    # Else pytest would warn that it is imported already: it is a plugin's package.
    sys.modules["attncheck"].__doc__ += "\nPYTEST_DONT_REWRITE"
    _kept = []

    def _keep() -> None:
        if "attncheck.cli.check" in sys.argv[2:] and not sees_gpu(os.environ):
            spec = importlib.util.spec_from_file_location("kept_evidence", _KEPT)
            spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
            started, subprocess.Popen = subprocess.Popen, Forked
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _kept.append(module.keep_for_forks())
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            subprocess.Popen = started
            gc.collect()
            gc.freeze()  # what is here stays, and forks share it

    gc.collect()
    gc.freeze()
    _request, _descriptors = _serve(sys.argv[1], _keep)
    _become(_request, _descriptors)
    if _request["forks"]:
        subprocess.Popen = Forked
    if _kept and not _request["keeps"]:
        _kept[0].steps_down()
    _end(_exit_code(_request["words"]))
