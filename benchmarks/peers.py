"""The peers, each with one or more ways to do a work; the fastest way of each peer counts.

A way is a pair of functions: one that does the work once and returns when it is done, and one that
returns the result as a NumPy array (None: there is nothing to compare). Everything is allocated
before. All batch normalizations have eps 1e-5, momentum 0.9 and a trained gamma.
"""

from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
from cases import BACKWARD

import mxbn

EPS = 1e-5
MOMENTUM = 0.9  # of the old statistics; PyTorch counts that of the new ones
OPERATORS = {"mxbn": mxbn, "built-in": mx}


class Arrays:
    """The data, the gradient of the output and the parameters of a case, the same for all peers."""

    def __init__(self, case):
        random = np.random.RandomState(0)
        self.axis = case.axis
        self.x = random.standard_normal(case.shape).astype("float32")
        self.dy = random.standard_normal(case.shape).astype("float32")
        self.addend = random.standard_normal(case.shape).astype("float32")
        self.parameters = {
            "gamma": random.uniform(0.5, 1.5, case.channels).astype("float32"),
            "beta": random.uniform(-0.5, 0.5, case.channels).astype("float32"),
            "moving_mean": random.uniform(-0.1, 0.1, case.channels).astype("float32"),
            "moving_var": random.uniform(0.5, 1.5, case.channels).astype("float32"),
        }


class MXNetPeers:
    """mxbn and the built-in operator, which get the same arrays and calls."""

    names = tuple(OPERATORS)

    def __init__(self, arrays):
        self.axis = arrays.axis
        self.parameters = arrays.parameters
        self.x, self.dy = mx.nd.array(arrays.x), mx.nd.array(arrays.dy)
        self.dx = mx.nd.zeros_like(self.x)
        self.copy_of_x = mx.nd.zeros_like(self.x)
        self.data, self.gradients = {"data": self.x}, {"data": self.dx}

    def call(self, peer, kind, data, parameters, attributes):
        """Return what a peer makes of data and parameters, as arrays ("nd") or Symbols ("sym")."""
        return getattr(OPERATORS[peer], kind).BatchNorm(*data, *parameters, **attributes)

    def ways(self, work):
        found = {}
        for peer in self.names:
            found[peer, "executor"] = self._executor(peer, work)
            if work in BACKWARD:
                # An executor passes the output's gradient through an identity node, a copy of the
                # whole tensor that no operator can avoid; outside of one it is used as it is, at
                # the price of Python code and of a graph made for each call. So the executor is
                # the faster way for small tensors and the other for large ones, and each operator
                # is judged by the way that is the better for it.
                found[peer, "imperative"] = self._imperative(peer, work)
        return found

    def _attributes(self, work):
        return {
            "eps": EPS,
            "momentum": MOMENTUM,
            "fix_gamma": False,
            "use_global_stats": work == "moving backward",
            "axis": self.axis,
        }

    def _executor(self, peer, work):
        parameters = {name: mx.nd.array(value) for name, value in self.parameters.items()}
        aux_states = {name: parameters.pop(name) for name in ("moving_mean", "moving_var")}
        train = work != "inference forward"
        data, variables = (
            [mx.sym.var(name) for name in names] for names in (self.data, self.parameters)
        )
        symbol = self.call(peer, "sym", data, variables, self._attributes(work))
        gradients = {name: mx.nd.zeros_like(value) for name, value in parameters.items()}
        executor = symbol.bind(
            mx.cpu(),
            {**self.data, **parameters},
            {**self.gradients, **gradients} if train else None,
            "write" if train else "null",
            aux_states,
        )
        executor.forward(is_train=train)
        if work in BACKWARD:
            return synchronous(lambda: executor.backward(self.dy)), self.dx.asnumpy
        forward = synchronous(lambda: executor.forward(is_train=train))
        return forward, lambda: executor.outputs[0].asnumpy()

    def _imperative(self, peer, work):
        parameters = {name: mx.nd.array(value) for name, value in self.parameters.items()}
        # Other views of the same data, with a place in a graph of its own.
        data = [each.detach() for each in self.data.values()]
        trained = [parameters["gamma"], parameters["beta"]]
        gradients = [*self.gradients.values(), *(mx.nd.zeros_like(each) for each in trained)]
        mx.autograd.mark_variables([*data, *trained], gradients)
        with mx.autograd.record():
            y = self.call(peer, "nd", data, parameters.values(), self._attributes(work))
        backward = synchronous(lambda: y.backward(self.dy, retain_graph=True))
        return backward, self.dx.asnumpy

    def copy_way(self):
        return synchronous(lambda: self.x.copyto(self.copy_of_x)), None


class NumPyCopy:
    """A copy by as many threads as the others use; NumPy lets go of the GIL while it copies."""

    def __init__(self, arrays, threads):
        copy = np.zeros_like(arrays.x)
        self._pieces = list(
            zip(*(np.array_split(each.reshape(-1), threads) for each in (copy, arrays.x)))
        )
        self._pool = ThreadPoolExecutor(max(threads - 1, 1))

    def copy_way(self):
        return self._copy, None

    def _copy(self):
        (first, *others) = self._pieces
        pending = [self._pool.submit(np.copyto, *piece) for piece in others]
        np.copyto(*first)
        for each in pending:
            each.result()

    def close(self):
        self._pool.shutdown()


def synchronous(call):
    def run():
        call()
        mx.nd.waitall()

    return run
