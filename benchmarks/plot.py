"""Draws the times of the operators relative to the copy."""

from cases import COPY_TENSORS, TENSORS, WORKS

from mxbn.tools.files import atomic

# Colours of Okabe and Ito, which colour-blind people tell apart; the markers differ too.
STYLES = {
    "mxbn": {"color": "#0072B2", "marker": "o"},
    "built-in": {"color": "#D55E00", "marker": "s"},
    "PyTorch": {"color": "#009E73", "marker": "^"},
}


def draw(path, results):
    """Write the plot; return why there is none, or None."""
    rows = results["operators"]
    if not rows:
        return "no operator was measured"
    try:
        import matplotlib
    except ImportError as error:
        return str(error)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = sorted({row["threads"] for row in rows})
    works = [work for work in WORKS if any(row["work"] == work for row in rows)]
    labels = list(dict.fromkeys(_label(row) for row in rows))
    figure, panels = pyplot.subplots(
        len(threads),
        len(works),
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(3 + 3 * len(works), 1.5 + len(threads) * (0.8 + 0.22 * len(labels))),
        layout="constrained",
    )
    for count, line in zip(threads, panels):
        for work, panel in zip(works, line):
            panel.set_title(f"{work}, {count} thread{'s' * (count > 1)}", fontsize=10)
            _draw_panel(
                panel, [r for r in rows if (r["threads"], r["work"]) == (count, work)], labels, work
            )
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    figure.supxlabel("time ÷ time of a copy of the data (left is faster)", fontsize=10)
    with atomic(path) as part:
        figure.savefig(part, format="png", dpi=120)
    pyplot.close(figure)
    return None


def _draw_panel(panel, rows, labels, work):
    panel.axvline(
        TENSORS[work] / COPY_TENSORS, color="black", linewidth=1, label="as fast as the copy moves"
    )
    for peer, style in STYLES.items():
        rows_of_peer = [row for row in rows if peer in row["peers"]]
        if rows_of_peer:
            ratios = [row["peers"][peer]["ms"] / row["peers"]["copy"]["ms"] for row in rows_of_peer]
            places = [labels.index(_label(row)) for row in rows_of_peer]
            panel.plot(ratios, places, linestyle="none", markersize=5, label=peer, **style)
    panel.set_xscale("log")
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.grid(alpha=0.3)


def _label(row):
    return f"{row['group']} {'x'.join(map(str, row['shape']))}"
