"""What is measured: shapes, kinds of work and the bytes that each must move."""

from collections import namedtuple

FORWARD = ("inference forward", "training forward")
BACKWARD = ("training backward", "moving backward")
WORKS = FORWARD + BACKWARD

# Tensors of the size of the data that must be read or written at least once: the data and the
# output, or the output's gradient, the data and the data's gradient.
TENSORS = {**dict.fromkeys(FORWARD, 2), **dict.fromkeys(BACKWARD, 3)}
COPY_TENSORS = 2
# With an addend and a ReLU, a forward reads the addend too, and a backward reads the output and
# writes the addend's gradient.
FUSED_TENSORS = {**dict.fromkeys(FORWARD, 3), "training backward": 5}
FLOAT_BYTES = 4


class Case(namedtuple("Case", "group shape axis")):
    """One shape of the data, float32, with the axis of the channels."""

    @property
    def text(self):
        return "x".join(map(str, self.shape))

    @property
    def tensor_bytes(self):
        size = FLOAT_BYTES
        for length in self.shape:
            size *= length
        return size

    @property
    def channels(self):
        return self.shape[self.axis]


# Channels, height and width of every batch normalization in ResNet-50 on images of 224x224. That
# of PyTorch has strides in its 3x3 convolutions and so the larger ones of 128, 256 and 512 channels
# too, which MXNet's resnet50_v1 has not.
RESNET_50 = (
    (64, 112, 112),
    (64, 56, 56),
    (128, 56, 56),
    (256, 56, 56),
    (128, 28, 28),
    (256, 28, 28),
    (512, 28, 28),
    (256, 14, 14),
    (512, 14, 14),
    (1024, 14, 14),
    (512, 7, 7),
    (2048, 7, 7),
)

CASES = (
    *(Case("ResNet-50", (32, *shape), 1) for shape in RESNET_50),
    Case("small", (1, 2, 4, 4), 1),
    Case("small", (2, 16, 8, 8), 1),
    Case("odd", (3, 31, 7, 7), 1),
    Case("odd", (8, 65, 33, 33), 1),
    Case("odd", (1, 3, 513, 511), 1),
    Case("odd", (33, 1001, 1, 1), 1),
    Case("NHWC", (32, 56, 56, 64), -1),
    Case("NHWC", (32, 28, 28, 512), -1),
    Case("NHWC", (32, 7, 7, 2048), -1),
    Case("NHWC", (5, 17, 19, 33), -1),
    Case("1-D", (32, 2048), 1),
    Case("1-D", (4096, 256), 1),
    Case("1-D", (1000, 37), 1),
    Case("5-D", (4, 32, 16, 56, 56), 1),
    Case("5-D", (2, 33, 5, 13, 17), 1),
)

# The ends of residual blocks.
FUSED_CASES = (
    *(
        Case("ResNet-50", (32, *shape), 1)
        for shape in ((256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7))
    ),
    Case("NHWC", (32, 28, 28, 512), -1),
)

QUICK_CASES = (
    Case("small", (1, 2, 4, 4), 1),
    Case("odd", (3, 31, 7, 7), 1),
    Case("NHWC", (2, 7, 7, 33), -1),
    Case("1-D", (32, 16), 1),
    Case("5-D", (2, 3, 4, 5, 6), 1),
)


QUICK_FUSED_CASES = QUICK_CASES[::2]


def chosen(cases, works, only):
    """Return the works of each case whose description holds the word `only` (None: all)."""
    found = {
        case: [work for work in works if wanted(f"{case.group} {case.text} {work}", only)]
        for case in cases
    }
    return {case: works for case, works in found.items() if works}


def wanted(description, only):
    return only is None or only.lower() in description.lower()
