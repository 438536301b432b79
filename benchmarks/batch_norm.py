#!/usr/bin/env python3
"""Compare the speed of mxbn with MXNet's built-in BatchNorm, PyTorch and a copy of the data.

Writes batch_norm.md, batch_norm.json and, where matplotlib is installed, batch_norm.png, and prints
the first. Runs where mxnet (1.9.1) and mxbn can be imported. A full run takes about twenty
minutes; nothing else should run on the machine.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile

import plot
import report

FOLDER = os.path.dirname(os.path.abspath(__file__))
NAME = "batch_norm"
BUSY = 0.5  # processes that ran or waited, on average over the last minute
LISTS = ("operators", "fused", "calls", "networks")


def main(arguments=None):
    options = parse(arguments)
    try:
        os.makedirs(options.out, exist_ok=True)
    except OSError as error:
        print(f"benchmark: --out: {error}", file=sys.stderr)
        return 2
    try:
        results = measure(options)
    except KeyboardInterrupt:
        print("\nbenchmark: interrupted", file=sys.stderr)
        return 130
    except subprocess.CalledProcessError as error:
        print(f"benchmark: a measuring process ended with {error.returncode}", file=sys.stderr)
        return 1
    if not any(results[name] for name in LISTS):
        print(f"benchmark: nothing matches --only {options.only}", file=sys.stderr)
        return 2
    path = os.path.join(options.out, NAME)
    text = report.markdown(results)
    report.write_json(path + ".json", results)
    report.write_text(path + ".md", text)
    no_plot = plot.draw(path + ".png", results)
    if no_plot:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".png")  # that of an earlier run, which would not fit the table
        print(f"benchmark: no plot: {no_plot}", file=sys.stderr)
    print(text)
    return 0


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few tiny shapes and short runs, to see that it works"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=os.path.join(FOLDER, "results"),
        help="folder for the files, made if missing (default: results, beside this file)",
    )
    parser.add_argument(
        "--only",
        metavar="WORD",
        help="measure only what has this in its description, such as 'ResNet-50', '64x56x56', "
        "'NHWC', 'training backward', 'small calls' or 'ResNet-18'",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=positive(int),
        nargs="+",
        default=[1, 2],
        help="numbers of threads, a process for each (default: 1 2)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=positive(float),
        help="time for each peer's way to do each work (default: 0.3, quick: 0.01)",
    )
    parser.add_argument(
        "--torch-path",
        metavar="DIR",
        default=os.environ.get("TORCH_PATH"),
        help="site-packages folder that holds PyTorch, if it is installed elsewhere; it is "
        "searched last (default: the environment variable TORCH_PATH). Without PyTorch its columns "
        "are left out",
    )
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 0.01 if options.quick else 0.3
    return options


def positive(kind):
    def convert(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if 0 < value < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")

    return convert


def measure(options):
    """Run measure.py for each number of threads and join the results."""
    joined = {"environment": {}, **{name: [] for name in LISTS}}
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"benchmark: the load is {load:.1f}: something else runs here", file=sys.stderr)
    for threads in dict.fromkeys(options.threads):
        part = measure_with(threads, options)
        joined["environment"] = part["environment"]
        for name in LISTS:
            joined[name] += part[name]
    joined["environment"].update(
        cpu=cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        load=load,
        system=platform.platform(),
        threads=list(dict.fromkeys(options.threads)),
        seconds=options.seconds,
        quick=options.quick,
    )
    return joined


def measure_with(threads, options):
    task = {key: getattr(options, key) for key in ("quick", "only", "seconds", "torch_path")}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MXNET_SUBGRAPH_VERBOSE": "0",  # no line on standard error for every executor
        # Have malloc keep freed memory: a result that a peer allocates anew then costs no new
        # pages, so that no peer pays for those.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }
    for name in ("MXNET_SUBGRAPH_BACKEND", "MXNET_MKLDNN_ENABLED", "MXNET_ENGINE_TYPE"):
        environment.pop(name, None)  # measure MXNet as it comes
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "results.json")
        command = [
            sys.executable,
            os.path.join(FOLDER, "measure.py"),
            json.dumps({"threads": threads, **task}),
            path,
        ]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        with open(path) as file:
            return json.load(file)


def cpu_model():
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
