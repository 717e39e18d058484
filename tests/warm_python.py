"""A Python server that has imported the slow modules and runs each command in a fork of itself.

Importing torch is most of the time that a small command takes; finding out which problems a plain
function takes is most of the rest (``evidence_cache.py``). ``Servers.run`` runs a command as
``subprocess.run`` does: with its own process, folder, environment and descriptors, and with the
exit code of Python. Only its first imports may be done already: a test of imports, descriptors or
signals starts a real Python, and so does at least one test of each verb.

``python warm_python.py ADDRESS MODULE…`` is the server. It ends when its standard input is closed.
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

_EVIDENCE_CACHE = Path(__file__).with_name("evidence_cache.py")
# Read when Python starts or a module is imported: each such environment needs its own server.
_READ_EARLY = ("PYTHON", "OMP_", "MKL_", "NPY_", "OPENBLAS_", "TRITON_INTERPRET")
_READ_LATE = {"PYTHONPATH", "PYTHONIOENCODING"}  # by the fork
# Commands before the cache is filled: a server for one test's environment hardly gets more.
_CACHE_AFTER = 2

# Nothing here imports Triton: it can be interpreted only if no module imported it before.
_HEAVY = ("torch", "torch.nn.attention.flex_attention", "sympy", "networkx", "mpmath", "ml_dtypes")
# Imports Triton, so only in an environment that has Triton interpreted anyway.
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
# By program. pytest must import its plugins itself, Hypothesis too, to rewrite their assertions.
_OWN = {
    "attncheck": (*_ROOMS, "attncheck.cases.strategies.problems", "attncheck.cli.check"),
    "pytest": _ROOMS,
}


class Servers:
    """Servers in one folder, started on demand, but only by the process that made the folder.

    Attributes:
        folder: Has their sockets: another process uses them by ``Servers(folder)``.
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
        """Run ``python -m module …``, ``python module.py …`` or ``python -c …``.

        Args:
            forks: The command's workers are forks of it and import nothing again. Never with a GPU,
                which no fork can use. The fixture ``forked_workers`` does the same in pytest.
            keeps: The command uses the server's cache of exact results.
        """
        env = dict(os.environ if env is None else env)
        forks = forks and not sees_gpu(env)
        address = self.start(module, env)
        words = [module, *arguments]
        request = {"words": words, "cwd": str(cwd), "env": env, "forks": forks, "keeps": keeps}
        with (
            socket.socket(socket.AF_UNIX) as connection,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            connection.connect(str(address))
            socket.send_fds(connection, [b"."], [out.fileno(), err.fileno()])
            connection.sendall(f"{json.dumps(request)}\n".encode())
            with connection.makefile() as replies:
                process = int(replies.readline())
                connection.settimeout(timeout)
                try:
                    code = int(replies.readline())
                except TimeoutError:
                    os.kill(process, signal.SIGKILL)
                    connection.settimeout(None)
                    connection.recv(1)  # until it has ended
                    raise subprocess.TimeoutExpired(words, timeout or 0) from None
            texts = [_read(file) for file in (out, err)]
        return subprocess.CompletedProcess(words, code, *texts)

    def start(self, module: str, env: Mapping[str, str]) -> Path:
        """Return the socket of the server for ``module`` and ``env``, started if needed."""
        kind = module if module in _OWN else "attncheck"
        early = {k: v for k, v in env.items() if k.startswith(_READ_EARLY) and k not in _READ_LATE}
        key = hashlib.sha256(json.dumps([kind, early], sort_keys=True).encode()).hexdigest()[:12]
        address = self.folder / key
        if not address.exists():
            assert self._own, f"no server for {kind} with {early}"
            interpreted = early.get("TRITON_INTERPRET") == "1"
            heavy = (*_HEAVY, *(_HEAVY_IF_INTERPRETED if interpreted else ()))
            others = {k: v for k, v in env.items() if k not in _READ_LATE}
            if "PYTHONPATH" in os.environ:  # the attncheck under test may not be the installed one
                others["PYTHONPATH"] = os.environ["PYTHONPATH"]
            self._listen(address, (*heavy, *_OWN[kind]), others)
        return address

    def _listen(self, address: Path, modules: tuple[str, ...], env: dict[str, str]) -> None:
        with tempfile.TemporaryFile() as err:
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
            # A real process would print a warning of its imports with every command.
            errors = _read(err)
            assert (ready, errors) == ("ready\n", ""), errors

    def stop(self) -> None:
        """End the servers that this process started."""
        for process in self._processes:
            process.communicate()  # closes its standard input
        shutil.rmtree(self.folder)


def sees_gpu(env: Mapping[str, str]) -> bool:
    """Return whether a process with the environment ``env`` sees a GPU."""
    return Path("/dev/nvidiactl").exists() and env.get("CUDA_VISIBLE_DEVICES") != ""


def _read(file) -> str:
    file.seek(0)
    return file.read().decode(errors="backslashreplace").replace("\r\n", "\n")


def _serve(address: str, fill_cache) -> tuple[dict, list[int]]:
    """Serve until standard input is closed; in each fork, return the request and its descriptors.

    ``fill_cache`` is called before the first ``attncheck`` command after ``_CACHE_AFTER`` others.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the first forks are not waited for
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    commands = 0
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        connection, _ = listener.accept()
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        with connection.makefile() as lines:
            request = json.loads(lines.readline())
        if request["words"][0] == "attncheck":
            if commands == _CACHE_AFTER:
                fill_cache()
            commands += 1
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_again(connection)
            return request, descriptors
        for descriptor in (connection.detach(), *descriptors):
            os.close(descriptor)


def _fork_again(connection: socket.socket) -> None:
    """Return in the second fork only; the first one sends that fork's id and exit code."""
    process = os.fork()
    if process == 0:
        connection.close()
        return
    with contextlib.suppress(BrokenPipeError):  # the client no longer waits
        connection.sendall(f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict, descriptors: list[int]) -> None:
    """Give this process the standard streams, folder and environment of ``request``."""
    os.setsid()  # a signal to the command's process group must not reach the server
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
    """A Popen that starts attncheck's workers as forks of this process."""

    def _execute_child(self, *arguments) -> None:
        options = dict(zip(_PARAMETERS, (self, *arguments), strict=True))
        if not any("worker_main" in str(word) for word in options["args"][2:3]):
            super()._execute_child(*arguments)
            return
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._work(options)
            finally:
                os._exit(1)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(options[name] for name in ends))

    def _work(self, options: dict) -> None:
        os.setsid()
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            os.dup2(options[name], number)
        inherited = sorted({2, *options["pass_fds"]})
        for low, high in itertools.pairwise((*inherited, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(low + 1, high)
        if options["cwd"]:
            os.chdir(options["cwd"])
        os.environ.clear()
        os.environ.update(options["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdin = os.fdopen(0, closefd=False)
        for name, number in (("stdout", 1), ("stderr", 2)):
            # As in Python, standard error is flushed after each line.
            buffering = 1 if number == 2 else -1
            stream = os.fdopen(number, "w", buffering, errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if "pytest" in sys.modules:
            atexit._clear()  # pytest's handlers are for pytest's process
        _end(_exit_code([*options["args"][1:]]))


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
    """Run ``words``; print Python's message on an uncaught exception, and return its exit code."""
    try:
        _run(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001  # the outermost frame
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """End at once, foreign code or not: destroying objects would copy the memory a fork shares."""
    FOREIGN_CODE.clear()
    try:
        end_process(code)
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    # attncheck is a plugin's package: pytest would warn that it is imported already.
    sys.modules["attncheck"].__doc__ += "\nPYTEST_DONT_REWRITE"
    _caches = []

    def _fill_cache() -> None:
        if "attncheck.cli.check" in sys.argv[2:] and not sees_gpu(os.environ):
            spec = importlib.util.spec_from_file_location("evidence_cache", _EVIDENCE_CACHE)
            spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
            popen, subprocess.Popen = subprocess.Popen, Forked
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _caches.append(module.fill_cache_for_forks())
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            subprocess.Popen = popen
            gc.collect()
            gc.freeze()  # these objects live on, and forks share their memory

    gc.collect()
    gc.freeze()
    _request, _descriptors = _serve(sys.argv[1], _fill_cache)
    _become(_request, _descriptors)
    if _request["forks"]:
        subprocess.Popen = Forked
    if _caches and not _request["keeps"]:
        _caches[0].uninstall()
    _end(_exit_code(_request["words"]))
