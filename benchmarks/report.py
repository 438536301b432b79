"""Writes what was measured as Markdown and JSON, each file at once or not at all."""

import json

from mxbn.tools.files import atomic

PEERS = ("mxbn", "mxbn unfused", "built-in", "PyTorch", "copy")

INTRODUCTION = """\
# Benchmark of batch normalization

{environment}

All peers ran by turns in one process for each number of threads; a time is the median of many runs
after warm-up. `÷` columns are the time of mxbn divided by that of the other: below 1, mxbn is
faster. GB/s are the bytes that must move divided by the time; each tensor of the size of the data
counts once: 2 x 4 x size of the data for a forward (data, output) and for the copy, 3 x 4 x size
for a backward (output's gradient, data, data's gradient). So a backward that is as fast as memory
takes 1.5 times as long as the copy. With an addend and a ReLU, a forward moves 3 tensors (data,
addend, output) and a backward 5 (output's gradient, output, data, and the gradients of data and
addend). Where there are several ways to do the work, the fastest one
of each peer counts; the last column names them.
"""


def markdown(results):
    parts = [INTRODUCTION.format(environment=_environment(results["environment"]))]
    threads = sorted({row["threads"] for name in _TABLES for row in results[name]})
    for name, (title, columns) in _TABLES.items():
        for count in threads:
            rows = [row for row in results[name] if row["threads"] == count]
            if rows:
                parts.append(f"## {title}, {count} thread{'s' * (count > 1)}\n")
                parts.append(table(rows, columns(rows)))
    return "\n".join(parts)


def _environment(environment):
    torch = environment["torch"] or f"left out ({environment['torch_left_out']})"
    lines = [
        f"- {environment['cpu']}, {environment['cpus']} CPUs; threads: "
        + ", ".join(map(str, environment["threads"]))
        + f"; load before the start: {environment['load']:.1f}",
        f"- mxbn {environment['mxbn']}, MXNet {environment['mxnet']}, PyTorch {torch}, "
        f"NumPy {environment['numpy']}, Python {environment['python']}, {environment['system']}",
        f"- float32; {environment['seconds']} s for each peer's way to do a work"
        + ("; quick run, too short to judge by" if environment["quick"] else ""),
    ]
    return "\n".join(lines)


def _operator_columns(rows):
    peers = _peers(rows)
    columns = {
        "group": lambda row: row["group"],
        "data": lambda row: "x".join(map(str, row["shape"])),
    }
    columns["axis"] = lambda row: row["axis"]
    columns["work"] = lambda row: row["work"]
    for peer in peers:
        columns[f"{peer} ms"] = value("peers", peer, "ms")
    for peer in peers:
        columns[f"{peer} GB/s"] = value("peers", peer, "gb_per_s")
    for peer in ("copy", *peers[1:-1]):
        columns[f"÷ {peer}"] = value("ratios", peer)
    columns["ways"] = lambda row: ", ".join(row["peers"][peer]["way"] for peer in peers)
    return columns


def _call_columns(_):
    columns = {"what": lambda row: row["what"], "work": lambda row: row["work"]}
    for peer in ("mxbn", "built-in"):
        columns[f"{peer} ms"] = value("peers", peer, "ms")
    columns["÷ built-in"] = value("ratios", "built-in")
    columns["runs"] = lambda row: row["peers"]["mxbn"]["runs"]
    return columns


_TABLES = {
    "operators": ("Operator", _operator_columns),
    "fused": ("relu(batch_norm(x) + addend)", _operator_columns),
    "calls": ("One small call, imperative and synchronous", _call_columns),
    "networks": ("Network, hybridized", _call_columns),
}


def _peers(rows):
    return [peer for peer in PEERS if peer in rows[0]["peers"]]


def value(*keys):
    def cell(row):
        for key in keys:
            row = row[key]
        return f"{row:.3g}" if row < 1000 else f"{row:.0f}"

    return cell


def table(rows, columns):
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[str(cell(row)) for cell in columns.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_text(path, text):
    with atomic(path) as part, open(part, "w", encoding="utf-8") as file:
        file.write(text)


def write_json(path, results):
    write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")
