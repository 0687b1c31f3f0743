"""torch's own thread settings, asked of a fresh process so that the asking one stays free of torch."""

import json
import signal
import subprocess
import sys
from importlib import metadata

from torchproof.types.doctor import TorchSettings

# The hook keeps the first line of the error itself: a traceback's last line may be the end of a long message.
_ASK = """
import json, sys, traceback
def answer_error(kind, error, trace):
    lines = "".join(traceback.format_exception_only(kind, error)).splitlines()
    print(json.dumps({"error": next((line for line in lines if line[:1].strip()), kind.__name__)}))
sys.excepthook = answer_error
import torch
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
names = {line.rpartition("/")[2] for line in maps.splitlines() if "/" in line}
openmp = sorted(name for name in names if name.startswith(("libgomp", "libiomp", "libomp")))
print(json.dumps({"num_threads": torch.get_num_threads(), "num_interop_threads": torch.get_num_interop_threads(),
                  "openmp": openmp[0] if openmp else ""}))
"""


def torch_settings(timeout_s: float = 60.0) -> TorchSettings | None:
    """torch's thread counts and OpenMP library with this environment, or why ``import torch`` fails.

    Args:
        timeout_s: ``import torch`` takes 2 to 10 s from a cold disk; 60 is more than a slow network disk needs.

    Returns:
        None when torch is not installed.
    """
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    command = [sys.executable, "-P", "-c", _ASK]  # -P: a torch.py in the current folder is not the user's torch
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return TorchSettings(error=f"import torch did not end within {timeout_s:g} s")
    except OSError as exc:
        return TorchSettings(error=f"{sys.executable} could not be started: {exc.strerror}")
    return read_answer(done.stdout, done.stderr, done.returncode)


def read_answer(stdout: str, stderr: str, returncode: int) -> TorchSettings:
    """Settings or the error from what the process left; a death by signal names the signal."""
    if returncode < 0:
        return TorchSettings(error=f"import torch was killed by {signal.Signals(-returncode).name}")
    lines = stdout.splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        last = stderr.strip().splitlines()[-1:]
        return TorchSettings(error=last[0] if last else f"import torch ended with exit code {returncode}")
    return TorchSettings(**answer)
