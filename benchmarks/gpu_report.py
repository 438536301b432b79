"""What the times of gpu_check.py mean, and its report as Markdown."""

import math

import report
from cases import COPY_TENSORS, TENSORS
from timing import summary

WORKS = ("inference forward", "training forward", "training backward")

# Values read and written for each value of the data, where nothing of the size of the data stays on
# the chip from one pass over it to the next: training reads the data, and backward the gradient of
# the output too, once for the sums and once more for the result. cases.TENSORS is what must move
# where all of it stays.
ACCESSES = {"inference forward": 2, "training forward": 3, "training backward": 5}
ITEM_BYTES = {"float16": 2, "float32": 4}
NOISE = 1.02  # a time that is not larger than this one times another counts as not longer

# What is aimed at, in which works, which ratio it is about, and how large that may be.
AIMS = (
    ("not slower than PyTorch in any shape", WORKS, "PyTorch", NOISE),
    ("inference at 80 % of the copy's bandwidth or more", WORKS[:1], "bound", 1 / 0.8),
    ("training forward within 1.3 times its traffic bound", WORKS[1:2], "bound", 1.3),
    ("training backward within 1.3 times its traffic bound", WORKS[2:], "bound", 1.3),
)

INTRODUCTION = """\
# Check of mxbn on a GPU

{environment}
"""

SPEED = """\
## Speed

Times are medians of CUDA events after warm-up, of mxbn, PyTorch's `batch_norm` and a copy on the
device by turns, on one stream, all work being queued before the GPU comes to it. Runs in turn use
memory of their own, more than the cache holds. GB/s are the bytes of 2 accesses per value in
inference and in the copy, 3 in a training forward (data twice, output) and 5 in a backward (data
and output's gradient twice, data's gradient), divided by the time. The traffic bound is the time of
as many bytes at the copy's speed; the bound if read once is that of 2, 2 and 3 accesses. `÷`
columns are the time of mxbn divided by the other: below 1, mxbn is faster.
"""


def speed_row(case, dtype, work, times):
    """Return what is told about a work: `times` are lists of seconds by peer."""
    tensor_bytes = math.prod(case.shape) * ITEM_BYTES[dtype]
    peers = {}
    for peer, values in times.items():
        accesses = COPY_TENSORS if peer == "copy" else ACCESSES[work]
        peers[peer] = summary(values)
        peers[peer]["gb_per_s"] = accesses * tensor_bytes / peers[peer]["ms"] / 1e6
    ours, copy = peers["mxbn"]["ms"], peers["copy"]["ms"]
    return {
        "layout": case.group,
        "shape": case.shape,
        "dtype": dtype,
        "work": work,
        "peers": peers,
        "ratios": {
            "copy": ours / copy,
            "PyTorch": ours / peers["PyTorch"]["ms"],
            "bound": ours / (copy * ACCESSES[work] / COPY_TENSORS),
            "bound if read once": ours / (copy * TENSORS[work] / COPY_TENSORS),
        },
    }


def verdicts(rows):
    """Return, for each aim, in how many rows it is met and the worst of them."""
    found = []
    for aim, works, ratio, most in AIMS:
        judged = [row for row in rows if row["work"] in works]
        if not judged:
            continue
        worst = max(judged, key=lambda row: row["ratios"][ratio])
        met = sum(row["ratios"][ratio] <= most for row in judged)
        found.append(
            {
                "aim": aim,
                "met": met,
                "of": len(judged),
                "verdict": "met" if met == len(judged) else "missed",
                "most": most,
                "worst": worst["ratios"][ratio],
                "where": f"{_shape(worst)} {worst['layout']} {worst['dtype']}, {worst['work']}",
            }
        )
    return found


def markdown(results):
    environment = "\n".join(f"- {key}: {value}" for key, value in results["environment"].items())
    parts = [INTRODUCTION.format(environment=environment)]
    for name, part in results["parts"].items():
        parts.append(_findings(name, part))
    if results["sanitizer"]:
        lines = (f"- {tool}: {said}\n" for tool, said in results["sanitizer"].items())
        parts.append("## compute-sanitizer\n\n" + "".join(lines))
    if results["speed"]:
        parts.append(SPEED)
        parts.append(report.table(results["verdicts"], _VERDICT_COLUMNS))
        for dtype in ITEM_BYTES:
            for work in WORKS:
                rows = [r for r in results["speed"] if (r["dtype"], r["work"]) == (dtype, work)]
                parts.append(f"### {work}, {dtype}\n\n{report.table(rows, _speed_columns())}")
    failed = results["failed"]
    parts.append(f"**{failed} failed**\n" if failed else "**Nothing failed**\n")
    return "\n".join(parts)


def _findings(name, part):
    text = f"## {name}\n\n{part['comparisons']} comparisons, {len(part['failures'])} failed.\n"
    if part["worst"]:
        text += "Largest errors, in units of rounding (in brackets: how many are allowed):\n\n"
        names = list(dict.fromkeys(name for worst in part["worst"].values() for name in worst))
        columns = {"dtype": lambda row: row[0]}
        columns.update((name, _worst(name)) for name in names)
        text += report.table(part["worst"].items(), columns)
    if part["failures"]:
        text += "\n" + "".join(f"- {failure}\n" for failure in part["failures"])
    return text


def _worst(name):
    def cell(row):
        if name not in row[1]:
            return ""
        units, allowed = row[1][name]
        return f"{units:.2g} ({allowed})"

    return cell


_VERDICT_COLUMNS = {
    "aim": lambda row: row["aim"],
    "verdict": lambda row: row["verdict"],
    "met in": lambda row: f"{row['met']} of {row['of']}",
    "largest ratio": lambda row: f"{row['worst']:.3g} (at most {row['most']:.3g})",
    "where": lambda row: row["where"],
}


def _speed_columns():
    columns = {"layout": lambda row: row["layout"], "data": _shape}
    peers = ("mxbn", "PyTorch", "copy")
    for peer in peers:
        columns[f"{peer} ms"] = report.value("peers", peer, "ms")
    for peer in peers:
        columns[f"{peer} GB/s"] = report.value("peers", peer, "gb_per_s")
    for ratio in ("PyTorch", "copy", "bound", "bound if read once"):
        columns[f"÷ {ratio}"] = report.value("ratios", ratio)
    return columns


def _shape(row):
    return "x".join(map(str, row["shape"]))
