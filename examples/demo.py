"""The demo: tunes MiniLM on real text, serves the bundle, asks it questions, and keeps serving until Ctrl-C."""

import argparse
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from docstrings import first_paragraphs, sample

ROOT = Path(__file__).parents[1]
WORK = Path("build/demo")
NUM_REQUESTS = 400  # of traffic to tune for
QUESTIONS = (
    "read a csv file line by line",
    "send an email",
    "how much free space is there on the disk",
    "wait until a thread has finished",
)
TORCHPROOF = [sys.executable, "-m", "torchproof"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop after the questions")
    once = parser.parse_args().once
    os.chdir(ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    traffic = WORK / "traffic.jsonl"
    traffic.write_text("".join(json.dumps({"text": text}) + "\n" for text in sample(NUM_REQUESTS).values()))
    bundle = WORK / "minilm.tp"

    tune = ["tune", "examples/minilm.py", "--traffic", str(traffic), "--budget", "150s", "-o", str(bundle)]
    show(tune)
    code = run([*TORCHPROOF, *tune])
    if code:
        return code
    serve = ["serve", str(bundle), "--port", "0"]
    show(serve)
    with subprocess.Popen([*TORCHPROOF, *serve], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = address(server)
            ask(url)
            if not once:
                print(f"\nserving at {url} until Ctrl-C; try:")
                print(f"""  curl {url}/predict -d '{{"text": "{QUESTIONS[0]}"}}'""", flush=True)
                server.wait()
        except KeyboardInterrupt:
            print("\nstopping")
        finally:
            server.send_signal(signal.SIGTERM)
        return 0 if server.wait() in (0, -signal.SIGTERM) else 1


def run(command: list[str]) -> int:
    """The command's exit code. A Ctrl-C reaches the command too, which cleans up before it ends."""
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def show(arguments: list[str]) -> None:
    print("\n$ torchproof", *arguments, flush=True)


def address(server: "subprocess.Popen[str]") -> str:
    """Passes on what the server says, up to the line with its address."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if "http://" in line:
            return next(word for word in line.split() if word.startswith("http://"))
    raise SystemExit(server.wait())


def ask(url: str) -> None:
    """Embeds functions of the standard library through the server, and finds the nearest to each question."""
    functions = first_paragraphs()
    vectors = {name: embed(url, text) for name, text in functions.items()}
    print(f"\nembedded {len(vectors):,} docstrings of the standard library over HTTP")
    for question in QUESTIONS:
        asked = embed(url, question)
        print(f"\n{question}?")
        for score, name in sorted(((dot(asked, v), n) for n, v in vectors.items()), reverse=True)[:3]:
            print(f"  {score:.2f}  {name}: {functions[name][:70]}")


def embed(url: str, text: str) -> list[float]:
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(f"{url}/predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        vector: list[float] = json.load(response)["embedding"]
    return vector


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
